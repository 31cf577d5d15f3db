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
_LABEL = "-m comment --comment tsd"

Saved = dict[str, list[str]]
"""The lines of `iptables-save` that are about our chains, by table."""


class IptablesChains:
    """Implements `Netfilter`. `flavour`: `iptables-nft`, `iptables-legacy`, or `iptables` for what the host calls
    so."""

    def __init__(self, names: HostNames, flavour: str, run: Run = run_program) -> None:
        self._names = names
        self.backend = flavour
        self._run = run
        self._applied = FirewallWishes()
        self._listing: dict[int, Saved] = {}
        self.trouble = ""
        self._must_lead = False
        self._was_short = False
        """The last write could not be seen whole afterwards."""

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
        self.trouble = ""
        wanted = {4: self._write(4, wishes)}
        try:
            wanted[6] = self._write(6, wishes)
        except HullError as err:
            self.trouble = f"IPv6 firewall rules are off, because {err.reason}"
        listing = {version: self._listed(version) for version in self._families()}
        # Somebody may have undone some of it already: then the next look writes it again. Once: it may be unreadable.
        is_short = any(self._count(listing[version]) < count for version, count in wanted.items())
        self._was_short = is_short and not self._was_short
        self._listing = {} if self._was_short else listing
        self._applied, self._must_lead = wishes, False
        log.info("firewall: chains %s-* of %s written (%s)", self._prefix, self.backend, mode_text(wishes.mode))
        if self.trouble:
            log.warning("%s", self.trouble)
        if wishes.mode == NODIVERT:
            wiring = "; ".join(self.hints())
            log.info("nothing leads to our firewall chains by itself; wire them with: %s", wiring)
        return was_ours

    def _is_there(self) -> bool:
        return all(self._listed(version) == listing for version, listing in self._listing.items())

    def _is_overtaken(self) -> bool:
        if not self._must_lead or self._applied.mode != ON:
            self._must_lead = False
        return self._must_lead and any(followers(self._save(version), self._prefix) for version in self._families())

    def remove(self) -> None:
        """Idempotent; programs that are not there have nothing to remove."""
        self._applied, self._listing, self.trouble = FirewallWishes(), {}, ""
        for version in (4, 6):
            saved = self._listed(version)
            for table, lines in saved.items():
                self._restore(version, table, [*_unhooked(lines, set()), *_dropped(lines, set())])

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
        return (4,) if self.trouble.startswith("IPv6 firewall") else (4, 6)

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
        """A table with a chain that iptables cannot read is not listed as a whole, but its other chains are."""
        lines = [f"*{table}"]
        for chain in [chain for chain in TABLE_OF if TABLE_OF[chain] == table]:
            for name in (chain.upper(), self._name(chain)):
                try:
                    listed = self._run([self._program(version), "-t", table, "-S", name], "")
                except HullError as err:
                    if not _says(err.reason, *_NO_CHAIN, *_MIXED):
                        raise
                    continue
                lines += [re.sub(r"^-N (\S+)", r":\1 - [0:0]", line) for line in listed.splitlines()]
        return "\n".join(lines)

    # --- writing

    def _count(self, listing: Saved) -> int:
        """Rules of our chains, and our jumps to them."""
        mine = f"-A {self._prefix}-"
        lines = [line for table in listing.values() for line in table]
        return sum(line.startswith(mine) or (line.startswith("-A") and _LABEL in line) for line in lines)

    def _write(self, version: int, wishes: FirewallWishes) -> int:
        """How many rules and jumps of ours are there now."""
        count = 0
        text = self._save(version)
        saved, displaced = ours(text, self._prefix), followers(text, self._prefix) if self._must_lead else set()
        rules = [rule for rule in rules_of(self._names, wishes) if version == 4 or not rule.is_v4_only]
        for table in TABLES:
            chains = [c for c in _chains(wishes.mode) if TABLE_OF[c] == table]
            hooked = {self._name(chain) for chain in chains} if wishes.mode == ON else set()
            lines = self._table(chains, rules, saved.get(table, []), hooked, displaced)
            try:
                if lines:
                    self._restore(version, table, lines)
                count += len(hooked) + sum(line.startswith(f"-A {self._prefix}-") for line in lines)
            except HullError as err:
                if table == "filter":
                    raise
                self.trouble = f"IPv{version} rules of the table {table} are missing, because {err.reason}"
        return count

    def _table(
        self, chains: list[Chain], rules: list[Rule], saved: list[str], hooked: set[str], displaced: set[str]
    ) -> list[str]:
        names = {self._name(chain) for chain in chains}
        lines = [f":{name} - [0:0]" for name in sorted(names)]
        lines += [f"-A {self._name(r.chain)} {arguments(r)}" for r in rules if self._name(r.chain) in names]
        present = {line.split()[-1] for line in _hooks(saved) if _LABEL in line} - displaced
        lines += _unhooked(saved, hooked - displaced)
        for chain in chains:
            if self._name(chain) in hooked - present:
                lines.append(f"-I {chain.upper()} 1 {_LABEL} -j {self._name(chain)}")
        return lines + _dropped(saved, names)

    def _restore(self, version: int, table: str, lines: list[str]) -> None:
        text = "\n".join([f"*{table}", *lines, "COMMIT", ""])
        self._run([self._program(version, "-restore"), "--noflush", "--wait", _WAIT_S], text)


def _says(text: str, *wanted: str) -> bool:
    return any(words in text for words in wanted)


def _chains(mode: int) -> tuple[Chain, ...]:
    return (*FILTER_CHAINS, *MARK_CHAINS) if mode == ON else FILTER_CHAINS


def ours(save: str, prefix: str) -> Saved:
    """What of `iptables-save` is about the chains `prefix`-*, without counters."""
    about = re.compile(rf"(?:^:| ){re.escape(prefix)}-(?:input|forward|postrouting|prerouting|output)\b")
    found: Saved = {}
    table = ""
    for line in save.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif about.search(line):
            found.setdefault(table, []).append(line.partition(" [")[0] if line.startswith(":") else line)
    return found


def followers(save: str, prefix: str) -> set[str]:
    """Chains of ours whose jump is not the first rule of its chain."""
    seen: set[tuple[str, str]] = set()
    found: set[str] = set()
    table = ""
    for line in save.splitlines():
        table = line[1:] if line.startswith("*") else table
        if line.startswith("-A "):
            place = (table, line.split()[1])
            if _LABEL in line and line.split()[-1].startswith(f"{prefix}-") and place in seen:
                found.add(line.split()[-1])
            seen.add(place)
    return found


def _own_chains(lines: list[str]) -> list[str]:
    return [line[1:].split()[0] for line in lines if line.startswith(":")]


def _hooks(lines: list[str]) -> list[str]:
    """Rules of other chains that lead to ours."""
    own = set(_own_chains(lines))
    return [line for line in lines if line.startswith("-A ") and line.split()[1] not in own]


def _unhooked(lines: list[str], keep: set[str]) -> list[str]:
    """Delete our own jumps, but for those to `keep`."""
    return [f"-D{line[2:]}" for line in _hooks(lines) if _LABEL in line and line.split()[-1] not in keep]


def _dropped(lines: list[str], keep: set[str]) -> list[str]:
    """Delete chains of ours that are not wanted any more; where somebody else's rule leads, only what is in them."""
    gone = [name for name in _own_chains(lines) if name not in keep]
    wired = {line.split()[-1] for line in _hooks(lines) if _LABEL not in line}
    return [*(f"-F {name}" for name in gone), *(f"-X {name}" for name in gone if name not in wired)]


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
