"""DNS over streams (RFC 7766), and the one to our own resolver that stands for 100.100.100.100 within this process."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tsd.base.addr import AddrPort
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
