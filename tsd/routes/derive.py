"""What the host and the filter should be, derived from the netmap and the user's wishes. Pure.

Rules: tailscale: ipn/ipnlocal/local.go (routerConfig), ipn/ipnlocal/node_backend.go (dnsConfigForNetmap),
net/routemanager. The same inputs always give an equal plan, so that "nothing to do" is a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_network

from tsd.base.addr import QUAD_100, QUAD_100_V6, IPAddress, IPPrefix, parse_ip
from tsd.base.errors import DecodeError
from tsd.hull import DnsConfig, RouterConfig
from tsd.netmap.netmap import Netmap
from tsd.tailcfg.dns import DNSConfig, Resolver
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
    exit_node_allow_lan: bool = False
    advertise_routes: tuple[IPPrefix, ...] = ()
    shields_up: bool = False
    snat_subnet_routes: bool = True
    stateful_filtering: bool = False
    netfilter_mode: int = 2

    def is_exit_node(self, node: Node) -> bool:
        """Whether `node` is the exit node that the user chose."""
        if self.exit_node_id:
            return node.stable_id == self.exit_node_id
        return self.exit_node_ip is not None and self.exit_node_ip in addresses_of(node)

    @property
    def wants_exit_node(self) -> bool:
        return bool(self.exit_node_id) or self.exit_node_ip is not None


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


def derive(netmap: Netmap, wishes: RouteWishes) -> Plan:
    own = tuple(_prefixes(netmap.self_node.addresses or ()))
    return Plan(
        wishes=wishes,
        router=_router(netmap, wishes, own),
        dns=_dns(netmap, wishes),
        local_prefixes=(*own, *_advertised(wishes)),
        hidden_routes=not wishes.accept_routes and any(node.primary_routes for node in netmap.peers.values()),
    )


def peer_prefixes(node: Node, wishes: RouteWishes) -> tuple[IPPrefix, ...]:
    """Allowed IPs of a peer that are in force: subnet routes only when accepted, defaults only of the exit node."""
    own = addresses_of(node)
    chosen: list[IPPrefix] = []
    for prefix in _prefixes(node.routed_ips):
        if prefix.prefixlen == 0:
            if wishes.is_exit_node(node):
                chosen.append(prefix)
        elif wishes.accept_routes or (prefix.prefixlen == prefix.max_prefixlen and prefix.network_address in own):
            chosen.append(prefix)
    return tuple(chosen)


def addresses_of(node: Node) -> list[IPAddress]:
    """Single addresses of a node; anything else in the list is left out."""
    return [p.network_address for p in _prefixes(node.addresses or ()) if p.prefixlen == p.max_prefixlen]


def _prefixes(texts: Iterable[str]) -> Iterator[IPPrefix]:
    for text in texts:
        try:
            yield ip_network(text, strict=False)
        except ValueError:
            continue


def _advertised(wishes: RouteWishes) -> list[IPPrefix]:
    """Advertised routes as filter destinations; default routes without the ranges that stay private."""
    found: list[IPPrefix] = []
    for prefix in wishes.advertise_routes:
        if prefix.prefixlen:
            found.append(prefix)
        else:
            found += _without_private(prefix)
    return found


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


def _router(netmap: Netmap, wishes: RouteWishes, own: tuple[IPPrefix, ...]) -> RouterConfig:
    routes: dict[IPPrefix, None] = {}
    for node in netmap.peers.values():
        for prefix in peer_prefixes(node, wishes):
            routes[prefix] = None
    families = {prefix.version for prefix in own}
    if 4 in families:
        routes[ip_network(QUAD_100)] = None
    if 6 in families:
        routes[ip_network(QUAD_100_V6)] = None
    if wishes.wants_exit_node:
        routes |= {DEFAULT_V4: None, DEFAULT_V6: None}
    return RouterConfig(
        local_addresses=own,
        routes=tuple(sorted(routes, key=_order)),
        subnet_routes=tuple(sorted(wishes.advertise_routes, key=_order)),
        snat_subnet_routes=wishes.snat_subnet_routes,
        stateful_filtering=wishes.stateful_filtering,
        netfilter_mode=wishes.netfilter_mode,
    )


def _order(prefix: IPPrefix) -> tuple[int, int, int]:
    return prefix.version, int(prefix.network_address), prefix.prefixlen


def _dns(netmap: Netmap, wishes: RouteWishes) -> DnsConfig:
    control: DNSConfig = netmap.dns
    suffix = netmap.magic_suffix if control.proxied else ""
    hosts = _hosts(netmap) if control.proxied else {}
    for record in control.extra_records or ():
        ip = _address(record.value)
        if ip is not None and record.type in ("", "A", "AAAA"):
            name = record.name.rstrip(".").lower()
            hosts[name] = (*hosts.get(name, ()), ip)
    routes = {
        name.strip(".").lower(): _upstreams(resolvers or ()) for name, resolvers in (control.routes or {}).items()
    }
    return DnsConfig(
        hosts=hosts,
        search_domains=_search_domains(control.domains or ()),
        routes=routes,
        resolvers=_upstreams(control.resolvers or ()),
        magic_suffix=suffix,
        wants_os_config=wishes.accept_dns,
    )


def _hosts(netmap: Netmap) -> dict[str, tuple[IPAddress, ...]]:
    hosts: dict[str, tuple[IPAddress, ...]] = {}
    for node in (netmap.self_node, *netmap.peers.values()):
        name = node.name.rstrip(".").lower()
        if name:
            hosts[name] = tuple(addresses_of(node))
    return hosts


def _search_domains(domains: Iterable[str]) -> tuple[str, ...]:
    """Without empties, trailing dots and repetitions."""
    return tuple(dict.fromkeys(d.strip(".") for d in domains if d.strip(".") and len(d) <= 253))


def _upstreams(resolvers: Iterable[Resolver]) -> tuple[str, ...]:
    return tuple(resolver.addr for resolver in resolvers if resolver.addr)


def _address(text: str) -> IPAddress | None:
    try:
        return parse_ip(text)
    except DecodeError:
        return None
