"""In which order upstreams are asked, and which never."""

from __future__ import annotations

import pytest

from tsd.base.addr import parse_ip
from tsd.dns import publicdns
from tsd.engine.names.upstreams import schedule


def texts(*upstreams: str) -> list[tuple[str, str, float]]:
    return [(one.kind, one.url or one.text, one.delay_s) for one in schedule(upstreams)]


def test_others_follow_each_other() -> None:
    assert texts("192.0.2.1", "192.0.2.2:5353", "2001:db8::1") == [
        ("plain", "192.0.2.1", 0.0),
        ("plain", "192.0.2.2:5353", 0.2),
        ("plain", "2001:db8::1", 0.4),
    ]


def test_https_first_then_plain_dns_of_the_same_provider() -> None:
    google = "https://dns.google/dns-query"
    assert texts("8.8.8.8", "8.8.4.4", "2001:4860:4860::8888") == [
        ("https", google, 0.0),
        ("plain", "8.8.8.8", 0.5),
        ("plain", "2001:4860:4860::8888", 0.5),
        ("plain", "8.8.4.4", 0.7),
    ]
    assert texts("8.8.8.8:5353") == [("plain", "8.8.8.8:5353", 0.0)]
    assert texts(google) == [("https", google, 0.0)]


def test_providers_without_plain_dns() -> None:
    url = "https://dns.nextdns.io/c3a884"
    assert texts("2a07:a8c0::c3:a884") == [("https", url, 0.0)]
    assert [str(ip) for ip in publicdns.addresses_of(url)] == [
        "45.90.28.0",
        "45.90.30.0",
        "2a07:a8c0::c3:a884",
        "2a07:a8c1::c3:a884",
    ]
    assert publicdns.addresses_of("https://dns.nextdns.io/xyz") == ()
    assert publicdns.only_https(parse_ip("45.90.28.7")) and not publicdns.only_https(parse_ip("8.8.8.8"))


def test_every_url_has_its_addresses_and_back() -> None:
    for url in publicdns._AT:
        assert all(publicdns.provider_of(ip) == (url, False) for ip in publicdns.addresses_of(url))


@pytest.mark.parametrize(
    "text",
    ["100.100.100.100", "[fd7a:115c:a1e0::53]:53", "http://100.100.100.100:80/dns-query", "tls://1.1.1.1", "nonsense",
     "https://dns.example/q", "http://[::1/", "http://host.example/dns-query",
     "2001:db8::1%eth0", "fe80::1%", "fe80::1%eth 0", "fe80::x%eth0"],
)  # fmt: skip
def test_never_asked(text: str) -> None:
    assert texts(text) == []


def test_a_router_that_announces_its_link_local_address_is_asked() -> None:
    """Networks with IPv6 announce it in RDNSS; interfaces come by name or number."""
    assert [(one.text, str(one.target)) for one in schedule(["fe80::1%eth0", "fe80::1%2"])] == [
        ("fe80::1%eth0", "[fe80::1%eth0]:53"),
        ("fe80::1%2", "[fe80::1%2]:53"),
    ]


def test_own_addresses_are_never_asked() -> None:
    own = frozenset([parse_ip("100.64.0.1")])
    assert schedule(["100.64.0.1", "http://100.64.0.1:1/dns-query"], own) == []
