"""Our firewall rules: one nftables table of our own, written whole and atomically with `nft -j -f -`.

Modes are those of --netfilter-mode. on: hooked in. nodivert: the same chains are filled but nothing leads to them; the
admin wires them. off: no table. Facts and traps: tailscale: util/linuxfw. A table of our own cannot overrule a drop of
another table at the same hook; finding and naming such drops, and the iptables backend, are not done here.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tsd.base.addr import CGNAT
from tsd.base.errors import HullError
from tsplatform.linux.hostnames import BYPASS_MARK, MARK_MASK, SUBNET_MARK, HostNames

log = logging.getLogger(__name__)

OFF, NODIVERT, ON = 0, 1, 2
_TIMEOUT_S = 20.0
_ALL_BITS = 0xFFFFFFFF

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FirewallWishes:
    """What the rules depend on. Equal wishes give equal rules."""

    mode: int = OFF
    masquerade: bool = False
    is_stateful: bool = False
    drops_strangers: bool = False
    """Drop packets from 100.64.0.0/10 that do not come through the tunnel: only where no other interface has such
    addresses (a provider's network, another overlay)."""


class Netfilter(Protocol):
    """Raises `HullError`."""

    def apply(self, wishes: FirewallWishes) -> None:
        """Make it so; also when somebody changed our rules meanwhile."""

    def remove(self) -> None: ...


RunNft = Callable[[list[str], str], str]


class NftTable:
    """Implements `Netfilter`. `run(arguments, input)` is nft; tests bring their own."""

    def __init__(self, names: HostNames, run: RunNft | None = None) -> None:
        self._names = names
        self._run = run or run_nft
        self._applied = FirewallWishes()
        self._listing = ""

    def apply(self, wishes: FirewallWishes) -> None:
        if wishes.mode == OFF:
            self.remove()
            return
        if wishes == self._applied and self._listing and self._listed() == self._listing:
            return
        self._run(["-j", "-f", "-"], json.dumps(ruleset(self._names, wishes)))
        self._applied, self._listing = wishes, self._listed()
        log.info("firewall: table inet %s written (%s)", self._names.nft_table, _mode_text(wishes.mode))
        if wishes.mode == NODIVERT:
            log.info(
                "nothing leads to our firewall chains by itself; wire them with: %s", "; ".join(hints(self._names))
            )

    def remove(self) -> None:
        """Idempotent; without nft there is nothing to remove."""
        self._applied, self._listing = FirewallWishes(), ""
        if shutil.which("nft") is None and self._run is run_nft:
            return
        table = {"family": "inet", "name": self._names.nft_table}
        # Adding first makes the deletion succeed when there is no such table.
        self._run(
            ["-j", "-f", "-"], json.dumps({"nftables": [{"add": {"table": table}}, {"delete": {"table": table}}]})
        )

    def _listed(self) -> str:
        """Our table as the kernel has it, without counters and handles; "" when it is gone."""
        try:
            raw = self._run(["-j", "list", "table", "inet", self._names.nft_table], "")
        except HullError:
            return ""
        return canonical(raw)


def run_nft(arguments: list[str], text: str) -> str:
    """Raises `HullError`."""
    try:
        done = subprocess.run(
            ["nft", *arguments], input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise HullError("firewall", "nft is not installed", "install nftables, or use --netfilter-mode=off") from None
    except (OSError, subprocess.TimeoutExpired) as err:
        raise HullError("firewall: nft", str(err)) from None
    if done.returncode != 0:
        raise HullError("firewall: nft", " ".join(done.stderr.split())[:300] or f"exit {done.returncode}")
    return done.stdout


def canonical(listing: str) -> str:
    """What matters of `nft -j list`."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in ("handle", "packets", "bytes")}
        return [strip(item) for item in value] if isinstance(value, list) else value

    try:
        objects = json.loads(listing)["nftables"]
    except (ValueError, KeyError):
        return ""
    return json.dumps([strip(item) for item in objects if "metainfo" not in item])


def _mode_text(mode: int) -> str:
    return {ON: "on", NODIVERT: "nodivert"}.get(mode, "off")


def hints(names: HostNames) -> list[str]:
    """The lines that wire our chains in mode nodivert."""
    table = f"inet {names.nft_table}"
    return [
        f"nft 'add chain {table} wired-{hook} {{ type {kind} hook {hook} priority {priority}; }}'"
        f" && nft add rule {table} wired-{hook} jump tsd-{hook}"
        for hook, kind, priority in (("input", "filter", -1), ("forward", "filter", -1), ("postrouting", "nat", 100))
    ]


# --- the rules


def ruleset(names: HostNames, wishes: FirewallWishes) -> Json:
    """Everything of one table, replacing what is there in one transaction."""
    table = names.nft_table
    named = {"family": "inet", "name": table}
    commands: list[Json] = [{"add": {"table": named}}, {"delete": {"table": named}}, {"add": {"table": named}}]
    content = {
        "tsd-input": _input(names, wishes),
        "tsd-forward": _forward(names, wishes),
        "tsd-postrouting": [[_is_marked("meta", SUBNET_MARK), {"masquerade": None}]] if wishes.masquerade else [],
    }
    commands += [{"add": {"chain": {"family": "inet", "table": table, "name": name}}} for name in content]
    for chain, rules in content.items():
        commands += [_rule(table, chain, expressions) for expressions in rules]
    if wishes.mode == ON:
        commands += _hooks(table)
    return {"nftables": commands}


def _hooks(table: str) -> list[Json]:
    """Base chains that lead to ours, and the marks that bring answers back the way the question went."""
    commands: list[Json] = []
    for hook, kind, priority in (
        ("input", "filter", -1),
        ("forward", "filter", -1),
        ("postrouting", "nat", 100),
        ("prerouting", "filter", -150),
        ("output", "filter", -150),
    ):
        chain = {"family": "inet", "table": table, "name": hook, "type": kind, "hook": hook, "prio": priority}
        commands.append({"add": {"chain": {**chain, "policy": "accept"}}})
    for hook in ("input", "forward", "postrouting"):
        commands.append(_rule(table, hook, [{"jump": {"target": f"tsd-{hook}"}}]))
    save = [_is_marked("meta", BYPASS_MARK), _set_mark("ct", BYPASS_MARK)]
    restore = [_is_marked("ct", BYPASS_MARK), _set_mark("meta", BYPASS_MARK)]
    return [*commands, _rule(table, "output", save), _rule(table, "prerouting", restore)]


def _input(names: HostNames, wishes: FirewallWishes) -> list[list[Json]]:
    rules: list[list[Json]] = [
        [_interface("iifname", names.device), {"accept": None}],
        [_is_marked("socket", BYPASS_MARK), {"accept": None}],
    ]
    return [*rules, *_strangers(names, wishes)]


def _forward(names: HostNames, wishes: FirewallWishes) -> list[list[Json]]:
    clamp: list[Json] = [
        {"match": {"op": "==", "left": {"&": [_tcp_flags(), ["syn", "rst"]]}, "right": "syn"}},
        {"mangle": {"key": {"tcp option": {"name": "maxseg", "field": "size"}}, "value": {"rt": {"key": "mtu"}}}},
    ]
    rules: list[list[Json]] = [
        [_interface("iifname", names.device), *clamp],
        [_interface("oifname", names.device), *clamp],
        [_interface("iifname", names.device), _set_mark("meta", SUBNET_MARK), {"accept": None}],
        *_strangers(names, wishes),
    ]
    if wishes.is_stateful:
        is_new = {"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["new", "invalid"]}}
        rules.append([_interface("oifname", names.device), is_new, {"drop": None}])
    rules.append([_interface("oifname", names.device), {"accept": None}])
    return rules


def _strangers(names: HostNames, wishes: FirewallWishes) -> list[list[Json]]:
    """Sources of the overlay that come in by another way are forged. Not so: answers, and DHCP (F06)."""
    if not wishes.drops_strangers:
        return []
    overlay = {"prefix": {"addr": str(CGNAT.network_address), "len": CGNAT.prefixlen}}
    states = ["new", "invalid", "untracked"]
    return [
        [_field("udp", "sport", 67), _field("udp", "dport", 68), {"return": None}],
        [
            _interface("iifname", names.device, "!="),
            _interface("iifname", "lo", "!="),
            _field("ip", "saddr", overlay),
            {"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": states}},
            {"drop": None},
        ],
    ]


def _rule(table: str, chain: str, expressions: list[Json]) -> Json:
    return {"add": {"rule": {"family": "inet", "table": table, "chain": chain, "expr": expressions}}}


def _interface(key: str, device: str, operator: str = "==") -> Json:
    return {"match": {"op": operator, "left": {"meta": {"key": key}}, "right": device}}


def _field(protocol: str, name: str, value: Any) -> Json:
    return {"match": {"op": "==", "left": {"payload": {"protocol": protocol, "field": name}}, "right": value}}


def _tcp_flags() -> Json:
    return {"payload": {"protocol": "tcp", "field": "flags"}}


def _is_marked(where: str, mark: int) -> Json:
    """`where`: meta (the packet), ct (its connection), socket (the socket it is for)."""
    return {"match": {"op": "==", "left": {"&": [{where: {"key": "mark"}}, MARK_MASK]}, "right": mark}}


def _set_mark(where: str, mark: int) -> Json:
    """Only our bits."""
    key = {where: {"key": "mark"}}
    value = {"|": [{"&": [{where: {"key": "mark"}}, _ALL_BITS & ~MARK_MASK]}, mark]}
    return {"mangle": {"key": key, "value": value}}
