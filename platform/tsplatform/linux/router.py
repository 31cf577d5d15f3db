"""Addresses, routes, rules and firewall of the overlay: what should be is compared with what is, and the rest done.

Model: tailscale: wgengine/router/osrouter. Routes live in a table of our own; marked packets (our own sockets) never
see it and end in "unreachable" rather than in the tunnel. Every change is tolerant of having been done already, and the
kernel is read each time, so that `apply` also repairs. Watching for changes is not done here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Protocol

from tsd.base.addr import CGNAT, IPAddress, IPPrefix
from tsd.base.errors import HullError
from tsd.base.log import fields
from tsd.hull import RouterConfig
from tsplatform.linux import rtnetlink as rt
from tsplatform.linux.hostnames import BYPASS_MARK, MARK_MASK, HostNames
from tsplatform.linux.journal import Entry, UndoJournal
from tsplatform.linux.netfilter import OFF, FirewallWishes, Netfilter
from tsplatform.linux.rtnetlink import Change, Route, Rule

log = logging.getLogger(__name__)

_GSO_MOST_BYTES = 60000
"""One super-segment fills one send of at most 64 datagrams and 65,000 bytes."""


class Kernel(Protocol):
    """`RtNetlink`, or a pretended one."""

    def index_of(self, device: str) -> int: ...

    def addresses(self, index: int = 0) -> list[tuple[int, IPAddress, int]]: ...

    def routes(self, version: int, table: int) -> list[tuple[Route, int]]: ...

    def rules(self, version: int, first: int, end: int) -> list[Rule]: ...

    def apply(self, changes: Sequence[Change]) -> list[str]: ...


class LinuxRouter:
    """Implements `tsd.hull.Router`. Raises `HullError` with everything that failed; the rest is done nevertheless."""

    def __init__(
        self,
        kernel: Kernel,
        names: HostNames,
        netfilter: Netfilter,
        journal: UndoJournal,
        *,
        mtu_bytes: int = 1280,
        ipv6_trouble: Callable[[str], str] | None = None,
    ) -> None:
        self._kernel = kernel
        self._names = names
        self._netfilter = netfilter
        self._journal = journal
        self._entry = Entry("slot", names.slot, names.device)
        self._mtu_bytes = mtu_bytes
        self._ipv6_trouble = ipv6_trouble or ipv6_trouble_of
        self.ipv6_off_because = ""

    def apply(self, config: RouterConfig) -> None:
        if not config.local_addresses:
            self.revert()
            return
        index = self._kernel.index_of(self._names.device)
        if not index:
            raise HullError("set up routing", f"the interface {self._names.device} is gone", "restart the daemon")
        self._journal.note(self._entry)
        failures = self._kernel.apply([rt.set_link(index, is_up=True, mtu_bytes=self._mtu_bytes)])
        failures += self._kernel.apply([rt.limit_gso(index, _GSO_MOST_BYTES)])
        self._look_at_ipv6()
        every = self._kernel.addresses()
        adds, deletes = self._differences(config, index, every)
        failures += self._firewall(config, index, every)
        added = self._kernel.apply(adds)
        failures += added
        if not added:
            # Dropping an address may take the source of new routes away: only when all is in place.
            failures += self._kernel.apply(deletes)
        if adds or deletes:
            log.debug(fields("routing changed", added=len(adds), deleted=len(deletes)))
        if failures:
            raise HullError("set up routing", "; ".join(dict.fromkeys(failures)))

    def revert(self) -> None:
        """Take everything back; the interface stays, down. Raises `HullError`."""
        failures: list[str] = []
        try:
            self._netfilter.remove()
        except HullError as err:
            failures.append(str(err))
        index = self._kernel.index_of(self._names.device)
        if index:  # first, because the kernel then drops all routes through it by itself
            failures += self._kernel.apply([rt.set_link(index, is_up=False)])
        failures += purge_routing(self._kernel, self._names)
        if index:
            gone = [rt.delete_address(index, ip, length) for _, ip, length in self._kernel.addresses(index)]
            failures += self._kernel.apply(gone)
        if failures:
            raise HullError("take back routing", "; ".join(dict.fromkeys(failures)))
        self._journal.forget(self._entry)

    # --- what should be

    def _versions(self) -> tuple[int, ...]:
        return (4,) if self.ipv6_off_because else (4, 6)

    def _look_at_ipv6(self) -> None:
        trouble = self._ipv6_trouble(self._names.device)
        if trouble and trouble != self.ipv6_off_because:
            log.warning("IPv6 on the tailnet is off, because %s", trouble)
        self.ipv6_off_because = trouble

    def _differences(
        self, config: RouterConfig, index: int, every: list[tuple[int, IPAddress, int]]
    ) -> tuple[list[Change], list[Change]]:
        versions = self._versions()
        table = self._names.table
        adds: list[Change] = []
        deletes: list[Change] = []
        has = {(ip, length) for number, ip, length in every if number == index and not ip.is_link_local}
        wanted = [(p.network_address, p.prefixlen) for p in config.local_addresses if p.version in versions]
        adds += [rt.add_address(index, *address) for address in wanted if address not in has]
        deletes += [rt.delete_address(index, *address) for address in sorted(has - set(wanted), key=str)]
        lan = [ip_network((ip, length), strict=False) for number, ip, length in every if number != index]
        for version in versions:
            routes = wanted_routes([p for p in config.routes if p.version == version], config.local_routes, lan)
            there = self._kernel.routes(version, table)
            ours = {route for route, through in there if route.is_throw or through == index}
            adds += [rt.add_route(route, table, index) for route in routes if route not in ours]
            prefixes = {route.prefix for route in routes}
            deletes += [rt.delete_route(r, table, through) for r, through in there if r.prefix not in prefixes]
            rules = rules_of(version, self._names)
            present = self._kernel.rules(version, self._names.priority, self._names.priority + 100)
            adds += [rt.add_rule(rule) for rule in rules if rule not in present]
            deletes += [rt.delete_rule(rule) for rule in present if rule not in rules]
        return adds, deletes

    def _firewall(self, config: RouterConfig, index: int, every: list[tuple[int, IPAddress, int]]) -> list[str]:
        is_alone = not any(ip in CGNAT for number, ip, _ in every if number != index and ip.version == 4)
        wishes = FirewallWishes(
            mode=config.netfilter_mode,
            masquerade=config.snat_subnet_routes,
            is_stateful=config.stateful_filtering,
            drops_strangers=is_alone,
        )
        if wishes.mode == OFF:
            wishes = FirewallWishes()
        try:
            self._netfilter.apply(wishes)
        except HullError as err:
            return [str(err)]
        return []


def wanted_routes(
    routes: Iterable[IPPrefix], local_routes: Iterable[IPPrefix], connected: Iterable[IPPrefix]
) -> list[Route]:
    """Routes of one family for our table.

    A network that the host itself is in wins over a route of the same or larger size, unless everything goes through an
    exit node: then the plan says which local networks are reachable (`local_routes`).
    """
    found: dict[IPPrefix, Route] = {prefix: Route(prefix) for prefix in routes}
    if not found:
        return []
    version = next(iter(found)).version
    thrown = [prefix for prefix in local_routes if prefix.version == version]
    if not any(prefix.prefixlen == 0 for prefix in found):
        thrown += [p for p in connected if p.version == version and _is_covered(p, found)]
    for prefix in thrown:
        found[prefix] = Route(prefix, is_throw=True)
    return list(found.values())


def _is_covered(network: IPPrefix, routes: Iterable[IPPrefix]) -> bool:
    if network.prefixlen == network.max_prefixlen or network.is_link_local or network.is_loopback:
        return False
    return any(network.subnet_of(route) for route in routes)  # type: ignore[arg-type]


def rules_of(version: int, names: HostNames) -> list[Rule]:
    """Marked packets: main, default, then nowhere. All others: our table first."""
    base = names.priority
    marked = (BYPASS_MARK, MARK_MASK)
    return [
        Rule(version, base + 10, rt.MAIN_TABLE, *marked),
        Rule(version, base + 30, rt.DEFAULT_TABLE, *marked),
        Rule(version, base + 50, 0, *marked),
        Rule(version, base + 70, names.table),
    ]


def purge_routing(kernel: Kernel, names: HostNames) -> list[str]:
    """Delete the rules and routes of a slot, whoever left them; texts of what failed."""
    gone: list[Change] = []
    for version in (4, 6):
        gone += [rt.delete_rule(rule) for rule in kernel.rules(version, names.priority, names.priority + 100)]
        gone += [rt.delete_route(r, names.table, through) for r, through in kernel.routes(version, names.table)]
    return kernel.apply(gone)


def ipv6_trouble_of(device: str, proc: Path = Path("/proc/sys/net/ipv6")) -> str:
    """Why IPv6 cannot be used on an interface; "" when it can."""
    if not proc.exists():
        return "the kernel runs without IPv6"
    try:
        is_off = (proc / "conf" / device / "disable_ipv6").read_text().strip() != "0"
    except OSError:
        return f"the kernel gives {device} no IPv6 (its MTU is below 1280?)"
    return f"net.ipv6.conf.{device}.disable_ipv6 is set" if is_off else ""
