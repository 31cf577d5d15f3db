"""What the engine needs from an operating system: small protocols and plain records.

Every method is idempotent. Implementations live in `tsplatform` and raise `HullError`; this file does nothing.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any, NamedTuple, Protocol

from tsd.base.addr import AddrPort, IPAddress, IPPrefix
from tsd.base.errors import HullError

log = logging.getLogger(__name__)


class Frame(NamedTuple):
    """One IP packet, or a TCP super-segment.

    `packet` is a complete IP packet (bytes-like, at most 65535 bytes). When `segment_bytes` > 0 it is a TCP packet
    whose payload is to be cut into pieces of that many bytes (and whose checksum need not be filled in): the form in
    which a kernel TUN with offloads and our own netstack move bulk data.
    """

    packet: bytes | bytearray | memoryview
    segment_bytes: int = 0


class Tun(Protocol):
    """The host's side of the overlay: a kernel device, or the userspace netstack."""

    name: str
    mtu_bytes: int
    is_userspace: bool

    def attach(self, on_frames: Callable[[list[Frame]], None]) -> None:
        """Start delivering what the host sends into the overlay, in batches, on the running loop."""

    def deliver(self, frames: Sequence[Frame]) -> None:
        """Hand packets that came from the overlay to the host; never blocks, drops when the host is slow."""

    def close(self) -> None: ...


class Stream(Protocol):
    """A byte stream, TCP of the overlay or of the host. One reader and one writer task."""

    local: AddrPort
    remote: AddrPort

    async def read(self, limit: int) -> bytes:
        """Up to `limit` bytes; b"" after the peer's FIN. Raises ConnectionResetError after a RST."""

    async def write(self, data: bytes | memoryview) -> None:
        """Returns once the data is accepted (back-pressure). Raises ConnectionError."""

    async def write_eof(self) -> None:
        """Half-close: FIN after everything written."""

    def abort(self) -> None:
        """RST, at once."""

    async def close(self) -> None:
        """FIN, then forget the connection; idempotent."""


class DatagramPort(Protocol):
    """A UDP port on the overlay."""

    local: AddrPort

    def send(self, data: bytes, remote: AddrPort) -> None: ...

    async def receive(self) -> tuple[bytes, AddrPort]: ...

    def close(self) -> None: ...


StreamHandler = Callable[[Stream], Awaitable[None]]


class OverlayNet(Protocol):
    """Sockets whose traffic runs inside the overlay (netstack), or the host's own sockets when a TUN routes it."""

    async def connect(self, remote: AddrPort, timeout_s: float = 10.0) -> Stream:
        """Raises ConnectionRefusedError, TimeoutError or OSError (no route)."""

    async def listen(self, local: AddrPort, handler: StreamHandler) -> int:
        """Serve each accepted connection; port 0 lets the implementation choose. Returns the port. Raises OSError."""

    def unlisten(self, local: AddrPort) -> None: ...

    async def open_datagram(self, local: AddrPort | None, remote_family: int = 4) -> DatagramPort:
        """`local` None: own overlay address of the family and a free port."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the host's routing and firewall should be. Compare by value; equal means nothing to do."""

    local_addresses: tuple[IPPrefix, ...] = ()
    routes: tuple[IPPrefix, ...] = ()
    exit_node_allow_lan: bool = False
    """With a default route among `routes`: networks that the host itself is in stay reachable beside it."""
    subnet_routes: tuple[IPPrefix, ...] = ()
    snat_subnet_routes: bool = True
    stateful_filtering: bool = False
    netfilter_mode: int = 2
    netfilter_kind: str = ""
    """Backend that was asked for: "nftables", "iptables", or "" for the one that the host lives with."""
    keeps_cgnat_open: bool = False
    """Let addresses of 100.64.0.0/10 in that do not come through the tunnel."""
    mtu_bytes: int = 1280

    @property
    def uses_exit_node(self) -> bool:
        return any(prefix.prefixlen == 0 for prefix in self.routes)


@dataclass(frozen=True, slots=True)
class DnsConfig:
    """What the host's resolver should be, and what our own resolver answers.

    `hosts` maps lower-case FQDNs without trailing dot to addresses. `routes` maps suffixes to upstream texts; an
    empty tuple means "answered by us". `resolvers` are for every other name (empty: the host's own).
    """

    hosts: Mapping[str, tuple[IPAddress, ...]] = field(default_factory=dict)
    search_domains: tuple[str, ...] = ()
    routes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    resolvers: tuple[str, ...] = ()
    magic_suffix: str = ""
    wants_os_config: bool = True
    subdomain_hosts: frozenset[str] = frozenset()
    """Hosts whose addresses every name below them has, too."""
    exit_node_filtered: tuple[str, ...] = ()
    """Names (and, with a dot in front, zones) that are not resolved for those who use us as exit node."""


class Router(Protocol):
    def apply(self, config: RouterConfig) -> None: ...

    def revert(self) -> None: ...


class Dns(Protocol):
    def apply(self, config: DnsConfig) -> None: ...

    def revert(self) -> None: ...

    def base_resolvers(self) -> list[str]:
        """Upstream resolvers of the host as they were before us."""

    def describe(self) -> dict[str, Any]:
        """For `tsctl dns status`: Mode (who keeps the host's settings), Because (why we think so), what was set."""


class StateStore(Protocol):
    """Small named byte strings that survive a crash. Raises `StateError`."""

    where: str
    is_durable: bool

    def get(self, name: str) -> bytes | None: ...

    def put(self, name: str, value: bytes | None) -> None:
        """Durable when it returns; None deletes. Writing the value already there writes nothing."""


class BlobCache(Protocol):
    """Larger named byte strings that may be lost at any time. Nothing here raises."""

    def get(self, name: str) -> bytes | None: ...

    def put(self, name: str, value: bytes | None) -> None:
        """A reader sees the old value or the new one, whole; None deletes."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """The underlay as the host sees it now. Equal states mean that nothing changed for us."""

    interface_addresses: dict[str, tuple[IPPrefix, ...]] = field(default_factory=dict)
    default_interface_v4: str = ""
    default_interface_v6: str = ""
    is_up: bool = True
    networks: tuple[IPPrefix, ...] = ()
    """What the host is connected to, without single addresses, loopback and link-local ranges."""
    gateway_v4: IPv4Address | None = None
    """Of the IPv4 default route; None also when the host does not tell."""

    @property
    def addresses(self) -> frozenset[IPAddress]:
        """All of them; empty also when the host does not tell."""
        return frozenset(p.network_address for prefixes in self.interface_addresses.values() for p in prefixes)


class LinkMonitor(Protocol):
    def state(self) -> LinkState: ...

    def changes(self) -> AsyncIterator[LinkState]:
        """Debounced; also yields the same state again after the machine woke from suspend."""


class Underlay(Protocol):
    def protect(self, sock: socket.socket) -> None:
        """Mark or bind a socket so that its traffic never enters our own tunnel."""

    def addresses(self) -> list[IPAddress]:
        """Local addresses worth offering as endpoints, in order of preference."""


ResolveWire = Callable[[bytes, bool], Awaitable[bytes]]
"""(query, whether it came by TCP) -> answer, both as on the wire."""
Report = Callable[[str, str], None]
"""(code, text): a warning of `tsd.engine.report.warnables`; an empty text ends it."""


@dataclass(slots=True)
class Hull:
    """One host's implementation of everything above; `kind` is "linux", "userspace", "memory", ..."""

    kind: str
    tun: Tun
    net: OverlayNet
    router: Router
    dns: Dns
    store: StateStore
    links: LinkMonitor
    underlay: Underlay
    fallback_because: str = field(default="", kw_only=True)
    """Why this is not the hull that was asked for first."""
    on_lost: Callable[[HullError], None] = field(default=lambda err: None, kw_only=True)
    """Told when the device is gone for good: the daemon can only end."""

    async def start(self, resolve: ResolveWire, report: Report, on_names: Callable[[str], None]) -> None:
        """Answer DNS on the service addresses and repair what others change; on the running loop.

        `report` and `on_names` are told what goes wrong later, "" when that is over.
        """

    def set_ports(self, ports: tuple[int, ...]) -> None:
        """UDP ports on which peers reach us."""

    def firewall_wiring(self) -> list[str]:
        """The lines with which an admin leads the host's firewall to our chains, in mode nodivert."""
        return []

    def forwarding_trouble(self, routes: Sequence[IPPrefix]) -> str:
        """Why this host would not forward packets to these networks, and the fix; "" when it would."""
        return ""

    def proxy_origin(self, proto: str, host: AddrPort) -> AddrPort | None:
        """Which overlay client is behind a socket that the hull opened on the host; `proto` is "tcp" or "udp"."""
        return None

    async def report(self) -> dict[str, Any]:
        """For `tsctl doctor`: what this hull is, and the facts of the host that only it can read."""
        named = {"Kind": self.kind, "Device": self.tun.name, "MtuBytes": self.tun.mtu_bytes}
        return named | {"FallbackBecause": self.fallback_because}

    def verify(self) -> None:
        """Compare the host with what it should be and repair, soon."""

    def close(self) -> None:
        """Undo: DNS, router, device. Never raises; reports by log."""
        for undo in (self.dns.revert, self.router.revert, self.tun.close):
            try:
                undo()
            except HullError as err:
                log.error("not undone: %s", err)
