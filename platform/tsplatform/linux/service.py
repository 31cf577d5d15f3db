"""The overlay's service addresses (100.100.100.100 and fd7a:115c:a1e0::53) on a host with a TUN.

Packets to them are taken out of the device's stream and answered by a small userspace stack, so that no socket, no
address and no port of the host is used: DNS over UDP and TCP (RFC 7766) by the engine's resolver; all else is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tsd.base.addr import QUAD_100, QUAD_100_V6, AddrPort
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.log import fields
from tsd.base.tasks import Tasks
from tsd.hull import DatagramPort, Frame, ResolveWire, Stream
from tsplatform.linux.tun import KernelTun
from tsplatform.userspace.tun import NetstackTun

log = logging.getLogger(__name__)

DNS_PORT = 53
IDLE_S = 45.0
MAX_QUERY_BYTES = 4096
MAX_WAITING = 256
MAX_CONNECTIONS = 128
MAX_PIPELINED = 32
"""Questions of one connection that are answered at the same time (RFC 7766, 6.2.1.1), in the order they get ready."""

_V4, _V6 = QUAD_100.packed, QUAD_100_V6.packed


class ServiceStack:
    """`start` it on the running loop. Without a resolver nothing listens, and every port is refused."""

    def __init__(self, tun: KernelTun, entropy: Entropy, clock: Clock | None = None, *, loopback_port: int = 0) -> None:
        """`loopback_port`: TCP and UDP to it go to this port of the host's loopback address (for tests)."""
        self._tun = tun
        self._stack = NetstackTun((QUAD_100, QUAD_100_V6), tun.mtu_bytes, entropy=entropy, clock=clock)
        self._stack.forwarder.only_ports = frozenset((loopback_port,) if loopback_port else ())
        self._tasks = Tasks(log)
        self._waiting = 0
        self._connections = 0
        tun.divert = self._divert

    async def start(self, resolve: ResolveWire) -> None:
        self._stack.attach(self._tun.deliver)
        for ip in (QUAD_100, QUAD_100_V6):
            local = AddrPort(ip, DNS_PORT)
            await self._stack.listen(local, lambda stream: self._serve_tcp(stream, resolve))
            self._tasks.spawn(self._serve_udp(await self._stack.open_datagram(local), resolve))

    def close(self) -> None:
        self._tasks.cancel()
        self._stack.close()

    def _divert(self, frame: Frame) -> bool:
        packet = frame.packet
        is_service = packet[16:20] == _V4 if packet[0] >> 4 == 4 else packet[24:40] == _V6
        if is_service:
            self._stack.deliver((frame,))
            return True
        return False

    async def _serve_udp(self, port: DatagramPort, resolve: ResolveWire) -> None:
        while True:
            query, source = await port.receive()
            if self._waiting < MAX_WAITING:
                self._tasks.spawn(self._answer_udp(port, source, query, resolve))

    async def _answer_udp(self, port: DatagramPort, source: AddrPort, query: bytes, resolve: ResolveWire) -> None:
        reply = await self._resolve(query, False, resolve)
        if reply:
            port.send(reply, source)

    async def _serve_tcp(self, stream: Stream, resolve: ResolveWire) -> None:
        if self._connections >= MAX_CONNECTIONS:
            stream.abort()
            return
        self._connections += 1
        try:
            await _Pipeline(stream, lambda query: self._resolve(query, True, resolve)).run()
        finally:
            self._connections -= 1
            await stream.close()

    async def _resolve(self, query: bytes, over_tcp: bool, resolve: ResolveWire) -> bytes:
        """b"" when there is nothing to say."""
        self._waiting += 1
        try:
            return await resolve(query, over_tcp)
        except OSError as err:
            log.debug(fields("query not answered", reason=err))
            return b""
        finally:
            self._waiting -= 1


class _Pipeline:
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
