"""One engine: an account, a tailnet, a plane and the reach of this host, wired together.

Everything runs on one loop. The engine knows its hull only through `tsd.hull`; who builds the hull, serves the
LocalAPI or the proxies is the daemon's business. Several engines may live in one process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tsd.base.addr import parse_ip
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.errors import DecodeError, StateError, TsdError
from tsd.base.keys import DiscoPrivate, MachinePrivate, NodePrivate
from tsd.base.tasks import Tasks
from tsd.dataplane.fdpump import FdPump
from tsd.dataplane.pump import Core
from tsd.engine.account.account import Account
from tsd.engine.account.expiry import KeyExpiry
from tsd.engine.account.prefs import Prefs
from tsd.engine.account.profiles import Profiles
from tsd.engine.account.seams import ControlLink
from tsd.engine.account.states import State
from tsd.engine.control import hostinfo
from tsd.engine.control.c2n_handlers import c2n_handlers
from tsd.engine.control.pings import ping_response
from tsd.engine.control.recollection import Recollection
from tsd.engine.control.session import ControlSession
from tsd.engine.lock.lock import TailnetLock
from tsd.engine.names.dialer import Dialer
from tsd.engine.names.forwarder import Surroundings
from tsd.engine.names.resolver import Resolver
from tsd.engine.path.pathmtu import Narrow
from tsd.engine.path.pings import Pings
from tsd.engine.path.plane import Plane, PlaneEvents, PlaneOptions
from tsd.engine.path.portmapping import PortMapping
from tsd.engine.path.reach import Reach, ReachEvents
from tsd.engine.path.sockets import OpenUdp
from tsd.engine.path.stamps import StampStore
from tsd.engine.peerapi import PeerApi
from tsd.engine.peers import Peer
from tsd.engine.report.bus import NotifyBus
from tsd.engine.report.health import Health
from tsd.engine.report.inspection import Inspection
from tsd.engine.tailnet import Tailnet
from tsd.engine.views import Views
from tsd.hull import BlobCache, Hull
from tsd.netmap.snapshot import Snapshot
from tsd.tailcfg.derpmap import DERPRegion
from tsd.tailcfg.mapping import PingResponse
from tsd.tailcfg.mapresponse import MapResponse
from tsd.tailcfg.register import RegisterResponse
from tsd.transport.control import ControlClient
from tsd.transport.derp import DerpOptions
from tsd.transport.dial import Dial

log = logging.getLogger(__name__)

PING_TIMEOUT_S = 10.0


@dataclass(slots=True)
class EngineOptions:
    """What the daemon (or a test) decides for an engine; frozen in spirit once it started."""

    version: str
    hull: Hull
    clock: Clock
    entropy: Entropy
    new_core: Callable[[], Core]
    open_udp: OpenUdp
    derp: Callable[[NodePrivate], DerpOptions]
    resolve_host: Callable[[str], Any]
    measure_https: Callable[[DERPRegion], Any]
    control_dial: Dial | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    wanted_port: int = 0
    is_ephemeral: bool = False
    never_direct_udp: bool = False
    always_use_derp: bool = False
    write_keylog: Callable[[str], None] | None = None
    new_pump: Callable[[Core], FdPump | None] = lambda core: None
    facts: hostinfo.HostFacts | None = None
    store_error: str = ""
    netmap_cache: BlobCache | None = None
    port_mapping: PortMapping | None = None


class Engine(Views):
    """Start it once; `close` undoes everything."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._clock = options.clock
        self._hull = options.hull
        self.facts = options.facts or hostinfo.HostFacts.read()
        self.health = Health(self._clock, self._on_health)
        self.health.on_wait = self._arm_health
        self.bus = NotifyBus(options.version, options.entropy)
        self.profiles = Profiles(options.hull.store, options.entropy, self._clock)
        self.account = Account(
            self.profiles, self.bus, self.health, self, self._clock, options.entropy, is_ephemeral=options.is_ephemeral
        )
        self.disco_private = DiscoPrivate.generate(options.entropy)
        self.recollection = self._new_recollection()
        self.profiles.on_delete = self.recollection.forget
        self.lock = TailnetLock(self)
        self.tailnet = Tailnet(self)
        self.tailnet.on_told = self.recollection.note
        self.account.now_ns = self.tailnet.keys.now_ns
        self.expiry = KeyExpiry(self.tailnet.keys.now_ns, self.tailnet.nodes, self._on_expiry)
        has_device = not options.hull.tun.is_userspace
        self.dialer = Dialer(options.hull.net, self, options.hull.underlay.protect, has_device=has_device)
        self.resolver = self._new_resolver()
        self.pings = Pings(self, self._clock, options.entropy)
        self.peerapi = PeerApi(options.hull.net, self, options.entropy)
        self.reach = self._new_reach()
        self.plane: Plane | None = None
        self.control: ControlSession | None = None
        self.is_control_connected = False
        self.control_error = ""
        self._stamps = StampStore(options.hull.store, self._clock.wall_ns(), self._on_store_trouble)
        self._tasks = Tasks(log)
        self._health_timer: asyncio.TimerHandle | None = None
        self.on_state: Callable[[State], None] = lambda state: None
        self.inspection = Inspection(self)
        self.c2n_handlers = c2n_handlers(self)

    def _new_recollection(self) -> Recollection:
        return Recollection(
            self.options.netmap_cache,
            self._clock,
            self.health,
            identity=self.account.identity,
            current=lambda: (self.tailnet.netmap, self.reach.home),
            bring_back=self._bring_back,
            on_void=self._forget_recalled,
            spawn=self.spawn,
        )

    def _new_reach(self) -> Reach:
        options = self.options
        return Reach(
            open_udp=options.open_udp,
            wanted_port=options.wanted_port,
            underlay=options.hull.underlay,
            links=options.hull.links,
            clock=self._clock,
            entropy=options.entropy,
            resolve=options.resolve_host,
            measure_https=options.measure_https,
            events=ReachEvents(
                self.report_self, self._on_home, self._on_link, self._on_socket_problem, self._on_relay_map
            ),
            never_direct_udp=options.never_direct_udp,
            port_mapping=options.port_mapping,
        )

    # --- life

    async def start(self) -> None:
        """Returns when LocalAPI requests can be answered; logging in goes on in the background."""
        if self.options.store_error:
            self._refuse_store(self.options.store_error)
        self.reach.open()
        try:
            self.account.begin()
        except StateError as err:
            self._refuse_store(str(err))
            self.account.update_state()

    def _refuse_store(self, reason: str) -> None:
        """Up, so that the reason can be read, but without an identity."""
        self.account.is_store_healthy = False
        self.health.set("state-store-health", error=reason)

    async def close(self) -> None:
        """Stop everything; an ephemeral node logs out first."""
        if self.account.is_ephemeral and self.control is not None and self.account.has_node_key:
            await self.control.logout()
        self.recollection.flush(is_in_sync=self.is_control_connected)
        self.account.close()
        self.lock.close()
        self._drop_plane()
        self._stamps.save()
        await self.reach.close()
        self.resolver.close()
        self.bus.close()
        self.expiry.close()
        if self._health_timer is not None:
            self._health_timer.cancel()
        self._tasks.cancel()
        self._hull.close()

    def spawn(self, work: Any) -> None:
        self._tasks.spawn(work)

    # --- AccountHost

    def open_control(self, url: str, machine_key: MachinePrivate, prefs: Prefs) -> ControlLink:
        client = ControlClient(
            url,
            machine_key,
            entropy=self.options.entropy,
            clock=self._clock,
            environ=self.options.environ,
            dial=self.options.control_dial,
        )
        self.control = ControlSession(
            client,
            self,
            report=hostinfo.self_report(self),
            entropy=self.options.entropy,
            lock_key=lambda: self.account.lock_key,
            known_node_key=prefs.node_key,
            is_ephemeral=self.account.is_ephemeral,
            c2n_handlers=self.c2n_handlers,
            pinger=self._ping_for_control,
        )
        return self.control

    def enter_state(self, old: State, new: State) -> None:
        if new.is_configured and not old.is_configured:
            self._raise_plane()
        elif not new.is_configured and (old.is_configured or new in (State.STOPPED, State.NEEDS_LOGIN)):
            self._drop_plane()
        self.health.set_if("wantrunning-false", new is State.STOPPED)
        self.on_state(new)

    def prefs_changed(self, old: Prefs, new: Prefs) -> None:
        self.tailnet.prefs_changed()
        self.report_self()

    def recall(self) -> None:
        self.spawn(self.recollection.recall())

    def _bring_back(self, snapshot: Snapshot) -> None:
        self.tailnet.recall(snapshot.message)
        self.reach.recall_home(snapshot.about.home_derp)

    def _forget_recalled(self) -> None:
        self.account.forget_node()
        self.tailnet.clear()

    def identity_changed(self) -> None:
        self._drop_plane()
        self.recollection.flush()
        self.recollection.leave()
        self.lock.leave()
        self.tailnet.clear()
        self.control = None
        self.is_control_connected = False

    def live_counts(self) -> tuple[int, int]:
        sessions = self.plane.wireguard.session_count() if self.plane is not None else 0
        return sessions, 1 if self.reach.home else 0

    # --- ControlEvents

    def on_auth_url(self, url: str) -> None:
        self.recollection.distrust()
        self.account.on_auth_url(url)

    def on_login_done(self, response: RegisterResponse, node_key: NodePrivate) -> None:
        old_key = self.plane.node_private if self.plane is not None else None
        self.account.on_registered(response, node_key)
        self.health.set_if("key-unused", self.control is not None and self.control.is_auth_key_unused)
        if old_key is not None and old_key != node_key:
            self._drop_plane()
            if self.account.state.is_configured:
                self._raise_plane()
                self.tailnet.refill()

    def on_map(self, message: MapResponse, is_first: bool) -> Awaitable[None] | None:
        behind = None
        if is_first or message.tka_info is not None:
            behind = self.lock.catch_up(message.tka_info, is_first=is_first)
        if behind is not None:
            return self._apply_after(behind, message, is_first)
        self.tailnet.apply(message, is_first)
        return None

    async def _apply_after(self, behind: Awaitable[None], message: MapResponse, is_first: bool) -> None:
        await behind
        self.tailnet.apply(message, is_first)

    def on_error(self, text: str, is_refusal: bool) -> None:
        self.control_error = text
        if is_refusal:
            self.recollection.distrust()
            self.account.on_refused(text)
        else:
            self.recollection.control_failed(text)
            if self.health.is_broken("no-control"):
                self.health.set("no-control", error=text)
            self.health.set_if("tls-connection-failed", False)
            self.health.set_if("not-in-map-poll", bool(text), error=text)

    def on_connected(self, is_connected: bool) -> None:
        self.is_control_connected = self.reach.is_home_known = is_connected
        if is_connected:
            self.health.clear("not-in-map-poll", "no-control")
        self.account.update_state()

    def on_pop_browser(self, url: str) -> None:
        self.account.tell_url(url)

    # --- plane

    def _raise_plane(self) -> None:
        node_key = self.account.node_key
        if node_key is None or self.plane is not None:
            return
        options = PlaneOptions(
            clock=self._clock,
            entropy=self.options.entropy,
            new_core=self.options.new_core,
            tai64n=self._stamps.source,
            disco_private=self.disco_private,
            derp=self.options.derp,
            never_direct_udp=self.options.never_direct_udp,
            always_use_derp=self.options.always_use_derp,
            write_keylog=self.options.write_keylog,
            new_pump=self.options.new_pump,
        )
        told = PlaneEvents(
            on_endpoints_wanted=self.reach.look,
            on_rebind_wanted=self.reach.rebind,
            on_relay=self._on_relay,
            on_relay_health=self._on_relay_health,
            on_session=self._on_session,
            on_handshake_sent=self._stamps.note_used,
            on_narrow_paths=self._on_narrow_paths,
        )
        self.plane = plane = Plane(node_key, options, self.tailnet.peers, self.reach.sockets, told)
        plane.datapath.intercept = self.pings.intercept
        plane.make_probe = self.pings.probe
        plane.wireguard.priority_message = self.tailnet.priority_message
        plane.paths_of = self.tailnet.members.paths_of
        plane.attach(self._hull.tun)
        self.pings.on_icmp_waiting = plane.watch_icmp
        self.reach.set_plane(plane)
        self.tailnet.refill()

    def rotate_disco_key(self) -> None:
        """A plane with a new one; peers learn of it from control and in the first packet of the new sessions."""
        self.disco_private = DiscoPrivate.generate(self.options.entropy)
        self.report_self()
        if self.plane is not None:
            self._close_plane()
            self._raise_plane()

    def _drop_plane(self) -> None:
        self._close_plane()
        self.tailnet.unplug()  # also what a killed daemon left closed for its exit node

    def _close_plane(self) -> None:
        """Routes stay: what goes out meanwhile is lost, and does not go around the tunnel."""
        plane, self.plane = self.plane, None
        if plane is not None:
            self.reach.set_plane(None)
            self._hull.tun.attach(lambda frames: None)
            plane.close()
            self.health.clear("no-derp-connection", "derp-region-error")

    def _on_session(self, peer: Peer) -> None:
        self.reach.note_traffic()
        if self.account.state is State.STARTING:
            self.account.update_state()

    def _on_relay(self, region: int, is_connected: bool, reason: str) -> None:
        if region == self.reach.home and self.plane is not None:
            name = self.derp_code(region) or str(region)
            told = {"derp_region_id": region, "derp_region_name": name, "error": reason}
            self.health.set_if("no-derp-connection", not is_connected, **told)
            if not is_connected:
                self.reach.relay_lost(region)

    def _on_relay_health(self, region: int, text: str) -> None:
        self.health.set_if("derp-region-error", bool(text), derp_region_id=region, error=text)

    def _on_home(self, region: int) -> None:
        self.health.set_if("no-derp-home", region == 0)
        self.health.clear("no-derp-connection")
        self.account.update_state()
        self.report_self()

    def _on_link(self, state: Any) -> None:
        self.health.set_if("network-status", not state.is_up)
        if state.is_up and self.control is not None:
            self.control.link_changed(state.addresses)

    def _on_relay_map(self, is_usable: bool) -> None:
        self.health.set_if("derp-map-empty", not is_usable)

    def _on_narrow_paths(self, found: dict[int, Narrow]) -> None:
        peers = [peer.short_name for handle in found if (peer := self.tailnet.peers.by_handle(handle)) is not None]
        least = min((narrow.mtu_bytes for narrow in found.values()), default=0)
        self.health.set_if("path-too-narrow", bool(found), peers=", ".join(peers[:8]), mtu=least)

    def _on_socket_problem(self, text: str) -> None:
        self._hull.set_ports(self.reach.udp_ports)
        self.health.set_if("no-udp4-bind", bool(text), error=text)

    # --- telling control about us

    def report_self(self) -> None:
        if self.control is not None:
            self.control.update(hostinfo.self_report(self))

    async def _ping_for_control(self, ip: str, kind: str) -> PingResponse:
        return ping_response(ip, kind, await self.ping(ip, kind))

    async def ping(self, ip: str, kind: str, size: int = 0) -> dict[str, Any]:
        """PingResult as JSON; waits without limit for the answer. Raises TsdError for an address that is none."""
        try:
            address = parse_ip(ip)
        except DecodeError:
            raise TsdError(f"not an IP address: {ip!r}") from None
        return await self.pings.ping(address, kind, size)

    # --- health and time

    def _on_health(self) -> None:
        self.bus.publish({"Health": self.health.state()})
        self._arm_health()

    def _arm_health(self) -> None:
        if self._health_timer is not None:
            self._health_timer.cancel()
            self._health_timer = None
        at = self.health.next_deadline()
        if at is not None:
            delay_s = max(at - self._clock.now(), 0.0) + 0.01
            self._health_timer = asyncio.get_running_loop().call_later(delay_s, self._on_health_timer)

    def _on_health_timer(self) -> None:
        self._health_timer = None
        self.health.on_deadline()
        self._arm_health()

    def _on_expiry(self) -> None:
        self.account.update_state()
        self.tailnet.members.expire()

    def _on_store_trouble(self, err: TsdError) -> None:
        self.health.set("state-store-write", error=err)

    # --- names

    def _new_resolver(self) -> Resolver:
        hull = self._hull
        around = Surroundings(
            hull.underlay.protect,
            hull.links.state,
            can_loop=not hull.tun.is_userspace,
            entropy=self.options.entropy,
        )
        resolver = Resolver(self.dialer, hull.dns.base_resolvers, around)
        resolver.forwarder.on_failing = self._on_dns_failing
        resolver.forwarder.on_loop = lambda servers: self.health.set_if("dns-loop", bool(servers), servers=servers)
        return resolver

    def _on_dns_failing(self, servers: str) -> None:
        is_ours = bool(servers) and self.account.prefs.corp_dns
        self.health.set_if("dns-forward-failing", is_ours, dns_servers=servers)
