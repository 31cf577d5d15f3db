"""What the host's resolver is told, for hosts that can send zones elsewhere and for those that cannot."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from tsd.dns.osconfig import OsDns, os_dns
from tsd.hull import DnsConfig

V4, V6 = ip_address("100.64.0.1"), ip_address("fd7a:115c:a1e0::1")
BOTH = ("100.100.100.100", "fd7a:115c:a1e0::53")
MAGIC = DnsConfig(routes={"tn.example": ()}, search_domains=("tn.example",), magic_suffix="tn.example")


@pytest.mark.parametrize("can_split", [True, False])
@pytest.mark.parametrize(
    "config", [DnsConfig(), DnsConfig(routes={"x": ()}, wants_os_config=False), DnsConfig(hosts={"a": (V4,)})]
)
def test_nothing(config: DnsConfig, can_split: bool) -> None:
    assert os_dns(config, [V4], can_split).is_empty


@pytest.mark.parametrize(
    ("config", "own", "servers"),
    [
        (MAGIC, [V4, V6], BOTH),
        (MAGIC, [V6], BOTH[1:]),
        (MAGIC, [V4], BOTH[:1]),
        (DnsConfig(resolvers=("1.1.1.1", "9.9.9.9:53")), [V4], ("1.1.1.1", "9.9.9.9")),
        (DnsConfig(resolvers=("1.1.1.1",), hosts={"a.example": (V4,)}), [V4], BOTH[:1]),
        (DnsConfig(resolvers=("1.1.1.1:5353",)), [V4], BOTH[:1]),
        (DnsConfig(resolvers=("45.90.28.0",)), [V4], BOTH[:1]),
        (DnsConfig(resolvers=("https://dns.google/dns-query",)), [V4], BOTH[:1]),
        (DnsConfig(resolvers=("http://100.64.0.9:80/dns-query",)), [V4], BOTH[:1]),
        (DnsConfig(resolvers=("1.1.1.1",), routes={"corp": ("10.0.0.1",)}), [V4], BOTH[:1]),
        (DnsConfig(routes={"corp": ("10.0.0.1",)}), [V4], BOTH[:1]),
    ],
)
def test_in_front_of_all_names(config: DnsConfig, own: list[object], servers: tuple[str, ...]) -> None:
    assert os_dns(config, own, False) == OsDns(servers, config.search_domains)  # type: ignore[arg-type]


def test_only_some_zones() -> None:
    found = os_dns(MAGIC, [V4], True)
    assert found.nameservers == BOTH[:1] and "tn.example" in found.match and "64.100.in-addr.arpa" in found.match
    corp = DnsConfig(routes={"corp": ("10.0.0.1", "10.0.0.2"), "b.example": ("10.0.0.1", "10.0.0.2")})
    assert os_dns(corp, [V4], True) == OsDns(("10.0.0.1", "10.0.0.2"), (), ("b.example", "corp"))
    mixed = DnsConfig(routes={"corp": ("10.0.0.1",), "b.example": ("10.0.0.2",)})
    assert os_dns(mixed, [V4], True) == OsDns(BOTH[:1], (), ("b.example", "corp"))
    odd = DnsConfig(routes={"corp": ("10.0.0.1", "https://dns.google/dns-query")})
    assert os_dns(odd, [V4], True).nameservers == BOTH[:1]
    everything = DnsConfig(routes={"corp": ("10.0.0.1",)}, resolvers=("1.1.1.1",))
    assert os_dns(everything, [V4], True) == OsDns(BOTH[:1])
