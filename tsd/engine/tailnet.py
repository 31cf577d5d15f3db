"""The tailnet as control describes it, and what follows from it for plane, host, filter and names.

`apply` is the only way in for the netmap: peers go and come first, then the filter, the relay map, the host's
routing and names, then the watchers of the bus. A step that fails becomes a health warning; the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError, HullError
from tsd.base.keys import DiscoPublic
from tsd.base.log import fields
from tsd.engine.account.prefs import UserProfile
from tsd.engine.account.profiles import NetworkProfile
from tsd.engine.jobs import Jobs, Steps
from tsd.engine.path.masquerade import Aliases, aliases_of
from tsd.engine.peerapi import Caller
from tsd.engine.peers import Peer, PeerTable, node_addresses
from tsd.engine.report.goshape import display_messages
from tsd.engine.report.status import go_node
from tsd.engine.wishes import Wishes
from tsd.filter.filter import PacketFilter
from tsd.filter.rules import matches_from_rules
from tsd.magicsock.types import PeerPaths
from tsd.netmap.netmap import Diff, Netmap, apply
from tsd.packet import tsmp
from tsd.routes.planner import Planner
from tsd.routes.rules import AllowedIp, Plan
from tsd.tailcfg.mapresponse import MapResponse
from tsd.tailcfg.node import Node
from tsd.tailcfg.wire import time_ns, time_text

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

log = logging.getLogger(__name__)

DNS_PORT = 53
NO_DISCO = str(DiscoPublic.zero())
LARGE_CHANGE = 300
"""More changed peers than this are worked in piece by piece, so that packets are not kept waiting."""
SLICE_PEERS = 25
SKEW_WORTH_MINDING_NS = 60 * 10**9
CONTROL_TIME_FLOOR_NS = 1_673_373_066 * 10**9
"""A server that says an earlier time is the one that is wrong (tailscale: ipn/ipnlocal/expiry.go)."""


class Tailnet:
    """Netmap, peers and the plan that follows from them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.netmap: Netmap | None = None
        self._control_time: tuple[int, float] | None = None
        self.peers = PeerTable()
        self.plan = Plan()
        self.own_addresses: tuple[IPAddress, ...] = ()
        self.filter = PacketFilter((), ())
        self.filter.own_disco_key = engine.disco_private.public().raw
        self.jailed_filter = PacketFilter((), ())
        self._advertised_disco: dict[int, DiscoPublic] = {}
        self._jailed: dict[int, None] = {}
        self._aliases: dict[int, Aliases] = {}
        self._planner = Planner()
        self.wishes = Wishes(engine)
        self.on_told: Callable[[Diff], None] = lambda diff: None
        self._soon_ns, self._soon = 0, ""
        self._jobs = Jobs(engine.options.clock, engine.spawn)

    # --- reading

    def now_ns(self) -> int:
        """Wall time by which keys expire: ours, or the server's when the two differ by more than a minute.

        Kept as a point on the clock that only goes forward: ours may be set right while we run.
        """
        wall_ns = self._engine.options.clock.wall_ns()
        if self._control_time is None:
            return wall_ns
        told_ns, told_at = self._control_time
        control_ns = told_ns + int((self._engine.options.clock.now() - told_at) * 1e9)
        return control_ns if abs(control_ns - wall_ns) > SKEW_WORTH_MINDING_NS else wall_ns

    @property
    def wants_own_dns(self) -> bool:
        return self._engine.account.prefs.corp_dns and self.netmap is not None

    def peer_for(self, ip: IPAddress) -> Peer | None:
        """The peer that an address routes to."""
        direct = self.peers.by_address(ip)
        if direct is not None or self._engine.plane is None:
            return direct
        handle = self._engine.plane.core.route(ip.packed)
        return self.peers.by_handle(handle) if handle is not None else None

    def is_routed(self, ip: IPAddress) -> bool:
        return self.peer_for(ip) is not None

    def stays_local(self, ip: IPAddress) -> bool:
        """Addresses that an exit node's default route does not cover: this host, and its networks if so wished."""
        if ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast:
            return True
        wishes = self.plan.wishes
        if wishes is None or not (wishes.wants_exit_node and wishes.exit_node_allow_lan):
            return False
        if self.peers.by_address(ip) is not None:
            return False
        return any(ip.version == p.version and ip in p for p in self._engine.options.hull.links.state().networks)

    def held_back(self, ip: IPAddress) -> str:
        """Nothing leaks around a chosen exit node that is missing, offers no route or has expired."""
        wishes, state = self.plan.wishes, self._engine.account.state
        if wishes is None or not wishes.wants_exit_node or not state.is_configured or self.stays_local(ip):
            return ""
        chosen = wishes.exit_node_id or wishes.exit_node_ip or f"auto:{wishes.auto_exit_node}"
        return f"exit node {chosen} is not available, and traffic does not go around it"

    def nodes(self) -> list[Node]:
        """All nodes of the netmap, ourselves first."""
        return [] if self.netmap is None else [self.netmap.self_node, *self.netmap.peers.values()]

    @property
    def is_busy(self) -> bool:
        """Whether a large change is still being worked in."""
        return self._jobs.is_busy

    def user_of(self, node: Node) -> UserProfile | None:
        profile = self.netmap.users.get(node.user) if self.netmap is not None else None
        if profile is None:
            return None
        return UserProfile(profile.id, profile.login_name, profile.display_name, profile.profile_pic_url)

    def identify(self, source: IPAddress) -> Caller | None:
        """Who sends from an overlay address, for PeerAPI."""
        peer = self.peers.by_address(source)
        own = self._engine.account.self_node
        if peer is None or own is None:
            return None
        user = self.user_of(peer.node)
        is_same_user = peer.node.user == own.user and not peer.node.tags and not own.tags
        any_address = parse_ip("0.0.0.0") if source.version == 4 else parse_ip("2000::")
        may_use_dns = is_same_user or self.filter.check(source, any_address, DNS_PORT)
        login = user.login_name if user is not None else ""
        return Caller(peer.node.name.rstrip("."), login, is_same_user, may_use_dns)

    def priority_message(self, handle: int) -> bytes | None:
        """First packet of each session: our disco key, so that a peer with an old netmap finds us."""
        peer = self.peers.by_handle(handle)
        if peer is None or peer.node.is_wireguard_only:
            return None
        for ip in peer.addresses:
            own = self._engine.own_address_for(ip)
            if own is not None:
                disco_key = self._engine.disco_private.public()
                return tsmp.disco_advertisement(own.packed, ip.packed, disco_key)
        return None

    def names_of_us(self) -> list[IPAddress]:
        """Addresses under which peers reach us: our own, and those that only some peers know."""
        return [*self.own_addresses, *(ip for named in self._aliases.values() for ip in named)]

    # --- changing

    def apply(self, message: MapResponse, is_first: bool) -> None:
        """One message of the map stream. Raises ProtocolError for a first one without our own node.

        Small changes are done when it returns; a large one goes on by and by, and what comes meanwhile waits.
        """
        self._jobs.submit(self._apply(message, is_first))

    def recall(self, message: MapResponse) -> None:
        """The netmap of the last run, as one message."""
        self._jobs.submit(self._apply(message, is_first=True, is_recalled=True))

    def _apply(self, message: MapResponse, is_first: bool, is_recalled: bool = False) -> Steps:
        self._note_time(message.control_time)
        if message.keep_alive and message.node is None:
            return
        wall_ns = self._engine.options.clock.wall_ns()
        old = self.netmap
        new, diff = apply(old, message, wall_ns=wall_ns, is_first=is_first)
        if not is_recalled:
            self.on_told(diff)
        is_full = is_first or message.node is not None or bool(message.peers)
        if diff.is_empty:
            if is_full:
                yield from self._tell(new, diff, is_full)
            return
        self.netmap = new
        needs_plan = diff.self_node or diff.dns or bool(diff.added or diff.changed or diff.removed)
        is_other_exit = needs_plan and old is not None and self.wishes.now(self.netmap) != self._planner.current.wishes
        if old is None or diff.self_node or is_other_exit or len(diff.upserted) > LARGE_CHANGE:
            yield from self._plan_anew()
        elif needs_plan:
            self._planner.update(new, diff)
        yield from self._apply_peers(new, diff)
        if is_other_exit:
            yield from self._place_all()
        if diff.self_node or old is None:
            self._apply_self(new)
        if diff.derp_map and new.derp_map is not None:
            self._engine.reach.set_derp_map(new.derp_map)
        if needs_plan:
            self._apply_plan()
        if diff.filters or diff.self_node or old is None:
            self._apply_filter()
        elif needs_plan:
            self._apply_treatment()
        if diff.health:
            self._engine.health.set_control_messages(display_messages(new))
        yield from self._tell(new, diff, is_full)
        self._engine.expiry.arm(None if is_full else [new.peers[i] for i in diff.upserted if i in new.peers])
        self._engine.account.update_state()
        if self._engine.plane is not None:
            self._engine.plane.driver.kick()

    def _note_time(self, control_time: str | None) -> None:
        control_ns = time_ns(control_time)
        if control_ns is not None and control_ns > CONTROL_TIME_FLOOR_NS:
            self._control_time = (control_ns, self._engine.options.clock.now())

    def _plan_anew(self) -> Steps:
        assert self.netmap is not None
        slices = self._planner.plan_in_slices(self.netmap, self.wishes.now(self.netmap))
        if len(self.netmap.peers) > LARGE_CHANGE:
            yield from slices
        else:
            for _ in slices:
                pass

    def prefs_changed(self) -> None:
        if self.netmap is not None and self.plan.wishes != self.wishes.now(self.netmap):
            self._jobs.submit(self._change_wishes())

    def _change_wishes(self) -> Steps:
        yield from self._plan_anew()
        yield from self._place_all()
        self._apply_plan()
        self._apply_filter()

    def clear(self) -> None:
        """Another identity: nothing of this tailnet is true any more."""
        self.unplug()
        self._jobs.clear()
        self.netmap = self._control_time = None
        self.peers.clear()
        self.own_addresses = ()
        self._advertised_disco.clear()
        self._jailed.clear()
        self._aliases.clear()
        self._planner = Planner()
        self.plan = Plan()

    def unplug(self) -> None:
        """The plane is gone: the host routes nothing into the overlay."""
        self._apply_to_host(Plan())
        self._engine.spawn(self._engine.peerapi.serve([]))

    def refill(self) -> None:
        """A new plane: everything that we know goes into it."""
        self._jobs.submit(self._refill())

    def _refill(self) -> Steps:
        if self._engine.plane is None or self.netmap is None:
            return
        yield from self._place_all()
        self._apply_self(self.netmap)
        self._apply_plan()
        self._apply_filter()

    def _place_all(self) -> Steps:
        is_large = len(self.peers) > LARGE_CHANGE
        for count, peer in enumerate(list(self.peers), 1):
            self._place(peer)
            if is_large and count % SLICE_PEERS == 0:
                yield

    def expire_peers(self) -> None:
        """The clock passed a key's end: such peers are unreachable from now on."""
        for peer in self.peers:
            if peer.node.is_expired(self.now_ns()):
                self._place(peer)
                if self._engine.plane is not None:
                    self._engine.plane.core.drop_sessions(peer.handle)

    def learn_disco_key(self, handle: int, disco_key: DiscoPublic) -> None:
        """A peer told its disco key inside its session; the netmap may lag behind."""
        peer = self.peers.by_handle(handle)
        if peer is None or disco_key.is_zero:
            return
        self._advertised_disco[handle] = disco_key
        if self._engine.plane is not None:
            self._engine.plane.set_peer(peer)

    # --- peers

    def _apply_peers(self, new: Netmap, diff: Diff) -> Steps:
        for node_id in diff.removed:
            gone = self.peers.remove(node_id)
            if gone is not None:
                self._forget(gone)
        is_large = len(diff.upserted) > LARGE_CHANGE
        for count, node_id in enumerate(diff.upserted, 1):
            node = new.peers.get(node_id)
            if node is not None:
                self._upsert(node)
            if is_large and count % SLICE_PEERS == 0:
                yield

    def _upsert(self, node: Node) -> None:
        own = self.netmap.self_node if self.netmap is not None else None
        if own is not None and (node.id == own.id or node.key == own.key):
            log.warning(fields("the server lists this node among its peers; left out", peer=node.name))
            return
        before = self.peers.by_id(node.id)
        old_disco = before.node.disco_key if before is not None else None
        try:
            peer, replaced = self.peers.upsert(node)
        except DecodeError as err:
            log.warning(fields("peer left out", peer=node.name, reason=err))
            return
        if replaced is not None:
            self._forget(replaced)
        if old_disco and node.disco_key and old_disco not in (node.disco_key, NO_DISCO):
            self._note_restart(peer, node.disco)
        self._note_treatment(peer)
        self._place(peer)

    def _note_restart(self, peer: Peer, new_disco: DiscoPublic | None) -> None:
        """A new disco key is a new process, unless the peer told us itself, inside a session of now."""
        if new_disco is not None:
            if self._engine.plane is not None and self._advertised_disco.get(peer.handle) != new_disco:
                self._engine.plane.restart_session(peer)
            self._advertised_disco.pop(peer.handle, None)

    def _note_treatment(self, peer: Peer) -> None:
        """Few peers are jailed or know us by another address; those are kept apart."""
        self._jailed.pop(peer.handle, None)
        self._aliases.pop(peer.handle, None)
        if peer.node.is_jailed:
            self._jailed[peer.handle] = None
        named = aliases_of(peer.node)
        if named:
            self._aliases[peer.handle] = named

    def _place(self, peer: Peer) -> None:
        plane = self._engine.plane
        if plane is not None:
            plane.set_peer(peer)
            plane.core.set_allowed_ips(peer.handle, self._allowed(peer))

    def _forget(self, peer: Peer) -> None:
        self._advertised_disco.pop(peer.handle, None)
        self._jailed.pop(peer.handle, None)
        self._aliases.pop(peer.handle, None)
        if self._engine.plane is not None:
            self._engine.plane.remove_peer(peer)

    def _allowed(self, peer: Peer) -> Sequence[AllowedIp]:
        return () if self._is_expired(peer.node) else self._planner.allowed_ips(peer.node.id)

    def _is_expired(self, node: Node) -> bool:
        """Asked for thousands of nodes at a time: texts of times are compared, and read only when they are close."""
        if node.key_expiry is None or (node.key_expiry > self._soon_text() and node.key_expiry.endswith("Z")):
            return node.expired
        return node.is_expired(self.now_ns())

    def _soon_text(self) -> str:
        """A time that is surely not in the past yet, in the form of the map."""
        now_ns = self.now_ns()
        if not 0 < self._soon_ns - now_ns < 120 * 10**9:
            self._soon_ns = now_ns + 60 * 10**9
            self._soon = time_text(self._soon_ns)
        return self._soon

    def paths_of(self, peer: Peer) -> PeerPaths:
        node = peer.node
        endpoints = []
        for text in node.endpoints or ():
            try:
                endpoints.append(AddrPort.parse(text))
            except DecodeError:
                continue
        is_expired = self._is_expired(node)
        return PeerPaths(
            node_key=peer.node_key,
            disco_key=self._advertised_disco.get(peer.handle) or node.disco,
            endpoints=() if is_expired else tuple(endpoints),
            home_derp=0 if is_expired else node.home_region,
            capver=node.cap,
            is_wireguard_only=node.is_wireguard_only,
            addresses=peer.addresses,
        )

    # --- what follows

    def _apply_self(self, new: Netmap) -> None:
        node = new.self_node
        self.own_addresses = node_addresses(node)
        self._engine.resolver.own_addresses = frozenset(self.own_addresses)
        network = NetworkProfile(magic_dns_name=new.magic_suffix, domain_name=new.domain, display_name=new.domain)
        self._engine.account.on_self_node(node, self.user_of(node), network)
        if self._engine.plane is not None:
            self._engine.spawn(self._serve_peerapi())

    def _apply_plan(self) -> None:
        self.plan = self._planner.current
        if self.netmap is not None and self.plan.wishes is not None:
            self.wishes.tell(self.netmap, self.plan.wishes)
        if self._engine.plane is not None:
            self._apply_to_host(self.plan)

    def _apply_to_host(self, plan: Plan) -> None:
        hull = self._engine.options.hull
        steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("router", lambda: hull.router.apply(plan.router)),
            ("dns", lambda: hull.dns.apply(plan.dns)),
        )
        for what, step in steps:
            try:
                step()
                self._engine.health.clear(f"{what}-failed" if what == "router" else "dns-set-os-config-failed")
            except HullError as err:
                log.error(fields(f"{what} not applied", reason=err))
                code = "router-failed" if what == "router" else "dns-set-os-config-failed"
                self._engine.health.set(code, error=err)
        self._engine.resolver.configure(plan.dns)

    async def _serve_peerapi(self) -> None:
        before = dict(self._engine.peerapi.ports)
        await self._engine.peerapi.serve(list(self.own_addresses))
        if before != self._engine.peerapi.ports:
            self._apply_filter()
            self._engine.report_self()

    def _apply_filter(self) -> None:
        if self.netmap is None:
            return
        try:
            matches, mistake = matches_from_rules(self.netmap.filter_rules())
        except DecodeError as err:
            matches, mistake = [], str(err)
        self._engine.health.set_if("invalid-packet-filter", bool(mistake), error=mistake)
        prefs = self._engine.account.prefs
        self.filter = self.filter.replace(matches, self.plan.local_prefixes, shields_up=prefs.shields_up)
        ports = self._engine.peerapi.ports
        self.filter.peerapi = frozenset((ip.packed, port) for ip, port in ports.items())
        self.filter.has_capability = self._source_has_capability
        self.jailed_filter = self.jailed_filter.replace((), self.plan.local_prefixes)
        plane = self._engine.plane
        if plane is not None:
            plane.datapath.filter = self.filter
            plane.datapath.jailed_filter = self.jailed_filter
            self._apply_treatment()

    def _apply_treatment(self) -> None:
        """Who is jailed, and who knows us by another address."""
        plane = self._engine.plane
        if plane is not None:
            plane.core.set_aliases(self.own_addresses, self._aliases)
            plane.datapath.jailed = frozenset(self._jailed)
            plane.rules_changed()

    def _source_has_capability(self, source: bytes, capability: str) -> bool:
        peer = self.peers.by_packed(source)
        return peer is not None and peer.node.has_cap(capability)

    def _tell(self, new: Netmap, diff: Diff, is_full: bool) -> Steps:
        """A full map shows our own node even when nothing changed: watchers take it as the sign to look again."""
        notify: dict[str, Any] = {}
        if is_full:
            notify["SelfChange"] = go_node(new.self_node, new.magic_suffix)
        if diff.upserted and self._engine.bus.sessions():
            changed = notify["PeersChanged"] = []
            for node_id in diff.upserted:
                if node_id in new.peers:
                    changed.append(go_node(new.peers[node_id], new.magic_suffix))
                if len(changed) % SLICE_PEERS == 0 and len(diff.upserted) > LARGE_CHANGE:
                    yield
        if diff.removed:
            notify["PeersRemoved"] = list(diff.removed)
        if notify:
            self._engine.bus.publish(notify)
