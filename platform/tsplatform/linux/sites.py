"""4via6 on a host with a TUN: IPv4 networks of numbered sites, which their clients address in IPv6.

The kernel does not translate such addresses, so what the packet filter let in for an advertised route of this kind goes
to a small userspace stack. It opens sockets of the host to the IPv4 address behind: the site sees this host as the
source. Programs of this host get there in the same way. Model: tailscale `wgengine/netstack` (handleLocalPackets).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tsd.base.addr import VIA_RANGE, IPAddress, IPPrefix, is_via_route
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.hull import Frame
from tsplatform.linux.tun import KernelTun
from tsplatform.userspace.forward import Protect
from tsplatform.userspace.tun import NetstackTun

_VIA_START = VIA_RANGE.network_address.packed[:8]


class SiteGateway:
    """`start` it on the running loop; `set_routes` says which sites are ours."""

    def __init__(
        self,
        tun: KernelTun,
        own_addresses: Callable[[], Sequence[IPAddress]],
        protect: Protect,
        entropy: Entropy,
        clock: Clock | None = None,
    ) -> None:
        """`protect`: the site's hosts are reached beside the tunnel, also when a peer offers the same IPv4 network."""
        self._tun = tun
        self._own_addresses = own_addresses
        self._routes: tuple[IPPrefix, ...] = ()
        self._stack = NetstackTun((), tun.mtu_bytes, entropy=entropy, clock=clock, protect=protect)
        self.proxy_origin = self._stack.proxy_origin
        tun.divert_inbound = self._divert_inbound

    def start(self) -> None:
        self._stack.attach(self._send)

    def close(self) -> None:
        self._stack.close()

    def set_routes(self, routes: Sequence[IPPrefix]) -> None:
        self._routes = tuple(filter(is_via_route, routes))
        self._stack.set_subnets(self._routes)

    def divert(self, frame: Frame) -> bool:
        """A program of this host speaks to a site of ours. Never somebody who forwards through this host."""
        packet = frame.packet
        if not self._is_for_site(packet) or bytes(packet[8:24]) not in self._own():
            return False
        self._stack.deliver((frame,))
        return True

    def _divert_inbound(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        if not self._routes:
            return frames
        taken = [frame for frame in frames if self._is_for_site(frame.packet)]
        if not taken:
            return frames
        self._stack.deliver(taken)
        return [frame for frame in frames if not self._is_for_site(frame.packet)]

    def _is_for_site(self, packet: bytes | bytearray | memoryview) -> bool:
        if not self._routes or packet[0] >> 4 != 6 or packet[24:32] != _VIA_START:
            return False
        target = int.from_bytes(packet[24:40], "big")
        return any(target >> 128 - p.prefixlen == int(p.network_address) >> 128 - p.prefixlen for p in self._routes)

    def _send(self, frames: list[Frame]) -> None:
        own = self._own()
        to_host = [frame for frame in frames if bytes(frame.packet[24:40]) in own]
        if to_host:
            self._tun.deliver(to_host)
        to_peers = [frame for frame in frames if bytes(frame.packet[24:40]) not in own] if to_host else frames
        if to_peers:
            self._tun.send(to_peers)

    def _own(self) -> set[bytes]:
        return {ip.packed for ip in self._own_addresses()}
