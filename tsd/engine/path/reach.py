"""How the world reaches us: sockets, netcheck, the home relay, and the endpoints we offer.

Lives longer than a plane. Looks at the underlay when asked (link change, stale endpoints, lost relay) and every
20 to 26 s while there is traffic; an idle node does not wake up for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy, uniform
from tsd.base.log import fields
from tsd.base.tasks import Tasks
from tsd.engine.driver import Driver
from tsd.engine.path.plane import Plane
from tsd.engine.path.portmapping import PortMapping
from tsd.engine.path.sockets import OpenUdp, UdpSockets
from tsd.hull import LinkMonitor, LinkState, Underlay
from tsd.magicsock.endpoints import EndpointList, StunFindings
from tsd.magicsock.types import OwnEndpoint
from tsd.netcheck.netcheck import HttpsWanted, NetcheckMachine, ReportReady, SendStun
from tsd.netcheck.plan import hosts_to_resolve
from tsd.netcheck.report import Report
from tsd.portmap.mapper import Seen
from tsd.tailcfg.derpmap import DERPMap, DERPRegion
from tsd.tailcfg.hostinfo import NetInfo

log = logging.getLogger(__name__)

RESTUN_MIN_S, RESTUN_MAX_S = 20.0, 26.0
ACTIVE_S = 45.0
DEBOUNCE_S = 0.05
_FACTS = (
    "mapping_varies_by_dest_ip", "working_ipv6", "os_has_ipv6", "working_udp", "preferred_derp", "have_port_map",
    "upnp", "pmp", "pcp",
)  # fmt: skip

Resolve = Callable[[str], Awaitable[list[IPAddress]]]
MeasureHttps = Callable[[DERPRegion], Awaitable[float | None]]


@dataclass(slots=True)
class ReachEvents:
    on_changed: Callable[[], None] = lambda: None
    """Endpoints, NetInfo or home region differ from what was told last."""
    on_home: Callable[[int], None] = lambda region: None
    on_link: Callable[[LinkState], None] = lambda state: None
    on_socket_problem: Callable[[str], None] = lambda text: None
    on_relay_map: Callable[[bool], None] = lambda is_usable: None
    """Whether the server's latest relay map has a relay in it; one that has none does not replace one that has."""


class Reach:
    """One per engine."""

    def __init__(
        self,
        *,
        open_udp: OpenUdp,
        wanted_port: int,
        underlay: Underlay,
        links: LinkMonitor,
        clock: Clock,
        entropy: Entropy,
        resolve: Resolve,
        measure_https: MeasureHttps,
        events: ReachEvents,
        never_direct_udp: bool = False,
        port_mapping: PortMapping | None = None,
    ) -> None:
        self._underlay = underlay
        self._links = links
        self._clock = clock
        self._entropy = entropy
        self._resolve = resolve
        self._measure_https = measure_https
        self._events = events
        self._wanted_port = wanted_port
        self._never_direct_udp = never_direct_udp
        self._port_mapping = port_mapping
        if port_mapping is not None:
            port_mapping.on_changed = lambda: self.look("portmap-changed")
        self.sockets = UdpSockets(open_udp, wanted_port, self._on_udp, self._on_udp_error)
        self.netcheck = NetcheckMachine(entropy=entropy)
        self._driver = Driver(clock)
        self._driver.add(self.netcheck, self._on_netcheck)
        self._endpoint_list = EndpointList()
        self._derp_map = DERPMap()
        self._plane: Plane | None = None
        self._tasks = Tasks(log)
        self._look_timer: asyncio.TimerHandle | None = None
        self._periodic_timer: asyncio.TimerHandle | None = None
        self._wants_another = False
        self._last_traffic = -1e9
        self.endpoints: tuple[OwnEndpoint, ...] = ()
        self.net_info = NetInfo()
        self.home = 0
        self.is_home_known = True
        """Whether control hears of a change of the home region; while it does not, peers look for us where it was."""

    @property
    def udp_ports(self) -> tuple[int, ...]:
        """Where packets of peers arrive."""
        return tuple(sorted({self.sockets.port_v4, self.sockets.port_v6} - {0}))

    @property
    def portmapped(self) -> AddrPort | None:
        """Where the home router lets peers in."""
        return self._port_mapping.external if self._port_mapping is not None else None

    # --- life

    def open(self) -> None:
        """Bind the sockets and watch the links."""
        self.sockets.bind()
        self._events.on_socket_problem(self.sockets.problem)
        self._tasks.spawn(self._watch_links())

    async def close(self) -> None:
        if self._port_mapping is not None:
            await self._port_mapping.close()
        self._driver.close()
        for timer in (self._look_timer, self._periodic_timer):
            if timer is not None:
                timer.cancel()
        self._tasks.cancel()
        self.sockets.close()

    def set_plane(self, plane: Plane | None) -> None:
        """The plane that gets what arrives; None drops it."""
        self._plane = plane
        if plane is None:
            return
        plane.datapath.on_stun = self._on_stun
        plane.derp.set_map(self._derp_map)
        now = self._clock.now()
        if self.home:
            plane.magicsock.set_home_derp(self.home, now)
            plane.derp.set_home(self.home)
        if self.endpoints:
            plane.magicsock.set_endpoints(self.endpoints, now)

    def set_derp_map(self, derp_map: DERPMap) -> None:
        if derp_map == self._derp_map:
            self._events.on_relay_map(derp_map.is_usable)
            return
        was_usable = self._derp_map.is_usable
        self._events.on_relay_map(derp_map.is_usable)
        if not derp_map.is_usable and was_usable:
            return
        self._derp_map = derp_map
        if self.home and derp_map.region(self.home) is None:
            self.netcheck.chooser.forget(self.home)
            self._set_home(0)
        if self._plane is not None:
            self._plane.derp.set_map(derp_map)
        self.look("derp-map")

    def recall_home(self, region: int) -> None:
        """The home region of the last run, until a look says otherwise."""
        if not self.home and self._derp_map.region(region) is not None:
            self.is_home_known = False
            self.netcheck.chooser.home = region
            self._set_home(region)

    @property
    def derp_map(self) -> DERPMap:
        return self._derp_map

    # --- looking

    def look(self, reason: str) -> None:
        """Look at the underlay soon; several wishes become one look."""
        if self._look_timer is not None:
            return
        log.debug(fields("look at the underlay", reason=reason))
        self._look_timer = asyncio.get_running_loop().call_later(DEBOUNCE_S, self._begin_look)

    def rebind(self, reason: str) -> None:
        """Bind the sockets anew: the old ones no longer send."""
        log.info(fields("binding UDP sockets anew", reason=reason))
        self.sockets.bind()
        self._events.on_socket_problem(self.sockets.problem)
        self._path_changed()

    def note_traffic(self) -> None:
        """Traffic went through; keeps the periodic look alive for a while."""
        self._last_traffic = self._clock.now()
        if self._periodic_timer is None and self._derp_map.is_usable:
            self._arm_periodic()

    def _arm_periodic(self) -> None:
        delay_s = uniform(self._entropy, RESTUN_MIN_S, RESTUN_MAX_S)
        self._periodic_timer = asyncio.get_running_loop().call_later(delay_s, self._on_periodic)

    def _on_periodic(self) -> None:
        self._periodic_timer = None
        if self._clock.now() - self._last_traffic <= ACTIVE_S:
            self.look("periodic")
            self._arm_periodic()

    def _begin_look(self) -> None:
        self._look_timer = None
        if self._port_mapping is not None and not self._never_direct_udp and self._plane is not None:
            self._port_mapping.look(self._links.state(), self.sockets.port_v4)
        if not self._derp_map.is_usable:
            self._settle(None)
            return
        if self.netcheck.is_running:
            self._wants_another = True
            return
        self._tasks.spawn(self._start_netcheck())

    async def _start_netcheck(self) -> None:
        resolved = await self._resolve_all(hosts_to_resolve(self._derp_map))
        local = self._underlay.addresses()
        has_v6 = self.sockets.port_v6 != 0 and any(ip.version == 6 and not ip.is_link_local for ip in local)
        self.netcheck.start(
            self._derp_map,
            self._clock.now(),
            resolved=resolved,
            has_v4=self.sockets.port_v4 != 0,
            has_v6=has_v6,
            os_has_ipv6=self.sockets.port_v6 != 0,
            last_heard=self._last_heard,
            unreachable=self._unreachable_regions(),
        )
        self._driver.kick()

    async def _resolve_all(self, names: Collection[str]) -> Mapping[str, list[IPAddress]]:
        found: dict[str, list[IPAddress]] = {}
        for name in names:
            try:
                found[name] = await asyncio.wait_for(self._resolve(name), 2.0)
            except (OSError, TimeoutError) as err:
                log.debug(fields("relay name does not resolve", endpoint=name, reason=err))
        return found

    def _last_heard(self, region: int) -> float:
        return self._plane.derp.last_heard(region) if self._plane is not None else -1e9

    def _unreachable_regions(self) -> Collection[int]:
        return self._plane.derp.unreachable() if self._plane is not None else ()

    def _on_netcheck(self, output: Any) -> None:
        match output:
            case SendStun(address, datagram):
                if self.sockets.send(address, datagram, len(datagram)):
                    self.netcheck.send_succeeded(address.ip.version)
                else:
                    self.netcheck.send_failed(address)
            case HttpsWanted(regions):
                for region_id in regions:
                    self._tasks.spawn(self._probe_https(region_id))
            case ReportReady(report):
                self._settle(report)

    async def _probe_https(self, region_id: int) -> None:
        region = self._derp_map.region(region_id)
        latency_s: float | None = None
        if region is not None:
            try:
                latency_s = await self._measure_https(region)
            except (OSError, TimeoutError) as err:
                log.debug(fields("no HTTPS answer from relay", derp_region=region_id, reason=err))
        self.netcheck.https_measured(region_id, latency_s, self._clock.now())
        self._driver.kick()

    # --- results

    def _settle(self, report: Report | None) -> None:
        now = self._clock.now()
        if report is not None:
            self._take_report(report)
        findings = StunFindings() if report is None else _findings(report)
        endpoints = self._endpoint_list.collect(
            now,
            stun=findings,
            local=self._underlay.addresses(),
            port_v4=self.sockets.port_v4,
            port_v6=self.sockets.port_v6,
            portmapped=self.portmapped,
            fixed_port=self._wanted_port,
        )
        if self._never_direct_udp:
            endpoints = ()
        is_new = endpoints != self.endpoints
        self.endpoints = endpoints
        if self._plane is not None:
            self._plane.magicsock.set_endpoints(endpoints, now)
            self._plane.driver.kick()
        if is_new or report is not None:
            self._events.on_changed()
        if self._wants_another:
            self._wants_another = False
            self.look("asked meanwhile")

    def _take_report(self, report: Report) -> None:
        home = report.preferred_derp or self.home or self._any_region()
        if self.home and not self.is_home_known and self.home not in self._unreachable_regions():
            home = self.netcheck.chooser.home = self.home
        if home != self.home:
            self._set_home(home)
        routers = self._port_mapping.seen if self._port_mapping is not None else Seen()
        info = NetInfo(
            mapping_varies_by_dest_ip=report.mapping_varies,
            working_ipv6=report.ipv6,
            os_has_ipv6=report.os_has_ipv6,
            working_udp=report.udp,
            working_icmpv4=False,
            have_port_map=self.portmapped is not None,
            upnp=routers.upnp,
            pmp=routers.pmp,
            pcp=routers.pcp,
            preferred_derp=home,
            derp_latency=report.derp_latency() or None,
        )
        if _is_material(self.net_info, info):
            self.net_info = info

    def _any_region(self) -> int:
        """A stable pick for a node that can measure nothing."""
        regions = [r.region_id for r in self._derp_map if r.derp_nodes and not r.no_measure_no_home]
        return regions[self.sockets.port_v4 % len(regions)] if regions else 0

    def _set_home(self, region: int) -> None:
        self.home = region
        if self._plane is not None:
            self._plane.magicsock.set_home_derp(region, self._clock.now())
            self._plane.derp.set_home(region)
        self._events.on_home(region)

    def relay_lost(self, region: int) -> None:
        """The home relay cannot be reached: measure again, another one may be better."""
        if region == self.home and sum(1 for _ in self._derp_map) > 1:
            self.look("derp-lost")

    # --- links

    async def _watch_links(self) -> None:
        async for state in self._links.changes():
            log.info(fields("link changed", up=state.is_up, interface=state.default_interface_v4 or None))
            self._events.on_link(state)
            if state.is_up:
                self.rebind("link-change")

    def _path_changed(self) -> None:
        self._endpoint_list.forget()
        if self._plane is not None:
            self._plane.link_changed(self._links.state().addresses)
        self.look("link-change")

    # --- sockets

    def _on_udp(self, datagrams: memoryview, datagram_bytes: int, source: AddrPort) -> None:
        if self._plane is not None:
            self._plane.on_udp(datagrams, datagram_bytes, source)
        else:
            self._on_stun(bytes(datagrams), source)

    def _on_udp_error(self, remote: AddrPort, error: int) -> None:
        if self._plane is not None:
            self._plane.on_udp_error(remote, error)

    def _on_stun(self, datagram: bytes, source: AddrPort) -> None:
        self.netcheck.receive_stun(datagram, source, self._clock.now())
        self._driver.kick()


def _findings(report: Report) -> StunFindings:
    return StunFindings(
        v4=tuple(report.global_v4.items()),
        v6=tuple(report.global_v6.items()),
        mapping_varies=report.mapping_varies,
    )


def _is_material(old: NetInfo, new: NetInfo) -> bool:
    """Latencies move all the time; only facts are worth telling control."""
    return any(getattr(old, name) != getattr(new, name) for name in _FACTS)
