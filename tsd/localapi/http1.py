"""HTTP/1.1 messages (RFC 9112), just what a local socket needs: strict request heads, chunked bodies, response heads.

Pure functions and one incremental decoder; no sockets. Names keep the spelling they are given, because one client
looks up `Etag` literally. No obsolete line folding, no compression, no trailers handed on.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import NamedTuple

from tsd.base.errors import DecodeError

MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 8 * 1024
_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


class BadRequest(DecodeError):
    """The bytes are no request that we serve; `status` is what to answer before closing."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__("localapi", reason)
        self.status = status


class RequestHead(NamedTuple):
    method: str
    target: str
    minor_version: int
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str, default: str = "") -> str:
        """The first value of a header, whatever its case."""
        wanted = name.lower()
        return next((value for key, value in self.headers if key.lower() == wanted), default)

    def get_all(self, name: str) -> list[str]:
        wanted = name.lower()
        return [value for key, value in self.headers if key.lower() == wanted]

    def has(self, name: str) -> bool:
        return bool(self.get_all(name))

    def has_token(self, name: str, token: str) -> bool:
        """Whether a comma-separated header names `token` (in any case)."""
        values = ",".join(self.get_all(name)).split(",")
        return any(value.strip().lower() == token for value in values)

    @property
    def keeps_alive(self) -> bool:
        if self.has_token("Connection", "close"):
            return False
        return self.minor_version >= 1 or self.has_token("Connection", "keep-alive")


def find_head_end(buffer: bytes | bytearray) -> int:
    """Length of the request head at the start of `buffer`, blank line included; -1 when it is not complete yet."""
    end = buffer.find(b"\r\n\r\n")
    return end + 4 if end >= 0 else -1


def parse_head(head: bytes) -> RequestHead:
    """Parse a complete head. Raises BadRequest."""
    lines = head[:-4].lstrip(b"\r\n").split(b"\r\n")
    method, target, minor_version = _request_line(lines[0])
    headers = tuple(_header_line(line) for line in lines[1:])
    parsed = RequestHead(method, target, minor_version, headers)
    _check_framing(parsed)
    return parsed


def _request_line(line: bytes) -> tuple[str, str, int]:
    parts = line.split(b" ")
    if len(parts) != 3 or not parts[0] or not _TOKEN.issuperset(parts[0]):
        raise BadRequest(400, "malformed request line")
    method, target, version = parts
    if version not in (b"HTTP/1.0", b"HTTP/1.1"):
        known = version.startswith(b"HTTP/") and len(version) == 8
        raise BadRequest(505 if known else 400, "only HTTP/1.0 and HTTP/1.1 are served")
    if not target or min(target) <= 0x20 or max(target) >= 0x7F:
        raise BadRequest(400, "malformed request target")
    return method.decode("ascii"), target.decode("ascii"), version[-1] - 0x30


def _header_line(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    if not colon or not name or not _TOKEN.issuperset(name):
        raise BadRequest(400, "malformed header line")
    value = value.strip(b" \t")
    if any(byte < 0x20 and byte != 0x09 for byte in value) or 0x7F in value:
        raise BadRequest(400, "control character in a header value")
    return name.decode("ascii"), value.decode("latin-1")


def _check_framing(head: RequestHead) -> None:
    lengths = set(head.get_all("Content-Length"))
    encodings = head.get_all("Transfer-Encoding")
    if len(lengths) > 1 or (lengths and encodings):
        raise BadRequest(400, "ambiguous body length")
    if any(not (value.isascii() and value.isdigit() and len(value) <= 18) for value in lengths):
        raise BadRequest(400, "malformed Content-Length")
    if encodings and (len(encodings) > 1 or encodings[0].lower() != "chunked" or head.minor_version == 0):
        raise BadRequest(501, "only the chunked transfer encoding is served")
    if len(head.get_all("Host")) > 1:
        raise BadRequest(400, "more than one Host header")


def body_length(head: RequestHead) -> int:
    """Bytes of the body that follow; -1 when it is chunked."""
    if head.has("Transfer-Encoding"):
        return -1
    return int(head.get("Content-Length", "0"))


class ChunkedDecoder:
    """Takes chunked bytes off the front of a buffer, piece by piece."""

    def __init__(self) -> None:
        self.is_done = False
        self._left = 0
        self._needs_crlf = False
        self._in_trailer = False
        self._trailer_bytes = 0

    def take(self, buffer: bytearray, limit: int = 65536) -> bytes:
        """Remove and return up to `limit` body bytes; b"" means done, or that more input is needed."""
        while not self.is_done:
            if self._left:
                piece = bytes(buffer[: min(self._left, limit)])
                del buffer[: len(piece)]
                self._left -= len(piece)
                self._needs_crlf = self._left == 0 and bool(piece)
                return piece
            if not self._step(buffer):
                break
        return b""

    def _step(self, buffer: bytearray) -> bool:
        """Consume one line of framing; False when it is not complete yet."""
        if self._needs_crlf:
            if len(buffer) < 2:
                return False
            if buffer[:2] != b"\r\n":
                raise BadRequest(400, "chunk longer than announced")
            del buffer[:2]
            self._needs_crlf = False
            return True
        end = buffer.find(b"\r\n")
        if end < 0:
            if len(buffer) > MAX_CHUNK_LINE_BYTES:
                raise BadRequest(400, "chunk header too long")
            return False
        line = bytes(buffer[:end])
        del buffer[: end + 2]
        self._line(line)
        return True

    def _line(self, line: bytes) -> None:
        if self._in_trailer:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise BadRequest(400, "trailers too long")
            self.is_done = not line
            return
        digits = line.partition(b";")[0].strip(b" \t")
        if not digits or len(digits) > 15 or not set(digits) <= set(b"0123456789abcdefABCDEF"):
            raise BadRequest(400, "malformed chunk size")
        self._left = int(digits, 16)
        self._in_trailer = self._left == 0


def response_head(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    """Status line and headers, exactly as given."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Status"
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace")


def chunk(data: bytes) -> bytes:
    """One chunk; b"" gives the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data)
