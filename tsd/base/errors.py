"""The one error tree.

Each room raises the leaf that says whose fault it was; nobody wraps an error twice.
OS and library exceptions are translated once, in `tsd.transport` and `tsplatform`.
"""

import os

_WITHOUT_REASON = ("Connect call failed", "[Errno")


class TsdError(Exception):
    """Root of every error that tsd raises on purpose."""


class DecodeError(TsdError):
    """Foreign bytes that do not parse: the receiver counts and drops them."""

    def __init__(self, room: str, reason: str) -> None:
        super().__init__(f"{room}: {reason}")
        self.room = room
        self.reason = reason


class ProtocolError(TsdError):
    """A peer broke the rules of a session: that session is closed."""


class ControlError(TsdError):
    """The coordination server refused or failed a request.

    `status` is the HTTP status (0 when none was received); `retry_after_s` is what the server asked for.
    """

    def __init__(self, message: str, *, status: int = 0, retryable: bool = True, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class ConfigError(TsdError):
    """The user's input is wrong: one line says what and how to fix it, exit code 2."""


class StateError(TsdError):
    """The state store cannot be read or written; the text names the file and the remedy."""


class HullError(TsdError):
    """The operating system refused `operation`; `hint` says how to put it right."""

    def __init__(self, operation: str, reason: str, hint: str = "", errno: int = 0) -> None:
        text = f"{operation}: {reason}"
        super().__init__(f"{text} ({hint})" if hint else text)
        self.operation = operation
        self.reason = reason
        self.hint = hint
        self.errno = errno


def reason_of(error: Exception) -> str:
    """What went wrong, in words for people: without Python's `[Errno 111]` and asyncio's "Connect call failed (…)"."""
    if not isinstance(error, OSError):
        return str(error)
    text = error.strerror or str(error)
    return os.strerror(error.errno) if error.errno and text.startswith(_WITHOUT_REASON) else text
