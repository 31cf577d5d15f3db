"""The plan kept up to date: what each peer contributes is remembered, so one changed peer costs one peer's work.

`Planner.update` gives what `derive` would give from scratch (a property test holds them together). Decisions are those
of `tsd.routes.rules`; here is only the bookkeeping.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from tsd.base.addr import CGNAT, TAILSCALE_ULA, IPAddress, IPPrefix
from tsd.hull import DnsConfig, LinkState, RouterConfig
from tsd.netmap.netmap import Diff, Netmap
from tsd.routes.rules import (
    Plan,
    PrefixCache,
    RouteWishes,
    dns_config,
    exit_node_of,
    host_name,
    host_records,
    local_destinations,
    offers_hidden_routes,
    order_of,
    peer_prefixes,
    router_config,
)
from tsd.tailcfg.node import Node

SLICE_PEERS = 200
COLLAPSE_OVER = 1000
"""With more single addresses than this in a range of the overlay, the whole range is routed instead."""


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What one peer adds: `allowed_ips` are in force for it, the rest feeds names and routes."""

    allowed_ips: tuple[IPPrefix, ...]
    name: str
    addresses: tuple[IPAddress, ...]
    is_hidden: bool


class RouteSet:
    """Routes counted by how many peers want them; single overlay addresses collapse into their range."""

    def __init__(self) -> None:
        self._counts: dict[IPPrefix, int] = {}
        self._singles = {4: 0, 6: 0}
        self.version = 0

    def add(self, prefix: IPPrefix) -> None:
        count = self._counts.get(prefix, 0)
        self._counts[prefix] = count + 1
        if count == 0:
            self._note(prefix, 1)

    def remove(self, prefix: IPPrefix) -> None:
        count = self._counts.get(prefix, 0)
        if count > 1:
            self._counts[prefix] = count - 1
        elif count == 1:
            del self._counts[prefix]
            self._note(prefix, -1)

    def _note(self, prefix: IPPrefix, change: int) -> None:
        family = single_family(prefix)
        if family and self._singles[family] > COLLAPSE_OVER and self._singles[family] + change > COLLAPSE_OVER:
            self._singles[family] += change
            return
        if family:
            self._singles[family] += change
        self.version += 1

    def routes(self) -> list[IPPrefix]:
        ranges: dict[int, IPPrefix] = {4: CGNAT, 6: TAILSCALE_ULA}
        collapsed = {family for family, count in self._singles.items() if count > COLLAPSE_OVER}
        kept = [prefix for prefix in self._counts if not collapsed or single_family(prefix) not in collapsed]
        kept += [ranges[family] for family in sorted(collapsed) if ranges[family] not in self._counts]
        return sorted(kept, key=order_of)


_CGNAT_FIRST, _CGNAT_LAST = int(CGNAT.network_address), int(CGNAT.broadcast_address)
_ULA_FIRST, _ULA_LAST = int(TAILSCALE_ULA.network_address), int(TAILSCALE_ULA.broadcast_address)


def single_family(prefix: IPPrefix) -> int:
    """4 or 6 for one address of the overlay's usual ranges, else 0."""
    if prefix.prefixlen != prefix.max_prefixlen:
        return 0
    number = int(prefix.network_address)
    if prefix.version == 4:
        return 4 if _CGNAT_FIRST <= number <= _CGNAT_LAST else 0
    return 6 if _ULA_FIRST <= number <= _ULA_LAST else 0


class Planner:
    """Start with `plan` (or `plan_in_slices`), go on with `update`."""

    def __init__(self) -> None:
        self.current = Plan()
        self.peers: dict[int, PeerPlan] = {}
        self._wishes = RouteWishes()
        self._link: LinkState | None = None
        self._cache = PrefixCache()
        self._routes = RouteSet()
        self._hosts: dict[str, tuple[IPAddress, ...]] = {}
        self._holders: dict[str, list[int]] = {}
        self._exit_node_id: int | None = None
        self._hidden = 0
        self._routed_version = -1

    def plan(self, netmap: Netmap, wishes: RouteWishes, link: LinkState | None = None) -> Plan:
        """From scratch, in one go."""
        slices = self.plan_in_slices(netmap, wishes, link)
        while True:
            try:
                next(slices)
            except StopIteration as done:
                plan: Plan = done.value
                return plan

    def plan_in_slices(
        self, netmap: Netmap, wishes: RouteWishes, link: LinkState | None = None
    ) -> Generator[None, None, Plan]:
        """From scratch, pausing after every `SLICE_PEERS` peers. Nothing else may be called meanwhile."""
        self.peers.clear()
        self._routes, self._hosts, self._holders, self._hidden, self._routed_version = RouteSet(), {}, {}, 0, -1
        self._wishes, self._link = wishes, link
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
        exit_node = exit_node_of(netmap, self._wishes) if self._wishes.wants_exit_node else None
        if diff.self_node or (exit_node.id if exit_node is not None else None) != self._exit_node_id:
            return self.plan(netmap, self._wishes, self._link)
        touched = (*diff.removed, *diff.added, *diff.changed)
        if touched:
            self._hosts = dict(self._hosts)
        for node_id in touched:
            self._drop(node_id)
        for node_id in touched:
            node = netmap.peers.get(node_id)
            if node is not None:
                self._add(node)
        if touched or diff.dns:
            self.current = self._finish(netmap, diff)
        return self.current

    def allowed_ips(self, node_id: int) -> tuple[IPPrefix, ...]:
        peer = self.peers.get(node_id)
        return peer.allowed_ips if peer is not None else ()

    def _add(self, node: Node) -> None:
        addresses = self._cache.addresses_of(node)
        allowed = peer_prefixes(node, self._wishes, self._cache)
        peer = PeerPlan(allowed, host_name(node), addresses, offers_hidden_routes(node, self._wishes))
        self.peers[node.id] = peer
        for prefix in allowed:
            self._routes.add(prefix)
        if peer.name:
            self._holders.setdefault(peer.name, []).append(node.id)
            self._settle_name(peer.name)
        self._hidden += peer.is_hidden

    def _drop(self, node_id: int) -> None:
        peer = self.peers.pop(node_id, None)
        if peer is None:
            return
        for prefix in peer.allowed_ips:
            self._routes.remove(prefix)
        if peer.name:
            self._holders[peer.name].remove(node_id)
            self._settle_name(peer.name)
        self._hidden -= peer.is_hidden

    def _settle_name(self, name: str) -> None:
        """A name that several peers claim belongs to the oldest of them."""
        holders = self._holders[name]
        if holders:
            self._hosts[name] = self.peers[min(holders)].addresses
        else:
            del self._holders[name], self._hosts[name]

    def _finish(self, netmap: Netmap, diff: Diff | None) -> Plan:
        has_hidden = self._hidden > 0
        if diff is None:
            local = local_destinations(netmap, self._wishes, self._cache)
            return Plan(self._wishes, self._router(netmap), self._dns(netmap), local, has_hidden)
        router = self.current.router if self._routed_version == self._routes.version else self._router(netmap)
        return replace(self.current, router=router, dns=self._dns(netmap), hidden_routes=has_hidden)

    def _router(self, netmap: Netmap) -> RouterConfig:
        self._routed_version = self._routes.version
        return router_config(netmap, self._wishes, self._routes.routes(), self._link, self._cache)

    def _dns(self, netmap: Netmap) -> DnsConfig:
        exit_node = netmap.peers.get(self._exit_node_id) if self._exit_node_id is not None else None
        hosts = host_records(netmap, self._hosts, self._cache)
        return dns_config(netmap, self._wishes, hosts, exit_node)
