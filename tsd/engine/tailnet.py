"""The tailnet as control describes it, and what follows from it for plane, host, filter and names.

`apply` is the only way in for the netmap: peers go and come first, then the filter, the relay map, the host's
routing and names, then the watchers of the bus. A step that fails becomes a health warning; the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tsd.base.addr import IPAddress, parse_ip
from tsd.base.errors import HullError
from tsd.base.log import fields
from tsd.engine.account.expiry import KeyTime, skew_text
from tsd.engine.account.prefs import UserProfile
from tsd.engine.account.profiles import NetworkProfile
from tsd.engine.jobs import Jobs, Steps
from tsd.engine.members import LARGE_CHANGE, SLICE_PEERS, Members
from tsd.engine.packetrules import PacketRules
from tsd.engine.peerapi import Caller
from tsd.engine.peers import Peer, node_addresses
from tsd.engine.report.goshape import display_messages
from tsd.engine.report.status import go_node
from tsd.engine.wishes import Wishes
from tsd.netmap.netmap import Diff, Netmap, apply, compare
from tsd.packet import tsmp
from tsd.routes.exitnode import offers_exit
from tsd.routes.planner import Planner
from tsd.routes.rules import Plan
from tsd.tailcfg.mapresponse import MapResponse
from tsd.tailcfg.node import Node

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

log = logging.getLogger(__name__)

DNS_PORT = 53


class Tailnet:
    """Netmap, peers and the plan that follows from them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.netmap: Netmap | None = None
        self.told: Netmap | None = None
        """The netmap with the peers that tailnet lock keeps out; most often the same."""
        self.keys = KeyTime(engine.options.clock)
        self._planner = Planner()
        self.members = Members(self.keys, lambda: engine.plane, lambda node_id: self._planner.allowed_ips(node_id))
        self.peers = self.members.peers
        self.rules = PacketRules(engine, self.members)
        self.plan = Plan()
        self.own_addresses: tuple[IPAddress, ...] = ()
        self.wishes = Wishes(engine)
        self.on_told: Callable[[Diff], None] = lambda diff: None
        self._jobs = Jobs(engine.options.clock, engine.spawn)

    # --- reading

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
        may_use_dns = is_same_user or self.rules.filter.check(source, any_address, DNS_PORT)
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
        return [*self.own_addresses, *(ip for named in self.members.aliases.values() for ip in named)]

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
        self.keys.note(message.control_time)
        skew_ns = self.keys.skew_ns()
        self._engine.health.set_if("clock-wrong", bool(skew_ns), difference=skew_text(skew_ns))
        if message.keep_alive and message.node is None:
            return
        wall_ns = self._engine.options.clock.wall_ns()
        told, diff = apply(self.told, message, wall_ns=wall_ns, is_first=is_first)
        if not is_recalled:
            self.on_told(diff)
        is_full = is_first or message.node is not None or bool(message.peers)
        is_whole = self.netmap is self.told
        before = self.told
        if not diff.is_empty:
            self.told = told
        if is_whole and not self._engine.lock.is_enforced(told):
            yield from self._work_in(told, diff, is_full)
        else:
            yield from self._sift(is_full, before, diff.upserted + diff.removed)

    def sift_anew(self) -> None:
        """Tailnet lock changed: who may be in the netmap?"""
        self._jobs.submit(self._sift(is_full=False))

    def _sift(self, is_full: bool, before: Netmap | None = None, touched: tuple[int, ...] = ()) -> Steps:
        """`touched`: the peers that differ from `before`, which is what control had told; None: nothing has changed."""
        told = self.told
        if told is None:
            return
        new, can_differ = yield from self._engine.lock.sift(told, before or told, touched)
        yield from self._work_in(new, compare(self.netmap, new, can_differ), is_full)

    def _work_in(self, new: Netmap, diff: Diff, is_full: bool) -> Steps:
        old = self.netmap
        if diff.is_empty:
            if is_full:
                yield from self._tell(new, diff, is_full)
            return
        self.netmap = new
        needs_plan = diff.self_node or diff.dns or bool(diff.added or diff.changed or diff.removed)
        has_exit_news = self._has_exit_news(new, diff)
        may_differ = (needs_plan or has_exit_news) and old is not None
        is_other_exit = may_differ and self.wishes.now(new) != self._planner.current.wishes
        if old is None or diff.self_node or is_other_exit or len(diff.upserted) > LARGE_CHANGE:
            yield from self._plan_anew()
        elif needs_plan:
            self._planner.update(new, diff)
        yield from self.members.apply(new, diff)
        if is_other_exit:
            yield from self.members.place_all()
        if diff.self_node or old is None:
            self._apply_self(new)
        if diff.derp_map and new.derp_map is not None:
            self._engine.reach.set_derp_map(new.derp_map)
        if needs_plan or is_other_exit:
            self._apply_plan()
        elif has_exit_news and self.plan.wishes is not None:
            self.wishes.tell(new, self.plan.wishes)
        if diff.filters or diff.self_node or old is None:
            self._apply_rules()
        elif needs_plan:
            self.rules.peers_changed(self.own_addresses)
        if diff.health:
            self._engine.health.set_control_messages(display_messages(new))
        yield from self._tell(new, diff, is_full)
        self._engine.expiry.arm(None if is_full else [new.peers[i] for i in diff.upserted if i in new.peers])
        self._engine.account.update_state()
        self._engine.lock.save()
        if self._engine.plane is not None:
            self._engine.plane.driver.kick()

    def _has_exit_news(self, new: Netmap, diff: Diff) -> bool:
        """An exit node came or went, which moves nothing else, and one is used."""
        wishes = self._planner.current.wishes
        if wishes is None or not wishes.wants_exit_node:
            return False
        return any(offers_exit(new.peers[node_id]) for node_id in diff.moved if node_id in new.peers)

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
        yield from self.members.place_all()
        self._apply_plan()
        self._apply_rules()

    def clear(self) -> None:
        """Another identity: nothing of this tailnet is true any more."""
        self.unplug()
        self._jobs.clear()
        self.netmap = self.told = None
        self.keys.forget()
        self._engine.health.clear("clock-wrong")
        self.members.clear()
        self.own_addresses = ()
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
        yield from self.members.place_all()
        self._apply_self(self.netmap)
        self._apply_plan()
        self._apply_rules()

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
            self._apply_rules()
            self._engine.report_self()

    def _apply_rules(self) -> None:
        if self.netmap is not None:
            self.rules.apply(self.netmap.filter_rules(), self.plan.local_prefixes, self.own_addresses)

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
