"""Who sees whom, kept up to date node by node: rule masks, members of every rule's source list, primary routers."""

from __future__ import annotations

from collections.abc import Iterator

from tsd.base.addr import IPPrefix
from tsd.coord.policy.compile import CompiledPolicy, FilterRules, bucket_of
from tsd.coord.policy.match import is_exit_route
from tsd.coord.policy.model import Subject


def bits(mask: int) -> Iterator[int]:
    """Positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Visibility:
    """Everything here is a function of the policy and of the subjects put in."""

    def __init__(self, compiled: CompiledPolicy) -> None:
        self.compiled = compiled
        self.subjects: dict[int, Subject] = {}
        self.sources: dict[int, int] = {}
        self.targets: dict[int, int] = {}
        self._route_masks: dict[int, dict[IPPrefix, int]] = {}
        self._members: dict[tuple[int, int], dict[int, None]] = {}
        self._texts: dict[int, tuple[str, ...]] = {}
        self._source_texts: dict[tuple[int, int], list[str]] = {}

    def put(self, subject: Subject) -> tuple[int, bool]:
        """Add or replace. Returns the rules whose source lists changed and whether its own filter may have."""
        old = self.subjects.get(subject.node_id)
        if old == subject:
            return 0, False
        old_sources = self.sources.get(subject.node_id, 0)
        old_targets = self.targets.get(subject.node_id)
        sources = self.compiled.source_mask(subject)
        targets = self.compiled.target_mask(subject)
        self.subjects[subject.node_id] = subject
        self.sources[subject.node_id] = sources
        self.targets[subject.node_id] = targets
        self._route_masks[subject.node_id] = {
            route: self.compiled.route_mask(subject, route) for route in subject.routes
        }
        self._texts[subject.node_id] = tuple(map(str, subject.addresses))
        self._move_member(subject.node_id, old_sources, sources)
        moved = old is None or old.addresses != subject.addresses or old.user != subject.user
        changed = (old_sources | sources) if moved else (old_sources ^ sources)
        is_target_changed = old_targets != targets or moved or old is None or old.routes != subject.routes
        return changed & self.compiled.dynamic_mask, is_target_changed

    def remove(self, node_id: int) -> int:
        """Returns the rules whose source lists changed."""
        sources = self.sources.pop(node_id, 0)
        self._move_member(node_id, sources, 0)
        self.targets.pop(node_id, None)
        self.subjects.pop(node_id, None)
        self._route_masks.pop(node_id, None)
        self._texts.pop(node_id, None)
        return sources & self.compiled.dynamic_mask

    def _move_member(self, node_id: int, old: int, new: int) -> None:
        bucket = bucket_of(node_id)
        for rule in bits((old | new) & self.compiled.dynamic_mask):
            self._source_texts.pop((rule, bucket), None)
        for rule in bits((old ^ new) & self.compiled.dynamic_mask):
            if new >> rule & 1:
                self._members.setdefault((rule, bucket), {})[node_id] = None
                continue
            members = self._members[rule, bucket]
            del members[node_id]
            if not members:
                del self._members[rule, bucket]

    def sees(self, first: int, second: int) -> bool:
        """Whether a rule joins two nodes in either direction."""
        if first not in self.sources or second not in self.sources:
            return False
        joined = (self.sources[first] & self.targets[second]) | (self.sources[second] & self.targets[first])
        if not joined:
            return False
        own = self.compiled.self_mask
        return bool(joined & ~own) or (bool(joined & own) and self._same_user(first, second))

    def _same_user(self, first: int, second: int) -> bool:
        one, other = self.subjects[first], self.subjects[second]
        return one.user is not None and one.user == other.user and not one.tags and not other.tags

    def usable_routes(self, viewer: int, router: int) -> tuple[IPPrefix, ...]:
        """Routes behind `router` that some rule lets `viewer` use."""
        masks = self._route_masks.get(router)
        if not masks:
            return ()
        mine = self.sources.get(viewer, 0)
        return tuple(route for route, mask in masks.items() if mine & mask)

    def chunk_names(self, viewer: int) -> dict[str, tuple[int, int]]:
        """Names of all filter chunks that may concern `viewer`; bucket -1 is the fixed part of a rule."""
        found: dict[str, tuple[int, int]] = {}
        mine = self.targets.get(viewer, 0)
        for rule in bits(mine):
            found[chunk_name(rule, -1)] = (rule, -1)
        for rule, bucket in sorted(self._members):
            if mine >> rule & 1:
                found[chunk_name(rule, bucket)] = (rule, bucket)
        return found

    def chunk(self, viewer: int, rule: int, bucket: int) -> FilterRules:
        """One named part of `viewer`'s packet filter, [] when empty."""
        subject = self.subjects.get(viewer)
        if subject is None:
            return []
        one = self.compiled.rules[rule]
        if bucket < 0:
            return self.compiled.filter_rule(rule, subject, list(one.static))
        if one.is_self:
            members = sorted(self._members.get((rule, bucket), ()))
            own = [text for member in members if self._same_user(member, viewer) for text in self._texts[member]]
            return self.compiled.filter_rule(rule, subject, own)
        return self.compiled.filter_rule(rule, subject, self._sources_of(rule, bucket))

    def _sources_of(self, rule: int, bucket: int) -> list[str]:
        """Addresses of the members, kept until one of them changes: every target gets the same list."""
        known = self._source_texts.get((rule, bucket))
        if known is None:
            members = sorted(self._members.get((rule, bucket), ()))
            known = self._source_texts[rule, bucket] = [text for one in members for text in self._texts[one]]
        return known

    def filters(self, viewer: int) -> dict[str, FilterRules]:
        """The whole packet filter of `viewer`; "base" is always there, so that it is never taken for "unchanged"."""
        found: dict[str, FilterRules] = {"base": []}
        for name, (rule, bucket) in self.chunk_names(viewer).items():
            rules = self.chunk(viewer, rule, bucket)
            if rules:
                found[name] = rules
        return found


def chunk_name(rule: int, bucket: int) -> str:
    """Clients join chunks in the order of their names; order does not matter, all rules allow."""
    return f"r{rule:04d}" if bucket < 0 else f"r{rule:04d}.{bucket:05d}"


class PrimaryRoutes:
    """Which of several routers of a subnet carries it: sticky, an online one before an offline one."""

    def __init__(self) -> None:
        self._routers: dict[IPPrefix, dict[int, None]] = {}
        self._routes: dict[int, tuple[IPPrefix, ...]] = {}
        self._online: dict[int, None] = {}
        self.primary: dict[IPPrefix, int] = {}

    def update(self, node_id: int, routes: tuple[IPPrefix, ...], is_online: bool) -> list[int]:
        """Nodes whose set of carried routes changed."""
        kept = tuple(route for route in routes if not is_exit_route(route))
        previous = self._routes.pop(node_id, ())
        if kept:
            self._routes[node_id] = kept
        self._online.pop(node_id, None)
        if is_online:
            self._online[node_id] = None
        for route in previous:
            self._routers[route].pop(node_id, None)
        for route in kept:
            self._routers.setdefault(route, {})[node_id] = None
        changed: dict[int, None] = {}
        for route in dict.fromkeys((*previous, *kept)):
            self._choose(route, changed)
        return list(changed)

    def _choose(self, route: IPPrefix, changed: dict[int, None]) -> None:
        routers = self._routers.get(route, {})
        current = self.primary.get(route)
        online = sorted(one for one in routers if one in self._online)
        if current in routers and (current in self._online or not online):
            return
        chosen = online[0] if online else min(routers, default=None)
        for node_id in (current, chosen):
            if node_id is not None:
                changed[node_id] = None
        if chosen is None:
            self.primary.pop(route, None)
            self._routers.pop(route, None)
        else:
            self.primary[route] = chosen

    def carries(self, node_id: int, route: IPPrefix) -> bool:
        return is_exit_route(route) or self.primary.get(route) == node_id
