"""Which names exist in the tailnet, and who answers for all others.

Rules: tailscale: ipn/ipnlocal/node_backend.go (dnsConfigForNetmap).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tsd.base.addr import IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.hull import DnsConfig
from tsd.netmap.netmap import Netmap
from tsd.routes.rules import PrefixCache, RouteWishes, addresses_of, host_name, unpacked
from tsd.tailcfg.dns import DNSConfig, DNSRecord, Resolver
from tsd.tailcfg.node import Node

EXIT_DNS_SINCE_CAPVER = 26
"""Nodes of this capability version answer DNS over HTTP on their PeerAPI (tailscale: tailcfg/tailcfg.go)."""
SUBDOMAINS_CAP = "dns-subdomain-resolve"
"""Names below such a node's are its own too."""
_MAX_DOMAIN = 253

Routes = dict[str, tuple[str, ...]]


class Hosts(Mapping[str, tuple[IPAddress, ...]]):
    """Names with their addresses; of thousands, few are ever asked for, so they stay packed until then."""

    def __init__(self, packed: dict[str, tuple[bytes, ...]]) -> None:
        self._packed = packed

    def __getitem__(self, name: str) -> tuple[IPAddress, ...]:
        return tuple([unpacked(raw) for raw in self._packed[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Hosts):
            return self._packed == other._packed
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and all(other.get(name) == ips for name, ips in self.items())

    __hash__ = None  # type: ignore[assignment]


def host_records(netmap: Netmap, peer_hosts: Mapping[str, tuple[bytes, ...]], cache: PrefixCache) -> Hosts:
    """Names of peers and of ourselves, and control's extra records."""
    hosts = dict(peer_hosts)
    own_name = host_name(netmap.self_node)
    if own_name:
        hosts[own_name] = tuple(cache.packed_of(netmap.self_node))
    for name, ip in _extra_addresses(netmap.dns.extra_records or ()):
        hosts[name] = (*hosts.get(name, ()), ip.packed)
    return Hosts(hosts)


def _extra_addresses(records: Iterable[DNSRecord]) -> Iterator[tuple[str, IPAddress]]:
    """Kinds of records other than addresses have no meaning yet."""
    for record in records:
        ip = _address(record.value)
        if ip is not None and record.type in ("", "A", "AAAA"):
            yield record.name.rstrip(".").lower(), ip


def dns_config(
    netmap: Netmap,
    wishes: RouteWishes,
    hosts: Mapping[str, tuple[IPAddress, ...]],
    exit_node: Node | None,
    subdomain_hosts: frozenset[str] = frozenset(),
) -> DnsConfig:
    """Names are answered by us in every case; the rest is for nodes that accept the tailnet's DNS settings."""
    control: DNSConfig = netmap.dns
    suffix = netmap.magic_suffix if control.proxied else ""
    routes, resolvers = _upstreams_in_force(control, wishes, exit_node) if wishes.accept_dns else ({}, ())
    if suffix:
        routes.setdefault(suffix.lower(), ())
    if wishes.accept_dns:
        _cover(routes, [name for name, _ in _extra_addresses(control.extra_records or ())])
    return DnsConfig(
        hosts=hosts,
        search_domains=_search_domains(control.domains or ()),
        routes=routes,
        resolvers=resolvers,
        magic_suffix=suffix,
        wants_os_config=wishes.accept_dns,
        subdomain_hosts=subdomain_hosts,
        exit_node_filtered=tuple(name for name in control.exit_node_filtered_set or () if name.strip(".")),
    )


def _upstreams_in_force(
    control: DNSConfig, wishes: RouteWishes, exit_node: Node | None
) -> tuple[Routes, tuple[str, ...]]:
    """Zones, and the resolvers for all other names: with an exit node it is asked, not those around us."""
    if not wishes.wants_exit_node:
        return _routes(control), upstreams(control.resolvers or ())
    by_exit_node = exit_node_url(exit_node)
    if by_exit_node:
        kept = upstreams(resolver for resolver in control.resolvers or () if resolver.use_with_exit_node)
        return _routes(control, only_with_exit_node=True), kept or (by_exit_node,)
    own = exit_node.exit_node_dns_resolvers if exit_node is not None and exit_node.is_wireguard_only else None
    resolvers = upstreams(control.resolvers or own or control.fallback_resolvers or ())
    return _routes(control), resolvers


def _routes(control: DNSConfig, *, only_with_exit_node: bool = False) -> Routes:
    """Zones without resolvers are ours to answer, with an exit node as without."""
    found: Routes = {}
    for name, resolvers in (control.routes or {}).items():
        kept = [one for one in resolvers or () if one.use_with_exit_node or not only_with_exit_node]
        if kept or not resolvers:
            found[name.strip(".").lower()] = upstreams(kept)
    return found


def _cover(routes: Routes, names: Iterable[str]) -> None:
    """A name of ours outside of all zones is a zone of its own, so that hosts which ask us for zones ask for it."""
    for name in names:
        if name and not any(name == zone or name.endswith("." + zone) for zone in routes):
            routes[name] = ()


def exit_node_url(exit_node: Node | None) -> str:
    """Where an exit node answers DNS for those who use it; "" when it cannot."""
    if exit_node is None or exit_node.is_wireguard_only:
        return ""
    hostinfo = exit_node.hostinfo
    if hostinfo is None or not (hostinfo.service_port("peerapi-dns-proxy") or exit_node.cap >= EXIT_DNS_SINCE_CAPVER):
        return ""
    for ip in addresses_of(exit_node):
        port = hostinfo.service_port("peerapi4" if ip.version == 4 else "peerapi6")
        if port:
            host = f"[{ip}]" if ip.version == 6 else str(ip)
            return f"http://{host}:{port}/dns-query"
    return ""


def _search_domains(domains: Iterable[str]) -> tuple[str, ...]:
    """Without empties, trailing dots, repetitions, and what would not be one word in a resolver's file."""
    return tuple(dict.fromkeys(d.strip(".") for d in domains if d.strip(".") and len(d) <= _MAX_DOMAIN and _is_word(d)))


def _is_word(text: str) -> bool:
    return text.isprintable() and " " not in text


def upstreams(resolvers: Iterable[Resolver]) -> tuple[str, ...]:
    return tuple(resolver.addr for resolver in resolvers if resolver.addr and _is_word(resolver.addr))


def _address(text: str) -> IPAddress | None:
    try:
        return parse_ip(text)
    except DecodeError:
        return None
