"""DNS settings of a tailnet (tailscale: tailcfg/tailcfg.go, DNSConfig; types/dnstype)."""

from __future__ import annotations

from tsd.tailcfg.wire import Wire, always


class Resolver(Wire, frozen=True, gc=False):
    """`addr`: an IP, ip:port, https://… (DoH), http://100.x…/dns-query (DoH of a peer) or tls://…."""

    addr: str = ""
    bootstrap_resolution: tuple[str, ...] | None = None
    use_with_exit_node: bool = False


class DNSRecord(Wire, frozen=True, gc=False):
    """An extra name; an empty `type` means A or AAAA, by `value`."""

    name: str = always("")
    type: str = ""
    value: str = always("")


class DNSConfig(Wire, frozen=True, gc=False):
    """`proxied` means MagicDNS is on; a route with no resolvers is answered by ourselves."""

    resolvers: tuple[Resolver, ...] | None = None
    routes: dict[str, tuple[Resolver, ...] | None] | None = None
    fallback_resolvers: tuple[Resolver, ...] | None = None
    domains: tuple[str, ...] | None = None
    proxied: bool = False
    nameservers: tuple[str, ...] | None = None
    cert_domains: tuple[str, ...] | None = None
    extra_records: tuple[DNSRecord, ...] | None = None
    exit_node_filtered_set: tuple[str, ...] | None = None
