"""HTTP/2 over any byte stream, on asyncio: `Http2Client` and `Http2Server`. The protocol itself is `tsd.http2`.

One task reads; writers go through the machine and out at once, so there is no second task and no queue of ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import unquote

from tsd.base.addr import parse_number
from tsd.base.errors import ControlError, ProtocolError
from tsd.base.log import fields
from tsd.http2.machine import (
    ConnectionFinished,
    DataReceived,
    Event,
    Headers,
    HeadersReceived,
    Http2Machine,
    PingAnswered,
    StreamFinished,
    WindowsChanged,
)
from tsd.transport.noise_stream import ByteStream

log = logging.getLogger("tsd.transport.h2")

MAX_REQUEST_BODY_BYTES = 1 << 20
MAX_HELD_BODY_BYTES = 8 << 20
SEND_QUEUE_BYTES = 256 << 10
PING_AFTER_S = 60.0
PONG_WITHIN_S = 30.0


class StreamLost(ControlError):
    """The stream or its connection ended before the answer was complete; a new connection may do better."""


class _Inbox:
    """What arrived on one stream, until somebody takes it."""

    def __init__(self) -> None:
        self.headers: HeadersReceived | None = None
        self.chunks: list[DataReceived] = []
        self.is_finished = False
        self.error = ""
        self._changed = asyncio.Event()

    def note(self, event: Event) -> None:
        match event:
            case HeadersReceived():
                # A second block is trailers, which carry nothing here.
                self.headers = self.headers or event
            case DataReceived():
                self.chunks.append(event)
            case StreamFinished(error=error):
                self.finish(error)
        self._changed.set()

    def finish(self, error: str) -> None:
        if not self.is_finished:
            self.is_finished, self.error = True, error
        self._changed.set()

    async def wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class _Connection:
    """The shared half of both roles: the reading task, and streams by number."""

    def __init__(self, stream: ByteStream, *, is_client: bool) -> None:
        self._stream = stream
        self._is_client = is_client
        self._machine = Http2Machine(is_client=is_client)
        self._inboxes: dict[int, _Inbox] = {}
        self._windows = asyncio.Condition()
        self._answered = asyncio.Event()
        self._has_heard = False
        self.closed_reason = ""

    @property
    def is_closed(self) -> bool:
        return bool(self.closed_reason)

    def flush(self) -> None:
        pending = self._machine.take_bytes()
        if pending and not self.is_closed:
            self._stream.write(pending)

    async def pump(self) -> None:
        """Read until the connection ends; never raises but for cancellation."""
        reason = "connection closed by the server"
        try:
            self.flush()
            while chunk := await self._stream.read():
                self._has_heard = True
                self._machine.receive(chunk)
                await self._dispatch(self._machine.take_events())
                self.flush()
                if self._machine.is_closed:
                    break
                if not self._is_client:
                    # Bounds what a client that never reads can make us hold. A client must not wait here: both ends
                    # waiting for the other to read would be a deadlock.
                    await self._stream.drain()
        except (OSError, ProtocolError, EOFError) as err:
            reason = str(err) or type(err).__name__
        except asyncio.CancelledError:
            reason = "closed"
            raise
        finally:
            await self._end(reason)

    async def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ConnectionFinished(reason=reason):
                    self.flush()
                    await self._end(reason)
                case PingAnswered():
                    self._answered.set()
                case WindowsChanged():
                    async with self._windows:
                        self._windows.notify_all()
                case _:
                    self._on_stream_event(event)
                    if isinstance(event, StreamFinished):
                        async with self._windows:
                            self._windows.notify_all()

    def _on_stream_event(self, event: Event) -> None:
        assert not isinstance(event, ConnectionFinished | WindowsChanged | PingAnswered)
        inbox = self._inboxes.get(event.stream_id)
        if inbox is not None:
            inbox.note(event)
        elif isinstance(event, DataReceived):
            self._machine.acknowledge(event.stream_id, event.flow_bytes)

    async def _end(self, reason: str) -> None:
        if self.is_closed:
            return
        self.closed_reason = reason
        for inbox in list(self._inboxes.values()):
            inbox.finish(reason)
        self._stream.close()
        async with self._windows:
            self._windows.notify_all()

    async def is_alive(self, timeout_s: float) -> bool:
        """Whether the other side answers a ping in time."""
        self._answered.clear()
        self._machine.ping(b"tsd-ping")
        self.flush()
        try:
            async with asyncio.timeout(timeout_s):
                await self._answered.wait()
        except TimeoutError:
            return False
        return True

    def take_chunk(self, stream_id: int, inbox: _Inbox) -> bytes:
        event = inbox.chunks.pop(0)
        self._machine.acknowledge(stream_id, event.flow_bytes)
        self.flush()
        return event.data

    async def send(self, stream_id: int, data: bytes, *, is_last: bool = False) -> None:
        """Returns once little enough is queued. Raises `StreamLost` when the stream is gone."""
        self._machine.send_data(stream_id, data, is_last=is_last)
        self.flush()
        async with self._windows:
            await self._windows.wait_for(
                lambda: self.is_closed or self._machine.queued_bytes(stream_id) < SEND_QUEUE_BYTES
            )
        if self.is_closed:
            raise StreamLost(self.closed_reason)
        try:
            await self._stream.drain()
        except OSError as err:
            raise StreamLost(str(err)) from None

    def forget(self, stream_id: int, *, is_reset: bool) -> None:
        inbox = self._inboxes.pop(stream_id, None)
        for event in inbox.chunks if inbox is not None else ():
            self._machine.acknowledge(stream_id, event.flow_bytes)
        if is_reset:
            self._machine.reset_stream(stream_id)
        self.flush()


class Http2Response:
    """Status and headers are there; the body comes as it arrives. Close it when you stop early."""

    def __init__(self, connection: _Connection, stream_id: int, inbox: _Inbox) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._inbox = inbox
        assert inbox.headers is not None
        self.status = parse_number(inbox.headers.get(":status"), 999) or 0
        self.headers = {name: value for name, value in inbox.headers.headers if not name.startswith(":")}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises `StreamLost` if the body is cut."""
        inbox = self._inbox
        while True:
            while inbox.chunks:
                yield self._connection.take_chunk(self._stream_id, inbox)
            if inbox.is_finished:
                break
            await inbox.wait()
        if inbox.error:
            raise StreamLost(inbox.error)
        self.close()

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body. Raises `ControlError` when it is longer than the limit."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > limit_bytes:
                self.close()
                raise ControlError(f"the server's answer is larger than {limit_bytes} bytes", status=self.status)
        return bytes(body)

    def close(self) -> None:
        """Idempotent; resets the stream when it has not ended."""
        self._connection.forget(self._stream_id, is_reset=not self._inbox.is_finished)


class Http2Client(_Connection):
    """Requests over one connection. The task that runs `pump` belongs to this object."""

    def __init__(self, stream: ByteStream, authority: str) -> None:
        super().__init__(stream, is_client=True)
        self._authority = authority
        self._task = asyncio.create_task(self.pump(), name="http2 client")

    async def request(self, method: str, path: str, headers: Headers = (), body: bytes = b"") -> Http2Response:
        """Returns when the response headers are there. Raises `StreamLost`; cancelling resets the stream."""
        async with self._windows:
            await self._windows.wait_for(lambda: self.is_closed or self._machine.can_open_stream)
        if self.is_closed:
            raise StreamLost(self.closed_reason)
        head = [(":method", method), (":scheme", "https"), (":authority", self._authority), (":path", path)]
        length = [("content-length", str(len(body)))] if body or method == "POST" else []
        try:
            stream_id = self._machine.open_stream([*head, *length, *headers], body)
        except ProtocolError as err:
            raise StreamLost(str(err)) from None
        inbox = self._inboxes[stream_id] = _Inbox()
        self.flush()
        try:
            while inbox.headers is None and not inbox.is_finished:
                await inbox.wait()
        except asyncio.CancelledError:
            self.forget(stream_id, is_reset=True)
            raise
        if inbox.headers is None:
            self.forget(stream_id, is_reset=False)
            raise StreamLost(inbox.error or "stream ended without an answer")
        async with self._windows:
            self._windows.notify_all()
        return Http2Response(self, stream_id, inbox)

    async def close(self) -> None:
        """GOAWAY, then the socket; waits for the reading task."""
        self._machine.close()
        self.flush()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Http2Request:
    """A request being served. The handler's task is cancelled when the client goes away."""

    def __init__(self, connection: Http2Server, stream_id: int, head: HeadersReceived, inbox: _Inbox) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._inbox = inbox
        self.method = head.get(":method")
        path, _, self.query = head.get(":path", "/").partition("#")[0].partition("?")
        self.path = unquote(path)
        self.headers = {name: value for name, value in head.headers if not name.startswith(":")}
        self.is_started = False
        self.is_ended = False

    async def body(self, limit_bytes: int = MAX_REQUEST_BODY_BYTES) -> bytes:
        """The whole body. Raises `ControlError` (413) when it is too long, `StreamLost` when it was cut.

        All requests of a connection share a budget, for anybody can open one before it is known who he is.
        """
        whole = bytearray()
        connection = self._connection
        try:
            while True:
                while self._inbox.chunks:
                    piece = connection.take_chunk(self._stream_id, self._inbox)
                    whole += piece
                    connection.held_body_bytes += len(piece)
                    if len(whole) > limit_bytes or connection.held_body_bytes > MAX_HELD_BODY_BYTES:
                        raise ControlError("request body too large", status=413)
                if self._inbox.is_finished:
                    break
                await self._inbox.wait()
        finally:
            connection.held_body_bytes -= len(whole)
        if self._inbox.error:
            raise StreamLost(self._inbox.error)
        return bytes(whole)

    def start(self, status: int, headers: Headers = ()) -> None:
        """Send the response head; then `send` as often as you like and `end`."""
        self.is_started = True
        self._connection.send_headers(self._stream_id, [(":status", str(status)), *headers])

    async def send(self, data: bytes) -> None:
        """Flushed at once; waits when the client reads slowly. Raises `StreamLost`."""
        await self._connection.send(self._stream_id, data)

    async def end(self) -> None:
        if not self.is_ended:
            self.is_ended = True
            await self._connection.send(self._stream_id, b"", is_last=True)

    async def respond(self, status: int, body: bytes = b"", content_type: str = "application/json") -> None:
        """Head, body and end in one go."""
        self.start(status, [("content-type", content_type), ("content-length", str(len(body)))])
        self.is_ended = True
        await self._connection.send(self._stream_id, body, is_last=True)


Http2Handler = Callable[[Http2Request], Awaitable[None]]


class Http2Server(_Connection):
    """Serves one connection: `await server.serve()` returns when it is over and all handlers have ended."""

    def __init__(self, stream: ByteStream, handler: Http2Handler) -> None:
        super().__init__(stream, is_client=False)
        self._handler = handler
        self.held_body_bytes = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        own = [asyncio.create_task(self.pump()), asyncio.create_task(self._watch())]
        try:
            await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [*own, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Returns when the client vanished without a word: it must not count as online for as long as TCP retries."""
        while True:
            self._has_heard = False
            await asyncio.sleep(PING_AFTER_S)
            if not self._has_heard and not await self.is_alive(PONG_WITHIN_S):
                log.info(fields("client does not answer", seconds=PING_AFTER_S + PONG_WITHIN_S))
                return

    def close(self) -> None:
        """GOAWAY and close; `serve` then returns."""
        self._machine.close()
        self.flush()
        self._stream.close()

    def send_headers(self, stream_id: int, headers: Headers) -> None:
        self._machine.send_headers(stream_id, headers)
        self.flush()

    def _on_stream_event(self, event: Event) -> None:
        assert not isinstance(event, ConnectionFinished | WindowsChanged)
        if isinstance(event, HeadersReceived) and event.stream_id not in self._inboxes:
            inbox = self._inboxes[event.stream_id] = _Inbox()
            request = Http2Request(self, event.stream_id, event, inbox)
            self._tasks[event.stream_id] = asyncio.create_task(self._run(request, event.stream_id))
            return
        super()._on_stream_event(event)
        if isinstance(event, StreamFinished) and event.error and event.stream_id in self._tasks:
            self._tasks[event.stream_id].cancel()

    async def _run(self, request: Http2Request, stream_id: int) -> None:
        try:
            await self._handle(request)
            if request.is_started:
                await request.end()
        except StreamLost:
            pass
        except Exception:
            log.exception(fields("handler failed", method=request.method, path=request.path))
            if not request.is_started:
                await asyncio.shield(request.respond(500, b"internal error", "text/plain"))
            self.forget(stream_id, is_reset=True)
        finally:
            self._tasks.pop(stream_id, None)
            self.forget(stream_id, is_reset=False)

    async def _handle(self, request: Http2Request) -> None:
        try:
            await self._handler(request)
        except ControlError as err:
            if request.is_started or isinstance(err, StreamLost):
                raise
            await request.respond(err.status or 500, str(err).encode(), "text/plain")
