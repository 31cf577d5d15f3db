"""Our rules in chains of our own inside the tables of iptables, for hosts whose firewall lives there.

An accept in the same base chain is final, which no other table can give us. Each table is written in one transaction by
`iptables-restore --noflush`; of the builtin chains only the jumps to ours are touched, and only in mode "on". What is
there is read with `iptables-save`: rules are normalised by the kernel, so a listing is compared with the one after the
last write and never with what was asked for. Jumps that an admin wrote (in mode "nodivert") are told from ours by a
comment, and never touched; chains that they lead to are emptied, not deleted. Facts: iptables-restore(8),
iptables-extensions(8).
"""

from __future__ import annotations

import logging
import re

from tsd.base.errors import HullError
from tsplatform.linux.hostnames import MARK_MASK, SUBNET_MARK, HostNames
from tsplatform.linux.netfilter.rules import (
    FILTER_CHAINS,
    MARK_CHAINS,
    NODIVERT,
    OFF,
    ON,
    Chain,
    FirewallWishes,
    Rule,
    mode_text,
    rules_of,
)
from tsplatform.linux.netfilter.run import NO_PROGRAM, Run, run_program
from tsplatform.linux.netfilter.saved import (
    Saved,
    completed,
    counted,
    dropped,
    followers,
    hooked,
    is_jump,
    is_same,
    jump,
    ours,
    unhooked,
    unknown,
    unreadable,
)

log = logging.getLogger(__name__)

LEGACY, NFT = "iptables-legacy", "iptables-nft"
TABLE_OF: dict[Chain, str] = {
    "input": "filter",
    "forward": "filter",
    "postrouting": "nat",
    "prerouting": "mangle",
    "output": "mangle",
}
TABLES = ("filter", "nat", "mangle")
_WAIT_S = "5"
_ABSENT = ("does not exist", "not supported by protocol")
"""How iptables-legacy says that the kernel has no such table, or not this family."""
_MIXED = ("is incompatible", "Parsing nftables rule failed", "needs to be upgraded")
"""How iptables-nft says that there are rules of nft which it cannot read."""
_NO_CHAIN = ("does not exist", "No chain")
_NO_RULE = "does a matching rule exist"
_NO_IPV6 = "IPv6 firewall rules are off"
_MOST_DUPLICATES = 4


class IptablesChains:
    """Implements `Netfilter`. `flavour`: `iptables-nft`, `iptables-legacy`, or `iptables` for what the host calls
    so."""

    def __init__(self, names: HostNames, flavour: str, run: Run = run_program) -> None:
        self._names = names
        self.backend = flavour
        self._run = run
        self._applied = FirewallWishes()
        self._listing: dict[int, Saved] = {}
        self._missing = ""
        self._hidden: set[str] = set()
        """Builtin chains that could not be read at the last look."""
        self._placed: set[tuple[int, str]] = set()
        """Families and builtin chains with a jump of ours: in one that cannot be read it is taken to be there still."""
        self._must_lead = False
        self._was_short = False
        """The last write could not be seen whole afterwards."""

    @property
    def trouble(self) -> str:
        return "; ".join(filter(None, (self._missing, self._not_known())))

    def _not_known(self) -> str:
        """Rules that may not be in force."""
        if not self._hidden or self._applied.mode != ON:
            return ""
        return (
            f"whether our firewall rules are in force cannot be told: {self.backend} cannot read what nft wrote into"
            f" {' and '.join(sorted(self._hidden))}; tsctl set --netfilter-backend=nft takes a table of our own"
        )

    def reconsider(self) -> None:
        """Rules that others put before our jumps since may drop what we accept."""
        self._must_lead = True

    def apply(self, wishes: FirewallWishes) -> bool:
        if wishes.mode == OFF:
            self.remove()
            return False
        was_ours = wishes == self._applied and bool(self._listing)
        if was_ours and not self._is_overtaken() and self._is_there():
            return False
        self._missing = ""
        wanted = {4: self._write(4, wishes)}
        try:
            wanted[6] = self._write(6, wishes)
        except HullError as err:
            self._missing = f"{_NO_IPV6}, because {err.reason}"
        listing = {version: self._listed(version) for version in self._families()}
        # Somebody may have undone some of it already: then the next look writes it again. Once: it may be unreadable.
        is_short = any(not self._is_whole(listing[version], lines) for version, lines in wanted.items())
        self._was_short = is_short and not self._was_short
        self._hidden = _unknown_in(listing)
        whole = {version: self._completed(saved, wanted[version]) for version, saved in listing.items()}
        self._listing = {} if self._was_short else whole
        self._applied, self._must_lead = wishes, False
        log.info("firewall: chains %s-* of %s written (%s)", self._prefix, self.backend, mode_text(wishes.mode))
        if self.trouble:
            log.warning("%s", self.trouble)
        if wishes.mode == NODIVERT:
            wiring = "; ".join(self.hints())
            log.info("nothing leads to our firewall chains by itself; wire them with: %s", wiring)
        return was_ours

    def _is_there(self) -> bool:
        now = {version: self._listed(version) for version in self._listing}
        self._hidden = _unknown_in(now)
        return all(is_same(now[version], listing) for version, listing in self._listing.items())

    def _is_overtaken(self) -> bool:
        if not self._must_lead or self._applied.mode != ON:
            self._must_lead = False
        return self._must_lead and any(followers(self._save(version), self._prefix) for version in self._families())

    def remove(self) -> None:
        """Idempotent; programs that are not there have nothing to remove."""
        self._applied, self._listing, self._missing = FirewallWishes(), {}, ""
        self._placed.clear()
        for version in (4, 6):
            saved = self._listed(version)
            for table, lines in saved.items():
                self._unhook_unseen(version, table, unknown(lines))
                self._restore(version, table, [*unhooked(lines, set()), *dropped(lines, set())])
                self._drop_unseen(version, table, unknown(lines))

    def hints(self) -> list[str]:
        """The lines that wire our chains in mode nodivert."""
        return [
            f"{self._program(version)} -t {TABLE_OF[chain]} -I {chain.upper()} -j {self._name(chain)}"
            for version in (4, 6)
            for chain in FILTER_CHAINS
        ]

    # --- reading

    @property
    def _prefix(self) -> str:
        return self._names.nft_table

    def _name(self, chain: Chain) -> str:
        return f"{self._prefix}-{chain}"

    def _program(self, version: int, action: str = "") -> str:
        base = self.backend if version == 4 else self.backend.replace("iptables", "ip6tables", 1)
        return base + action

    def _families(self) -> tuple[int, ...]:
        return (4,) if self._missing.startswith(_NO_IPV6) else (4, 6)

    def _listed(self, version: int) -> Saved:
        return ours(self._save(version), self._prefix)

    def _save(self, version: int) -> str:
        """Table by table: one with rules that iptables cannot read (of nft, or a real tailscaled) hides no other.

        Raises `HullError` when one cannot be listed that may be there: our jumps would be added a second time.
        """
        found = []
        for table in TABLES:
            try:
                text = said = self._run([self._program(version, "-save"), "-t", table], "")
            except HullError as err:
                text, said = "", err.reason
                if err.errno != NO_PROGRAM and not _says(said, *_ABSENT, *_MIXED):
                    raise
            found.append(self._save_chains(version, table) if _says(said, *_MIXED) else text)
        return "\n".join(found)

    def _save_chains(self, version: int, table: str) -> str:
        """A table with a chain that iptables cannot read is not listed as a whole, but its other chains are.

        Of a builtin chain that cannot be read our jump may be seen nevertheless, if it stands before what cannot be.
        """
        lines = [f"*{table}"]
        for chain in [chain for chain in TABLE_OF if TABLE_OF[chain] == table]:
            for name in (chain.upper(), self._name(chain)):
                try:
                    listed = self._run([self._program(version), "-t", table, "-S", name], "")
                except HullError as err:
                    if not _says(err.reason, *_NO_CHAIN, *_MIXED):
                        raise
                    if name.isupper() and not _says(err.reason, *_NO_CHAIN):
                        lines += self._probed(version, table, chain)
                    continue
                lines += [re.sub(r"^-N (\S+)", r":\1 - [0:0]", line) for line in listed.splitlines()]
        return "\n".join(lines)

    def _probed(self, version: int, table: str, chain: Chain) -> list[str]:
        """Our jump if it is there, or the line of a chain that cannot be read."""
        mine = jump(chain.upper(), self._name(chain))
        said = self._try(version, table, f"-C {mine}")
        if not said:
            return [f"-A {mine}"]
        return [] if _says(said, _NO_RULE, *_NO_CHAIN) else [unreadable(chain.upper())]

    def _try(self, version: int, table: str, line: str) -> str:
        """Why not, or "" when it was done."""
        try:
            self._run([self._program(version), "--wait", _WAIT_S, "-t", table, *line.split()], "")
        except HullError as err:
            return err.reason
        return ""

    # --- chains that cannot be read

    def _unhook_unseen(self, version: int, table: str, builtins: set[str]) -> None:
        for name in builtins:
            line = f"-D {jump(name, f'{self._prefix}-{name.lower()}')}"
            for _ in range(_MOST_DUPLICATES):
                if self._try(version, table, line):
                    break
            self._placed.discard((version, name))

    def _drop_unseen(self, version: int, table: str, builtins: set[str]) -> None:
        for name in builtins:
            self._try(version, table, f"-X {self._prefix}-{name.lower()}")

    # --- writing

    def _is_whole(self, listing: Saved, wanted: dict[str, list[str]]) -> bool:
        """Whether all that was written is seen, but for what cannot be."""
        for table, lines in wanted.items():
            present = listing.get(table, [])
            hidden = unknown(present)
            found = counted(present, self._prefix)
            for what, count in counted(lines, self._prefix).items():
                if found[what] != count and hidden.isdisjoint(what.split()[1:2]):
                    return False
        return True

    @staticmethod
    def _completed(saved: Saved, wanted: dict[str, list[str]]) -> Saved:
        jumps = {table: list(filter(is_jump, lines)) for table, lines in wanted.items()}
        return {table: completed(lines, jumps.get(table, ())) for table, lines in saved.items()}

    def _write(self, version: int, wishes: FirewallWishes) -> dict[str, list[str]]:
        """Rules and jumps of ours that are there now, by table."""
        wanted: dict[str, list[str]] = {}
        text = self._save(version)
        saved, displaced = ours(text, self._prefix), followers(text, self._prefix) if self._must_lead else set()
        rules = [rule for rule in rules_of(self._names, wishes) if version == 4 or not rule.is_v4_only]
        for table in TABLES:
            chains = [c for c in _chains(wishes.mode) if TABLE_OF[c] == table]
            jumps = {self._name(chain): jump(chain.upper(), self._name(chain)) for chain in chains if wishes.mode == ON}
            self._unhook_unseen(
                version, table, unknown(saved.get(table, [])) - {line.split()[0] for line in jumps.values()}
            )
            lines = self._table(version, chains, rules, saved.get(table, []), jumps, displaced)
            try:
                self._restore(version, table, lines)
                wanted[table] = [*lines, *(f"-A {line}" for line in jumps.values())]
            except HullError as err:
                if table == "filter":
                    raise
                self._missing = f"IPv{version} rules of the table {table} are missing, because {err.reason}"
        return wanted

    def _table(
        self,
        version: int,
        chains: list[Chain],
        rules: list[Rule],
        saved: list[str],
        jumps: dict[str, str],
        displaced: set[str],
    ) -> list[str]:
        names = {self._name(chain) for chain in chains}
        lines = [f":{name} - [0:0]" for name in sorted(names)]
        lines += [f"-A {self._name(r.chain)} {arguments(r)}" for r in rules if self._name(r.chain) in names]
        present = hooked(saved) - displaced
        lines += unhooked(saved, set(jumps) - displaced)
        for name, line in jumps.items():
            builtin = line.split()[0]
            is_taken_to_be_there = builtin in unknown(saved) and (version, builtin) in self._placed
            if name not in present and not is_taken_to_be_there:
                lines.append(f"-I {builtin} 1 {line.partition(' ')[2]}")
            self._placed.add((version, builtin))
        return lines + dropped(saved, names)

    def _restore(self, version: int, table: str, lines: list[str]) -> None:
        if not lines:
            return
        text = "\n".join([f"*{table}", *lines, "COMMIT", ""])
        self._run([self._program(version, "-restore"), "--noflush", "--wait", _WAIT_S], text)


def _says(text: str, *wanted: str) -> bool:
    return any(words in text for words in wanted)


def _unknown_in(listing: dict[int, Saved]) -> set[str]:
    return {name for saved in listing.values() for lines in saved.values() for name in unknown(lines)}


def _chains(mode: int) -> tuple[Chain, ...]:
    return (*FILTER_CHAINS, *MARK_CHAINS) if mode == ON else FILTER_CHAINS


# --- the rules


def arguments(rule: Rule) -> str:
    """Conditions and target of one rule."""
    words: list[str] = []
    for flag, value in (("-s", rule.source), ("-i", rule.in_device), ("-o", rule.out_device)):
        words += [flag, value] if value else []
    if rule.is_syn:
        words += ["-p", "tcp", "-m", "tcp", "--tcp-flags", "SYN,RST", "SYN"]
    if any(rule.udp):
        words += ["-p", "udp", "-m", "udp"]
        for flag, port in zip(("--sport", "--dport"), rule.udp, strict=True):
            words += [flag, str(port)] if port else []
    for module, mark in (("mark", rule.mark), ("connmark", rule.connection_mark)):
        words += ["-m", module, "--mark", f"{mark:#x}/{MARK_MASK:#x}"] if mark else []
    if rule.is_new:
        words += ["-m", "conntrack", "!", "--ctstate", "ESTABLISHED,RELATED"]
    return " ".join([*words, "-j", _target(rule)])


def _target(rule: Rule) -> str:
    masks = f"--nfmask {MARK_MASK:#x} --ctmask {MARK_MASK:#x}"
    return {
        "accept": "ACCEPT",
        "drop": "DROP",
        "return": "RETURN",
        "masquerade": "MASQUERADE",
        "mark": f"MARK --set-xmark {SUBNET_MARK:#x}/{MARK_MASK:#x}",
        "clamp": "TCPMSS --clamp-mss-to-pmtu",
        "save": f"CONNMARK --save-mark {masks}",
        "restore": f"CONNMARK --restore-mark {masks}",
    }[rule.verdict]
