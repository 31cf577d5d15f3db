"""DNS over streams (RFC 7766), and the stream and the UDP port to our own resolver that stand for 100.100.100.100
within this process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.log import fields
from tsd.base.tasks import Tasks
from tsd.hull import ResolveWire, Stream
from tsplatform.userspace.hostsock import HostStream

log = logging.getLogger(__name__)

DNS_PORT = 53
IDLE_S = 45.0
MAX_QUERY_BYTES = 4096
MAX_PIPELINED = 32
"""Questions of one connection that are answered at the same time (RFC 7766, 6.2.1.1), in the order they get ready."""


def open_service(
    resolve: ResolveWire, spawn: Callable[[Coroutine[Any, Any, None]], object], remote: AddrPort
) -> Stream:
    """A connection to one of the overlay's service addresses. Raises ConnectionRefusedError for all but DNS."""
    if remote.port != DNS_PORT:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"{remote.ip} answers DNS only, on port {DNS_PORT}")
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    spawn(_serve(HostStream(far, remote, remote), resolve))
    return HostStream(near, remote, remote)


class ServicePort:
    """A `hull.DatagramPort` whose only other end is our resolver; of too many questions at a time some are lost."""

    def __init__(
        self, resolve: ResolveWire, spawn: Callable[[Coroutine[Any, Any, None]], object], ip: IPAddress
    ) -> None:
        self.local = AddrPort(ip, 0)
        self._resolve = resolve
        self._spawn = spawn
        self._replies: asyncio.Queue[tuple[bytes, AddrPort] | None] = asyncio.Queue(MAX_PIPELINED)
        self._asked = 0
        self._is_closed = False

    def send(self, data: bytes, remote: AddrPort) -> None:
        if remote.port == DNS_PORT and self._asked < MAX_PIPELINED and not self._is_closed:
            self._asked += 1
            self._spawn(self._ask(data, remote))

    async def _ask(self, query: bytes, remote: AddrPort) -> None:
        try:
            reply = await self._resolve(query, False)
        finally:
            self._asked -= 1
        if reply and not self._is_closed:
            with contextlib.suppress(asyncio.QueueFull):
                self._replies.put_nowait((reply, remote))

    async def receive(self) -> tuple[bytes, AddrPort]:
        """Raises OSError when closed."""
        found = None if self._is_closed else await self._replies.get()
        if found is None:
            raise OSError(errno.EBADF, "the port is closed")
        return found

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(asyncio.QueueFull):
                self._replies.put_nowait(None)


async def _serve(stream: Stream, resolve: ResolveWire) -> None:
    try:
        await Pipeline(stream, lambda query: resolve(query, True)).run()
    finally:
        await stream.close()


class Pipeline:
    """The questions of one connection."""

    def __init__(self, stream: Stream, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._stream = stream
        self._answer = answer
        self._free = asyncio.Semaphore(MAX_PIPELINED)
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Until the client ends, is silent for long, or says something else."""
        running = Tasks(log)
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    query = await _read_query(self._stream)
                if query is None:
                    break
                await self._free.acquire()
                running.spawn(self._reply(query))
            await asyncio.gather(*running, return_exceptions=True)
        except (TimeoutError, OSError) as err:
            log.debug(fields("connection ended", reason=err))
        finally:
            running.cancel()

    async def _reply(self, query: bytes) -> None:
        try:
            reply = await self._answer(query)
            if reply:
                async with self._writing:
                    await self._stream.write(len(reply).to_bytes(2, "big") + reply)
        except OSError:
            self._stream.abort()
        finally:
            self._free.release()


async def _read_query(stream: Stream) -> bytes | None:
    """One length-prefixed message; None at the end or when it is too long."""
    head = await _read_exactly(stream, 2)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    return await _read_exactly(stream, size) if 0 < size <= MAX_QUERY_BYTES else None


async def _read_exactly(stream: Stream, count: int) -> bytes | None:
    got = b""
    while len(got) < count:
        chunk = await stream.read(count - len(got))
        if not chunk:
            return None
        got += chunk
    return got
