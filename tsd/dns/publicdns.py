"""Public resolvers that also answer over HTTPS: which URL an address stands for, and where a URL is reached.

The list: tailscale: net/dns/publicdns/publicdns.go. The addresses serve both port 53 and port 443, so that no name has
to be looked up before the first question.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_network
from typing import NamedTuple

from tsd.base.addr import IPAddress, parse_ip


class Provider(NamedTuple):
    """Where an address answers over HTTPS; `only_https`: it does not answer on port 53."""

    url: str
    only_https: bool


_NEXTDNS, _CONTROLD = "https://dns.nextdns.io/", "https://dns.controld.com/"
_NEXTDNS_V6 = (IPv6Network("2a07:a8c0::/33"), IPv6Network("2a07:a8c1::/33"))
_NEXTDNS_V4 = ("45.90.28.0", "45.90.30.0")
_CONTROLD_AT = ("76.76.2.22", "76.76.10.22", "2606:1a40::22", "2606:1a40:1::22")
_ONLY_HTTPS_RANGES = (
    *_NEXTDNS_V6,
    *(
        ip_network(text)
        for text in ("45.90.28.0/24", "45.90.30.0/24", "2606:1a40::/48", "2606:1a40:1::/48", "185.71.138.138/32")
    ),
    *(ip_network(text) for text in ("2001:67c:930::1/128", "76.76.2.22/32", "76.76.10.22/32")),
)
_LONGEST_ID = 12


def _mullvad(host: str, number: int) -> tuple[str, tuple[str, ...]]:
    return f"https://{host}.mullvad.net/dns-query", (f"194.242.2.{number}", f"2a07:e340::{number}")


def _controld(path: str, number: int) -> tuple[str, tuple[str, ...]]:
    ends = ("76.76.2.{}", "76.76.10.{}", "2606:1a40::{}", "2606:1a40:1::{}")
    return f"https://freedns.controld.com/{path}", tuple(end.format(number) for end in ends)


def _cira(host: str, number: int) -> tuple[str, tuple[str, ...]]:
    ends = ("149.112.121.{}", "149.112.122.{}", "2620:10a:80bb::{}", "2620:10a:80bc::{}")
    return f"https://{host}.canadianshield.cira.ca/dns-query", tuple(end.format(number) for end in ends)


def _cloudflare(host: str, number: int) -> tuple[str, tuple[str, ...]]:
    v6 = tuple(f"2606:4700:4700::{high}{number}" for high in ("111", "100"))
    return f"https://{host}cloudflare-dns.com/dns-query", (f"1.1.1.{number}", f"1.0.0.{number}", *v6)


_AT: dict[str, tuple[str, ...]] = dict(
    (
        _cloudflare("", 1),
        _cloudflare("security.", 2),
        _cloudflare("family.", 3),
        ("https://dns.google/dns-query", ("8.8.8.8", "8.8.4.4", "2001:4860:4860::8888", "2001:4860:4860::8844")),
        ("https://dns.quad9.net/dns-query", ("9.9.9.9", "149.112.112.112", "2620:fe::fe", "2620:fe::9")),
        ("https://dns11.quad9.net/dns-query", ("9.9.9.11", "149.112.112.11", "2620:fe::11", "2620:fe::fe:11")),
        ("https://dns10.quad9.net/dns-query", ("9.9.9.10", "149.112.112.10", "2620:fe::10", "2620:fe::fe:10")),
        _mullvad("dns", 2),
        _mullvad("adblock.dns", 3),
        _mullvad("base.dns", 4),
        _mullvad("extended.dns", 5),
        _mullvad("family.dns", 6),
        _mullvad("all.dns", 9),
        ("https://wikimedia-dns.org/dns-query", ("185.71.138.138", "2001:67c:930::1")),
        *(_controld(path, number) for number, path in enumerate(("p0", "p1", "p2", "p3", "family"))),
        _cira("private", 10),
        _cira("protected", 20),
        _cira("family", 30),
    )
)
_URL_OF: dict[IPAddress, str] = {parse_ip(text): url for url, texts in _AT.items() for text in texts}


def provider_of(ip: IPAddress) -> Provider | None:
    """None for a resolver that is not known to speak HTTPS."""
    url = _URL_OF.get(ip)
    if url is not None:
        return Provider(url, False)
    if isinstance(ip, IPv6Address) and any(ip in network for network in _NEXTDNS_V6):
        return Provider(_NEXTDNS + ip.packed[16 - _LONGEST_ID :].lstrip(b"\0").hex(), True)
    return None


def addresses_of(url: str) -> tuple[IPAddress, ...]:
    """Where a provider's URL is reached; empty for an unknown one."""
    if url in _AT:
        return tuple(parse_ip(text) for text in _AT[url])
    if url.startswith(_NEXTDNS):
        return _nextdns(url.removeprefix(_NEXTDNS).partition("/")[0].partition("?")[0])
    if url.startswith(_CONTROLD):
        return tuple(parse_ip(text) for text in _CONTROLD_AT)
    return ()


def _nextdns(profile: str) -> tuple[IPAddress, ...]:
    try:
        number = bytes.fromhex(profile)
    except ValueError:
        return ()
    if not 0 < len(number) <= _LONGEST_ID:
        return ()
    v6 = (IPv6Address(int(network.network_address) | int.from_bytes(number, "big")) for network in _NEXTDNS_V6)
    return (*(IPv4Address(text) for text in _NEXTDNS_V4), *v6)


def only_https(ip: IPAddress) -> bool:
    """Whether an address must not be given to a program that asks on port 53."""
    return any(ip in network for network in _ONLY_HTTPS_RANGES if network.version == ip.version)
