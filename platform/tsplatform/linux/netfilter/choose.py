"""Which backend holds our rules: the one that was asked for, or the one that the host's own firewall lives in.

Model: tailscale: util/linuxfw/detector.go, except that without a wish nftables comes first and only rules that are in
force on the host speak against it. iptables-legacy is never run to look: that alone would load its tables.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tsd.base.errors import HullError
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.journal import Entry, UndoJournal
from tsplatform.linux.netfilter.iptables import LEGACY, NFT, TABLES, IptablesChains
from tsplatform.linux.netfilter.nft import NftTable
from tsplatform.linux.netfilter.rules import OFF, FirewallWishes, Netfilter
from tsplatform.linux.netfilter.run import Run, run_program
from tsplatform.linux.programs import find_program

log = logging.getLogger(__name__)

NFTABLES = "nftables"
MADE = "nft-table"
"""Kind of the journal's entries about tables that iptables made because of us."""
_OURS = re.compile(r"\btsd\d?-(input|forward|postrouting)\b")
_LEGACY_TABLES = (Path("/proc/net/ip_tables_names"), Path("/proc/net/ip6_tables_names"))


class Choice(NamedTuple):
    backend: str
    """`nftables`, or the flavour of iptables."""
    because: str


class HostLook:
    """What the choice depends on; tests bring their own."""

    def __init__(self, run: Run = run_program, has: Callable[[str], bool] | None = None) -> None:
        self._run = run
        self.has = has or (lambda program: find_program(program) is not None)

    def has_legacy_tables(self) -> bool:
        for path in _LEGACY_TABLES:
            try:
                if path.read_text().strip():
                    return True
            except OSError:
                continue
        return False

    def has_legacy_rules(self) -> bool:
        """Rules of others in the tables of iptables-legacy."""
        if not self.has_legacy_tables():
            return False
        return any(_has_rules(self._try([f"{name}-save"])) for name in (LEGACY, "ip6tables-legacy"))

    def has_nft_iptables_rules(self) -> bool:
        """Rules of others that iptables-nft wrote, or a policy of it that drops."""
        return any(_is_of_iptables(item) for item in self.ruleset())

    def default_flavour(self) -> str:
        """What the host means by `iptables`."""
        if not self.has("iptables"):
            return next((name for name in (NFT, LEGACY) if self.has(name)), "")
        flavour = LEGACY if "legacy" in self._try(["iptables", "-V"]) else NFT
        return flavour if self.has(flavour) else "iptables"

    def tables(self) -> set[str]:
        """Such as "ip filter"."""
        tables = [item["table"] for item in self.ruleset() if "table" in item]
        return {f"{table['family']} {table['name']}" for table in tables}

    def ruleset(self) -> list[dict[str, Any]]:
        """Everything in nftables."""
        try:
            return list(json.loads(self._try(["nft", "-j", "list", "ruleset"]))["nftables"])
        except (ValueError, KeyError):
            return []

    def _try(self, words: list[str]) -> str:
        try:
            return self._run(words, "")
        except HullError:
            return ""


def _has_rules(save: str) -> bool:
    for line in save.splitlines():
        if line.startswith("-A ") and not _OURS.search(line):
            return True
        if line.startswith(":") and line.split()[1:2] == ["DROP"]:
            return True
    return False


def _is_of_iptables(item: dict[str, Any]) -> bool:
    entry = item.get("rule") or item.get("chain") or {}
    if entry.get("family") not in ("ip", "ip6") or entry.get("table") != "filter":
        return False
    chain = entry.get("chain") or entry.get("name")
    if "chain" in item:
        return chain in ("INPUT", "FORWARD") and entry.get("policy") == "drop"
    return chain in ("INPUT", "FORWARD") and not _OURS.search(json.dumps(entry.get("expr")))


def choose(wish: str, look: HostLook) -> Choice:
    """`wish`: nftables, iptables, one flavour of it, or "" or auto. Raises `HullError` when nothing is there."""
    if wish in ("nftables", "nft"):
        return Choice(NFTABLES, "it was asked for")
    if wish in (NFT, LEGACY):
        return Choice(wish, "it was asked for")
    flavour = look.default_flavour()
    if wish == "iptables" and flavour:
        if look.has(LEGACY) and look.has_legacy_rules():
            return Choice(LEGACY, "it was asked for, and the rules of this host are there")
        return Choice(flavour, "it was asked for")
    return _auto(flavour, look)


def _auto(flavour: str, look: HostLook) -> Choice:
    if flavour and look.has(LEGACY) and look.has_legacy_rules():
        return Choice(LEGACY, "the rules of this host are there")
    if not look.has("nft"):
        if not flavour:
            hint = "install nftables or iptables, or use --netfilter-mode=off"
            raise HullError("firewall", "neither nft nor iptables is installed", hint)
        return Choice(flavour, "nft is not installed")
    if flavour in (NFT, "iptables") and look.has_nft_iptables_rules():
        return Choice(flavour, "the rules of this host are there")
    return Choice(NFTABLES, "nothing speaks against it")


class HostFirewall:
    """Implements `Netfilter` with the backend that fits, and leaves nothing in those that do not."""

    def __init__(
        self,
        names: HostNames,
        journal: UndoJournal,
        *,
        forced: str = "",
        look: HostLook | None = None,
        run: Run = run_program,
    ) -> None:
        self._names = names
        self._journal = journal
        self._forced = forced
        self._look = look or HostLook(run)
        self._run = run
        self._backend: Netfilter | None = None
        self._kind = ""
        self._reconsiders = False
        self._choice = Choice("", "")

    @property
    def backend(self) -> str:
        return self._choice.backend if self._backend is not None else ""

    @property
    def trouble(self) -> str:
        return self._backend.trouble if self._backend is not None else ""

    def apply(self, wishes: FirewallWishes) -> bool:
        if wishes.mode == OFF:
            self.remove()
            return False
        old = self._backend
        if old is None or wishes.kind != self._kind or self._reconsiders:
            self._choose(wishes.kind)
            if self._backend is old and old is not None:
                old.reconsider()
            self._reconsiders = False
        assert self._backend is not None
        was_flushed = self._backend.apply(wishes)
        if old is not None and old is not self._backend:
            old.remove()
            if self.backend in (NFTABLES, LEGACY):
                self._drop_made_tables()
        return was_flushed

    def remove(self) -> None:
        """From every backend: a daemon that was killed may have used another one."""
        self._backend = None
        failures = []
        for backend in self._every():
            try:
                backend.remove()
            except HullError as err:
                failures.append(str(err))
        self._drop_made_tables()
        if failures:
            raise HullError("take back the firewall", "; ".join(failures))

    def reconsider(self) -> None:
        self._reconsiders = True

    def hints(self) -> list[str]:
        return self._backend.hints() if self._backend is not None else []

    def _choose(self, kind: str) -> None:
        choice = choose(self._forced or kind, self._look)
        self._kind = kind
        if self._backend is not None and choice.backend == self._choice.backend:
            return
        self._choice = choice
        self._backend = self._make(choice.backend)
        if choice.backend not in (NFTABLES, LEGACY):
            self._note_made_tables()
        log.info("firewall: %s, because %s", choice.backend, choice.because)

    def _make(self, backend: str) -> Netfilter:
        if backend == NFTABLES:
            return NftTable(self._names, self._run)
        return IptablesChains(self._names, backend, self._run)

    def _every(self) -> list[Netfilter]:
        found: list[Netfilter] = [NftTable(self._names, self._run)] if self._look.has("nft") else []
        flavours = [NFT] if self._look.has(NFT) else ["iptables"] if self._look.has("iptables") else []
        if self._look.has(LEGACY) and self._look.has_legacy_tables():
            flavours.append(LEGACY)
        return found + [IptablesChains(self._names, flavour, self._run) for flavour in flavours]

    # --- tables that iptables-nft makes and never deletes

    def _note_made_tables(self) -> None:
        present = self._look.tables()
        for family in ("ip", "ip6"):
            for table in TABLES:
                if f"{family} {table}" not in present:
                    self._journal.note(Entry(MADE, self._names.slot, f"{family} {table}"))

    def _drop_made_tables(self) -> None:
        entries = [e for e in self._journal.entries if e.kind == MADE and e.slot == self._names.slot]
        ruleset = self._look.ruleset() if entries else []
        for entry in entries:
            if _is_bare(ruleset, entry.device):
                try:
                    self._run(["nft", "delete", "table", *entry.device.split()], "")
                except HullError as err:
                    log.info("left behind: %s", err)
            self._journal.forget(entry)


def _is_bare(ruleset: list[dict[str, Any]], name: str) -> bool:
    """Whether a table is there with nothing in it but hooks that let everything pass."""
    inside = [entry for item in ruleset for kind, entry in item.items() if kind != "table" and _table_of(entry) == name]
    is_there = any("table" in item and f"{item['table']['family']} {item['table']['name']}" == name for item in ruleset)
    return is_there and all(entry.get("hook") and entry.get("policy") == "accept" for entry in inside)


def _table_of(entry: dict[str, Any]) -> str:
    return f"{entry.get('family')} {entry.get('table')}"
