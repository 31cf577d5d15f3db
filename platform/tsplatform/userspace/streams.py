"""Overlay sockets of the userspace stack in the shape of `tsd.hull`: `OverlayStream` and `OverlayDatagrams`.

They only wait and wake; bytes move in `tsd.netstack`. A `sink` takes the events instead of waiting tasks: that is how
the forwarders pump without a task per connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tsd.base.addr import AddrPort, IPAddress
from tsd.netstack.events import DatagramBinding
from tsd.netstack.stack import Stack
from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.connection import Connection

_WRITE_PIECE_BYTES = 256 << 10
_DATAGRAM_QUEUE = 256


class Glue(Protocol):
    """What a stream needs from the TUN that drives the stack."""

    stack: Stack

    def now(self) -> float: ...

    def touch(self, connection: Connection) -> None: ...

    def kick(self) -> None: ...


def connection_error(connection: Connection) -> OSError:
    """The exception that says why a connection died."""
    error = connection.error
    if error == "refused":
        return ConnectionRefusedError(111, "connection refused")
    if error == "timeout":
        return TimeoutError(110, "connection timed out")
    if error == "unreachable":
        return OSError(113, "no route to host")
    if error == "prohibited":
        return PermissionError(13, "the other node's access rules do not allow it")
    if error == "aborted":
        return ConnectionAbortedError(103, "connection aborted")
    if error == "reset":
        return ConnectionResetError(104, "connection reset by peer")
    return BrokenPipeError(32, error or "the connection is closed")


class OverlayStream:
    """hull.Stream on a connection of the stack."""

    def __init__(self, glue: Glue, connection: Connection, local: AddrPort, remote: AddrPort) -> None:
        self.local = local
        self.remote = remote
        self.connection = connection
        self.sink: Callable[[int], None] | None = None
        self._glue = glue
        self._opened: asyncio.Future[None] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_closed = False
        connection.owner = self

    def on_events(self, bits: int) -> None:
        """Called by the glue with CONNECTED, READABLE, WRITABLE, DEAD."""
        if self.sink is not None:
            self.sink(bits)
            return
        if bits & (c.CONNECTED | c.DEAD):
            _wake(self._opened)
        if bits & (c.READABLE | c.DEAD):
            _wake(self._reader)
        if bits & (c.WRITABLE | c.DEAD):
            _wake(self._writer)

    async def wait_open(self, timeout_s: float) -> None:
        """Until the handshake is done; raises what it ended with."""
        connection = self.connection
        if connection.state in (c.SYN_SENT, c.SYN_RECEIVED):
            loop = asyncio.get_running_loop()
            self._opened = loop.create_future()
            late = loop.call_later(timeout_s, _fail_late, self._opened)
            try:
                await self._opened
            except (TimeoutError, asyncio.CancelledError):
                self.abort()
                raise
            finally:
                late.cancel()
                self._opened = None
        if connection.state == c.CLOSED:
            raise connection_error(connection)

    async def read(self, limit: int) -> bytes:
        connection = self.connection
        while True:
            data = connection.read(limit, self._glue.now())
            if data:
                if connection.ack_wanted:
                    self._glue.touch(connection)
                return data
            if connection.error:
                raise connection_error(connection)
            if connection.is_at_eof or self._is_closed or connection.state == c.CLOSED:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    async def write(self, data: bytes | memoryview) -> None:
        if len(data) <= _WRITE_PIECE_BYTES:
            await self._write(data)
            return
        view = memoryview(data)
        for at in range(0, len(view), _WRITE_PIECE_BYTES):
            await self._write(view[at : at + _WRITE_PIECE_BYTES])

    async def _write(self, data: bytes | memoryview) -> None:
        connection = self.connection
        if connection.error or self._is_closed:
            raise connection_error(connection)
        connection.write(data)
        self._glue.touch(connection)
        while connection.send_room <= 0 and connection.state != c.CLOSED:
            connection.wants_writable = True
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        if connection.error:
            raise connection_error(connection)

    async def write_eof(self) -> None:
        self.connection.shutdown_write()
        self._glue.touch(self.connection)

    def abort(self) -> None:
        self._is_closed = True
        self.connection.abort(self._glue.now())
        self._glue.kick()
        self.on_events(c.DEAD)

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.connection.close(self._glue.now())
            self._glue.touch(self.connection)
            if self.sink is None:
                self.on_events(c.DEAD)


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _fail_late(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(TimeoutError(110, "connection timed out"))


class OverlayDatagrams:
    """hull.DatagramPort on the stack. The queue drops the newest when its reader is slow."""

    def __init__(self, glue: Glue, address: IPAddress | None, port: int, reply_from: IPAddress) -> None:
        self._glue = glue
        self._binding: DatagramBinding = glue.stack.bind_datagram(address, port, self)
        self.local = AddrPort(address or reply_from, self._binding.port)
        self._queue: deque[tuple[bytes, AddrPort]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def on_datagram(self, payload: bytes, remote: AddrPort) -> None:
        if len(self._queue) < _DATAGRAM_QUEUE:
            self._queue.append((payload, remote))
            _wake(self._waiter)

    def send(self, data: bytes, remote: AddrPort) -> None:
        """Raises OSError when there is no address of that family, or the datagram is too long."""
        source = self.local
        if source.ip.version != remote.ip.version:
            own = self._glue.stack.own_address(remote.ip.version)
            if own is None:
                raise OSError(97, "no overlay address of that family")
            source = AddrPort(own, source.port)
        self._glue.stack.datagrams.send(source, remote, data)
        self._glue.kick()

    async def receive(self) -> tuple[bytes, AddrPort]:
        while not self._queue:
            if self._is_closed:
                raise ConnectionAbortedError(103, "the port is closed")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._queue.popleft()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._glue.stack.datagrams.unbind(self._binding)
            _wake(self._waiter)
