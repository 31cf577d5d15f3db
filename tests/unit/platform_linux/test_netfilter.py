"""The firewall table: which rules, when it is written again, and how nft's answers are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tsd.base.errors import HullError
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.netfilter import NODIVERT, OFF, ON, FirewallWishes, NftTable, canonical, ruleset

NAMES = HostNames("tsd0")


def _rules(wishes: FirewallWishes, chain: str) -> list[list[dict[str, Any]]]:
    added = [command["add"] for command in ruleset(NAMES, wishes)["nftables"] if "add" in command]
    return [item["rule"]["expr"] for item in added if "rule" in item and item["rule"]["chain"] == chain]


def _hooks(wishes: FirewallWishes) -> list[str]:
    added = [command["add"] for command in ruleset(NAMES, wishes)["nftables"] if "add" in command]
    return [item["chain"]["hook"] for item in added if "hook" in item.get("chain", {})]


class FakeNft:
    def __init__(self) -> None:
        self.table = ""
        self.written = 0
        self.trouble = ""

    def __call__(self, arguments: list[str], text: str) -> str:
        if self.trouble:
            raise HullError("firewall: nft", self.trouble)
        if arguments == ["-j", "-f", "-"]:
            commands = json.loads(text)["nftables"]
            self.table = text if len(commands) > 2 else ""
            self.written += bool(self.table)
            return ""
        if not self.table:
            raise HullError("firewall: nft", "No such file or directory")
        return json.dumps({"nftables": [{"metainfo": {}}, {"rule": {"handle": self.written, "text": self.table}}]})


def test_on_hooks_in_and_nodivert_does_not() -> None:
    assert set(_hooks(FirewallWishes(ON))) == {"input", "forward", "postrouting", "prerouting", "output"}
    assert _hooks(FirewallWishes(NODIVERT, masquerade=True)) == []
    assert _rules(FirewallWishes(NODIVERT, masquerade=True), "tsd-postrouting")


def test_the_wishes_change_the_rules() -> None:
    plain, full = FirewallWishes(ON), FirewallWishes(ON, True, True, True)
    assert _rules(plain, "tsd-postrouting") == []
    assert [rule[-1] for rule in _rules(full, "tsd-postrouting")] == [{"masquerade": None}]
    assert not any({"drop": None} in rule for rule in _rules(plain, "tsd-forward") + _rules(plain, "tsd-input"))
    assert sum({"drop": None} in rule for rule in _rules(full, "tsd-forward")) == 2
    assert sum({"drop": None} in rule for rule in _rules(full, "tsd-input")) == 1


def test_the_table_is_replaced_in_one_transaction() -> None:
    commands = ruleset(NAMES, FirewallWishes(ON))["nftables"]
    assert [next(iter(command)) for command in commands[:3]] == ["add", "delete", "add"]


def test_it_is_written_again_only_when_it_changed() -> None:
    nft = FakeNft()
    table = NftTable(NAMES, nft)
    table.apply(FirewallWishes(ON))
    table.apply(FirewallWishes(ON))
    assert nft.written == 1
    nft.table = ""
    table.apply(FirewallWishes(ON))
    assert (nft.written, bool(nft.table)) == (2, True)
    table.apply(FirewallWishes(NODIVERT))
    assert nft.written == 3
    table.apply(FirewallWishes(OFF))
    assert nft.table == ""


def test_failures_are_told() -> None:
    nft = FakeNft()
    nft.trouble = "Operation not permitted"
    with pytest.raises(HullError, match="Operation not permitted"):
        NftTable(NAMES, nft).apply(FirewallWishes(ON))


def test_counters_and_handles_do_not_count() -> None:
    def listing(handle: int) -> str:
        counter = {"counter": {"packets": handle, "bytes": handle}}
        return json.dumps({"nftables": [{"metainfo": {}}, {"rule": {"handle": handle, "expr": [counter]}}]})

    assert canonical(listing(1)) == canonical(listing(2)) != ""
    assert canonical("no json") == ""
