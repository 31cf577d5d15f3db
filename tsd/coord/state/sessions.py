"""Map polls: the first full map of each, then deltas that hold only what changed.

A change costs one note per open poll that may care and one small frame per poll that does. The JSON of a peer is built
once and shared by all viewers. Notes are collected for a moment (`flush_delay_s`), so a burst leaves as one frame.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from tsd.base.addr import IPPrefix
from tsd.base.log import fields
from tsd.coord.policy.compile import FilterRules, bucket_of
from tsd.coord.state import nodeview, ssh
from tsd.coord.state.events import Event, FrameReady, SessionEnded
from tsd.coord.state.records import Moment, problem
from tsd.coord.state.registry import Change, Registry
from tsd.coord.state.visibility import bits, chunk_name
from tsd.tailcfg.mapresponse import KEEP_ALIVE
from tsd.tailcfg.wire import encode_json, time_text

log = logging.getLogger("tsd.coord")

SESSIONS_PER_FLUSH = 32
"""A new policy concerns every poll; in slices it does not stall the server."""

Routes = tuple[IPPrefix, ...]


@dataclass(slots=True)
class Session:
    """One open poll and what its client knows: peers (with the routes shown), profiles, filter chunks."""

    id: int
    node_id: int
    disco_key: str
    known: dict[int, Routes] = field(default_factory=dict)
    profiles: dict[int, None] = field(default_factory=dict)
    chunks: dict[str, None] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    pending_chunks: dict[str, tuple[int, int]] = field(default_factory=dict)
    is_self_pending: bool = False
    is_filter_pending: bool = False
    is_policy_pending: bool = False
    is_ssh_pending: bool = False
    ssh: bytes = b""
    is_health_pending: bool = False
    last_frame: float = 0.0


class Sessions:
    """Implements `registry.Listener`."""

    def __init__(self, outputs: list[Event]) -> None:
        self.outputs = outputs
        self.registry: Registry
        self.open: dict[int, Session] = {}
        self.by_node: dict[int, dict[int, None]] = {}
        self._dirty: dict[int, None] = {}
        self._health: dict[int, list[str]] = {}
        self._fragments: dict[int, dict[Routes, msgspec.Raw | None]] = {}
        self.fragments_built = 0

    @property
    def is_dirty(self) -> bool:
        return bool(self._dirty)

    # Polls

    def start(self, session_id: int, node_id: int, disco_key: str, moment: Moment) -> None:
        """Open a poll and send its first frame, the whole map."""
        session = Session(session_id, node_id, disco_key, last_frame=moment.now)
        self.open[session_id] = session
        self.by_node.setdefault(node_id, {})[session_id] = None
        self._send(session, self._full_map(session, moment.wall_ns), moment.now)

    def snapshot(self, node_id: int, moment: Moment) -> bytes:
        """The whole map for one who asks just once."""
        return encode_json(self._full_map(Session(0, node_id, ""), moment.wall_ns))

    def stop(self, session_id: int) -> Session | None:
        session = self.open.pop(session_id, None)
        if session is not None:
            self._dirty.pop(session_id, None)
            own = self.by_node[session.node_id]
            own.pop(session_id, None)
            if not own:
                del self.by_node[session.node_id]
        return session

    def is_polling(self, node_id: int) -> bool:
        return node_id in self.by_node

    def of_node(self, node_id: int) -> list[Session]:
        return [self.open[one] for one in self.by_node.get(node_id, ())]

    def keep_alive(self, session: Session, now: float) -> None:
        session.last_frame = now
        self.outputs.append(FrameReady(session.id, KEEP_ALIVE))

    def set_health(self, node_id: int, lines: list[str]) -> None:
        """What stands in the node's maps from now on."""
        if lines == self._health.get(node_id, []):
            return
        self._health[node_id] = lines
        if not lines:
            del self._health[node_id]
        for session in self.of_node(node_id):
            session.is_health_pending = True
            self._dirty[session.id] = None

    # Listener

    def node_changed(self, node_id: int, change: int) -> None:
        self._fragments.pop(node_id, None)
        is_ssh_touched = self._has_ssh and bool(change & Change.WHOLE)
        for session in self.open.values():
            session.is_ssh_pending = session.is_ssh_pending or is_ssh_touched
            if session.node_id == node_id:
                if change & Change.WHOLE:
                    session.is_self_pending = True
                    self._dirty[session.id] = None
                continue
            session.pending[node_id] = session.pending.get(node_id, Change.NOTHING) | change
            self._dirty[session.id] = None

    def node_removed(self, node_id: int) -> None:
        self._fragments.pop(node_id, None)
        self._health.pop(node_id, None)
        for session in self.of_node(node_id):
            self.stop(session.id)
            self.outputs.append(SessionEnded(session.id))
        for session in self.open.values():
            session.pending[node_id] = Change.WHOLE
            session.is_ssh_pending = session.is_ssh_pending or self._has_ssh
            self._dirty[session.id] = None

    def sources_changed(self, node_id: int, rules: int) -> None:
        bucket = bucket_of(node_id)
        targets = self.registry.visibility.targets
        for session in self.open.values():
            for rule in bits(rules & targets.get(session.node_id, 0)):
                session.pending_chunks[chunk_name(rule, bucket)] = (rule, bucket)
                self._dirty[session.id] = None

    def filter_changed(self, node_id: int) -> None:
        """The node's own filter; and, as masks may have moved, who it sees."""
        for session in self.of_node(node_id):
            session.is_filter_pending = True
            for other in self.registry.nodes:
                session.pending.setdefault(other, Change.NOTHING)
            self._dirty[session.id] = None

    def policy_changed(self) -> None:
        self._fragments.clear()
        for session in self.open.values():
            session.is_policy_pending = session.is_self_pending = session.is_ssh_pending = True
            for node_id in self.registry.nodes:
                session.pending.setdefault(node_id, Change.NOTHING)
            self._dirty[session.id] = None

    # Frames

    def flush(self, moment: Moment) -> None:
        """One frame for every poll that has news; for some of them, when there are many (`is_dirty` says so)."""
        for session_id in list(islice(self._dirty, SESSIONS_PER_FLUSH)):
            del self._dirty[session_id]
            session = self.open[session_id]
            frame = self._delta(session, moment.wall_ns)
            if frame:
                self._send(session, frame, moment.now)

    def _send(self, session: Session, frame: dict[str, Any], now: float) -> None:
        session.last_frame = now
        self.outputs.append(FrameReady(session.id, encode_json(frame)))

    def _full_map(self, session: Session, wall_ns: int) -> dict[str, Any]:
        registry = self.registry
        viewer = session.node_id
        peers: list[msgspec.Raw] = []
        profiles: dict[int, None] = {registry.nodes[viewer].owner_id: None}
        for node_id in sorted(registry.nodes):
            if node_id != viewer and registry.visibility.sees(viewer, node_id):
                self._add_peer(session, node_id, wall_ns, peers, profiles)
        filters = registry.visibility.filters(viewer)
        session.chunks = dict.fromkeys(filters)
        frame: dict[str, Any] = {
            "Node": self._self_node(viewer),
            "DERPMap": registry.config.derp_map,
            "Peers": peers,
            "DNSConfig": nodeview.dns_config(registry.config),
            "Domain": registry.config.base_domain,
            "CollectServices": False,
            "PacketFilters": filters,
            "UserProfiles": self._profiles(session, profiles),
            "ControlTime": time_text(wall_ns),
            "Debug": {"DisableLogTail": True},
        }
        if viewer in self._health:
            frame["Health"] = self._health[viewer]
        if self._has_ssh:
            self._add_ssh(session, frame)
        return frame

    def _self_node(self, node_id: int) -> Any:
        registry = self.registry
        node = registry.nodes[node_id]
        extra = registry.visibility.compiled.attributes(registry.visibility.subjects[node_id])
        return nodeview.self_node(node, registry.config, self._carried(node_id), extra)

    def _carried(self, node_id: int) -> Routes:
        node = self.registry.nodes[node_id]
        return tuple(route for route in node.routes if self.registry.routers.carries(node_id, route))

    def _shown_routes(self, viewer: int, node_id: int) -> Routes:
        usable = self.registry.visibility.usable_routes(viewer, node_id)
        return usable and tuple(route for route in usable if self.registry.routers.carries(node_id, route))

    def _fragment(self, node_id: int, routes: Routes, wall_ns: int) -> msgspec.Raw | None:
        """A peer as JSON, built once for all viewers; None for a node that nobody can be shown."""
        cached = self._fragments.setdefault(node_id, {})
        if routes not in cached:
            node = self.registry.nodes[node_id]
            reason = problem(node)
            if reason:
                log.warning(fields("node left out", node=node_id, reason=reason))
                cached[routes] = None
                return None
            self.fragments_built += 1
            is_online = node_id in self.registry.online
            view = nodeview.peer_node(node, self.registry.config, routes, is_online, node.is_expired(wall_ns))
            cached[routes] = msgspec.Raw(encode_json(view))
        return cached[routes]

    def _add_peer(
        self, session: Session, node_id: int, wall_ns: int, peers: list[msgspec.Raw], profiles: dict[int, None]
    ) -> None:
        routes = self._shown_routes(session.node_id, node_id)
        fragment = self._fragment(node_id, routes, wall_ns)
        if fragment is None:
            return
        peers.append(fragment)
        session.known[node_id] = routes
        owner = self.registry.nodes[node_id].owner_id
        if owner not in session.profiles:
            profiles[owner] = None

    def _profiles(self, session: Session, wanted: dict[int, None]) -> list[Any]:
        session.profiles.update(wanted)
        return [nodeview.profile(user_id, self.registry.users.get(user_id)) for user_id in sorted(wanted)]

    def _delta(self, session: Session, wall_ns: int) -> dict[str, Any]:
        frame: dict[str, Any] = {}
        if session.is_self_pending:
            frame["Node"] = self._self_node(session.node_id)
            session.is_self_pending = False
        self._peer_changes(session, wall_ns, frame)
        filters = self._filter_changes(session)
        if filters:
            frame["PacketFilters"] = filters
        session.is_policy_pending = False
        if session.is_ssh_pending:
            self._add_ssh(session, frame)
        if session.is_health_pending:
            frame["Health"], session.is_health_pending = self._health.get(session.node_id, []), False
        return frame

    @property
    def _has_ssh(self) -> bool:
        return self.registry.visibility.compiled.policy.has_ssh

    def _add_ssh(self, session: Session, frame: dict[str, Any]) -> None:
        session.is_ssh_pending = False
        raw = encode_json(ssh.policy_for(self.registry.visibility, session.node_id))
        if raw != session.ssh and (self._has_ssh or session.ssh):
            session.ssh = raw
            frame["SSHPolicy"] = msgspec.Raw(raw)

    def _peer_changes(self, session: Session, wall_ns: int, frame: dict[str, Any]) -> None:
        pending, session.pending = session.pending, {}
        upserts: list[msgspec.Raw] = []
        removed: list[int] = []
        patches: list[Any] = []
        online: dict[str, bool] = {}
        profiles: dict[int, None] = {}
        for node_id in sorted(pending):
            change = pending[node_id]
            if node_id == session.node_id:
                continue
            if not self.registry.visibility.sees(session.node_id, node_id):
                if session.known.pop(node_id, None) is not None:
                    removed.append(node_id)
            elif self._needs_whole(session, node_id, change):
                self._add_peer(session, node_id, wall_ns, upserts, profiles)
            elif change & Change.PATH or (change and node_id not in self.registry.online):
                patches.append(nodeview.patch(self.registry.nodes[node_id], node_id in self.registry.online))
            elif change & Change.ONLINE:
                online[str(node_id)] = True
        found = {
            "PeersRemoved": removed,
            "PeersChanged": upserts,
            "PeersChangedPatch": patches,
            "OnlineChange": online,
            "UserProfiles": self._profiles(session, profiles) if profiles else [],
        }
        frame.update({name: value for name, value in found.items() if value})

    def _needs_whole(self, session: Session, node_id: int, change: int) -> bool:
        """A patch cannot add a peer, nor empty a list of endpoints, nor change routes."""
        if node_id not in session.known or change & Change.WHOLE:
            return True
        if session.known[node_id] != self._shown_routes(session.node_id, node_id):
            return True
        node = self.registry.nodes[node_id]
        return bool(change & Change.PATH) and not (node.endpoints and node.home_derp and node.disco_key)

    def _filter_changes(self, session: Session) -> dict[str, FilterRules | None]:
        pending, session.pending_chunks = session.pending_chunks, {}
        visibility = self.registry.visibility
        if session.is_filter_pending or session.is_policy_pending:
            session.is_filter_pending = False
            filters = visibility.filters(session.node_id)
            session.chunks = dict.fromkeys(filters)
            return {"*": None, **filters}
        changed: dict[str, FilterRules | None] = {}
        for name, (rule, bucket) in pending.items():
            rules = visibility.chunk(session.node_id, rule, bucket)
            if rules:
                session.chunks[name] = None
                changed[name] = rules
            elif name in session.chunks:
                del session.chunks[name]
                changed[name] = None
        return changed
