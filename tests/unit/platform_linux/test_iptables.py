"""The rules in iptables: whose jumps are whose, what is put back, and chains and tables that cannot be read."""

from __future__ import annotations

import json

import pytest

from harness.fakefirewall import BAD, BUILTIN, FakeIptables
from tsd.base.errors import HullError
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.netfilter.iptables import IptablesChains, arguments
from tsplatform.linux.netfilter.rules import NODIVERT, ON, FirewallWishes, rules_of
from tsplatform.linux.netfilter.saved import ours

NAMES = HostNames("tsd0")
FULL = FirewallWishes(ON, True, True, True, (41641,))


def test_iptables_says_the_same() -> None:
    texts = {f"{rule.chain} {arguments(rule)}" for rule in rules_of(NAMES, FULL)}
    assert {
        "input -i tsd0 -j ACCEPT",
        "input -p udp -m udp --dport 41641 -j ACCEPT",
        "input -p udp -m udp --sport 67 --dport 68 -j RETURN",
        "input -s 100.64.0.0/10 -m conntrack ! --ctstate ESTABLISHED,RELATED -j DROP",
        "forward -i tsd0 -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu",
        "forward -i tsd0 -j MARK --set-xmark 0x100000/0x300000",
        "postrouting -m mark --mark 0x100000/0x300000 -j MASQUERADE",
        "prerouting -m connmark --mark 0x200000/0x300000 -j CONNMARK --restore-mark"
        " --nfmask 0x300000 --ctmask 0x300000",
    } <= texts


def test_iptables_modes_leave_the_admins_jumps_alone() -> None:
    fake = FakeIptables()
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    chains.apply(FULL)
    assert fake.tables["4filter"]["INPUT"] == ["-A INPUT -m comment --comment tsd -j tsd-input"]
    assert "tsd-output" in fake.tables["4mangle"] and "tsd-postrouting" in fake.tables["6nat"]
    chains.apply(FirewallWishes(NODIVERT, True))
    assert fake.tables["4filter"]["INPUT"] == [] and "tsd-output" not in fake.tables["4mangle"]
    fake.tables["4filter"]["INPUT"].append("-A INPUT -j tsd-input")
    chains.apply(FirewallWishes(NODIVERT, False))
    assert fake.tables["4filter"]["INPUT"] == ["-A INPUT -j tsd-input"]
    chains.remove()
    assert fake.tables["4filter"] == {
        "INPUT": ["-A INPUT -j tsd-input"],
        **{name: [] for name in BUILTIN[1:]},
        "tsd-input": [],
    }
    assert "tsd-input" not in fake.tables["6filter"]


def test_iptables_puts_back_what_was_flushed() -> None:
    fake = FakeIptables()
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    assert not chains.apply(FULL) and not chains.apply(FULL)
    whole = json.dumps(fake.tables)
    fake.tables["6filter"]["INPUT"].clear()
    fake.tables["4filter"]["tsd-forward"].clear()
    assert chains.apply(FULL)
    assert json.dumps(fake.tables) == whole


def test_iptables_leads_again_when_the_others_are_looked_at() -> None:
    fake = FakeIptables()
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    chains.apply(FULL)
    fake.tables["4filter"]["INPUT"].insert(0, "-A INPUT -j ts-input")
    assert not chains.apply(FULL)
    chains.reconsider()
    chains.apply(FULL)
    assert [rule.split()[-1] for rule in fake.tables["4filter"]["INPUT"]] == ["tsd-input", "ts-input"]
    whole = json.dumps(fake.tables)
    chains.reconsider()
    chains.apply(FULL)
    assert json.dumps(fake.tables) == whole


def test_f05_missing_parts_of_iptables_are_told_and_the_rest_works() -> None:
    fake = FakeIptables()
    fake.refuses = "ip6tables"
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    chains.apply(FULL)
    assert chains.trouble == "IPv6 firewall rules are off, because refused" and "4filter" in fake.tables
    assert not chains.apply(FULL)
    fake.refuses = "*mangle"
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    chains.apply(FULL)
    assert "table mangle" in chains.trouble


@pytest.mark.parametrize("said", ["# Table `filter' is incompatible", "Parsing nftables rule failed"])
def test_iptables_finds_its_own_in_a_table_that_it_cannot_read_as_a_whole(said: str) -> None:
    fake = FakeIptables()
    fake.mixed = said
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    chains.apply(FULL)
    whole = json.dumps(fake.tables)
    assert not chains.apply(FULL)
    later = IptablesChains(NAMES, "iptables-nft", fake)
    later.apply(FULL)
    assert json.dumps(fake.tables) == whole
    later.remove()
    assert "tsd" not in json.dumps(fake.tables)


@pytest.mark.parametrize("theirs", ["-s 192.0.2.1/32 -m comment --comment tsd -j tsd-input", "-j tsd-input"])
def test_a_rule_of_an_admin_that_looks_like_our_jump_hides_nothing(theirs: str) -> None:
    fake = FakeIptables()
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    fake.tables["4filter"] = {name: [] for name in BUILTIN} | {"tsd-input": []}
    fake.tables["4filter"]["INPUT"].append(f"-A INPUT {theirs}")
    chains.apply(FULL)
    assert fake.tables["4filter"]["INPUT"] == [f"-A INPUT {JUMP}", f"-A INPUT {theirs}"]
    assert not chains.apply(FULL)
    fake.tables["4filter"]["INPUT"].pop(0)
    assert chains.apply(FULL)
    chains.remove()
    assert fake.tables["4filter"]["INPUT"] == [f"-A INPUT {theirs}"] and fake.tables["4filter"]["tsd-input"] == []


def test_what_is_missing_after_it_was_written_is_counted_chain_by_chain() -> None:
    """One rule too many here is not one too few there."""
    fake = FakeIptables()

    class Meddler(IptablesChains):
        def _listed(self, version: int) -> dict[str, list[str]]:
            found = super()._listed(version)
            if self.meddles:
                fake.tables["4filter"]["tsd-input"].append("-A tsd-input -j DROP")
                fake.tables["4filter"]["tsd-forward"].pop()
                self.meddles = False
                return super()._listed(version)
            return found

        meddles = False

    chains = Meddler(NAMES, "iptables-nft", fake)
    chains.apply(FULL)
    whole = json.dumps(fake.tables)
    chains.meddles = True
    chains.apply(FirewallWishes(ON, True, True, True, (41642,)))
    chains.apply(FirewallWishes(ON, True, True, True, (41642,)))
    assert json.dumps(fake.tables) == whole.replace("41641", "41642")


JUMP = "-m comment --comment tsd -j tsd-input"


def test_f03_a_chain_that_cannot_be_read_is_neither_empty_nor_in_order() -> None:
    fake = FakeIptables()
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    fake.tables["4filter"] = {name: [] for name in BUILTIN}
    builtin = fake.tables["4filter"]["INPUT"]
    builtin.append(BAD)
    chains.apply(FULL)
    assert builtin == [f"-A INPUT {JUMP}", BAD] and chains.trouble == "", "it is seen where it stands first"
    builtin[:] = [BAD, *builtin]
    for _ in range(3):
        assert not chains.apply(FULL)
        chains.reconsider()
    assert builtin.count(f"-A INPUT {JUMP}") == 1, "not written again and again"
    assert "cannot read what nft wrote into INPUT;" in chains.trouble
    chains.apply(FirewallWishes(ON))
    assert builtin.count(f"-A INPUT {JUMP}") <= 2
    builtin[:] = []
    assert chains.apply(FirewallWishes(ON)), "what can be read again is looked at"
    assert builtin == [f"-A INPUT {JUMP}"] and chains.trouble == ""
    builtin.append(BAD)
    chains.remove()
    assert builtin == [BAD] and "tsd-input" not in fake.tables["4filter"]


def test_a_jump_in_a_chain_that_cannot_be_read_is_written_once() -> None:
    fake = FakeIptables()
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    fake.hides = {"INPUT"}
    chains.apply(FULL)
    for port in range(5):
        chains.apply(FirewallWishes(ON, udp_ports=(port,)))
    assert fake.tables["4filter"]["INPUT"].count(f"-A INPUT {JUMP}") == 1 and "INPUT" in chains.trouble
    chains.apply(FirewallWishes(NODIVERT))
    assert chains.trouble == ""


@pytest.mark.parametrize("table", ["4filter", "4nat", "4mangle"])
def test_iptables_writes_nothing_when_it_cannot_tell_what_is_there(table: str) -> None:
    fake = FakeIptables()
    chains = IptablesChains(NAMES, "iptables-nft", fake)
    chains.apply(FULL)
    whole = json.dumps(fake.tables)
    fake.unlisted = {table: HullError("firewall: iptables-nft-save", "timed out")}
    for attempt in (lambda: chains.apply(FirewallWishes(ON)), chains.remove):
        with pytest.raises(HullError, match="timed out"):
            attempt()
        assert json.dumps(fake.tables) == whole
    fake.unlisted = {}
    chains.apply(FULL)
    assert json.dumps(fake.tables) == whole


@pytest.mark.parametrize(
    "said",
    [
        HullError("firewall", "ip6tables-nft-save is not installed", errno=127),
        HullError("firewall", "Cannot initialize: Table does not exist (do you need to insmod?)"),
        HullError("firewall", "Cannot initialize: Address family not supported by protocol"),
    ],
)
def test_where_no_table_can_be_there_is_nothing_to_take_back(said: HullError) -> None:
    fake = FakeIptables()
    fake.unlisted = {f"6{table}": said for table in ("filter", "nat", "mangle")}
    IptablesChains(NAMES, "iptables-nft", fake).remove()


def test_a_second_slot_is_not_taken_for_ours() -> None:
    save = "*filter\n:tsd1-input - [0:0]\n:ts-input - [0:0]\n:tsd-input - [3:4]\n-A INPUT -j tsd1-input\nCOMMIT\n"
    assert ours(save, "tsd") == {"filter": [":tsd-input -"]}
    assert ours(save, "tsd1") == {"filter": [":tsd1-input -", "-A INPUT -j tsd1-input"]}
