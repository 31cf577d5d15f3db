"""A policy against nodes: who may see whom, and the packet filter of each node.

Every rule becomes one bit. A node has a mask of the rules it is a source of and a mask of the rules it is a target
of; two nodes see each other when the masks meet, so one changed node costs one comparison per viewer. Source lists
go out in named chunks (`<rule>.<bucket of node ids>`), so that one new node changes one small chunk of the filter
and not a list of all nodes. Capabilities (`app`) and destinations follow the wire shape FilterRule
(tailscale: tailcfg/tailcfg.go).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tsd.base.addr import IPPrefix
from tsd.coord.policy.match import (
    INTERNET,
    is_exit_route,
    matches,
    matches_any,
    matches_identity,
    narrower,
    overlaps,
    owned_prefixes,
)
from tsd.coord.policy.model import ALL_PORTS, Kind, Policy, PortRange, Rule, Selector, Subject, Target

BUCKET_NODES = 32
FilterRules = list[dict[str, Any]]


def bucket_of(node_id: int) -> int:
    return node_id // BUCKET_NODES


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """One bit of the masks. `static` sources are the same for everybody; `is_self` = only devices of one user."""

    rule: Rule
    static: tuple[str, ...]
    dynamic: tuple[Selector, ...]
    is_self: bool


def _split(rule: Rule) -> Iterable[CompiledRule]:
    own = tuple(target for target in rule.targets if target.selector.kind is Kind.SELF)
    others = tuple(target for target in rule.targets if target.selector.kind is not Kind.SELF)
    is_any = any(selector.kind is Kind.ANY for selector in rule.sources)
    static = tuple(str(one.prefix) for one in rule.sources if one.prefix is not None)
    dynamic = tuple(one for one in rule.sources if one.prefix is None)
    if others:
        chosen = (("*",), ()) if is_any else (static, dynamic)
        yield CompiledRule(rule._replace(targets=others), *chosen, is_self=False)
    if own:
        yield CompiledRule(rule._replace(targets=own), (), rule.sources, is_self=True)


class CompiledPolicy:
    """Questions about single nodes; keeps nothing about them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rules: tuple[CompiledRule, ...] = tuple(one for rule in policy.rules for one in _split(rule))
        self.self_mask = sum(1 << index for index, one in enumerate(self.rules) if one.is_self)
        self.dynamic_mask = sum(1 << index for index, one in enumerate(self.rules) if one.dynamic)

    def source_mask(self, subject: Subject) -> int:
        """Bits of the rules that `subject` is a source of."""
        mask = 0
        for index, one in enumerate(self.rules):
            if one.is_self and (subject.tags or subject.user is None):
                continue
            if matches_any(self.policy, one.rule.sources, subject):
                mask |= 1 << index
        return mask

    def target_mask(self, subject: Subject) -> int:
        """Bits of the rules that reach `subject` or something behind it."""
        return sum(1 << index for index in range(len(self.rules)) if self.destinations(index, subject))

    def route_mask(self, subject: Subject, route: IPPrefix) -> int:
        """Bits of the rules that reach `route` behind `subject`."""
        behind = subject._replace(addresses=(), routes=(route,))
        mask = 0
        for index, one in enumerate(self.rules):
            if not one.is_self and any(
                _reached(self.policy, t.selector, behind, behind=True) for t in one.rule.targets
            ):
                mask |= 1 << index
        return mask

    def destinations(self, index: int, subject: Subject) -> list[tuple[str, tuple[PortRange, ...]]]:
        """What of `subject` rule `index` opens: address or prefix text ("*" for all) and ports."""
        one = self.rules[index]
        if one.is_self and (subject.tags or subject.user is None):
            return []
        found: dict[tuple[str, tuple[PortRange, ...]], None] = {}
        for target in one.rule.targets:
            for text in _reached(self.policy, target.selector, subject):
                found[text, target.ports] = None
        return list(found)

    def filter_rule(self, index: int, subject: Subject, sources: list[str]) -> FilterRules:
        """Rule `index` in the filter of `subject`, for these sources; [] when it does not concern it."""
        reached = self.destinations(index, subject)
        if not reached or not sources:
            return []
        rule = self.rules[index].rule
        if rule.app is not None:
            dsts = list(dict.fromkeys(net for text, _ports in reached for net in _as_prefixes(text)))
            return [{"SrcIPs": sources, "CapGrant": [{"Dsts": dsts, "CapMap": rule.app}]}]
        ports = [
            {"IP": text, "Ports": {"First": span.first, "Last": span.last}} for text, spans in reached for span in spans
        ]
        entry: dict[str, Any] = {"SrcIPs": sources, "DstPorts": ports}
        if rule.protocols:
            entry["IPProto"] = list(rule.protocols)
        return [entry]

    def attributes(self, subject: Subject) -> dict[str, list[Any]]:
        """CapMap entries that `nodeAttrs` give to `subject`."""
        found: dict[str, list[Any]] = {}
        for attr in self.policy.node_attrs:
            if matches_any(self.policy, attr.targets, subject):
                found.update(attr.attributes)
        return found

    def approves_route(self, subject: Subject, route: IPPrefix) -> bool:
        """Whether `autoApprovers` let `subject` serve `route`."""
        if is_exit_route(route):
            return matches_any(self.policy, self.policy.exit_approvers, subject)
        return any(
            overlaps(prefix, route) and prefix.prefixlen <= route.prefixlen and matches_any(self.policy, who, subject)
            for prefix, who in self.policy.route_approvers.items()
        )

    def may_tag(self, subject: Subject, tag: str) -> bool:
        """Whether the owner of `subject` (or one of its tags) owns `tag`."""
        return matches_any(self.policy, self.policy.tag_owners.get(tag, ()), subject)


def _as_prefixes(text: str) -> list[str]:
    return ["0.0.0.0/0", "::/0"] if text == "*" else [text]


def _reached(policy: Policy, selector: Selector, subject: Subject, behind: bool = False) -> list[str]:
    """Texts of what `selector` means at `subject`. With `behind` only routes count, not who the node is."""
    kind = selector.kind
    if kind is Kind.ANY:
        return ["*"]
    if kind is Kind.INTERNET:
        return [str(net) for net in INTERNET] if any(is_exit_route(route) for route in subject.routes) else []
    if kind is Kind.PREFIX and selector.prefix is not None:
        wanted = selector.prefix
        return [
            _text(narrower(wanted, owned))
            for owned in owned_prefixes(subject)
            if not is_exit_route(owned) and overlaps(wanted, owned)
        ]
    if behind:
        return []
    if kind is Kind.SELF or matches_identity(policy, selector, subject):
        return [str(address) for address in subject.addresses]
    return []


def _text(prefix: IPPrefix) -> str:
    return str(prefix.network_address) if prefix.prefixlen == prefix.max_prefixlen else str(prefix)


def allows(policy: Policy, source: Subject, goal: Subject, protocol: int, port: int) -> bool:
    """Whether some rule lets `source` reach `port` of `goal`; both may be stand-ins without addresses."""
    return any(
        rule.app is None
        and (protocol in rule.protocols or (not rule.protocols and protocol in (1, 6, 17, 58)))
        and any(_covers(policy, selector, source) for selector in rule.sources)
        and any(_opens(policy, target, source, goal, port) for target in rule.targets)
        for rule in policy.rules
    )


def _covers(policy: Policy, selector: Selector, subject: Subject) -> bool:
    return matches(policy, selector, subject)


def _opens(policy: Policy, target: Target, source: Subject, goal: Subject, port: int) -> bool:
    if target.ports != (ALL_PORTS,) and not any(port in span for span in target.ports):
        return False
    if target.selector.kind is Kind.SELF:
        return source.user is not None and source.user == goal.user and not source.tags and not goal.tags
    if target.selector.kind is Kind.INTERNET:
        return any(overlaps(net, route) for net in INTERNET for route in goal.routes)
    return matches(policy, target.selector, goal)
