"""Values that go in and out of magicsock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class PeerPaths:
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


@dataclass(frozen=True, slots=True)
class PathInfo:
    """The path to a peer, for status. `cur_addr` is set only while it is trusted."""

    cur_addr: AddrPort | None = None
    relay_region: int = 0
    latency_s: float = 0.0
    last_pong: float = 0.0
    last_send: float = 0.0
    last_receive: float = 0.0
    is_active: bool = False
    candidates: tuple[AddrPort, ...] = ()


@dataclass(frozen=True, slots=True)
class SendUdp:
    address: AddrPort
    datagram: bytes


@dataclass(frozen=True, slots=True)
class SendDerp:
    region: int
    node_key: NodePublic
    datagram: bytes


@dataclass(frozen=True, slots=True)
class PathChanged:
    """A peer moved between relay and direct, or between direct paths."""

    handle: int
    path: PathInfo


@dataclass(frozen=True, slots=True)
class EndpointsWanted:
    """Find our endpoints again (re-STUN) and answer with `set_endpoints`, even when nothing changed."""

    reason: str


@dataclass(frozen=True, slots=True)
class RebindWanted:
    """The UDP sockets refuse to send: bind them anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class PongReceived:
    """A peer answered; `endpoint` None means by relay."""

    handle: int
    endpoint: AddrPort | None
    derp_region: int
    latency_s: float


@dataclass(frozen=True, slots=True)
class CliPong:
    """An answer to `Magicsock.ping`; several paths may answer one token."""

    token: int
    latency_s: float
    endpoint: AddrPort | None
    derp_region: int


@dataclass(frozen=True, slots=True)
class CliPingFailed:
    token: int
    reason: str


Output = SendUdp | SendDerp | PathChanged | EndpointsWanted | RebindWanted | PongReceived | CliPong | CliPingFailed
