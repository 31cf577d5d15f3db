"""The firewall: which rules, how both backends write them, when they are written again, which backend is taken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tsd.base.errors import HullError
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.journal import Scope, UndoJournal
from tsplatform.linux.netfilter import choose as choosing
from tsplatform.linux.netfilter.choose import HostFirewall, HostLook, choose
from tsplatform.linux.netfilter.iptables import IptablesChains, arguments
from tsplatform.linux.netfilter.nft import NftTable, canonical, commands_for
from tsplatform.linux.netfilter.rules import NODIVERT, OFF, ON, FirewallWishes, rules_of
from tsplatform.linux.netfilter.saved import ours
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


class FakeNft:
    """Keeps the last text as its table."""

    def __init__(self) -> None:
        self.table = ""
        self.written = 0
        self.trouble = ""
        self.unlisted = ""

    def __call__(self, words: Sequence[str], text: str) -> str:
        if self.trouble:
            raise HullError("firewall: nft", self.trouble)
        if words[-1] == "-":
            commands = json.loads(text)["nftables"]
            self.table = text if len(commands) > 2 else ""
            self.written += bool(self.table)
            return ""
        if self.unlisted:
            raise HullError("firewall: nft", self.unlisted)
        if not self.table:
            raise HullError("firewall: nft", "No such file or directory")
        rule = {"chain": "tsd-input", "handle": self.written, "text": self.table}
        return json.dumps({"nftables": [{"metainfo": {}}, {"rule": rule}]})


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


# --- iptables


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


BUILTIN = ("INPUT", "FORWARD", "POSTROUTING", "PREROUTING", "OUTPUT")
BAD = "what only nft can read"


class FakeIptables:
    """Tables of both families as `iptables-restore --noflush` would leave them."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.refuses = "nothing"
        self.unlisted: dict[str, HullError] = {}
        self.mixed = ""
        self.hides: set[str] = set()
        """Chains in which nothing of ours is ever found."""

    def __call__(self, words: Sequence[str], text: str) -> str:
        family = "6" if words[0].startswith("ip6") else "4"
        if words[0].endswith("-save"):
            if family + words[-1] in self.unlisted:
                raise self.unlisted[family + words[-1]]
            if self.mixed.startswith("Parsing"):
                raise HullError("firewall: iptables-nft-save", self.mixed)
            return self.mixed or self._save(family, words[-1])
        if words[1:2] == ["--wait"]:
            return self._one(self.tables.get(family + words[4], {}), words[5:])
        if words[3:4] == ["-S"]:
            return self._list_chain(self.tables.get(family + words[2], {}), words[4])
        if self.refuses in words[0] + text:
            raise HullError(f"firewall: {words[0]}", "refused")
        lines = text.splitlines()
        chains = self.tables.setdefault(family + lines[0][1:], {name: [] for name in BUILTIN})
        for line in lines[1:-1]:
            self._do(chains, line)
        return ""

    def _save(self, family: str, table: str) -> str:
        out = []
        for name, chains in self.tables.items():
            if name == family + table and (self.hides & set(chains) or any(BAD in rules for rules in chains.values())):
                return f"# Table `{table}' is incompatible, use 'nft' tool."
            if name == family + table:
                out += [f"*{name[1:]}", *(f":{chain} - [0:0]" for chain in chains)]
                out += [rule for rules in chains.values() for rule in rules] + ["COMMIT"]
        return "\n".join(out)

    def _list_chain(self, chains: dict[str, list[str]], name: str) -> str:
        if name not in chains or BAD in chains[name] or name in self.hides:
            raise HullError("firewall: iptables-nft", f"chain `{name}' in table `filter' is incompatible")
        return "\n".join([f"-P {name} ACCEPT" if name.isupper() else f"-N {name}", *chains[name]])

    def _one(self, chains: dict[str, list[str]], words: Sequence[str]) -> str:
        """`-C` and `-D` find what stands before a rule that cannot be read."""
        verb, name, *rest = words
        if verb == "-X":
            if name not in chains or any(rule.endswith(f" {name}") for rules in chains.values() for rule in rules):
                raise HullError("firewall: iptables-nft", "CHAIN_DEL failed")
            del chains[name]
            return ""
        for rule in chains.get(name, []) or ([BAD] if name in self.hides else []):
            if rule == BAD or name in self.hides:
                raise HullError("firewall: iptables-nft", "Parsing nftables rule failed")
            if rule == f"-A {name} {' '.join(rest)}":
                if verb == "-D":
                    chains[name].remove(rule)
                return ""
        raise HullError("firewall: iptables-nft", "Bad rule (does a matching rule exist in that chain?).")

    def _do(self, chains: dict[str, list[str]], line: str) -> None:
        if line.startswith(":"):
            chains[line[1:].split()[0]] = []
            return
        verb, name, *rest = line.split()
        if verb == "-I":
            chains.setdefault(name, []).insert(0, f"-A {name} {' '.join(rest[1:])}")
        elif verb == "-A":
            chains[name].append(line)
        elif verb == "-D":
            chains[name].remove(f"-A {name} {' '.join(rest)}")
        elif verb == "-F":
            chains[name] = []
        elif verb == "-X":
            assert not any(rule.endswith(f" {name}") for rules in chains.values() for rule in rules), "in use"
            del chains[name]


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
