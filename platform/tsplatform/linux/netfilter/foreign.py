"""Firewall rules of others that drop the tailnet's packets, found in nftables (iptables-nft lives there too).

Rules are followed in their order, also through jumps. A rule counts when all that it asks for is true of the packets
that concern us: our device, the tailnet's addresses. What cannot be judged (ports, states, limits) makes a drop the
admin's business; an accept that names our device counts whatever else it asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import ip_address, ip_network, summarize_address_range
from typing import Any

from tsd.base.addr import CGNAT, TAILSCALE_ULA, IPPrefix

Json = dict[str, Any]

_WAYS = {"prerouting": "iif", "input": "iif", "forward": "iif", "output": "oif", "postrouting": "oif"}
_FAMILIES = ("ip", "ip6", "inet")
_NEUTRAL = frozenset(
    {"counter", "log", "comment", "notrack", "mangle", "accept", "drop", "reject", "jump", "goto", "return"}
)
_PASSES = "passes"
_DEEPEST = 5


def foreign_drops(objects: list[Json], device: str) -> list[Json]:
    """`Chain` (family, table, name of where the drop is), `Hook`, `Why`, for each chain of others that drops us."""
    found = []
    ruleset = _Ruleset(objects, device)
    for chain in ruleset.chains:
        way = _WAYS.get(str(chain.get("hook")), "")
        if not way or chain.get("family") not in _FAMILIES or chain.get("type") == "nat" or _is_ours(chain):
            continue
        where, verdict = ruleset.verdict(chain, way)
        if not verdict and chain.get("policy") == "drop":
            where, verdict = chain, "policy drop"
        if verdict and verdict != _PASSES:
            named = f"{where.get('family')} {where.get('table')} {where.get('name')}"
            found.append({"Chain": named, "Hook": chain["hook"], "Why": verdict})
    return found


def _is_ours(chain: Json) -> bool:
    table = str(chain.get("table"))
    return table.startswith("tsd") and (table[3:] == "" or table[3:].isdigit()) and chain.get("family") == "inet"


class _Ruleset:
    def __init__(self, objects: list[Json], device: str) -> None:
        self.chains = [item["chain"] for item in objects if isinstance(item.get("chain"), dict)]
        self._rules: dict[tuple[object, ...], list[Json]] = {}
        for item in objects:
            rule = item.get("rule")
            if isinstance(rule, dict):
                place = (rule.get("family"), rule.get("table"), rule.get("chain"))
                self._rules.setdefault(place, []).append(rule)
        self._sets = {_place(item["set"]): item["set"] for item in objects if isinstance(item.get("set"), dict)}
        self._device = device

    def verdict(
        self, chain: Json, way: str, *, is_sure: bool = True, is_named: bool = False, depth: int = 0
    ) -> tuple[Json, str]:
        """(chain, why) of the first drop, `_PASSES` when we are let through before, or "" to leave it to the policy."""
        for rule in self._rules.get(_place(chain), ()):
            expressions = [e for e in rule.get("expr") or [] if isinstance(e, dict)]
            answers = [
                self._concerns_us(e["match"], way, chain) for e in expressions if isinstance(e.get("match"), dict)
            ]
            if False in answers:
                continue
            sure = is_sure and None not in answers and all(_NEUTRAL | {"match"} >= set(e) for e in expressions)
            named = is_named or any(_names_device(e.get("match"), self._device, way) for e in expressions)
            words = {word for e in expressions for word in e}
            if "accept" in words and (sure or named):
                return chain, _PASSES
            if words & {"drop", "reject"} and sure:
                return chain, self._why(expressions, way)
            target = _target(expressions)
            if target and depth < _DEEPEST:
                inner = {"family": chain.get("family"), "table": chain.get("table"), "name": target}
                found = self.verdict(inner, way, is_sure=sure, is_named=named, depth=depth + 1)
                if found[1]:
                    return found
            if sure and words & {"return", "goto"}:
                break
        return chain, ""

    def _concerns_us(self, match: Json, way: str, chain: Json) -> bool | None:
        """None when it cannot be known."""
        operator, left = match.get("op"), match.get("left")
        if operator not in ("==", "in", "!=") or not isinstance(left, dict):
            return None
        answer = None
        if (left.get("meta") or {}).get("key") in (way, way + "name"):
            answer = any(_is_name_of(name, self._device) for name in self._members(match.get("right"), chain))
        elif (left.get("payload") or {}).get("field") == ("saddr" if way == "iif" else "daddr"):
            answer = self._holds_the_tailnet(match.get("right"), chain, negated=operator == "!=")
        return answer if answer is None or operator != "!=" else not answer

    def _holds_the_tailnet(self, right: object, chain: Json, *, negated: bool) -> bool | None:
        """None where only part of it is meant."""
        known = [p for member in self._members(right, chain) for p in _prefixes(member)]
        for own in (CGNAT, TAILSCALE_ULA):
            near = [p for p in known if p.version == own.version]
            if any(p.prefixlen <= own.prefixlen and p.overlaps(own) for p in near):
                return True
            if near and negated and not any(p.overlaps(own) for p in near):
                return False
        return None

    def _members(self, right: object, chain: Json) -> list[object]:
        if isinstance(right, str) and right.startswith("@"):
            found = self._sets.get((chain.get("family"), chain.get("table"), right[1:]), {}).get("elem")
            return [_value(one) for one in found] if isinstance(found, list) else []
        members = right.get("set") if isinstance(right, dict) else None
        return [_value(one) for one in members] if isinstance(members, list) else [right]

    def _why(self, expressions: list[Json], way: str) -> str:
        verdict = next(word for e in expressions for word in ("drop", "reject") if word in e)
        keys = [e["match"]["left"] for e in expressions if "match" in e]
        if any("payload" in key for key in keys):
            return f"a {verdict} of {CGNAT if _speaks_v4(keys) else TAILSCALE_ULA}"
        if any("meta" in key for key in keys):
            return f"a {verdict} of what {'comes in' if way == 'iif' else 'goes out'} on {self._device}"
        return f"a {verdict} of everything"


def _place(one: Json) -> tuple[object, ...]:
    return one.get("family"), one.get("table"), one.get("name")


def _speaks_v4(keys: Iterable[Json]) -> bool:
    return all((key.get("payload") or {}).get("protocol") != "ip6" for key in keys)


def _names_device(match: object, device: str, way: str) -> bool:
    if not isinstance(match, dict) or match.get("op") not in ("==", "in") or not isinstance(match.get("left"), dict):
        return False
    return (match["left"].get("meta") or {}).get("key") in (way, way + "name")


def _is_name_of(name: object, device: str) -> bool:
    return name == device or (isinstance(name, str) and name.endswith("*") and device.startswith(name[:-1]))


def _target(expressions: Iterable[Json]) -> object:
    return next((e[k].get("target") for e in expressions for k in ("jump", "goto") if isinstance(e.get(k), dict)), None)


def _value(element: object) -> object:
    """Elements with a comment, counter or timeout are wrapped."""
    wrapped = element.get("elem") if isinstance(element, dict) else None
    return wrapped.get("val") if isinstance(wrapped, dict) else element


def _prefixes(member: object) -> Iterator[IPPrefix]:
    try:
        if isinstance(member, str):
            yield ip_network(member)
        elif isinstance(member, dict) and isinstance(member.get("prefix"), dict):
            yield ip_network((member["prefix"]["addr"], member["prefix"]["len"]), strict=False)
        elif isinstance(member, dict) and isinstance(member.get("range"), list):
            first, last = (ip_address(text) for text in member["range"])
            yield from summarize_address_range(first, last)
    except (ValueError, KeyError, TypeError):
        return
