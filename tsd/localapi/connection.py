"""One accepted connection: buffered bytes in, flow-controlled bytes out, and notice when the other end goes away.

asyncio only; knows bytes and request heads, not endpoints. Reading goes on while a handler works (that is how a
disconnect is seen), bounded by pausing the transport.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import cast

from tsd.base.errors import TsdError
from tsd.localapi.http1 import (
    MAX_HEAD_BYTES,
    BadRequest,
    ChunkedDecoder,
    RequestHead,
    body_length,
    find_head_end,
    parse_head,
)

HIGH_WATER_BYTES = 256 * 1024
HEAD_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 900.0
MAX_JSON_BYTES = 16 * 1024 * 1024


class ClientGone(TsdError):
    """The other end hung up: stop working for it."""


class Connection(asyncio.Protocol):
    """Byte side of a connection. `served` is the task that owns it."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.is_eof = False
        self.is_lost = False
        self._data_waiter: asyncio.Future[None] | None = None
        self._write_waiter: asyncio.Future[None] | None = None
        self._is_reading_paused = False
        self._is_write_paused = False
        self._gone_scopes: list[UntilGone] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if len(self.buffer) > HIGH_WATER_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()
        self._wake(self._data_waiter)

    def eof_received(self) -> bool:
        self.is_eof = True
        self._wake(self._data_waiter)
        self._notify_gone()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_eof = self.is_lost = True
        self._wake(self._data_waiter)
        self._wake(self._write_waiter)
        self._notify_gone()

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._wake(self._write_waiter)

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _notify_gone(self) -> None:
        for scope in self._gone_scopes:
            scope.fire()

    async def fill(self) -> bool:
        """Wait for more input; False when there will be none."""
        if self.is_eof:
            return False
        if self._is_reading_paused and len(self.buffer) <= HIGH_WATER_BYTES // 2:
            self._is_reading_paused = False
            self.transport.resume_reading()
        before = len(self.buffer)
        self._data_waiter = asyncio.get_running_loop().create_future()
        try:
            await self._data_waiter
        finally:
            self._data_waiter = None
        return len(self.buffer) > before or not self.is_eof

    async def read(self, limit: int) -> bytes:
        """Up to `limit` raw bytes; b"" at the end."""
        while not self.buffer:
            if not await self.fill():
                return b""
        data = bytes(self.buffer[:limit])
        del self.buffer[:limit]
        return data

    def write(self, data: bytes) -> None:
        if not self.is_lost:
            self.transport.write(data)

    async def drain(self) -> None:
        """Back-pressure: returns when the transport takes more. Raises ClientGone."""
        if self._is_write_paused and not self.is_lost:
            self._write_waiter = asyncio.get_running_loop().create_future()
            try:
                await self._write_waiter
            finally:
                self._write_waiter = None
        if self.is_lost:
            raise ClientGone("connection lost")

    def until_gone(self) -> UntilGone:
        """`async with` block that ends with ClientGone when the other end hangs up meanwhile."""
        return UntilGone(self)

    async def read_head(self) -> RequestHead | None:
        """The next request, None at a clean end. Raises BadRequest."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S) as timeout:
                while True:
                    head = self._take_head()
                    if head is not None:
                        return head
                    if self.buffer and deadline is None:
                        deadline = loop.time() + HEAD_TIMEOUT_S
                        timeout.reschedule(deadline)
                    if not await self.fill():
                        return None
        except TimeoutError:
            if self.buffer:
                raise BadRequest(408, "request head did not arrive in time") from None
            return None

    def _take_head(self) -> RequestHead | None:
        while self.buffer.startswith(b"\r\n"):
            del self.buffer[:2]
        end = find_head_end(self.buffer)
        if end > MAX_HEAD_BYTES or (end < 0 and len(self.buffer) > MAX_HEAD_BYTES):
            raise BadRequest(431, "request head too large")
        if end < 0:
            if b"\n\n" in self.buffer:
                raise BadRequest(400, "lines must end in CR LF")
            return None
        head = bytes(self.buffer[:end])
        del self.buffer[:end]
        return parse_head(head)


class UntilGone:
    """Cancels the block's task when the connection ends, and turns that into ClientGone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._task: asyncio.Task[object] | None = None
        self._has_fired = False

    def fire(self) -> None:
        if self._task is not None and not self._has_fired:
            self._has_fired = True
            self._task.cancel()

    async def __aenter__(self) -> None:
        if self._connection.is_eof:
            raise ClientGone("client hung up")
        self._task = asyncio.current_task()
        self._connection._gone_scopes.append(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection._gone_scopes.remove(self)
        if not self._has_fired or self._task is None:
            return
        still_cancelled = self._task.uncancel() > 0
        if kind is asyncio.CancelledError and not still_cancelled:
            raise ClientGone("client hung up") from None


class Body:
    """The request's body, read once, as a stream or whole."""

    def __init__(self, connection: Connection, head: RequestHead) -> None:
        self._connection = connection
        self.length = body_length(head)
        self._left = self.length
        self._chunked = ChunkedDecoder() if self.length < 0 else None
        self._expects_continue = head.has_token("Expect", "100-continue")

    @property
    def is_read(self) -> bool:
        return self._chunked.is_done if self._chunked else self._left == 0

    async def read_some(self) -> bytes:
        """The next piece; b"" at the end. Raises BadRequest when the body is cut short."""
        if self._expects_continue and not self.is_read:
            self._expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not self.is_read:
            piece = self._take()
            if piece:
                return piece
            if not self.is_read and not await self._connection.fill():
                raise BadRequest(400, "request body cut short")
        return b""

    def _take(self) -> bytes:
        buffer = self._connection.buffer
        if self._chunked is not None:
            return self._chunked.take(buffer)
        piece = bytes(buffer[: min(self._left, 65536)])
        del buffer[: len(piece)]
        self._left -= len(piece)
        return piece

    async def read(self, limit: int = MAX_JSON_BYTES) -> bytes:
        pieces: list[bytes] = []
        total = 0
        while piece := await self.read_some():
            total += len(piece)
            if total > limit:
                raise BadRequest(413, "request body too large")
            pieces.append(piece)
        return b"".join(pieces)

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> bytes:
        piece = await self.read_some()
        if not piece:
            raise StopAsyncIteration
        return piece

    async def discard(self, limit: int = HIGH_WATER_BYTES) -> bool:
        """Skip what the handler left unread; False when that is not worth it (close instead)."""
        if self._expects_continue and not self.is_read:
            return False
        total = 0
        try:
            async with asyncio.timeout(5.0):
                while piece := await self.read_some():
                    total += len(piece)
                    if total > limit:
                        return False
        except (BadRequest, TimeoutError):
            return False
        return True
