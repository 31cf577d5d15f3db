"""One daemon per state file and per socket: a lock that the kernel drops with the process.

The lock file stays behind on purpose: removing it would let two processes lock two different files of one name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from tsd.base.errors import StateError

# A folder that takes no lock file must not stop a daemon that can work without one.
_TOLERATED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.ENOLCK, errno.ENOTSUP})


class HeldError(StateError):
    """Another process has the lock; `holder` is its id in words."""

    def __init__(self, text: str, holder: str) -> None:
        super().__init__(text)
        self.holder = holder


class FileLock:
    """Held from construction to `close`. Raises `HeldError`, or `StateError` where files cannot be made."""

    def __init__(self, protected: str | os.PathLike[str], what: str) -> None:
        """`what` completes "another daemon … uses this", e.g. "state file"."""
        target = Path(protected)
        self.path = target.with_name(f".{target.name}.lock")
        self._fd = -1
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as err:
            if err.errno in _TOLERATED:
                return
            raise StateError(f"{self.path}: {err.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise HeldError(
                f"the {what} {target} is in use by another daemon (pid {holder}); stop that one first, or give this one"
                " its own --statedir and --socket",
                holder,
            ) from None
        self._fd = fd
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    @property
    def is_held(self) -> bool:
        """False where the folder takes no lock file (read-only), and after `close`."""
        return self._fd >= 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
