"""The plan kept up to date: what each peer contributes is remembered, so one changed peer costs one peer's work.

`Planner.update` gives what `derive` would give from scratch (a property test holds them together). Decisions are those
of `tsd.routes.rules`; here is only the bookkeeping.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import NamedTuple

from tsd.base.addr import CGNAT, TAILSCALE_ULA, IPPrefix
from tsd.hull import DnsConfig, RouterConfig
from tsd.netmap.netmap import Diff, Netmap
from tsd.routes.names import SUBDOMAINS_CAP, dns_config, host_records
from tsd.routes.rules import (
    AllowedIp,
    Plan,
    PrefixCache,
    RouteWishes,
    allowed_ips,
    exit_node_of,
    host_name,
    local_destinations,
    offers_hidden_routes,
    order_of,
    prefix_of,
    router_config,
)
from tsd.tailcfg.node import Node

SLICE_PEERS = 200
COLLAPSE_OVER = 1000
"""With more single addresses than this in a range of the overlay, the whole range is routed instead."""


class PeerPlan(NamedTuple):
    """What one peer adds: `allowed_ips` are in force for it, the rest feeds names and routes."""

    allowed_ips: tuple[AllowedIp, ...]
    name: str
    addresses: tuple[bytes, ...]
    """4 or 16 bytes each."""
    is_hidden: bool


class RouteSet:
    """Routes counted by how many peers want them; single overlay addresses collapse into their range.

    `one_cgnat`: whether those of 100.64.0.0/10 do so whatever their number; None: as the others.
    """

    def __init__(self, one_cgnat: bool | None = None) -> None:
        always_or_never = {True: 0, False: sys.maxsize, None: COLLAPSE_OVER}
        self._collapse_over = {4: always_or_never[one_cgnat], 6: COLLAPSE_OVER}
        self._singles: dict[int, dict[AllowedIp, int]] = {4: {}, 6: {}}
        self._others: dict[AllowedIp, int] = {}
        self.version = 0

    def add(self, route: AllowedIp) -> None:
        counts = self._counts_of(route)
        if route in counts:
            counts[route] += 1
            return
        counts[route] = 1
        # A range that is collapsed already does not change by one more address.
        if counts is self._others or len(counts) <= self._limit_of(counts) + 1:
            self.version += 1

    def remove(self, route: AllowedIp) -> None:
        counts = self._counts_of(route)
        count = counts.get(route, 0)
        if count > 1:
            counts[route] = count - 1
        elif count == 1:
            del counts[route]
            if counts is self._others or len(counts) <= self._limit_of(counts):
                self.version += 1

    def _limit_of(self, singles: dict[AllowedIp, int]) -> int:
        return self._collapse_over[4 if singles is self._singles[4] else 6]

    def _counts_of(self, route: AllowedIp) -> dict[AllowedIp, int]:
        """Single addresses of the overlay's usual ranges are kept by family, all else together."""
        if isinstance(route, bytes):
            if len(route) == 4:
                if route[0] == 100 and route[1] & 0xC0 == 64:
                    return self._singles[4]
            elif route.startswith(_ULA_START):
                return self._singles[6]
        return self._others

    def routes(self) -> list[IPPrefix]:
        ranges: dict[int, IPPrefix] = {4: CGNAT, 6: TAILSCALE_ULA}
        found: dict[IPPrefix, None] = {prefix_of(route): None for route in self._others}
        for family, singles in self._singles.items():
            if len(singles) > self._collapse_over[family]:
                found[ranges[family]] = None
            else:
                found |= dict.fromkeys(prefix_of(route) for route in singles)
        return sorted(found, key=order_of)


_ULA_START = TAILSCALE_ULA.network_address.packed[: TAILSCALE_ULA.prefixlen // 8]


class Planner:
    """Start with `plan` (or `plan_in_slices`), go on with `update`."""

    def __init__(self) -> None:
        self.current = Plan()
        self.peers: dict[int, PeerPlan] = {}
        self._wishes = RouteWishes()
        self._cache = PrefixCache()
        self._routes = RouteSet()
        self._hosts: dict[str, tuple[bytes, ...]] = {}
        self._rivals: dict[str, list[int]] = {}
        """Peers that claim one name, where there are several."""
        self._parents: dict[int, str] = {}
        """Names of those that also have all names below."""
        self._owners: dict[str, int] = {}
        self._exit_node_id: int | None = None
        self._hidden = 0
        self._routed_version = -1

    def plan(self, netmap: Netmap, wishes: RouteWishes) -> Plan:
        """From scratch, in one go."""
        slices = self.plan_in_slices(netmap, wishes)
        while True:
            try:
                next(slices)
            except StopIteration as done:
                plan: Plan = done.value
                return plan

    def plan_in_slices(self, netmap: Netmap, wishes: RouteWishes) -> Generator[None, None, Plan]:
        """From scratch, pausing after every `SLICE_PEERS` peers. Nothing else may be called meanwhile."""
        self.peers.clear()
        self._routes, self._hosts, self._owners, self._rivals = RouteSet(wishes.one_cgnat), {}, {}, {}
        self._parents.clear()
        self._hidden, self._routed_version = 0, -1
        self._wishes = wishes
        self._cache.trim(4 * len(netmap.peers) + 64)
        exit_node = exit_node_of(netmap, wishes)
        self._exit_node_id = exit_node.id if exit_node is not None else None
        for count, node in enumerate(netmap.peers.values(), 1):
            self._add(node)
            if count % SLICE_PEERS == 0:
                yield
        self.current = self._finish(netmap, None)
        return self.current

    def update(self, netmap: Netmap, diff: Diff) -> Plan:
        """After a delta; equal parts of the plan stay the same objects."""
        touched = (*diff.removed, *diff.added, *diff.changed)
        if diff.self_node or self._is_other_exit_node(netmap, touched):
            return self.plan(netmap, self._wishes)
        for node_id in touched:
            self._drop(node_id)
        for node_id in touched:
            node = netmap.peers.get(node_id)
            if node is not None:
                self._add(node)
        if touched or diff.dns:
            self.current = self._finish(netmap, diff)
        return self.current

    def _is_other_exit_node(self, netmap: Netmap, touched: Iterable[int]) -> bool:
        """Whether these peers change who the chosen exit node is."""
        if not self._wishes.wants_exit_node:
            return False
        for node_id in touched:
            node = netmap.peers.get(node_id)
            if (node is not None and self._wishes.is_exit_node(node)) != (node_id == self._exit_node_id):
                return True
        return False

    def allowed_ips(self, node_id: int) -> tuple[AllowedIp, ...]:
        peer = self.peers.get(node_id)
        return peer.allowed_ips if peer is not None else ()

    def _add(self, node: Node) -> None:
        own = self._cache.packed_of(node)
        allowed = allowed_ips(node, self._wishes, self._cache, own)
        peer = PeerPlan(allowed, host_name(node), tuple(own), offers_hidden_routes(node, self._wishes))
        self.peers[node.id] = peer
        for route in allowed:
            self._routes.add(route)
        if peer.name:
            self._claim(peer.name, node.id)
            if node.has_cap(SUBDOMAINS_CAP):
                self._parents[node.id] = peer.name
        self._hidden += peer.is_hidden

    def _drop(self, node_id: int) -> None:
        peer = self.peers.pop(node_id, None)
        if peer is None:
            return
        for route in peer.allowed_ips:
            self._routes.remove(route)
        self._parents.pop(node_id, None)
        if peer.name:
            self._release(peer.name, node_id)
        self._hidden -= peer.is_hidden

    def _claim(self, name: str, node_id: int) -> None:
        """A name that several peers claim belongs to the oldest of them."""
        owner = self._owners.get(name)
        if owner is not None:
            rivals = self._rivals.setdefault(name, [owner])
            rivals.append(node_id)
            node_id = min(rivals)
        self._owners[name] = node_id
        self._hosts[name] = self.peers[node_id].addresses

    def _release(self, name: str, node_id: int) -> None:
        rivals = self._rivals.get(name)
        if rivals is None:
            del self._owners[name], self._hosts[name]
            return
        rivals.remove(node_id)
        self._owners[name] = min(rivals)
        self._hosts[name] = self.peers[min(rivals)].addresses
        if len(rivals) == 1:
            del self._rivals[name]

    def _finish(self, netmap: Netmap, diff: Diff | None) -> Plan:
        has_hidden = self._hidden > 0
        if diff is None:
            local = local_destinations(netmap, self._wishes, self._cache)
            return Plan(self._wishes, self._router(netmap), self._dns(netmap), local, has_hidden)
        router = self.current.router if self._routed_version == self._routes.version else self._router(netmap)
        return replace(self.current, router=router, dns=self._dns(netmap), hidden_routes=has_hidden)

    def _router(self, netmap: Netmap) -> RouterConfig:
        self._routed_version = self._routes.version
        return router_config(netmap, self._wishes, self._routes.routes(), self._cache)

    def _dns(self, netmap: Netmap) -> DnsConfig:
        exit_node = netmap.peers.get(self._exit_node_id) if self._exit_node_id is not None else None
        hosts = host_records(netmap, self._hosts, self._cache)
        return dns_config(netmap, self._wishes, hosts, exit_node, frozenset(self._parents.values()))
