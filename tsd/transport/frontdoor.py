"""One listening port for upgrades (ts2021, DERP) and ordinary HTTP.

The front door reads the first request head. A named `Upgrade` goes to its handler as a raw stream, with every byte
that followed the head still in it; anything else goes to aiohttp from the first byte on. aiohttp alone cannot do this:
it parses what follows a foreign upgrade as the next request. Only the first request of a connection can upgrade.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import h11

from tsd.base.addr import AddrPort, parse_ip
from tsd.base.errors import DecodeError
from tsd.base.log import fields

log = logging.getLogger("tsd.transport.frontdoor")

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
STREAM_LIMIT_BYTES = 256 << 10


@dataclass(slots=True)
class Upgrade:
    """A request that asked for a raw stream. Header names are lower case; nothing has been answered yet."""

    method: str
    target: str
    headers: dict[str, str]
    remote: AddrPort
    is_tls: bool
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def accept(self, protocol: str, extra: Mapping[str, str] | None = None) -> None:
        """Write the 101; the stream is raw from here."""
        lines = ["HTTP/1.1 101 Switching Protocols", f"Upgrade: {protocol}", "Connection: upgrade"]
        lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
        self.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    def refuse(self, status: int, text: str) -> None:
        """Answer as HTTP; the connection is closed when the handler returns."""
        body = text.encode() + b"\n"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.write(head.encode("latin-1") + body)

    def write(self, data: bytes) -> None:
        """Raises ConnectionResetError when the client has gone (uvloop would raise RuntimeError)."""
        if self.writer.is_closing():
            raise ConnectionResetError("the client has gone")
        self.writer.write(data)


UpgradeHandler = Callable[[Upgrade], Awaitable[None]]
ProtocolFactory = Callable[[], Any]


@dataclass(slots=True)
class FrontDoor:
    """Listens and hands connections on.

    `web` makes aiohttp's protocol: the `server` of an `AppRunner` that was set up (None: everything else is 404).
    `upgrades` maps lower-case values of the Upgrade header to handlers. A handler owns its connection until it returns.
    """

    web: ProtocolFactory | None
    upgrades: Mapping[str, UpgradeHandler]
    _servers: list[asyncio.Server] = field(default_factory=list)
    _tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)
    _waiting: dict[_HeadReader, None] = field(default_factory=dict)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> AddrPort:
        """Raises OSError. May be called for several addresses; returns the one that was bound."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _HeadReader(self, tls is not None), host, port, ssl=tls)
        self._servers.append(server)
        bound = server.sockets[0].getsockname()
        return AddrPort(parse_ip(bound[0].partition("%")[0]), bound[1])

    async def close(self) -> None:
        """Stop listening and end every upgraded connection. Ordinary ones belong to the AppRunner."""
        for server in self._servers:
            server.close()
        for waiting in list(self._waiting):
            waiting.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start_upgrade(self, upgrade: Upgrade, handler: UpgradeHandler) -> None:
        task = asyncio.get_running_loop().create_task(self._run(upgrade, handler))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _run(self, upgrade: Upgrade, handler: UpgradeHandler) -> None:
        try:
            await handler(upgrade)
        except (OSError, EOFError) as err:
            log.debug(fields("upgraded connection ended", reason=err))
        except Exception:
            log.exception("upgrade handler failed")
        finally:
            upgrade.writer.close()


class _HeadReader(asyncio.Protocol):
    """Buffers the first request head, then steps aside for good."""

    def __init__(self, door: FrontDoor, is_tls: bool) -> None:
        self._door = door
        self._is_tls = is_tls
        self._buffer = bytearray()
        self._timeout: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timeout = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self.abort)
        self._door._waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def eof_received(self) -> bool:
        return False

    def abort(self) -> None:
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        first = self._buffer.lstrip(b"\r\n")[:1]
        if first and not first.isalpha():
            self._refuse(400, "not an HTTP request" if self._is_tls else "this port speaks HTTP without TLS")
            return
        if not _has_whole_head(self._buffer):
            if len(self._buffer) > MAX_HEAD_BYTES:
                self._refuse(431, "request head too large")
            return
        self._leave()
        request, leftover = _parse_head(bytes(self._buffer)) if b"upgrade" in self._buffer.lower() else (None, b"")
        if request is not None:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
            handler = self._door.upgrades.get(headers.get("upgrade", "").lower())
            if handler is not None:
                self._hand_to_upgrade(request, headers, leftover, handler)
                return
        self._hand_to_web()

    def _leave(self) -> None:
        self._door._waiting.pop(self, None)
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _hand_to_upgrade(
        self, request: h11.Request, headers: dict[str, str], leftover: bytes, handler: UpgradeHandler
    ) -> None:
        transport = self._transport
        assert transport is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=STREAM_LIMIT_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        if leftover:
            reader.feed_data(leftover)
        method, target = request.method.decode("latin-1"), request.target.decode("latin-1")
        upgrade = Upgrade(method, target, headers, _remote(transport), self._is_tls, reader, writer)
        self._door.start_upgrade(upgrade, handler)

    def _hand_to_web(self) -> None:
        transport = self._transport
        assert transport is not None
        if self._door.web is None:
            self._refuse(404, "not found")
            return
        protocol = self._door.web()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(bytes(self._buffer))

    def _refuse(self, status: int, text: str) -> None:
        self._leave()
        transport = self._transport
        assert transport is not None
        body = text.encode() + b"\n"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode("latin-1") + body)
        transport.close()


def _has_whole_head(buffer: bytearray) -> bool:
    return b"\r\n\r\n" in buffer or b"\n\n" in buffer


def _parse_head(raw: bytes) -> tuple[h11.Request | None, bytes]:
    """The request and what follows its head; (None, b"") for anything that is not HTTP/1 (aiohttp will say so)."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        connection.receive_data(raw)
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None, b""
    if not isinstance(event, h11.Request):
        return None, b""
    leftover, _ = connection.trailing_data
    return event, leftover


def _remote(transport: asyncio.Transport) -> AddrPort:
    peer = transport.get_extra_info("peername")
    try:
        return AddrPort(parse_ip(str(peer[0]).partition("%")[0]), int(peer[1]))
    except (DecodeError, TypeError, IndexError, ValueError):
        return AddrPort(parse_ip("0.0.0.0"), 0)
