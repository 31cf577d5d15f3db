"""HTTP/1.1 proxy: CONNECT tunnels and absolute-URI requests with keep-alive (RFC 9110, RFC 9112).

Bodies are passed through with the framing they came in; only heads are rewritten. Ambiguous framing is refused. A
failed target is reported with the header that clients of the field look for (tailscale: `cmd/tailscaled/proxy.go`).
No caching.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

from tsd.base.addr import parse_number
from tsd.base.errors import DecodeError
from tsd.hull import Stream
from tsplatform.userspace.hostsock import HostStream, error_text

if TYPE_CHECKING:
    from tsplatform.userspace.proxy import ProxyServer

_MAX_HEAD_BYTES = 64 << 10
_READ_BYTES = 256 << 10
_IDLE_S = 120.0
_BODY_LAG_S = 0.05
"""How long the last bytes of a request's body may still be on their way when the answer is there already."""
_LINGER_S = 5.0
"""How long a client may go on sending a body that the target has answered already."""
_HOP_BY_HOP = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization", b"host"))
_MAX_LENGTH_DIGITS = 18
_MAX_INTERIM_ANSWERS = 32
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_UNTIL_EOF = -1
_CHUNKED = -2
_IDEMPOTENT = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE"))


class BadMessage(Exception):
    """A head or body that breaks the rules of HTTP/1."""


class Head:
    """A start line in three parts, and header fields in order."""

    __slots__ = ("fields", "line")

    def __init__(self, raw: bytes) -> None:
        lines = [line.removesuffix(b"\r") for line in raw.split(b"\n")]
        self.line = lines[0].split(b" ", 2)
        if len(self.line) < 2 or _has_controls(lines[0]):
            raise BadMessage("start line")
        self.fields: list[tuple[bytes, bytes]] = []
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip() or _has_controls(line):
                raise BadMessage("header field")
            self.fields.append((name, value.strip(b" \t")))

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]

    def tokens(self, name: bytes) -> set[bytes]:
        return {part.strip().lower() for value in self.all(name) for part in value.split(b",")} - {b""}

    def body_framing(self) -> int | None:
        """Content length, `_CHUNKED`, or None when the head does not say."""
        codings = self.all(b"transfer-encoding")
        lengths = set(self.all(b"content-length"))
        if codings:
            if lengths or b",".join(codings).lower().strip() != b"chunked":
                raise BadMessage("ambiguous body framing")
            return _CHUNKED
        if not lengths:
            return None
        value = lengths.pop()
        if lengths or not value.isdigit() or len(value) > _MAX_LENGTH_DIGITS:
            raise BadMessage("content length")
        return int(value)


def _has_controls(line: bytes) -> bool:
    """Bytes that other readers of the same head may take for the end of a line or of the text."""
    return b"\r" in line or b"\0" in line


class Source:
    """A stream with read-ahead."""

    def __init__(self, stream: Stream, first: bytes = b"") -> None:
        self.stream = stream
        self.buffer = first
        self._searched = 0

    def take_head(self) -> bytes | None:
        """Up to and without the blank line; None when it is not whole yet.

        Lines may end in LF alone and blank lines may come first (RFC 9112, 2.2). What is not text, such as TLS or
        SOCKS4 on this port, would never have an end and is refused at once.
        """
        if not self._searched:
            self.buffer = self.buffer.lstrip(b"\r\n")
        if self.buffer and not 0x20 < self.buffer[0] < 0x7F:
            raise BadMessage("this is not plain HTTP (the URL of the proxy begins with http://)")
        end = _END_OF_HEAD.search(self.buffer, self._searched)
        if end is not None:
            head, self.buffer = self.buffer[: end.start()], self.buffer[end.end() :]
            self._searched = 0
            return head
        if len(self.buffer) > _MAX_HEAD_BYTES:
            raise BadMessage("head too large")
        self._searched = max(len(self.buffer) - 3, 0)
        return None

    async def read_head(self) -> bytes:
        """A whole head; b"" when the stream ended before anything came."""
        while (head := self.take_head()) is None:
            more = await self.stream.read(16384)
            if not more:
                if self.buffer:
                    raise BadMessage("truncated head")
                return b""
            self.buffer += more
        return head

    async def take_some(self, limit: int) -> bytes:
        if self.buffer:
            taken, self.buffer = self.buffer[:limit], self.buffer[limit:]
            return taken
        return await self.stream.read(min(limit, _READ_BYTES))

    async def take_line(self) -> bytes:
        while b"\r\n" not in self.buffer:
            more = await self.stream.read(4096)
            if not more or len(self.buffer) > _MAX_HEAD_BYTES:
                raise BadMessage("truncated body")
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\r\n")
        return line

    async def copy_body(self, framing: int, sink: Stream) -> None:
        """Pass a body on, with the framing it has."""
        if framing >= 0:
            await self._copy_exactly(framing, sink)
        elif framing == _UNTIL_EOF:
            while data := await self.take_some(_READ_BYTES):
                await sink.write(data)
        else:
            await self._copy_chunks(sink)

    async def _copy_exactly(self, count: int, sink: Stream) -> None:
        while count:
            data = await self.take_some(count)
            if not data:
                raise BadMessage("truncated body")
            await sink.write(data)
            count -= len(data)

    async def _copy_chunks(self, sink: Stream) -> None:
        while True:
            line = await self.take_line()
            digits = line.partition(b";")[0].strip()
            if not digits or len(digits) > 15 or digits.strip(b"0123456789abcdefABCDEF"):
                raise BadMessage("chunk size")
            await sink.write(line + b"\r\n")
            size = int(digits, 16)
            if not size:
                break
            await self._copy_exactly(size + 2, sink)
        while True:
            line = await self.take_line()
            await sink.write(line + b"\r\n")
            if not line:
                return


class HttpSession:
    """One client connection: requests one after another, with the last target kept open between them."""

    def __init__(self, server: ProxyServer, client: HostStream, first: bytes) -> None:
        self._server = server
        self._client = client
        self._source = Source(client, first)
        self._target: Source | None = None
        self._target_name = ("", 0)
        self._body: asyncio.Task[None] | None = None
        """Copies the body of the request in hand."""

    async def serve(self) -> None:
        try:
            while await self._serve_one():
                pass
        except BadMessage as err:
            with contextlib.suppress(OSError):
                await self._answer(400, "Bad Request", str(err))
        finally:
            if self._body is not None:
                self._body.cancel()
            self._drop_target()

    def _drop_target(self) -> None:
        if self._target is not None:
            self._target.stream.abort()
            self._target = None

    async def _serve_one(self) -> bool:
        """False when the connection is over."""
        raw = self._source.take_head()
        if raw is None:
            async with asyncio.timeout(_IDLE_S):  # not wait_for, which makes a task per call
                raw = await self._source.read_head()
        if not raw:
            return False
        head = Head(raw)
        if len(head.line) != 3 or not head.line[2].startswith(b"HTTP/1."):
            raise BadMessage("request line")
        if head.line[0] == b"CONNECT":
            await self._tunnel(head)
            return False
        return await self._forward(head)

    async def _answer(self, status: int, reason: str, detail: str, *, error: bool = False) -> None:
        extra = f"Tailscale-Connect-Error: {detail}\r\n" if error else ""
        body = detail + "\n"
        await self._client.write(
            f"HTTP/1.1 {status} {reason}\r\n{extra}Content-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body.encode())}\r\nConnection: close\r\n\r\n{body}".encode("utf-8", "replace")
        )

    async def _dial(self, host: str, port: int, status: int, reason: str) -> Stream | None:
        """None when it failed and the client has been told."""
        try:
            return await self._server.dialer.dial(host, port)
        except (OSError, DecodeError, LookupError) as err:
            await self._answer(status, reason, error_text(err), error=True)
            return None

    async def _tunnel(self, head: Head) -> None:
        host, port = split_authority(head.line[1], 443)
        target = await self._dial(host, port, 500, "Internal Server Error")
        if target is None:
            return
        try:
            await self._client.write(b"HTTP/1.1 200 OK\r\n\r\n")
            if self._source.buffer:
                await target.write(self._source.buffer)
        except BaseException:
            target.abort()
            raise
        await self._server.relay(self._client, target)

    async def _forward(self, head: Head) -> bool:
        method, uri, version = head.line
        if not uri.lower().startswith(b"http://"):
            raise BadMessage("this is a proxy: send http:// URIs or CONNECT")
        authority, path = split_uri(uri[7:])
        name = split_authority(authority, 80)
        framing = head.body_framing() or 0
        request = _request_head(head, authority, path)
        is_reused = self._target is not None and self._target_name == name
        target = await self._open_target(name)
        response = await self._exchange(target, request, framing) if target is not None else b""
        if target is not None and not response and is_reused and method in _IDEMPOTENT and not framing:
            self._drop_target()  # the kept connection had ended: once more on a fresh one
            target = await self._open_target(name)
            response = await self._exchange(target, request, framing) if target is not None else b""
        if target is None:
            return False
        if not response:
            await self._answer(502, "Bad Gateway", "the target closed the connection without an answer")
            return False
        is_client_open = version == b"HTTP/1.1" and b"close" not in _connection_tokens(head)
        is_body_sent = await self._is_body_sent(head)
        try:
            is_open = await self._return_response(target, response, method, is_client_open and is_body_sent)
        except BadMessage as err:
            await self._answer(502, "Bad Gateway", f"the target's answer is not HTTP: {err}")
            return False
        if not is_body_sent and self._body is not None and b"100-continue" not in head.tokens(b"expect"):
            await asyncio.wait((self._body,), timeout=_LINGER_S)
        return is_open

    async def _is_body_sent(self, head: Head) -> bool:
        """False when the target answers before it has the whole body: it refuses it, or goes on reading as it writes.
        The client has the answer at once then; one that waits for "100 Continue" would wait for ever."""
        if self._body is not None and not self._body.done():
            await asyncio.wait((self._body,), timeout=_BODY_LAG_S)
        return self._body is None or self._body.done()

    async def _open_target(self, name: tuple[str, int]) -> Source | None:
        if self._target is not None and self._target_name != name:
            self._drop_target()
        if self._target is None:
            stream = await self._dial(*name, 502, "Bad Gateway")
            if stream is None:
                return None
            self._target = Source(stream)
            self._target_name = name
        return self._target

    async def _exchange(self, target: Source, request: bytes, framing: int) -> bytes:
        """Send the request and its body; returns the head of the first answer, b"" when there is none."""
        self._body = None
        try:
            if not framing:
                await target.stream.write(request)
                return await target.read_head()
            self._body = self._server.spawn(self._send_body(target, request, framing))
            while True:
                raw = await target.read_head()
                if raw[9:12] != b"100":
                    return raw
                await self._client.write(raw + b"\r\n\r\n")
        except (OSError, BadMessage):
            return b""

    async def _send_body(self, target: Source, request: bytes, framing: int) -> None:
        try:
            await target.stream.write(request)
            await self._source.copy_body(framing, target.stream)
        except (OSError, BadMessage):
            target.stream.abort()

    async def _return_response(self, target: Source, raw: bytes, method: bytes, is_client_open: bool) -> bool:
        response = Head(raw)
        status = response.line[1]
        interim = 0
        while status[:1] == b"1" and status != b"101":
            interim += 1
            if interim > _MAX_INTERIM_ANSWERS:
                raise BadMessage("too many interim answers")
            await self._client.write(raw + b"\r\n\r\n")
            raw = await target.read_head()
            response = Head(raw)
            status = response.line[1]
        if status == b"101":
            await self._client.write(raw + b"\r\n\r\n" + target.buffer)
            if self._source.buffer:
                await target.stream.write(self._source.buffer)
            self._target = None
            await self._server.relay(self._client, target.stream)
            return False
        framing = response.body_framing()
        if method == b"HEAD" or status in (b"204", b"304"):
            framing = 0
        elif framing is None:
            framing = _UNTIL_EOF
        is_kept = framing != _UNTIL_EOF and is_client_open
        head = _response_head(response, is_kept)
        try:
            if 0 <= framing <= len(target.buffer):  # all of it is here: one write
                body, target.buffer = target.buffer[:framing], target.buffer[framing:]
                await self._client.write(head + body)
            else:
                await self._client.write(head)
                await target.copy_body(framing, self._client)
        except (OSError, BadMessage):
            self._client.abort()  # the client must not take a cut body for a whole one
            return False
        is_target_open = response.line[0] == b"HTTP/1.1" and b"close" not in response.tokens(b"connection")
        if framing == _UNTIL_EOF or not is_target_open:
            self._drop_target()
        return is_kept


def split_uri(rest: bytes) -> tuple[bytes, bytes]:
    """(authority, path with its query) of what follows the scheme; a fragment is not the target's business."""
    rest = rest.partition(b"#")[0]
    end = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    authority, path = rest[:end], rest[end:]
    return authority, path if path[:1] == b"/" else b"/" + path


def split_authority(authority: bytes, default_port: int) -> tuple[str, int]:
    """("name or address", port). Raises BadMessage."""
    text = authority.rpartition(b"@")[2].decode("ascii", "replace")
    host, colon, digits = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, digits = text, str(default_port)
    port = parse_number(digits, 65535)
    if not host or not port:
        raise BadMessage("host and port")
    return host.strip("[]"), port


def _connection_tokens(head: Head) -> set[bytes]:
    return head.tokens(b"connection") | head.tokens(b"proxy-connection")


def _request_head(head: Head, authority: bytes, path: bytes) -> bytes:
    """Origin form, hop-by-hop fields removed."""
    listed = head.tokens(b"connection")
    lines = [b"%s %s HTTP/1.1" % (head.line[0], path), b"Host: " + authority.rpartition(b"@")[2]]
    for name, value in head.fields:
        key = name.lower()
        if key not in _HOP_BY_HOP and (key not in listed or key == b"upgrade"):
            lines.append(name + b": " + value)
    if b"upgrade" in listed:
        lines.append(b"Connection: Upgrade")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _response_head(response: Head, is_kept: bool) -> bytes:
    listed = response.tokens(b"connection")
    lines = [b" ".join((b"HTTP/1.1", *response.line[1:]))]
    for name, value in response.fields:
        key = name.lower()
        if key not in (b"connection", b"keep-alive", b"proxy-connection") and key not in listed:
            lines.append(name + b": " + value)
    if not is_kept:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"
