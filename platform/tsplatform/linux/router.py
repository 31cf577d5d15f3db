"""Addresses, routes, rules and firewall of the overlay: what should be is compared with what is, and the rest done.

Model: tailscale: wgengine/router/osrouter. Routes live in a table of our own; marked packets (our own sockets) never
see it and end in "unreachable" rather than in the tunnel. An exit node's default routes have a table of their own,
asked after those of all slots, which ends in "unreachable": that stays when the interface goes down or the daemon is
killed, so that nothing leaks around the exit node. Every change is tolerant of having been done already, and the kernel
is read each time, so that `apply` also repairs. Watching for changes is not done here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Protocol

from tsd.base.addr import CGNAT, TAILSCALE_ULA, IPAddress, IPPrefix, is_via_route
from tsd.base.errors import HullError
from tsd.base.log import fields
from tsd.hull import RouterConfig
from tsplatform.linux import rtnetlink as rt
from tsplatform.linux.hostnames import BYPASS_MARK, MARK_MASK, HostNames
from tsplatform.linux.journal import Entry, UndoJournal
from tsplatform.linux.netfilter.rules import OFF, ON, FirewallWishes, Netfilter
from tsplatform.linux.rtnetlink import Change, Route, Rule
from tsplatform.linux.sysctls import MarkedSources

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
        udp_ports: Callable[[], tuple[int, ...]] = tuple,
        sources: MarkedSources | None = None,
    ) -> None:
        self._kernel = kernel
        self._names = names
        self._netfilter = netfilter
        self._journal = journal
        self._entry = Entry("slot", names.slot, names.device)
        self._mtu_bytes = mtu_bytes
        self._ipv6_trouble = ipv6_trouble or ipv6_trouble_of
        self._udp_ports = udp_ports
        self._sources = sources or MarkedSources(journal, names.slot)
        self.ipv6_off_because = ""
        self.overlaps: tuple[IPPrefix, ...] = ()
        """Networks of this host that peers offer too; ours win."""
        self.put_back: tuple[str, ...] = ()
        """What of ours the last `apply` found missing, though it had been there."""
        self._applied = RouterConfig()

    @property
    def firewall(self) -> Netfilter:
        return self._netfilter

    def apply(self, config: RouterConfig) -> None:
        if not config.local_addresses:
            self.revert()
            return
        index = self._kernel.index_of(self._names.device)
        if not index:
            raise HullError("set up routing", f"the interface {self._names.device} is gone", "restart the daemon")
        self._journal.note(self._entry)
        self.put_back = ()
        failures = self._kernel.apply([rt.set_link(index, is_up=True, mtu_bytes=self._mtu_bytes)])
        failures += self._kernel.apply([rt.limit_gso(index, _GSO_MOST_BYTES)])
        self._look_at_ipv6()
        every = self._kernel.addresses()
        adds, deletes = self._differences(config, index, every)
        # Routing first: what leaks around an exit node cannot be called back.
        added = self._kernel.apply(adds)
        if config == self._applied:
            self._note_repair(adds)
        failures += added + self._firewall(config, index, every)
        if not added:
            # Dropping an address may take the source of new routes away: only when all is in place.
            failures += self._kernel.apply(deletes)
        if adds or deletes:
            log.debug(fields("routing changed", added=len(adds), deleted=len(deletes)))
        self._applied = config
        if failures:
            raise HullError("set up routing", "; ".join(dict.fromkeys(failures)))

    def _note_repair(self, adds: Sequence[Change]) -> None:
        kinds = dict.fromkeys(_KIND_OF.get(type(change.subject), "") for change in adds if not _is_throw(change))
        self.put_back = tuple(kind for kind in kinds if kind)

    def revert(self, *, stays_closed: bool = False) -> None:
        """Take everything back; the interface stays, down. Raises `HullError`.

        `stays_closed`: a killed daemon that used an exit node left the host closed; so it stays until the next `apply`.
        """
        failures: list[str] = []
        self.overlaps, self.put_back, self._applied = (), (), RouterConfig()
        self._sources.restore()
        try:
            self._netfilter.remove()
        except HullError as err:
            failures.append(str(err))
        index = self._kernel.index_of(self._names.device)
        if index:  # first, because the kernel then drops all routes through it by itself
            failures += self._kernel.apply([rt.set_link(index, is_up=False)])
        is_closed = stays_closed and is_barred(self._kernel, self._names)
        failures += purge_routing(self._kernel, self._names, keeps_bars=is_closed)
        if index:
            gone = [rt.delete_address(index, ip, length) for _, ip, length in self._kernel.addresses(index)]
            failures += self._kernel.apply(gone)
        if failures:
            raise HullError("take back routing", "; ".join(dict.fromkeys(failures)))
        if not is_closed:
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
        adds: list[Change] = []
        deletes: list[Change] = []
        has = {(ip, length) for number, ip, length in every if number == index and not ip.is_link_local}
        wanted = [(p.network_address, p.prefixlen) for p in config.local_addresses if p.version in versions]
        adds += [rt.add_address(index, *address) for address in wanted if address not in has]
        deletes += [rt.delete_address(index, *address) for address in sorted(has - set(wanted), key=str)]
        lan = [ip_network((ip, length), strict=False) for number, ip, length in every if number != index]
        self.overlaps = overlaps_of(config, lan)
        for version in (4, 6):
            for table, routes in self._routes(config, version, lan).items():
                there = self._kernel.routes(version, table)
                ours = {route for route, through in there if not route.through_device or through == index}
                adds += [rt.add_route(route, table, index) for route in routes if route not in ours]
                prefixes = {(route.prefix, route.is_bar) for route in routes}
                deletes += [
                    rt.delete_route(r, table, through) for r, through in there if (r.prefix, r.is_bar) not in prefixes
                ]
            is_closed = config.uses_exit_node and (version in versions or self.ipv6_off_because != NO_IPV6)
            rules = rules_of(version, self._names, is_closed) if is_closed or version in versions else []
            present = present_rules(self._kernel, version, self._names)
            adds += [rt.add_rule(rule) for rule in rules if rule not in present]
            deletes += [rt.delete_rule(rule) for rule in present if rule not in rules]
        return adds, deletes

    def _routes(self, config: RouterConfig, version: int, lan: Sequence[IPPrefix]) -> dict[int, list[Route]]:
        """By table."""
        names = self._names
        if version in self._versions():
            sites = filter(is_via_route, config.subnet_routes)  # the kernel cannot forward there, the device can
            wanted = [p for p in (*config.routes, *sites) if p.version == version]
            return {
                names.table: wanted_routes(wanted, lan, config.exit_node_allow_lan),
                names.exit_table: exit_routes(wanted, lan, config.exit_node_allow_lan),
            }
        # No IPv6 in the tunnel: with an exit node there is none beside it either.
        closes = config.uses_exit_node and self.ipv6_off_because != NO_IPV6
        return {names.table: [], names.exit_table: [Route(_DEFAULT[version], is_bar=True)] if closes else []}

    def _firewall(self, config: RouterConfig, index: int, every: list[tuple[int, IPAddress, int]]) -> list[str]:
        is_alone = not any(ip in CGNAT for number, ip, _ in every if number != index and ip.version == 4)
        wishes = FirewallWishes(
            mode=config.netfilter_mode,
            masquerade=config.snat_subnet_routes,
            is_stateful=config.stateful_filtering,
            drops_strangers=is_alone and not config.keeps_cgnat_open,
            udp_ports=self._udp_ports(),
            kind=config.netfilter_kind,
        )
        if wishes.mode == OFF:
            wishes = FirewallWishes()
        try:
            if wishes.mode == ON:
                self._sources.trust_marks()
            else:
                self._sources.restore()
            if self._netfilter.apply(wishes):
                self.put_back = (*self.put_back, "firewall rules")
        except HullError as err:
            return [str(err)]
        return []


_KIND_OF: dict[type, str] = {Route: "routes", Rule: "routing rules", tuple: "addresses"}


def _is_throw(change: Change) -> bool:
    """Those come and go with the host's own networks."""
    return isinstance(change.subject, Route) and change.subject.is_throw


_DEFAULT = {4: ip_network("0.0.0.0/0"), 6: ip_network("::/0")}


def wanted_routes(routes: Iterable[IPPrefix], connected: Iterable[IPPrefix], allow_lan: bool) -> list[Route]:
    """Routes of one family for our table, without the default routes of an exit node.

    A network that the host itself is in wins over routes to it, to parts of it and to what it is a part of; with an
    exit node only when the user wishes so.
    """
    every = list(routes)
    wanted = [prefix for prefix in every if prefix.prefixlen]
    found = {prefix: Route(prefix) for prefix in wanted}
    for network in connected if allow_lan or len(wanted) == len(every) else ():
        if not is_shared(network):
            continue
        if _is_covered(network, wanted):
            found[network] = Route(network, is_throw=True)
        for route in wanted:
            if not is_overlay(route) and _is_covered(route, (network,)):
                found[route] = Route(route, is_throw=True)
    return list(found.values())


def exit_routes(routes: Iterable[IPPrefix], connected: Iterable[IPPrefix], allow_lan: bool) -> list[Route]:
    """The default routes among them, closed behind, and around them the host's own networks if so wished."""
    defaults = [prefix for prefix in routes if prefix.prefixlen == 0]
    lan = [n for n in connected if is_shared(n) and _is_covered(n, defaults)] if allow_lan else []
    bars = [Route(prefix, is_bar=True) for prefix in defaults]
    return [*map(Route, defaults), *bars, *(Route(network, is_throw=True) for network in dict.fromkeys(lan))]


def is_shared(network: IPPrefix) -> bool:
    """A network with other hosts in it, of which a route could be meant."""
    return not (network.prefixlen == network.max_prefixlen or network.is_link_local or network.is_loopback)


def _is_covered(network: IPPrefix, routes: Iterable[IPPrefix]) -> bool:
    return any(network.version == route.version and network.subnet_of(route) for route in routes)  # type: ignore[arg-type]


def overlaps_of(config: RouterConfig, connected: Iterable[IPPrefix]) -> tuple[IPPrefix, ...]:
    """Networks of this host that an accepted subnet route covers; an exit node's default route is meant to."""
    accepted = [route for route in config.routes if route.prefixlen and not is_overlay(route)]
    found = [network for network in connected if is_shared(network)]
    return tuple(dict.fromkeys(n for n in found if any(n.version == r.version and n.overlaps(r) for r in accepted)))


def is_overlay(route: IPPrefix) -> bool:
    """Routes to nodes, not to networks behind them."""
    return route.prefixlen == route.max_prefixlen or _is_covered(route, (CGNAT, TAILSCALE_ULA))


def rules_of(version: int, names: HostNames, uses_exit_node: bool = False) -> list[Rule]:
    """Marked packets: main, default, then nowhere. All others: our table first."""
    base = names.priority
    marked = (BYPASS_MARK, MARK_MASK)
    return [
        Rule(version, base + 10, rt.MAIN_TABLE, *marked),
        Rule(version, base + 30, rt.DEFAULT_TABLE, *marked),
        Rule(version, base + 50, 0, *marked),
        Rule(version, base + 70, names.table),
        *([Rule(version, names.exit_priority, names.exit_table)] if uses_exit_node else []),
    ]


def present_rules(kernel: Kernel, version: int, names: HostNames) -> list[Rule]:
    """What has one of our priorities, and what of ours lies between them.

    A rule that is added without a priority gets the one before all that are there (wg-quick's do): it is not ours.
    """
    numbers = {rule.priority for rule in rules_of(version, names, uses_exit_node=True)}
    there = kernel.rules(version, names.priority, names.priority + 100)
    there += kernel.rules(version, names.exit_priority, names.exit_priority + 1)
    tables = (names.table, names.exit_table)
    return [r for r in there if r.priority in numbers or r.table in tables or r.mark & MARK_MASK == BYPASS_MARK]


def is_barred(kernel: Kernel, names: HostNames) -> bool:
    """Whether the table of a slot lets nothing pass that it has no route for."""
    return any(route.is_bar for version in (4, 6) for route, _ in kernel.routes(version, names.exit_table))


def purge_routing(kernel: Kernel, names: HostNames, *, keeps_bars: bool = False) -> list[str]:
    """Delete the rules and routes of a slot, whoever left them; texts of what failed."""
    gone: list[Change] = []
    for version in (4, 6):
        if not keeps_bars:
            gone += [rt.delete_rule(rule) for rule in present_rules(kernel, version, names)]
        for table in (names.table, names.exit_table):
            routes = [one for one in kernel.routes(version, table) if not (one[0].is_bar and keeps_bars)]
            gone += [rt.delete_route(route, table, through) for route, through in routes]
    return kernel.apply(gone)


NO_IPV6 = "the kernel runs without IPv6"


def ipv6_trouble_of(device: str, proc: Path = Path("/proc/sys/net/ipv6")) -> str:
    """Why IPv6 cannot be used on an interface; "" when it can."""
    if not proc.exists():
        return NO_IPV6
    try:
        is_off = (proc / "conf" / device / "disable_ipv6").read_text().strip() != "0"
    except OSError:
        return f"the kernel gives {device} no IPv6 (its MTU is below 1280?)"
    return f"net.ipv6.conf.{device}.disable_ipv6 is set" if is_off else ""
