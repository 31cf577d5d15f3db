"""Labels, addresses and settings."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path

import pytest

from tsd.base.addr import AddrPort
from tsd.base.errors import ConfigError
from tsd.coord.settings import Settings, parse_duration, parse_listen, parse_prefixes, relay_node
from tsd.coord.state.addresses import AddressPool
from tsd.coord.state.naming import is_label, label_for, unique_label


def test_long_names_stay_unique_and_legal() -> None:
    taken: dict[str, None] = {}
    for _ in range(120):
        label = unique_label(label_for("a" * 70), taken)
        assert is_label(label) and label not in taken
        taken[label] = None


def test_addresses_are_the_same_number_in_both_families() -> None:
    pool = AddressPool()
    assert [str(a) for a in pool.allocate(())] == ["100.64.0.1", "fd7a:115c:a1e0::1"]
    assert [str(a) for a in pool.allocate(())] == ["100.64.0.2", "fd7a:115c:a1e0::2"]


def test_reserved_addresses_are_passed_over() -> None:
    pool = AddressPool()
    pool.note_used(ip_address("100.100.99.255"))
    assert str(pool.allocate(())[0]) == "100.100.101.0"
    pool = AddressPool()
    pool.note_used(ip_address("100.64.0.82"))
    assert str(pool.allocate(())[0]) == "100.64.0.84", "fd7a:115c:a1e0::53 is the DNS service"


def test_a_full_prefix_says_so_and_freed_addresses_come_back() -> None:
    pool = AddressPool(IPv4Network("192.0.2.0/29"), None)
    taken = {}
    for _ in range(6):
        (address,) = pool.allocate(taken)
        taken[address] = None
    with pytest.raises(ConfigError, match="no free address"):
        pool.allocate(taken)
    del taken[ip_address("192.0.2.3")]
    assert pool.allocate(taken) == (ip_address("192.0.2.3"),)


def test_single_family_pools() -> None:
    assert [str(a) for a in AddressPool(None, IPv6Network("fd00:1::/48")).allocate(())] == ["fd00:1::1"]
    with pytest.raises(ConfigError):
        AddressPool(None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:80", "127.0.0.1:80"), (":80", "0.0.0.0:80"), ("localhost:5", "127.0.0.1:5"), ("::1", "[::1]:9"),
     ("[::1]:8", "[::1]:8"), ("10.0.0.1", "10.0.0.1:9")],
)  # fmt: skip
def test_listen_addresses(text: str, expected: str) -> None:
    assert str(parse_listen(text, "--listen", 9)) == expected


@pytest.mark.parametrize("text", ["", "host:80", "1.2.3.4:99999", "http://1.2.3.4:5", "1.2.3:4"])
def test_bad_listen_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        parse_listen(text, "--listen", 9)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("24h", 86400), ("1d12h", 129600), ("0s", 0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--x") == seconds


@pytest.mark.parametrize("text", ["", "1", "h", "1y", "-1h", "1.5h", "99999999999d", "1h2"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ConfigError, match="--x"):
        parse_duration(text, "--x")


def test_prefixes() -> None:
    assert parse_prefixes("172.27.0.0/24", "none") == (IPv4Network("172.27.0.0/24"), None)
    for v4, v6 in (("none", "none"), ("10.0.0.1/8", "none"), ("x", "none"), ("none", "fd00::1/48")):
        with pytest.raises(ConfigError):
            parse_prefixes(v4, v6)


def test_settings_refuse_what_clients_cannot_use(tmp_path: Path) -> None:
    here, everywhere = AddrPort(ip_address("127.0.0.1"), 0), AddrPort(ip_address("0.0.0.0"), 0)
    for wrong in (
        {"url": "ftp://x"}, {"url": "http://h/path"}, {"base_domain": "under_score"}, {"tls_cert": tmp_path / "c"},
        {"derp_listen": None}, {"derp_listen": everywhere},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            Settings(**{"state": tmp_path, "listen": here, "derp_listen": here, "stun_listen": here, **wrong})
    opened = Settings(tmp_path, everywhere, everywhere, everywhere, advertise="192.0.2.5")
    assert opened.public_url(AddrPort(ip_address("0.0.0.0"), 80)) == "http://192.0.2.5:80"
    region = opened.derp_map(443, 0, "sha256-raw:00").region(900)
    assert region is not None and region.derp_nodes[0].stun_port == -1


def test_relay_node_is_literal_where_it_can_be() -> None:
    v4, v6, name = relay_node("192.0.2.1", 1, 2, ""), relay_node("::1", 1, 2, ""), relay_node("relay.example", 1, 2, "")
    assert (v4.ipv4, v4.ipv6) == ("192.0.2.1", "none") and (v6.ipv4, v6.ipv6) == ("none", "::1")
    assert (name.ipv4, name.ipv6, name.host_name) == ("", "", "relay.example")
