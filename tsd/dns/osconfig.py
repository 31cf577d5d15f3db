"""What the host's own resolver is told: which servers, which names to complete, and for which names only. Pure.

Rules: tailscale: net/dns/manager.go (compileConfig). A host that can send some zones elsewhere keeps its own servers
for everything else; on others our resolver stands in front of all names and asks the host's servers in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tsd.base.addr import QUAD_100, QUAD_100_V6, AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.dns import publicdns
from tsd.dns.zone import magic_suffixes
from tsd.hull import DnsConfig

SERVICE_TEXTS = (str(QUAD_100), str(QUAD_100_V6))
_DNS_PORT = 53


@dataclass(frozen=True, slots=True)
class OsDns:
    """No `match`: the servers are for all names."""

    nameservers: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    match: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.nameservers


def os_dns(config: DnsConfig, own: Sequence[IPAddress], can_split: bool, *, stays_local: bool = False) -> OsDns:
    """`own` are our overlay addresses; `can_split` tells whether the host sends single zones to other servers.

    `stays_local`: in a network without IPv4 we choose who is asked, for only its own resolvers may know the way out.
    """
    if not config.wants_os_config or not (config.routes or config.resolvers):
        return OsDns()
    search = config.search_domains
    plain = _plain_addresses(config.resolvers)
    has_unrouted_hosts = not config.magic_suffix and bool(config.hosts)
    if plain and len(plain) == len(config.resolvers) and not (config.routes or has_unrouted_hosts or stays_local):
        return OsDns(plain, search)
    service = _service(own)
    if config.resolvers or not can_split:
        return OsDns(service, search)
    match = tuple(sorted({*config.routes, *magic_suffixes(config.magic_suffix)}))
    common = set(config.routes.values())
    servers = _plain_addresses(next(iter(common))) if len(common) == 1 else ()
    if servers and len(servers) == len(next(iter(common))):
        return OsDns(servers, search, match)
    return OsDns(service, search, match)


def _service(own: Sequence[IPAddress]) -> tuple[str, ...]:
    """Those of our service addresses that can be reached."""
    versions = {ip.version for ip in own} or {4}
    return tuple(text for text, version in zip(SERVICE_TEXTS, (4, 6), strict=True) if version in versions)


def _plain_addresses(upstreams: Sequence[str]) -> tuple[str, ...]:
    """Of resolvers that any program can ask: an address, port 53, plain DNS."""
    found = []
    for text in upstreams:
        try:
            ip, port = parse_ip(text), _DNS_PORT
        except DecodeError:
            try:
                ip, port = AddrPort.parse(text)
            except DecodeError:
                continue
        if port == _DNS_PORT and not publicdns.only_https(ip):
            found.append(str(ip))
    return tuple(found)
