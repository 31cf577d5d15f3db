"""The decisions behind a plan, one function each: whose routes count, and what the host routes and filters.

Rules: tailscale: ipn/ipnlocal/local.go (routerConfig), net/routemanager. Names are `names`; `tsd.routes.planner` puts
them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_network

from tsd.base.addr import QUAD_100, QUAD_100_V6, IPAddress, IPPrefix, is_tailnet_packed, packed_single
from tsd.hull import DnsConfig, RouterConfig
from tsd.netmap.netmap import Netmap
from tsd.tailcfg.node import Node

DEFAULT_V4, DEFAULT_V6 = ip_network("0.0.0.0/0"), ip_network("::/0")

_NEVER_FORWARDED: tuple[IPPrefix, ...] = tuple(
    ip_network(text)
    for text in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "127.0.0.0/8",
        "224.0.0.0/4",
        "100.64.0.0/10",
        "fc00::/7",
        "fe80::/10",
        "ff00::/8",
        "::1/128",
    )
)
"""What an exit node does not offer by way of its default routes (tailscale: ipn/ipnlocal, shrinkDefaultRoute)."""


@dataclass(frozen=True, slots=True)
class RouteWishes:
    """The part of the prefs that routing and names depend on."""

    accept_routes: bool = False
    accept_dns: bool = True
    exit_node_id: str = ""
    exit_node_ip: IPAddress | None = None
    auto_exit_node: str = ""
    """Not empty: `exit_node_id` was chosen by us, and may be empty while there is none to choose."""
    exit_node_allow_lan: bool = False
    advertise_routes: tuple[IPPrefix, ...] = ()
    shields_up: bool = False
    snat_subnet_routes: bool = True
    stateful_filtering: bool = False
    netfilter_mode: int = 2
    netfilter_kind: str = ""
    keeps_cgnat_open: bool = False
    """Control asks to let addresses of 100.64.0.0/10 in that do not come through the tunnel."""
    one_cgnat: bool | None = None
    """Control asks for one route to 100.64.0.0/10 (or for one to each peer)."""

    def is_exit_node(self, node: Node) -> bool:
        """Whether `node` is the exit node that the user chose."""
        if self.exit_node_id:
            return node.stable_id == self.exit_node_id
        return self.exit_node_ip is not None and self.exit_node_ip.packed in PrefixCache().packed_of(node)

    @property
    def wants_exit_node(self) -> bool:
        return bool(self.exit_node_id or self.auto_exit_node) or self.exit_node_ip is not None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that follows; an empty plan undoes everything."""

    wishes: RouteWishes | None = None
    router: RouterConfig = field(default_factory=RouterConfig)
    dns: DnsConfig = field(default_factory=DnsConfig)
    local_prefixes: tuple[IPPrefix, ...] = ()
    """Destinations that the packet filter lets in at all: own addresses and advertised routes."""
    hidden_routes: bool = False
    """Peers offer routes that the user does not accept."""


AllowedIp = IPPrefix | bytes
"""A prefix, or one address as 4 or 16 bytes: what `Core.set_allowed_ips` takes."""


class PrefixCache:
    """Prefixes by text; entries that do not parse are None. For those that are not single addresses."""

    def __init__(self) -> None:
        self._known: dict[str, IPPrefix | None] = {}

    def prefixes(self, texts: Iterable[str]) -> list[IPPrefix]:
        return [prefix for prefix in map(self.prefix, texts) if prefix is not None]

    def prefix(self, text: str) -> IPPrefix | None:
        if text in self._known:
            return self._known[text]
        found = self._known[text] = _parse(text)
        return found

    def allowed_ip(self, text: str) -> AllowedIp | None:
        """Single addresses as bytes, however they are written."""
        packed = packed_single(text)
        if packed is not None:
            return packed
        prefix = self.prefix(text)
        if prefix is None or prefix.prefixlen != prefix.max_prefixlen:
            return prefix
        return prefix.network_address.packed

    def addresses_of(self, node: Node) -> tuple[IPAddress, ...]:
        """Single addresses of a node; anything else in the list is left out."""
        return tuple([unpacked(raw) for raw in self.packed_of(node)])

    def packed_of(self, node: Node) -> list[bytes]:
        found: list[bytes] = []
        for text in node.addresses or ():
            packed = packed_single(text) or self.allowed_ip(text)
            if isinstance(packed, bytes):
                found.append(packed)
        return found

    def trim(self, limit: int) -> None:
        if len(self._known) > limit:
            self._known.clear()


def unpacked(raw: bytes) -> IPAddress:
    return IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw)


def prefix_of(allowed: AllowedIp) -> IPPrefix:
    return ip_network((allowed, 8 * len(allowed))) if isinstance(allowed, bytes) else allowed


def _parse(text: str) -> IPPrefix | None:
    if "%" in text:
        return None
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def peer_prefixes(node: Node, wishes: RouteWishes, cache: PrefixCache | None = None) -> tuple[IPPrefix, ...]:
    """Allowed IPs of a peer that are in force, as prefixes."""
    cache = cache or PrefixCache()
    return tuple(prefix_of(allowed) for allowed in allowed_ips(node, wishes, cache, cache.packed_of(node)))


def allowed_ips(node: Node, wishes: RouteWishes, cache: PrefixCache, own: list[bytes]) -> tuple[AllowedIp, ...]:
    """Allowed IPs of a peer that are in force: subnet routes only when accepted, defaults only of the exit node.
    `own` are its addresses.

    One address of the overlay's own ranges is never a subnet: a service address moves between hosts without a say
    of ours.
    """
    if (node.allowed_ips is None or node.allowed_ips == node.addresses) and len(own) == len(node.addresses or ()):
        return tuple(own)
    chosen: dict[AllowedIp, None] = {}
    for text in node.routed_ips:
        allowed = packed_single(text) or cache.allowed_ip(text)
        if allowed is None:
            continue
        if isinstance(allowed, bytes):
            is_wanted = wishes.accept_routes or is_tailnet_packed(allowed) or allowed in own
        elif allowed.prefixlen == 0:
            is_wanted = wishes.is_exit_node(node)
        else:
            is_wanted = wishes.accept_routes
        if is_wanted:
            chosen[allowed] = None
    return tuple(chosen)


def addresses_of(node: Node) -> list[IPAddress]:
    """Single addresses of a node; anything else in the list is left out."""
    return list(PrefixCache().addresses_of(node))


def exit_node_of(netmap: Netmap, wishes: RouteWishes) -> Node | None:
    """The peer chosen as exit node, when it is there."""
    if not wishes.wants_exit_node:
        return None
    return next((node for node in netmap.peers.values() if wishes.is_exit_node(node)), None)


def offers_hidden_routes(node: Node, wishes: RouteWishes) -> bool:
    return bool(node.primary_routes) and not wishes.accept_routes


def host_name(node: Node) -> str:
    return node.name.rstrip(".").lower()


def order_of(prefix: IPPrefix) -> tuple[int, int, int]:
    return prefix.version, int(prefix.network_address), prefix.prefixlen


def local_destinations(netmap: Netmap, wishes: RouteWishes, cache: PrefixCache) -> tuple[IPPrefix, ...]:
    """Own addresses, and advertised routes without the ranges that stay private behind a default route."""
    found = cache.prefixes(netmap.self_node.addresses or ())
    for prefix in wishes.advertise_routes:
        found += [prefix] if prefix.prefixlen else _without_private(prefix)
    return tuple(found)


def _without_private(default: IPPrefix) -> list[IPPrefix]:
    left: list[IPPrefix] = [default]
    for hole in _NEVER_FORWARDED:
        if hole.version == default.version:
            left = [piece for prefix in left for piece in _cut(prefix, hole)]
    return left


def _cut(prefix: IPPrefix, hole: IPPrefix) -> list[IPPrefix]:
    if not prefix.overlaps(hole):
        return [prefix]
    if hole.prefixlen <= prefix.prefixlen:
        return []
    return list(prefix.address_exclude(hole))  # type: ignore[arg-type]


def router_config(
    netmap: Netmap, wishes: RouteWishes, peer_routes: Iterable[IPPrefix], cache: PrefixCache
) -> RouterConfig:
    own = tuple(cache.prefixes(netmap.self_node.addresses or ()))
    families = {prefix.version for prefix in own}
    routes = dict.fromkeys(peer_routes)
    if 4 in families:
        routes[ip_network(QUAD_100)] = None
    if 6 in families:
        routes[ip_network(QUAD_100_V6)] = None
    if wishes.wants_exit_node:
        # Both, whatever the exit node offers and even while it is missing: nothing may leak around it.
        routes |= {DEFAULT_V4: None, DEFAULT_V6: None}
    return RouterConfig(
        local_addresses=own,
        routes=tuple(sorted(routes, key=order_of)),
        exit_node_allow_lan=wishes.exit_node_allow_lan,
        subnet_routes=tuple(sorted(wishes.advertise_routes, key=order_of)),
        snat_subnet_routes=wishes.snat_subnet_routes,
        stateful_filtering=wishes.stateful_filtering,
        netfilter_mode=wishes.netfilter_mode,
        netfilter_kind=wishes.netfilter_kind,
        keeps_cgnat_open=wishes.keeps_cgnat_open,
    )
