"""HTTP/1.1 over the daemon's Unix socket, blocking, as little as tsctl needs. Works on tailscaled, too.

One idle connection is kept and reused. Neither http.client nor socket: importing them costs more than the call.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import time

from tsctl import fastjson
from tsctl.goflags import Failure
from tsd.localapi.schema import CAPABILITY_VERSION, LOCALAPI_HOST, LOCALAPI_PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SYSTEM_SOCKET = "/run/tsd/tsd.sock"
_REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    412: "Precondition Failed",
    429: "Too Many Requests",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
}


def default_socket() -> str:
    """$TSD_SOCKET, the system daemon's socket when we may use it, else the one of this user's own daemon."""
    chosen = os.environ.get("TSD_SOCKET")
    if chosen:
        return chosen
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    if os.access(SYSTEM_SOCKET, os.W_OK) or os.geteuid() == 0 or not runtime_dir:
        return SYSTEM_SOCKET
    return os.path.join(runtime_dir, "tsd", "tsd.sock")


class Unreachable(Failure):
    """No daemon answers on the socket."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(f"failed to connect to local tsd; is it running?\n{_what_to_check(path, error)}")


def _what_to_check(path: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"  {path} does not exist: start the daemon (systemctl start tsd), or name its socket with --socket"
    if error.errno == errno.ECONNREFUSED:
        return (
            f"  {path} is there but nobody listens: the daemon has died; look at `journalctl -u tsd` and start it again"
        )
    if error.errno == errno.ETIMEDOUT:
        return (
            f"  {path} takes connections, but the daemon has not answered for {ANSWER_S:.0f} s: it is frozen, or its"
            " machine stalls; look at `journalctl -u tsd`, or restart it"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"  no permission to open {path}: run this as root, or check the folder's permissions"
    return f"  {path}: {error.strerror or error}; check that the daemon runs and that --socket is right"


ANSWER_S = 30.0
NOT_HTTP = "the socket does not speak HTTP: is it the daemon's?"


def _number(text: str, base: int = 10) -> int:
    """A length or status of the daemon's answer."""
    digits = text.strip()
    if not digits.isalnum() or not digits.isascii() or len(digits) > 18:
        raise Failure(NOT_HTTP)
    try:
        return int(digits, base)
    except ValueError:
        raise Failure(NOT_HTTP) from None


class ApiFailure(Failure):
    """The daemon refused or failed a call."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
        reason = f"{status} {_REASONS.get(status, '')}".rstrip()
        text = f"Access denied: {message}" if status == 403 else f"{reason}: {message}"
        super().__init__(text)


class Refused(Failure):
    """The daemon refused a value and says why in JSON."""


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        try:
            return fastjson.loads(self.body)
        except ValueError:
            raise Failure("the daemon's answer is not JSON: is something else listening on this socket?") from None


class _Wire:
    """A connection with a read buffer."""

    def __init__(self, path: str) -> None:
        self.sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self.buffer = b""
        try:
            self.sock.connect(path)
        except OSError as error:
            self.sock.close()
            raise Unreachable(path, error) from None

    def close(self) -> None:
        self.sock.close()

    def fill(self) -> bool:
        data = self.sock.recv(65536)
        self.buffer += data
        return bool(data)

    def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            if not self.fill():
                raise ConnectionResetError("connection closed by the daemon")
        found, self.buffer = self.buffer.split(mark, 1)
        return found

    def exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count > 0:
            if not self.buffer and not self.fill():
                raise ConnectionResetError("answer cut short")
            piece, self.buffer = self.buffer[:count], self.buffer[count:]
            parts.append(piece)
            count -= len(piece)
        return b"".join(parts)

    def rest(self) -> bytes:
        while self.fill():
            pass
        found, self.buffer = self.buffer, b""
        return found

    def chunk(self) -> bytes:
        """The next chunk of a chunked body; b"" after the last."""
        size = _number(self.until(b"\r\n").split(b";")[0].decode("latin-1"), 16)
        data = self.exactly(size)
        self.until(b"\r\n")
        return data

    def head(self) -> tuple[int, dict[str, str]]:
        lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise Failure(NOT_HTTP)
        pairs = (line.partition(":") for line in lines[1:])
        return _number(words[1]), {name.lower(): value.strip() for name, _, value in pairs}


class LocalClient:
    def __init__(self, path: str = "") -> None:
        self.path = path or default_socket()
        self._idle: _Wire | None = None

    def call(
        self,
        method: str,
        name: str,
        body: object = None,
        *,
        expect: tuple[int, ...] = (200,),
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """One call; `name` is what follows /localapi/v0/. Raises Failure unless the status is expected."""
        raw = None if body is None else body if isinstance(body, bytes) else fastjson.dumps(body).encode()
        reply = self._exchange(method, name, raw, headers or {}, timeout_s)
        if reply.status not in expect:
            raise failure_of(reply)
        return reply

    def get(self, name: str) -> Any:
        """What the daemon knows without waiting for anybody; it has some time for that, not for ever."""
        try:
            return self.call("GET", name, timeout_s=ANSWER_S).json()
        except TimeoutError:
            raise Unreachable(self.path, OSError(errno.ETIMEDOUT, "")) from None

    def status(self, with_peers: bool = True) -> dict[str, Any]:
        found = self.get("status" if with_peers else "status?peers=false")
        if not isinstance(found, dict):
            raise Failure("the daemon's status is not a JSON object")
        return found

    def prefs(self) -> dict[str, Any]:
        found = self.get("prefs")
        if not isinstance(found, dict):
            raise Failure("the daemon's preferences are not a JSON object")
        return found

    def _exchange(
        self, method: str, name: str, body: bytes | None, headers: dict[str, str], timeout_s: float | None
    ) -> Reply:
        reused, self._idle = self._idle, None
        wire = reused or _Wire(self.path)
        try:
            wire.sock.settimeout(timeout_s)
            wire.sock.sendall(request_bytes(method, name, body, headers))
            reply = self._read_reply(method, wire)
        except TimeoutError:
            wire.close()
            raise
        except OSError as error:
            wire.close()
            if reused is not None and method in ("GET", "HEAD"):
                return self._exchange(method, name, body, headers, timeout_s)
            raise Unreachable(self.path, error) from None
        except Failure:
            wire.close()
            raise
        if reply.headers.get("connection", "").lower() == "close":
            wire.close()
        else:
            self._idle = wire
        return reply

    @staticmethod
    def _read_reply(method: str, wire: _Wire) -> Reply:
        status, headers = wire.head()
        if method == "HEAD" or status in (204, 304):
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding", "").lower() == "chunked":
            parts = []
            while piece := wire.chunk():
                parts.append(piece)
            return Reply(status, headers, b"".join(parts))
        if "content-length" in headers:
            return Reply(status, headers, wire.exactly(_number(headers["content-length"])))
        headers["connection"] = "close"
        return Reply(status, headers, wire.rest())

    def stream(self, name: str, method: str = "GET") -> LineStream:
        """Open a streaming call; returns once the daemon has answered its head."""
        wire = _Wire(self.path)
        try:
            wire.sock.sendall(request_bytes(method, name, None if method == "GET" else b"", {}))
            status, headers = wire.head()
            if status != 200:
                length = _number(headers.get("content-length", "0"))
                raise failure_of(Reply(status, headers, wire.exactly(length)))
        except OSError as error:
            wire.close()
            raise Unreachable(self.path, error) from None
        except Failure:
            wire.close()
            raise
        return LineStream(wire, is_chunked=headers.get("transfer-encoding", "").lower() == "chunked")

    def dial(self, host: str, port: int, network: str = "tcp") -> tuple[int, bytes, str]:
        """(socket's fd, bytes already read, "") for a tailnet address, or (-1, b"", "ip:port") to dial directly."""
        wire = _Wire(self.path)
        headers = {
            "Connection": "upgrade",
            "Upgrade": "ts-dial",
            "Dial-Host": host,
            "Dial-Port": str(port),
            "Dial-Network": network,
        }
        try:
            wire.sock.sendall(request_bytes("POST", "dial", b"", headers))
            status, found = wire.head()
            if status == 101:
                return wire.sock.detach(), wire.buffer, ""
            body = wire.exactly(_number(found.get("content-length", "0")))
        except OSError as error:
            wire.close()
            raise Unreachable(self.path, error) from None
        except Failure:
            wire.close()
            raise
        wire.close()
        if status == 200 and found.get("dial-self") == "true":
            return -1, b"", found.get("dial-addr", "")
        raise failure_of(Reply(status, found, body))


def request_bytes(method: str, name: str, body: bytes | None, headers: dict[str, str]) -> bytes:
    path = name if name.startswith("/") else LOCALAPI_PREFIX + name
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {LOCALAPI_HOST}",
        f"Tailscale-Cap: {CAPABILITY_VERSION}",
        *(f"{key}: {value}" for key, value in headers.items()),
    ]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + (body or b"")


def failure_of(reply: Reply) -> Failure:
    """The failure that an unexpected answer stands for."""
    message = reply.body.decode("utf-8", "replace").strip()
    if message.startswith("{"):
        try:
            found = fastjson.loads(reply.body)
        except ValueError:
            found = {}
        for key in ("Error", "error"):
            if isinstance(found.get(key), str) and found[key]:
                return Refused(found[key])
    return ApiFailure(reply.status, message)


class LineStream:
    """JSON lines that the daemon flushes one by one."""

    def __init__(self, wire: _Wire, *, is_chunked: bool) -> None:
        self._wire = wire
        self._is_chunked = is_chunked
        self._lines = b""

    def next_line(self, timeout_s: float | None = None) -> bytes | None:
        """One line; None when nothing came in time. Raises EOFError at the end of the stream."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._lines:
            if not self._wire.buffer and not self._is_ready(deadline):
                return None
            try:
                data = self._wire.chunk() if self._is_chunked else self._plain()
            except (OSError, Failure):
                raise EOFError from None
            if not data:
                raise EOFError
            self._lines += data
        line, _, self._lines = self._lines.partition(b"\n")
        return line

    def next_json(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        line = self.next_line(timeout_s)
        if line is None:
            return None
        try:
            value = fastjson.loads(line)
        except ValueError:
            raise Failure("a line of the notification stream is not JSON") from None
        return value if isinstance(value, dict) else {}

    def _plain(self) -> bytes:
        if not self._wire.buffer:
            self._wire.fill()
        data, self._wire.buffer = self._wire.buffer, b""
        return data

    def _is_ready(self, deadline: float | None) -> bool:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        return bool(select.select([self._wire.sock], [], [], wait_s)[0])

    def close(self) -> None:
        self._wire.close()
