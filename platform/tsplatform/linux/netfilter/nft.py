"""Our rules as one nftables table of our own, written atomically with `nft -j -f -`.

Chains that an admin adds to it (mode "nodivert": no other table can jump to ours) are left alone. A table of our own
cannot overrule a drop of another table at the same hook; `tsplatform.linux.checks` finds such drops.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from tsd.base.errors import HullError
from tsplatform.linux.hostnames import BYPASS_MARK, MARK_MASK, SUBNET_MARK, HostNames
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
from tsplatform.linux.netfilter.run import Run, run_program
from tsplatform.linux.programs import find_program

log = logging.getLogger(__name__)

Json = dict[str, Any]

_ALL_BITS = 0xFFFFFFFF
_HOOKS: dict[Chain, tuple[str, int]] = {
    "input": ("filter", -1),
    "forward": ("filter", -1),
    "postrouting": ("nat", 100),
    "prerouting": ("filter", -150),
    "output": ("filter", -150),
}
_MANAGED = frozenset({*_HOOKS, *(f"tsd-{chain}" for chain in _HOOKS)})
_WRITE = ("nft", "-j", "-f", "-")
_ABSENT = "No such file or directory"


class NftTable:
    """Implements `Netfilter`."""

    trouble = ""
    backend = "nftables"

    def __init__(self, names: HostNames, run: Run = run_program) -> None:
        self._names = names
        self._run = run
        self._applied = FirewallWishes()
        self._listing = ""

    def apply(self, wishes: FirewallWishes) -> bool:
        if wishes.mode == OFF:
            self.remove()
            return False
        was_ours = wishes == self._applied and bool(self._listing)
        present = self._present()
        if was_ours and canonical(present) == self._listing:
            return False
        self._run(_WRITE, json.dumps({"nftables": commands_for(self._names, wishes, chain_names(present))}))
        self._applied, self._listing = wishes, canonical(self._present())
        log.info("firewall: table inet %s written (%s)", self._names.nft_table, mode_text(wishes.mode))
        if wishes.mode == NODIVERT:
            wiring = "; ".join(hints(self._names))
            log.info("nothing leads to our firewall chains by itself; wire them with: %s", wiring)
        return was_ours

    def remove(self) -> None:
        """Idempotent; without nft there is nothing to remove."""
        self._applied, self._listing = FirewallWishes(), ""
        if find_program("nft") is None and self._run is run_program:
            return
        present = chain_names(self._present())
        if present - _MANAGED:
            commands = _emptied(self._names, present & _MANAGED)
        else:  # adding first makes the deletion succeed when there is no such table
            table = {"family": "inet", "name": self._names.nft_table}
            commands = [{"add": {"table": table}}, {"delete": {"table": table}}]
        self._run(_WRITE, json.dumps({"nftables": commands}))

    def reconsider(self) -> None:
        """The order of tables is that of their priorities."""

    def hints(self) -> list[str]:
        return hints(self._names)

    def _present(self) -> list[Json]:
        """Our table as the kernel has it; empty when it is gone. Raises `HullError` when that cannot be told."""
        try:
            raw = self._run(["nft", "-j", "list", "table", "inet", self._names.nft_table], "")
            return list(json.loads(raw)["nftables"])
        except HullError as err:
            if _ABSENT in err.reason:
                return []
            raise
        except (ValueError, KeyError, TypeError) as err:
            raise HullError("firewall: nft", f"the listing of our table cannot be read: {err}") from None


def canonical(objects: list[Json]) -> str:
    """What matters of our own chains in `nft -j list`: without counters and handles."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in ("handle", "packets", "bytes")}
        return [strip(item) for item in value] if isinstance(value, list) else value

    own = [item for item in objects if _chain_of(item) in _MANAGED]
    return json.dumps([strip(item) for item in own]) if own else ""


def chain_names(objects: list[Json]) -> set[str]:
    return {str(item["chain"]["name"]) for item in objects if "chain" in item}


def _chain_of(item: Json) -> str:
    return str(item.get("chain", {}).get("name") or item.get("rule", {}).get("chain") or "")


def hints(names: HostNames) -> list[str]:
    """The lines that wire our chains in mode nodivert."""
    table = f"inet {names.nft_table}"
    return [
        f"nft 'add chain {table} wired-{hook} {{ type {kind} hook {hook} priority {priority}; }}'"
        f" && nft add rule {table} wired-{hook} jump tsd-{hook}"
        for hook, (kind, priority) in _HOOKS.items()
        if hook in FILTER_CHAINS
    ]


# --- the rules


def commands_for(names: HostNames, wishes: FirewallWishes, present: set[str]) -> list[Json]:
    """One transaction that makes our chains so; `present` are those in the table now."""
    commands: list[Json] = [{"add": {"table": {"family": "inet", "name": names.nft_table}}}]
    commands += _emptied(names, present & _MANAGED)
    chains = (*FILTER_CHAINS, *MARK_CHAINS) if wishes.mode == ON else FILTER_CHAINS
    commands += [_add("chain", names, name=f"tsd-{chain}") for chain in chains]
    for rule in rules_of(names, wishes):
        commands.append(_add("rule", names, chain=f"tsd-{rule.chain}", expr=_expressions(rule)))
    if wishes.mode == ON:
        for chain in chains:
            kind, priority = _HOOKS[chain]
            hook = {"type": kind, "hook": chain, "prio": priority, "policy": "accept"}
            commands.append(_add("chain", names, name=chain, **hook))
            commands.append(_add("rule", names, chain=chain, expr=[{"jump": {"target": f"tsd-{chain}"}}]))
    return commands


def _emptied(names: HostNames, chains: set[str]) -> list[Json]:
    """Chains with a hook go first: they lead to the others. Where an admin's chain may lead, only the rules go."""
    named = [{"family": "inet", "table": names.nft_table, "name": chain} for chain in sorted(chains)]
    hooks = [chain for chain in named if chain["name"] in _HOOKS]
    return [*({"flush": {"chain": chain}} for chain in named), *({"delete": {"chain": chain}} for chain in hooks)]


def _add(what: str, names: HostNames, **content: Any) -> Json:
    return {"add": {what: {"family": "inet", "table": names.nft_table, **content}}}


def _expressions(rule: Rule) -> list[Json]:
    return [*_conditions(rule), *_actions(rule)]


def _conditions(rule: Rule) -> list[Json]:
    found: list[Json] = []
    for key, device in (("iifname", rule.in_device), ("oifname", rule.out_device)):
        if device:
            found.append(_match("==", {"meta": {"key": key}}, device))
    if rule.source:
        address, _, length = rule.source.partition("/")
        found.append(_field("ip", "saddr", {"prefix": {"addr": address, "len": int(length)}}))
    for name, port in zip(("sport", "dport"), rule.udp, strict=True):
        if port:
            found.append(_field("udp", name, port))
    for where, mark in (("meta", rule.mark), ("ct", rule.connection_mark)):
        if mark:
            found.append(_match("==", {"&": [{where: {"key": "mark"}}, MARK_MASK]}, mark))
    if rule.is_new:
        found.append(_match("in", {"ct": {"key": "state"}}, ["new", "invalid", "untracked"]))
    if rule.is_syn:
        flags = {"payload": {"protocol": "tcp", "field": "flags"}}
        found.append(_match("==", {"&": [flags, ["syn", "rst"]]}, "syn"))
    return found


def _actions(rule: Rule) -> list[Json]:
    match rule.verdict:
        case "clamp":
            key = {"tcp option": {"name": "maxseg", "field": "size"}}
            return [{"mangle": {"key": key, "value": {"rt": {"key": "mtu"}}}}]
        case "mark":
            return [_set_mark("meta", SUBNET_MARK)]
        case "save":
            return [_set_mark("ct", BYPASS_MARK)]
        case "restore":
            return [_set_mark("meta", BYPASS_MARK)]
    return [{rule.verdict: None}]


def _match(operator: str, left: Json, right: Any) -> Json:
    return {"match": {"op": operator, "left": left, "right": right}}


def _field(protocol: str, name: str, value: Any) -> Json:
    return _match("==", {"payload": {"protocol": protocol, "field": name}}, value)


def _set_mark(where: str, mark: int) -> Json:
    """Only our bits. `where`: meta (the packet), ct (its connection)."""
    key = {where: {"key": "mark"}}
    return {"mangle": {"key": key, "value": {"|": [{"&": [key, _ALL_BITS & ~MARK_MASK]}, mark]}}}
