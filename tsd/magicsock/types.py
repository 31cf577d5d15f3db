"""Values that go in and out of magicsock."""

from __future__ import annotations

from enum import IntEnum
from ipaddress import IPv4Address
from typing import NamedTuple

from msgspec import Struct

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.keys import DiscoPublic, NodePublic

DERP_MAGIC_IP = IPv4Address("127.3.3.40")
"""Stands for "by relay" where the wire wants an address; the port is the region (tailscale: tailcfg/derpmap.go)."""


class EndpointKind(IntEnum):
    """Type codes that control knows (tailscale: tailcfg/tailcfg.go, EndpointType)."""

    LOCAL = 1
    STUN = 2
    PORTMAPPED = 3
    STUN4_LOCAL_PORT = 4
    EXPLICIT = 5


class OwnEndpoint(NamedTuple):
    address: AddrPort
    kind: EndpointKind = EndpointKind.LOCAL


class PeerPaths(Struct, frozen=True):
    """What the netmap says about reaching a peer; `home_derp` 0 means unknown."""

    node_key: NodePublic
    disco_key: DiscoPublic | None = None
    endpoints: tuple[AddrPort, ...] = ()
    home_derp: int = 0
    capver: int = 0
    is_wireguard_only: bool = False
    addresses: tuple[IPAddress, ...] = ()


class Route(NamedTuple):
    """Where to send WireGuard datagrams now: `udp`, `derp_region` (0: none), or both while `udp` is not trusted."""

    udp: AddrPort | None
    derp_region: int


NO_ROUTE = Route(None, 0)


class DerpSource(NamedTuple):
    """Where something came from that arrived by relay."""

    region: int
    node_key: NodePublic


class PathInfo(Struct, frozen=True):
    """The path to a peer, for status. `cur_addr` is set only while it is trusted."""

    cur_addr: AddrPort | None = None
    relay_region: int = 0
    latency_s: float = 0.0
    last_pong: float = 0.0
    last_send: float = 0.0
    last_receive: float = 0.0
    is_active: bool = False
    candidates: tuple[AddrPort, ...] = ()


class SendUdp(Struct, frozen=True):
    address: AddrPort
    datagram: bytes


class SendDerp(Struct, frozen=True):
    region: int
    node_key: NodePublic
    datagram: bytes


class PathChanged(Struct, frozen=True):
    """A peer moved between relay and direct, or between direct paths."""

    handle: int
    path: PathInfo


class EndpointsWanted(Struct, frozen=True):
    """Find our endpoints again (re-STUN) and answer with `set_endpoints`, even when nothing changed."""

    reason: str


class RebindWanted(Struct, frozen=True):
    """The UDP sockets refuse to send: bind them anew."""

    reason: str


class DataProbeWanted(Struct, frozen=True):
    """Send data that the peer answers to this address alone; `Magicsock.data_passed` takes note of the answer."""

    handle: int
    address: AddrPort


class PongReceived(Struct, frozen=True):
    """A peer answered; `endpoint` None means by relay."""

    handle: int
    endpoint: AddrPort | None
    derp_region: int
    latency_s: float


class CliPong(Struct, frozen=True):
    """An answer to `Magicsock.ping`; several paths may answer one token."""

    token: int
    latency_s: float
    endpoint: AddrPort | None
    derp_region: int


class CliPingFailed(Struct, frozen=True):
    token: int
    reason: str


Output = (
    SendUdp
    | SendDerp
    | PathChanged
    | EndpointsWanted
    | RebindWanted
    | DataProbeWanted
    | PongReceived
    | CliPong
    | CliPingFailed
)
