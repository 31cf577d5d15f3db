"""The overlay's service addresses (100.100.100.100 and fd7a:115c:a1e0::53) on a host with a TUN.

Packets to them are taken out of the device's stream and answered by a small userspace stack, so that no socket, no
address and no port of the host is used: DNS over UDP and TCP (RFC 7766) by the engine's resolver; all else is refused.
"""

from __future__ import annotations

import logging

from tsd.base.addr import QUAD_100, QUAD_100_V6, AddrPort
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.log import fields
from tsd.base.tasks import Tasks
from tsd.hull import DatagramPort, Frame, ResolveWire, Stream
from tsplatform.dnsstream import DNS_PORT, Pipeline
from tsplatform.linux.tun import KernelTun
from tsplatform.userspace.tun import NetstackTun

log = logging.getLogger(__name__)

MAX_WAITING = 256
MAX_CONNECTIONS = 128

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

    async def start(self, resolve: ResolveWire) -> None:
        self._stack.attach(self._tun.deliver)
        for ip in (QUAD_100, QUAD_100_V6):
            local = AddrPort(ip, DNS_PORT)
            await self._stack.listen(local, lambda stream: self._serve_tcp(stream, resolve))
            self._tasks.spawn(self._serve_udp(await self._stack.open_datagram(local), resolve))

    def close(self) -> None:
        self._tasks.cancel()
        self._stack.close()

    def divert(self, frame: Frame) -> bool:
        """Whether a frame of the host was for the services."""
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
            await Pipeline(stream, lambda query: self._resolve(query, True, resolve)).run()
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
