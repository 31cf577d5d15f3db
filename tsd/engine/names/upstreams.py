"""Which resolvers a question goes to, in which order and how far apart.

Known public resolvers are asked over HTTPS first and over plain DNS half a second later; of several others each gets a
head start before the next (tailscale: net/dns/resolver/forwarder.go, resolversWithDelays). An exit node's PeerAPI is
asked over HTTP inside the tunnel. Other https:// and all tls:// resolvers are not asked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from tsd.base.addr import QUAD_100, QUAD_100_V6, AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.dns import publicdns

DNS_PORT = 53
STAGGER_S = 0.2
HTTPS_HEAD_START_S = 0.5

Kind = Literal["plain", "https", "peer"]
_SERVICES: frozenset[IPAddress] = frozenset({QUAD_100, QUAD_100_V6})
NO_ADDRESS = AddrPort(parse_ip("0.0.0.0"), 0)
_ZONED = re.compile(r"[0-9a-fA-F:.]+%[A-Za-z0-9_.-]{1,15}")


class Upstream(NamedTuple):
    """`text` as it was configured; `url` of those that speak HTTP; `delay_s` after the first one."""

    text: str
    kind: Kind
    target: AddrPort
    url: str = ""
    delay_s: float = 0.0


def plain_target(text: str) -> AddrPort | None:
    """ip, ip:port, or a router's link-local address with its interface, as IPv6 networks announce it."""
    try:
        return AddrPort.parse(text)
    except DecodeError:
        pass
    try:
        ip = _link_local(text) if "%" in text else parse_ip(text)
    except DecodeError:
        return None
    return AddrPort(ip, DNS_PORT)


def _link_local(text: str) -> IPv6Address:
    """Raises DecodeError."""
    try:
        ip = IPv6Address(text) if _ZONED.fullmatch(text) else None
    except ValueError:
        ip = None
    if ip is None or not ip.is_link_local:
        raise DecodeError("dns", f"no link-local address with its interface: {text[:100]!r}")
    return ip


def schedule(
    texts: Sequence[str],
    own: frozenset[IPAddress] = frozenset(),
    provider_of: Callable[[IPAddress], publicdns.Provider | None] = publicdns.provider_of,
) -> list[Upstream]:
    """Sorted by delay. Ourselves are left out: our service addresses, and `own` ones."""
    targets = {text: plain_target(text) for text in texts}
    refused = _SERVICES | own
    found: list[Upstream] = []
    providers: dict[str, publicdns.Provider] = {}
    for text, target in targets.items():
        if target is None:
            found += _by_url(text, refused)
            continue
        provider = provider_of(target.ip) if target.port == DNS_PORT else None
        if provider is not None and target.ip not in refused and provider.url not in providers:
            providers[provider.url] = provider
            found.append(Upstream(text, "https", NO_ADDRESS, provider.url))
    found += _plain({text: target for text, target in targets.items() if target is not None}, refused, provider_of)
    return sorted(found, key=lambda upstream: upstream.delay_s)


def _by_url(text: str, refused: frozenset[IPAddress]) -> list[Upstream]:
    if text.startswith("https://"):
        return [Upstream(text, "https", NO_ADDRESS, text)] if publicdns.addresses_of(text) else []
    if text.startswith("http://"):
        try:
            url = urlsplit(text)
            target = AddrPort(parse_ip(url.hostname or ""), url.port or 80)
        except (DecodeError, ValueError):
            return []
        return [] if target.ip in refused else [Upstream(text, "peer", target, text)]
    return []


def _plain(
    targets: dict[str, AddrPort],
    refused: frozenset[IPAddress],
    provider_of: Callable[[IPAddress], publicdns.Provider | None],
) -> list[Upstream]:
    found: list[Upstream] = []
    seen: Counter[tuple[str, int]] = Counter()
    others = 0
    for text, target in targets.items():
        if target.ip in refused:
            continue
        provider = provider_of(target.ip) if target.port == DNS_PORT else None
        if provider is None:
            found.append(Upstream(text, "plain", target, delay_s=others * STAGGER_S))
            others += 1
        elif not provider.only_https:
            key = (provider.url, target.ip.version)
            delay_s = HTTPS_HEAD_START_S + (STAGGER_S if seen[key] else 0)
            seen[key] += 1
            found.append(Upstream(text, "plain", target, delay_s=delay_s))
    return found
