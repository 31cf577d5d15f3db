"""The caretaker in virtual time: what leads to a comparison, who is named for undoing ours, which facts are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from ipaddress import ip_network
from typing import Any

import pytest

from harness.jumploop import run_virtual
from tsd.base.errors import HullError
from tsd.hull import RouterConfig
from tsplatform import netlink
from tsplatform.linux import caretaker
from tsplatform.linux.caretaker import FIGHT_REPAIRS, FIGHT_S, SLOW_REPAIRS, Caretaker
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.netfilter.choose import NFTABLES
from tsplatform.linux.netfilter.iptables import LEGACY, NFT
from tsplatform.linux.watch import FIGHT_PACE_S

OURS, THEIRS = frozenset({"tsd"}), frozenset({"firewalld"})
UP = RouterConfig(local_addresses=(ip_network("100.64.0.1/32"),))
ROUTER = RouterConfig(local_addresses=UP.local_addresses, subnet_routes=(ip_network("192.0.2.0/24"),))
CULPRIT = "nft (process 77)"


class FakeFirewall:
    backend = NFTABLES
    trouble = ""
    reconsidered = 0

    def reconsider(self) -> None:
        self.reconsidered += 1


class FakeRouter:
    overlaps: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.firewall = FakeFirewall()
        self.put_back: tuple[str, ...] = ()


class FakeThreaded:
    """Compares at once; `finds` is what it has to put back each time."""

    def __init__(self, router: FakeRouter) -> None:
        self.config = UP
        self.cost_s = 0.0
        self.is_busy = self.is_failing = False
        self.on_done: Callable[[], None] = lambda: None
        self.finds: tuple[str, ...] = ()
        self.compared: list[float] = []
        self._router = router

    def verify(self) -> None:
        self.compared.append(asyncio.get_running_loop().time())
        self._router.put_back = self.finds
        self.on_done()


class FakeCounters:
    def __init__(self) -> None:
        self.now = (b"1",)
        self.is_closed = False

    def read(self) -> tuple[bytes, ...]:
        return self.now

    def close(self) -> None:
        self.is_closed = True


class FakeNftWatch:
    """Only the caretaker's own `_on_nft` is looked at."""

    def __init__(self, on_change: Callable[[frozenset[str], str], None]) -> None:
        self.change = on_change

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Bed:
    def __init__(self) -> None:
        self.router = FakeRouter()
        self.threaded = FakeThreaded(self.router)
        self.counters = FakeCounters()
        self.is_up = True
        self.forwarding = ""
        self.rules: Any = []
        self.reads: list[float] = []
        self.told: dict[str, str] = {}
        self.care: Any = Caretaker(HostNames("tsd0"), self.router, self.threaded, lambda: self.is_up)  # type: ignore[arg-type]

    def report(self, code: str, text: str) -> None:
        self.told[code] = text

    def read_ruleset(self) -> str:
        self.reads.append(asyncio.get_running_loop().time())
        if isinstance(self.rules, Exception):
            raise self.rules
        return json.dumps({"nftables": self.rules})

    def hear(self, tables: frozenset[str], program: str = "") -> None:
        self.care._nft.change(tables, program)

    async def compared(self, seconds: float) -> int:
        """How often in that time."""
        before = len(self.threaded.compared)
        await asyncio.sleep(seconds)
        return len(self.threaded.compared) - before


Test = Callable[[Bed], Coroutine[Any, Any, None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    """Runs a test in virtual time, with nothing of this machine behind."""

    async def at_once(work: Callable[[], Any]) -> Any:
        return work()

    def no_events(groups: int) -> None:
        raise OSError(1, "not here")

    @contextlib.asynccontextmanager
    async def bed() -> AsyncIterator[Bed]:
        made = Bed()
        monkeypatch.setattr(caretaker, "read_ruleset", made.read_ruleset)
        monkeypatch.setattr(caretaker, "forwarding_trouble", lambda routes: made.forwarding)
        monkeypatch.setattr(caretaker, "LegacyCounters", lambda tables: made.counters)
        made.care.start(made.report)
        await asyncio.sleep(5)  # the first look at the rules of others, and the comparison after it
        yield made
        made.care.stop()

    async def run(test: Test) -> None:
        async with bed() as made:
            await test(made)

    monkeypatch.setattr(caretaker, "NftWatch", FakeNftWatch)
    monkeypatch.setattr(caretaker, "strict_interfaces", lambda: ["eth0"])
    monkeypatch.setattr(netlink, "open_changes", no_events)
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    return lambda test: run_virtual(lambda: run(test))


def test_one_comparison_for_a_burst_of_events_and_none_without(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        assert await bed.compared(100) == 0
        for _ in range(50):
            bed.hear(OURS, CULPRIT)
        assert await bed.compared(100) == 1
        bed.hear(frozenset())  # events were lost
        assert await bed.compared(1) == 1
        bed.hear(THEIRS)
        assert await bed.compared(0.4) == 0

    play(test)


@pytest.mark.parametrize(("backend", "tables", "count"), [(NFT, {"nat"}, 1), (NFT, {"tsd"}, 0), (NFTABLES, {"nat"}, 0)])
def test_only_tables_that_hold_our_rules_count(
    play: Callable[[Test], None], backend: str, tables: set[str], count: int
) -> None:
    async def test(bed: Bed) -> None:
        bed.router.firewall.backend = backend
        bed.hear(frozenset(tables))
        assert await bed.compared(0.4) == count

    play(test)


def test_what_is_put_back_once_is_no_fight_but_again_and_again_is(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        bed.threaded.finds = ("firewall rules", "routes")
        for count in range(1, FIGHT_REPAIRS + 1):
            assert bed.told["routing-fight"] == "", count
            bed.hear(OURS, CULPRIT)
            await asyncio.sleep(1)
        assert bed.told["routing-fight"] == f"{CULPRIT} removes firewall rules, routes"
        bed.threaded.finds = ()
        await asyncio.sleep(FIGHT_S - FIGHT_REPAIRS)
        await asyncio.sleep(10)
        assert bed.told["routing-fight"] == ""

    play(test)


def test_a_fight_costs_less_the_longer_it_lasts(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        bed.threaded.finds = ("routes",)

        async def fight(seconds: int) -> int:
            before = len(bed.threaded.compared)
            for _ in range(seconds * 10):
                bed.hear(OURS, CULPRIT)
                await asyncio.sleep(0.1)
            return len(bed.threaded.compared) - before

        assert SLOW_REPAIRS <= await fight(8) <= 17
        assert await fight(60) <= 60 / FIGHT_PACE_S + SLOW_REPAIRS + 2
        bed.threaded.finds = ()
        await asyncio.sleep(20)
        bed.hear(OURS)
        assert await bed.compared(1) == 1, "at once again"

    play(test)


def test_what_we_change_ourselves_names_nobody(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        bed.threaded.is_busy = True
        bed.hear(OURS, "nft (process 1, our own)")
        bed.threaded.is_busy = False
        bed.threaded.finds = ("routes",)
        for _ in range(FIGHT_REPAIRS):
            bed.hear(OURS)
            await asyncio.sleep(1)
        assert bed.told["routing-fight"] == "another program removes routes"

    play(test)


def test_a_comparison_that_failed_is_made_again_until_it_ends_well(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        bed.threaded.is_failing = True
        assert 8 <= await bed.compared(31) <= 12
        bed.threaded.is_busy = True
        await asyncio.sleep(5)
        assert await bed.compared(31) == 0, "while one is under way"
        bed.threaded.is_busy = bed.threaded.is_failing = False
        assert await bed.compared(31) == 0

    play(test)


def test_iptables_legacy_has_no_events_and_is_looked_at(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        bed.router.firewall.backend = LEGACY
        await asyncio.sleep(10)
        assert await bed.compared(10) == 0
        bed.counters.now = (b"2",)
        assert await bed.compared(1.5) == 1
        assert await bed.compared(10) == 0
        bed.care.stop()
        assert bed.counters.is_closed

    play(test)


def test_facts_are_told_and_taken_back(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        names = ("device-down", "ip-forwarding-off", "lan-overlap", "firewall-incomplete", "rp-filter-strict")
        assert [bed.told[name] for name in names] == [""] * 5
        bed.is_up, bed.forwarding = False, "IPv4 forwarding is disabled"
        bed.router.overlaps = (ip_network("192.0.2.0/24"),)
        bed.router.firewall.trouble = "IPv6 firewall rules are off"
        exits = (ip_network("0.0.0.0/0"),)
        own = UP.local_addresses
        bed.threaded.config = RouterConfig(own, exits, subnet_routes=exits, snat_subnet_routes=False, netfilter_mode=0)
        await asyncio.sleep(4)
        assert "tsd0 is not here any more" in bed.told["device-down"]
        assert bed.told["ip-forwarding-off"] == bed.forwarding and bed.told["lan-overlap"] == "192.0.2.0/24"
        assert bed.told["firewall-incomplete"] == bed.router.firewall.trouble
        assert bed.told["rp-filter-strict"] == "eth0" and bed.told["nosnat-with-advertised-exit-node"] == "off"
        bed.is_up, bed.forwarding, bed.router.overlaps, bed.router.firewall.trouble = True, "", (), ""
        bed.threaded.config = UP
        await asyncio.sleep(4)
        assert not [text for text in bed.told.values() if text]

    play(test)


def drop_of(hook: str) -> dict[str, Any]:
    where = {"family": "inet", "table": "wall", "name": hook, "type": "filter", "hook": hook, "policy": "drop"}
    return {"chain": where}


def test_drops_of_others_are_named_with_the_remedy(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        bed.rules = [drop_of("input"), drop_of("forward")]
        bed.hear(THEIRS)
        await asyncio.sleep(3)
        said = bed.told["foreign-drop"]
        assert "inet wall input (policy drop): nft insert rule" in said and "wall forward" not in said
        assert bed.router.firewall.reconsidered == 2, "each time the rules of others are read"
        bed.threaded.config = ROUTER
        bed.hear(THEIRS)
        await asyncio.sleep(3)
        assert "inet wall forward" in bed.told["foreign-drop"], "a router forwards"
        bed.rules = HullError("read the firewall", "timed out")
        bed.hear(THEIRS)
        await asyncio.sleep(3)
        assert "inet wall forward" in bed.told["foreign-drop"], "what cannot be read says nothing new"
        bed.threaded.config = RouterConfig(UP.local_addresses, netfilter_mode=0)
        bed.hear(THEIRS)
        await asyncio.sleep(3)
        assert bed.told["foreign-drop"] == ""

    play(test)


def test_a_ruleset_that_takes_long_to_read_is_read_seldom(
    play: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bed: Bed) -> None:
        ticks = iter(range(1_000_000))
        monkeypatch.setattr(caretaker.time, "monotonic", lambda: float(next(ticks)))  # each reading takes a second
        for _ in range(400):
            bed.hear(THEIRS)
            await asyncio.sleep(0.5)
        pauses = [after - before for before, after in zip(bed.reads[1:], bed.reads[2:], strict=False)]
        assert pauses and min(pauses) >= 49 and len(bed.reads) <= 8

    play(test)


def test_nothing_goes_on_after_the_end(play: Callable[[Test], None]) -> None:
    async def test(bed: Bed) -> None:
        bed.hear(OURS)
        bed.hear(THEIRS)
        bed.care.stop()
        bed.told.clear()
        reads = len(bed.reads)
        assert await bed.compared(100) == 0 and len(bed.reads) == reads and not bed.told

    play(test)
