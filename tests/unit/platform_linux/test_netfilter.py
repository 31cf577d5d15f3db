"""The firewall: which rules, how both backends write them, when they are written again, which backend is taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.fakefirewall import FakeIptables, FakeNft
from tsd.base.errors import HullError
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.journal import Scope, UndoJournal
from tsplatform.linux.netfilter import choose as choosing
from tsplatform.linux.netfilter.choose import HostFirewall, HostLook, choose
from tsplatform.linux.netfilter.nft import NftTable, canonical, commands_for
from tsplatform.linux.netfilter.rules import NODIVERT, OFF, ON, FirewallWishes, rules_of
from tsplatform.linux.netfilter.watch import parse_events

NAMES = HostNames("tsd0")
FULL = FirewallWishes(ON, True, True, True, (41641,))


def _verdicts(wishes: FirewallWishes, chain: str) -> list[str]:
    return [rule.verdict for rule in rules_of(NAMES, wishes) if rule.chain == chain]


def test_the_wishes_change_the_rules() -> None:
    plain = FirewallWishes(ON)
    assert _verdicts(plain, "postrouting") == [] and _verdicts(FULL, "postrouting") == ["masquerade"]
    assert "drop" not in _verdicts(plain, "forward") + _verdicts(plain, "input")
    assert _verdicts(FULL, "forward") == ["clamp", "clamp", "mark", "accept", "drop", "drop", "accept"]
    assert _verdicts(FULL, "input") == ["accept", "accept", "return", "return", "drop"]
    assert _verdicts(FirewallWishes(NODIVERT), "output") == [] and _verdicts(plain, "output") == ["save"]


def _added(wishes: FirewallWishes, what: str) -> list[dict[str, Any]]:
    commands = commands_for(NAMES, wishes, set())
    return [command["add"][what] for command in commands if what in command.get("add", {})]


def test_nft_hooks_in_only_when_it_is_on() -> None:
    hooks = {chain["hook"] for chain in _added(FULL, "chain") if "hook" in chain}
    assert hooks == {"input", "forward", "postrouting", "prerouting", "output"}
    assert not [chain for chain in _added(FirewallWishes(NODIVERT), "chain") if "hook" in chain]


def test_nft_leaves_chains_that_an_admin_added() -> None:
    commands = commands_for(NAMES, FULL, {"tsd-input", "input", "wired-input"})
    touched = {c[verb]["chain"]["name"] for c in commands for verb in ("flush", "delete") if verb in c}
    assert touched == {"tsd-input", "input"}
    assert [c["delete"]["chain"]["name"] for c in commands if "delete" in c] == ["input"]


def test_nft_writes_again_only_what_changed_and_tells_what_was_flushed() -> None:
    nft = FakeNft()
    table = NftTable(NAMES, nft)
    assert not table.apply(FirewallWishes(ON))
    assert not table.apply(FirewallWishes(ON))
    assert nft.written == 1
    nft.table = ""
    assert table.apply(FirewallWishes(ON))
    assert (nft.written, bool(nft.table)) == (2, True)
    assert not table.apply(FirewallWishes(NODIVERT))
    table.apply(FirewallWishes(OFF))
    assert nft.table == ""


def test_nft_writes_nothing_when_it_cannot_tell_what_is_there() -> None:
    nft = FakeNft()
    table = NftTable(NAMES, nft)
    table.apply(FirewallWishes(ON))
    nft.unlisted = "timed out"
    for attempt in (lambda: table.apply(FULL), table.remove):
        with pytest.raises(HullError, match="timed out"):
            attempt()
    assert nft.written == 1 and nft.table
    nft.unlisted = ""
    table.apply(FULL)
    assert nft.written == 2


def test_counters_and_handles_do_not_count() -> None:
    def listing(number: int, chain: str = "tsd-input") -> list[dict[str, Any]]:
        expression = [{"counter": {"packets": number, "bytes": number}}, {"accept": None}]
        rule = {"chain": chain, "handle": number, "expr": expression}
        return [{"metainfo": {"version": str(number)}}, {"chain": {"name": "wired-input"}}, {"rule": rule}]

    assert canonical(listing(1)) == canonical(listing(2)) != ""
    assert canonical([]) == "" and canonical(listing(1, "wired-input")) == ""


# --- which one


class Look(HostLook):
    def __init__(self, *programs: str, legacy: bool = False, nft_rules: bool = False, flavour: str = "iptables-nft"):
        super().__init__(lambda words, text: "", lambda program: program in programs)
        self.legacy, self.nft_rules = legacy, nft_rules
        self.flavour = flavour if "iptables" in programs else ""

    def has_legacy_rules(self) -> bool:
        return self.legacy

    def has_legacy_tables(self) -> bool:
        return self.legacy

    def has_nft_iptables_rules(self) -> bool:
        return self.nft_rules

    def default_flavour(self) -> str:
        return self.flavour


BOTH = ("nft", "iptables", "iptables-nft", "iptables-legacy")


@pytest.mark.parametrize(
    ("wish", "look", "wanted"),
    [
        ("", Look(*BOTH), "nftables"),
        ("auto", Look(*BOTH, nft_rules=True), "iptables-nft"),
        ("", Look(*BOTH, legacy=True), "iptables-legacy"),
        ("", Look(*BOTH, legacy=True, nft_rules=True), "iptables-legacy"),
        ("", Look("nft"), "nftables"),
        ("", Look("iptables", flavour="iptables"), "iptables"),
        ("", Look("nft", nft_rules=True), "nftables"),
        ("iptables", Look(*BOTH), "iptables-nft"),
        ("iptables", Look(*BOTH, legacy=True), "iptables-legacy"),
        ("nftables", Look(*BOTH, legacy=True), "nftables"),
        ("iptables-legacy", Look(*BOTH), "iptables-legacy"),
    ],
)
def test_f02_the_backend_is_the_one_that_holds_the_hosts_rules(wish: str, look: Look, wanted: str) -> None:
    assert choose(wish, look).backend == wanted


def test_f02_without_any_firewall_tool_it_says_so() -> None:
    with pytest.raises(HullError, match="neither nft nor iptables"):
        choose("", Look())


def test_f02_the_backend_follows_the_host_when_its_rules_come_later(tmp_path: Path) -> None:
    nft, iptables, look = FakeNft(), FakeIptables(), Look(*BOTH)
    firewall = HostFirewall(
        NAMES,
        UndoJournal(tmp_path, Scope("boot", "net")),
        look=look,
        run=lambda words, text: nft(words, text) if words[0] == "nft" else iptables(words, text),
    )
    firewall.apply(FULL)
    look.nft_rules = True
    firewall.apply(FULL)
    assert firewall.backend == "nftables"
    firewall.reconsider()
    firewall.apply(FULL)
    assert firewall.backend == "iptables-nft" and not nft.table


def test_a_change_of_the_backend_leaves_nothing_in_the_old_one(tmp_path: Path) -> None:
    nft, iptables = FakeNft(), FakeIptables()

    def run(words: Sequence[str], text: str) -> str:
        return nft(words, text) if words[0] == "nft" else iptables(words, text)

    journal = UndoJournal(tmp_path, Scope("boot", "net"))
    firewall = HostFirewall(NAMES, journal, look=Look(*BOTH), run=run)
    firewall.apply(FULL)
    assert nft.table and not iptables.tables
    firewall.apply(FirewallWishes(ON, kind="iptables"))
    assert not nft.table and "tsd-input" in iptables.tables["4filter"] and firewall.backend == "iptables-nft"
    assert {entry.kind for entry in journal.entries} == {choosing.MADE}
    firewall.apply(FirewallWishes(ON, kind="nftables"))
    assert nft.table and "tsd-input" not in iptables.tables["4filter"] and not journal.entries
    firewall.apply(FirewallWishes())
    assert not nft.table and firewall.backend == ""


def test_events_name_the_table_and_the_program() -> None:
    def message(kind: int, *attributes: tuple[int, bytes]) -> bytes:
        body = b"\x02\x00\x00\x00"
        for number, value in attributes:
            body += (len(value) + 4).to_bytes(2, "little") + number.to_bytes(2, "little") + value
            body += bytes(-len(value) % 4)
        return (len(body) + 16).to_bytes(4, "little") + (10 << 8 | kind).to_bytes(2, "little") + bytes(10) + body

    raw = message(2, (1, b"tsd\0")) + message(15, (1, bytes(4)), (2, (77).to_bytes(4, "big")), (3, b"nft\0"))
    assert parse_events(raw) == ({"tsd"}, "nft (process 77)")
    assert parse_events(raw[:20]) == (set(), "") == parse_events(b"")
