"""The router on a pretended kernel: differences, repair, order, families, slots."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from tsd.base.addr import IPAddress, IPPrefix
from tsd.base.errors import HullError
from tsd.hull import RouterConfig
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.journal import Entry, Scope, UndoJournal
from tsplatform.linux.netfilter.rules import FirewallWishes
from tsplatform.linux.router import LinuxRouter, exit_routes, ipv6_trouble_of, rules_of, wanted_routes
from tsplatform.linux.rtnetlink import Change, Route, Rule

SCOPE = Scope("boot", "net")
DEVICE, LAN = 7, 2


class FakeKernel:
    """Does what it is told, unless `refuses` is part of what it is called."""

    def __init__(self) -> None:
        self.is_up = False
        self.index = DEVICE
        self.table: dict[int, set[Route]] = {4: set(), 6: set()}
        self.exits: dict[int, set[Route]] = {4: set(), 6: set()}
        self.present: dict[int, set[Rule]] = {4: set(), 6: set()}
        self.mine: set[tuple[IPAddress, int]] = set()
        self.lan: list[tuple[int, IPAddress, int]] = []
        self.refuses = "nothing"
        self.done: list[str] = []

    def index_of(self, device: str) -> int:
        return self.index

    def addresses(self, index: int = 0) -> list[tuple[int, IPAddress, int]]:
        return [(DEVICE, *address) for address in self.mine] + ([] if index else self.lan)

    def routes(self, version: int, table: int) -> list[tuple[Route, int]]:
        return [(route, DEVICE if route.through_device else 0) for route in self._table_of(table)[version]]

    def rules(self, version: int, first: int, end: int) -> list[Rule]:
        return [rule for rule in self.present[version] if first <= rule.priority < end]

    def apply(self, changes: Sequence[Change]) -> list[str]:
        failures = []
        for change in changes:
            if self.refuses in change.what:
                failures.append(f"{change.what}: refused")
                continue
            if isinstance(change.subject, bool):
                self.is_up = change.subject
                continue
            if change.subject is None:
                continue
            self.done.append(change.what)
            self._change(change)
        return failures

    def _table_of(self, number: object) -> dict[int, set[Route]]:
        return self.exits if isinstance(number, int) and 63 <= number < 71 else self.table

    def _change(self, change: Change) -> None:
        subject, is_deletion = change.subject, change.request.startswith("RTM_DEL")
        if isinstance(subject, Route):
            version, table = subject.prefix.version, self._table_of(dict(change.body.attributes)["RTA_TABLE"])
            table[version] = {r for r in table[version] if (r.prefix, r.is_bar) != (subject.prefix, subject.is_bar)}
            if not is_deletion:
                table[version].add(subject)
        elif isinstance(subject, Rule):
            (self.present[subject.family].discard if is_deletion else self.present[subject.family].add)(subject)
        elif isinstance(subject, tuple):
            (self.mine.discard if is_deletion else self.mine.add)((subject[0], subject[1]))


class FakeFirewall:
    def __init__(self) -> None:
        self.wishes: FirewallWishes | None = None
        self.trouble = ""

    backend = "nftables"

    def apply(self, wishes: FirewallWishes) -> bool:
        if self.trouble:
            raise HullError("firewall", self.trouble)
        self.wishes = wishes
        return False

    def remove(self) -> None:
        self.wishes = None


def _prefixes(*texts: str) -> tuple[IPPrefix, ...]:
    return tuple(ip_network(text) for text in texts)


CONFIG = RouterConfig(
    local_addresses=_prefixes("100.64.0.1/32", "fd7a:115c:a1e0::1/128"),
    routes=_prefixes("100.64.0.2/32", "100.100.100.100/32", "fd7a:115c:a1e0::2/128"),
)


class Bed:
    def __init__(self, folder: Path, slot: int = 0, ipv6_trouble: str = "") -> None:
        self.kernel = FakeKernel()
        self.firewall = FakeFirewall()
        self.journal = UndoJournal(folder, SCOPE)
        self.names = HostNames("tsd0", slot)
        self.ipv6_trouble = ipv6_trouble
        self.router = LinuxRouter(
            self.kernel, self.names, self.firewall, self.journal, ipv6_trouble=lambda device: self.ipv6_trouble
        )

    def state(self) -> tuple[object, ...]:
        kernel = self.kernel
        return kernel.is_up, kernel.mine, kernel.table, kernel.present, self.firewall.wishes


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def test_everything_is_set_up_and_doing_it_again_does_nothing(bed: Bed) -> None:
    bed.router.apply(CONFIG)
    assert bed.kernel.is_up
    assert bed.kernel.mine == {(ip_address("100.64.0.1"), 32), (ip_address("fd7a:115c:a1e0::1"), 128)}
    assert bed.kernel.table[4] == {Route(p) for p in CONFIG.routes if p.version == 4}
    assert bed.kernel.present[6] == set(rules_of(6, bed.names))
    assert bed.firewall.wishes == FirewallWishes(mode=2, masquerade=True, drops_strangers=True)
    bed.kernel.done.clear()
    bed.router.apply(CONFIG)
    assert bed.kernel.done == []


def test_only_differences_are_done_and_adds_come_first(bed: Bed) -> None:
    bed.router.apply(CONFIG)
    bed.kernel.done.clear()
    routes = (*CONFIG.routes[1:], *_prefixes("100.64.0.9/32"))
    bed.router.apply(RouterConfig(local_addresses=_prefixes("100.64.0.5/32"), routes=routes))
    assert bed.kernel.done == [
        "add the address 100.64.0.5",
        "add the route 100.64.0.9/32",
        "delete the address 100.64.0.1",
        "delete the address fd7a:115c:a1e0::1",
        "delete the route 100.64.0.2/32",
    ]


def test_what_somebody_flushed_or_added_is_put_right(bed: Bed) -> None:
    bed.router.apply(CONFIG)
    wanted = [set(bed.kernel.table[4]), set(bed.kernel.present[4]), set(bed.kernel.mine)]
    bed.kernel.table[4] = {Route(ip_network("192.0.2.0/24"))}
    bed.kernel.present[4] = {Rule(4, 5370, 99), Rule(4, 5310, 254, 1, 1)}
    bed.kernel.mine.clear()
    assert bed.router.put_back == ()
    bed.router.apply(CONFIG)
    assert [bed.kernel.table[4], bed.kernel.present[4], bed.kernel.mine] == wanted
    assert bed.router.put_back == ("addresses", "routes", "routing rules")


def test_rules_that_the_kernel_put_right_before_ours_are_not_ours(bed: Bed) -> None:
    """wg-quick names no priority and gets one below the lowest: 5309, then 5308."""
    foreign = {Rule(4, 5309, 51820, 0xCA6C, 0xFFFFFFFF), Rule(4, 5308, 254)}
    bed.router.apply(CONFIG)
    bed.kernel.present[4] |= foreign
    bed.router.apply(CONFIG)
    assert foreign <= bed.kernel.present[4] and bed.router.put_back == ()
    bed.router.revert()
    assert bed.kernel.present[4] == foreign


def test_a_failed_addition_keeps_what_is_there_and_says_so(bed: Bed) -> None:
    bed.router.apply(CONFIG)
    bed.kernel.refuses = "add the route 100.64.0.9"
    with pytest.raises(HullError, match=r"add the route 100\.64\.0\.9/32: refused"):
        bed.router.apply(RouterConfig(CONFIG.local_addresses, _prefixes("100.64.0.9/32", "100.64.0.10/32")))
    assert Route(ip_network("100.64.0.10/32")) in bed.kernel.table[4]
    assert Route(ip_network("100.64.0.2/32")) in bed.kernel.table[4]


def test_a_firewall_that_fails_does_not_stop_routing(bed: Bed) -> None:
    bed.firewall.trouble = "nft is not installed"
    with pytest.raises(HullError, match="nft is not installed"):
        bed.router.apply(CONFIG)
    assert Route(ip_network("100.64.0.2/32")) in bed.kernel.table[4]


def test_nothing_is_left_and_the_journal_forgets(bed: Bed) -> None:
    before = bed.state()
    bed.router.apply(CONFIG)
    assert bed.journal.entries == (Entry("slot", 0, "tsd0"),)
    bed.router.apply(RouterConfig())
    assert (bed.state(), bed.journal.entries) == (before, ())
    bed.router.revert()
    assert bed.state() == before


def test_a_failed_revert_stays_in_the_journal(bed: Bed) -> None:
    bed.router.apply(CONFIG)
    bed.kernel.refuses = "delete the IPv4 rule 5370"
    with pytest.raises(HullError, match="5370"):
        bed.router.revert()
    assert bed.journal.entries


def test_f05_without_ipv6_the_rest_works_and_the_reason_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed(tmp_path, ipv6_trouble="the kernel runs without IPv6")
    bed.router.apply(CONFIG)
    assert not bed.kernel.table[6] and not bed.kernel.present[6] and len(bed.kernel.mine) == 1
    assert bed.router.ipv6_off_because == "the kernel runs without IPv6"
    bed.router.apply(CONFIG)
    assert caplog.text.count("off, because the kernel runs without IPv6") == 1
    bed.ipv6_trouble = ""
    bed.router.apply(CONFIG)
    assert bed.kernel.table[6] and bed.kernel.present[6] and len(bed.kernel.mine) == 2


def test_why_ipv6_is_off(tmp_path: Path) -> None:
    proc = tmp_path / "ipv6"
    assert "without IPv6" in ipv6_trouble_of("tsd0", proc)
    (proc / "conf" / "tsd0").mkdir(parents=True)
    assert "no IPv6" in ipv6_trouble_of("tsd0", proc)
    (proc / "conf" / "tsd0" / "disable_ipv6").write_text("1\n")
    assert "disable_ipv6" in ipv6_trouble_of("tsd0", proc)
    (proc / "conf" / "tsd0" / "disable_ipv6").write_text("0\n")
    assert ipv6_trouble_of("tsd0", proc) == ""


def test_a_second_slot_has_its_own_table_and_priorities(tmp_path: Path) -> None:
    bed = Bed(tmp_path, slot=1)
    foreign = Rule(4, 5370, 53)
    bed.kernel.present[4].add(foreign)
    bed.router.apply(CONFIG)
    assert {rule.priority for rule in bed.kernel.present[4]} == {5370, 5410, 5430, 5450, 5470}
    bed.router.revert()
    assert bed.kernel.present[4] == {foreign}
    assert bed.names.nft_table == "tsd1"


def test_a_device_that_is_gone_is_said(bed: Bed) -> None:
    bed.kernel.index = 0
    with pytest.raises(HullError, match="tsd0 is gone"):
        bed.router.apply(CONFIG)


@pytest.mark.parametrize(
    ("routes", "allow_lan", "connected", "thrown"),
    [
        (["192.0.2.0/24"], False, ["192.0.2.0/24"], ["192.0.2.0/24"]),
        (["192.0.0.0/16"], False, ["192.0.2.0/24", "10.0.0.0/8"], ["192.0.2.0/24"]),
        (["192.0.2.128/25"], False, ["192.0.2.0/24"], ["192.0.2.128/25"]),
        (["0.0.0.0/0", "192.0.2.0/24"], False, ["192.0.2.0/24"], []),
        (["0.0.0.0/0"], True, ["192.0.2.0/24"], ["192.0.2.0/24"]),
        (["100.64.0.0/10"], False, ["100.64.5.0/24", "100.64.9.9/32"], ["100.64.5.0/24"]),
        (["100.64.5.1/32"], False, ["100.64.5.0/24"], []),
        (["fd00::/8"], False, ["192.0.2.0/24", "fe80::/64", "fd00:1::/64"], ["fd00:1::/64"]),
    ],
)
def test_f07_connected_networks_win_unless_all_goes_through_an_exit_node(
    routes: list[str], allow_lan: bool, connected: list[str], thrown: list[str]
) -> None:
    own = wanted_routes(_prefixes(*routes), _prefixes(*connected), allow_lan)
    found = own + exit_routes(_prefixes(*routes), _prefixes(*connected), allow_lan)
    assert not any(route.prefix.prefixlen == 0 for route in own)
    assert {str(route.prefix) for route in found if route.is_throw} == set(thrown)
    assert {str(route.prefix) for route in found if route.through_device} == set(routes) - set(thrown)
    assert [str(route.prefix) for route in found if route.is_bar] == [r for r in routes if r == "0.0.0.0/0"]


EXIT = RouterConfig(CONFIG.local_addresses, (*CONFIG.routes, *_prefixes("0.0.0.0/0", "::/0")))


def _bars(bed: Bed, version: int) -> list[Route]:
    return [route for route in bed.kernel.exits[version] if route.is_bar]


def test_p05_an_exit_node_is_closed_behind(bed: Bed) -> None:
    bed.router.apply(EXIT)
    assert _bars(bed, 4) and _bars(bed, 6)
    bed.router.apply(CONFIG)
    assert not _bars(bed, 4) and not _bars(bed, 6)


def test_p05_what_a_crash_left_closed_stays_so_until_it_is_judged(bed: Bed) -> None:
    bed.router.apply(EXIT)
    bed.router.revert(stays_closed=True)
    assert _bars(bed, 4) and bed.kernel.present[4] and bed.journal.entries
    assert not bed.kernel.table[4] and not any(route.through_device for route in bed.kernel.exits[4])
    bed.router.apply(RouterConfig())
    assert not bed.kernel.exits[4] and not bed.kernel.present[4] and not bed.journal.entries


def test_p05_without_ipv6_in_the_tunnel_there_is_none_beside_it(tmp_path: Path) -> None:
    bed = Bed(tmp_path, ipv6_trouble="net.ipv6.conf.tsd0.disable_ipv6 is set")
    bed.router.apply(EXIT)
    assert not bed.kernel.table[6] and bed.kernel.exits[6] == set(_bars(bed, 6)) != set() and bed.kernel.present[6]
    bed.router.apply(CONFIG)
    assert not bed.kernel.exits[6] and not bed.kernel.present[6]


def test_f07_an_overlap_is_noticed(bed: Bed) -> None:
    bed.kernel.lan = [(LAN, ip_address("192.0.2.5"), 24)]
    bed.router.apply(RouterConfig(CONFIG.local_addresses, _prefixes("192.0.0.0/16", "10.0.0.0/8")))
    assert [str(network) for network in bed.router.overlaps] == ["192.0.2.0/24"]


def test_f06_no_drop_of_strangers_where_another_interface_lives_in_that_range(bed: Bed) -> None:
    bed.kernel.lan = [(LAN, ip_address("100.100.5.2"), 20)]
    bed.router.apply(CONFIG)
    assert bed.firewall.wishes is not None and not bed.firewall.wishes.drops_strangers
