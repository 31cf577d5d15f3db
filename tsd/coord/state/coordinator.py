"""The coordination server as one sans-IO machine: registration, map polls, lite updates, administration, timers.

Inputs are verbs; `take_outputs` gives what is to be done, in order (see `events`). The server drives it, tests too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from msgspec.structs import replace

from tsd.base.addr import AddrPort
from tsd.base.entropy import Entropy, uniform
from tsd.base.errors import DecodeError
from tsd.base.keys import DiscoPublic
from tsd.base.machine import Deadline
from tsd.coord.policy.model import DEFAULT_POLICY, Policy
from tsd.coord.state.config import CoordConfig
from tsd.coord.state.events import Event, FrameReady
from tsd.coord.state.records import MAX_SMALL_INT, AuthKey, Moment, NodeRecord, User
from tsd.coord.state.registration import Registration
from tsd.coord.state.registry import Change, Registry
from tsd.coord.state.sessions import Sessions
from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.mapping import MapRequest, PingRequest
from tsd.tailcfg.register import RegisterRequest
from tsd.tailcfg.wire import encode_json

MAX_ENDPOINTS = 64
DUPLICATE_TEXT = (
    "The node key of this machine is in use by another running daemon (cloned disk or copied state?). "
    "Give one of them its own state: log out and in again there."
)


class Coordinator:
    def __init__(self, config: CoordConfig, entropy: Entropy, policy: Policy = DEFAULT_POLICY) -> None:
        self.config = config
        self.entropy = entropy
        self.outputs: list[Event] = []
        self.sessions = Sessions(self.outputs)
        self.registry = Registry(config, self.outputs, self.sessions)
        self.sessions.registry = self.registry
        self.registration = Registration(self.registry, self.outputs, entropy)
        self.registry.set_policy(policy)
        self._timers: list[tuple[float, int, str, int]] = []
        self._timer_count = 0
        self._flush_at: float | None = None
        self._contact: dict[int, float] = {}
        self._reaping: dict[int, None] = {}
        self._discos: dict[int, list[str]] = {}
        self._duplicates: dict[int, None] = {}

    def load(
        self, users: Iterable[User], auth_keys: Iterable[AuthKey], nodes: Iterable[NodeRecord], moment: Moment
    ) -> None:
        """Take over what the store holds; ephemeral nodes get their full grace from now."""
        self.registry.load(users, auth_keys, nodes)
        self.registry.approve_automatically(self.registry.nodes.values())
        for node in self.registry.nodes.values():
            self.touch(node, moment)
            self.watch_expiry(node, moment)
        self._arm("save", 0, moment.now + self.config.save_delay_s)

    # Requests of nodes

    def find(self, machine: str, node_key: str) -> NodeRecord | None:
        """The node that a map request may speak for; None is answered 404."""
        node_id = self.registry.by_node_key.get(node_key)
        node = self.registry.nodes[node_id] if node_id is not None else None
        return node if node is not None and node.machine_key == machine else None

    def register(self, token: int, machine: str, request: RegisterRequest, moment: Moment) -> None:
        """A `RegisterAnswered` for `token` follows, possibly much later."""
        node_id = self.registration.register(token, machine, request, moment)
        if node_id:
            self.touch(self.registry.nodes[node_id], moment)
            self.watch_expiry(self.registry.nodes[node_id], moment)
        self.settle(moment)

    def cancel_register(self, token: int) -> None:
        self.registration.cancel(token)

    def open_poll(self, session_id: int, node: NodeRecord, request: MapRequest, moment: Moment) -> None:
        """Start a map stream; its first `FrameReady` follows at once."""
        self.touch(node, moment)
        self.update(node, request, moment, is_poll=True)
        self.registry.set_online(self.registry.nodes[node.id], True)
        self.sessions.start(session_id, node.id, request.disco_key, moment)
        self._arm("keepalive", session_id, moment.now + self._keepalive_interval())
        self.settle(moment)

    def close_poll(self, session_id: int, moment: Moment) -> None:
        session = self.sessions.stop(session_id)
        if session is None:
            return
        if session.node_id in self._duplicates and len(self.sessions.of_node(session.node_id)) < 2:
            del self._duplicates[session.node_id]
            self._tell_health(session.node_id)
            self.settle(moment)
        if self.sessions.is_polling(session.node_id):
            return
        self._discos.pop(session.node_id, None)
        self.touch(self.registry.nodes[session.node_id], moment)
        self._arm("offline", session.node_id, moment.now + self.config.offline_grace_s)

    def update(self, node: NodeRecord, request: MapRequest, moment: Moment, is_poll: bool = False) -> None:
        """Take over what the node says about itself. A poll may carry less than a lite update does."""
        self.touch(node, moment)
        changed = replace(node, cap=min(request.version, MAX_SMALL_INT))
        if node.id not in self.registry.online:
            # Clients ignore a new disco key of an offline peer unless it was seen since.
            changed = replace(changed, last_seen_ns=moment.wall_ns)
        disco = _disco_text(request.disco_key)
        if disco:
            changed = replace(changed, disco_key=disco)
            self._note_disco(node, disco)
        if request.endpoints is not None or not is_poll:
            changed = replace(changed, endpoints=_usable_endpoints(request.endpoints or ()))
        if request.hostinfo is not None:
            changed = self._with_hostinfo(changed, request.hostinfo)
        if changed != node:
            self.registry.put(changed, _difference(node, changed))
        self._tell_health(node.id)
        self.settle(moment)

    def map_once(self, node: NodeRecord, request: MapRequest, moment: Moment) -> bytes:
        """One whole map without a poll."""
        self.update(node, request, moment, is_poll=True)
        return self.sessions.snapshot(node.id, moment)

    def send_ping(self, node_id: int, ping: PingRequest) -> bool:
        """Put a PingRequest on every poll of the node; False when it has none."""
        frame = encode_json({"PingRequest": ping})
        sessions = self.sessions.of_node(node_id)
        self.outputs.extend(FrameReady(session.id, frame) for session in sessions)
        return bool(sessions)

    def is_admitted(self, node_key: str, wall_ns: int) -> bool:
        """Whether the relay may serve this node key."""
        node_id = self.registry.by_node_key.get(node_key)
        return node_id is not None and not self.registry.nodes[node_id].is_expired(wall_ns)

    # Timers

    def next_deadline(self) -> Deadline | None:
        timer = Deadline(self._timers[0][0], self._timers[0][2]) if self._timers else None
        if self._flush_at is not None and (timer is None or self._flush_at <= timer.at):
            return Deadline(self._flush_at, "flush")
        return timer

    def on_deadline(self, moment: Moment) -> None:
        while self._timers and self._timers[0][0] <= moment.now:
            _at, _count, kind, subject = heapq.heappop(self._timers)
            getattr(self, f"_on_{kind}")(subject, moment)
        if self._flush_at is not None and self._flush_at <= moment.now:
            self._flush_at = None
            self.sessions.flush(moment)
            if self.sessions.is_dirty:
                self._flush_at = moment.now
        self.settle(moment)

    def take_outputs(self) -> list[Event]:
        taken = list(self.outputs)
        self.outputs.clear()
        return taken

    def settle(self, moment: Moment) -> None:
        """After any change: have it flushed soon."""
        if self.sessions.is_dirty and self._flush_at is None:
            self._flush_at = moment.now + self.config.flush_delay_s

    def watch_expiry(self, node: NodeRecord, moment: Moment) -> None:
        """Tell the peers when the key of `node` expires."""
        if node.expiry_ns is not None and node.expiry_ns > moment.wall_ns:
            self._arm("expire", node.id, moment.now + (node.expiry_ns - moment.wall_ns) / 1e9 + 0.001)

    def touch(self, node: NodeRecord, moment: Moment) -> None:
        """Contact with the node: ephemeral nodes are kept from here on."""
        self._contact[node.id] = moment.now
        if node.ephemeral and node.id not in self._reaping:
            self._reaping[node.id] = None
            self._arm("reap", node.id, moment.now + self.config.ephemeral_timeout_s)

    def _arm(self, kind: str, subject: int, at: float) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (at, self._timer_count, kind, subject))

    def _keepalive_interval(self) -> float:
        return self.config.keepalive_s + uniform(self.entropy, 0.0, self.config.keepalive_s / 6)

    def _on_keepalive(self, session_id: int, moment: Moment) -> None:
        session = self.sessions.open.get(session_id)
        if session is None:
            return
        due = session.last_frame + self.config.keepalive_s
        if due <= moment.now:
            self.sessions.keep_alive(session, moment.now)
            due = moment.now + self._keepalive_interval()
        self.touch(self.registry.nodes[session.node_id], moment)
        self._arm("keepalive", session_id, due)

    def _on_offline(self, node_id: int, moment: Moment) -> None:
        node = self.registry.nodes.get(node_id)
        if node is None or self.sessions.is_polling(node_id):
            return
        due = self._contact[node_id] + self.config.offline_grace_s
        if due > moment.now:
            self._arm("offline", node_id, due)
            return
        wall_ns = moment.wall_ns - int((moment.now - self._contact[node_id]) * 1e9)
        self.registry.put(replace(node, last_seen_ns=wall_ns), Change.NOTHING)
        self.registry.set_online(self.registry.nodes[node_id], False)

    def _on_reap(self, node_id: int, moment: Moment) -> None:
        self._reaping.pop(node_id, None)
        node = self.registry.nodes.get(node_id)
        if node is None or not node.ephemeral:
            return
        if self.sessions.is_polling(node_id):
            self._contact[node_id] = moment.now
        due = self._contact[node_id] + self.config.ephemeral_timeout_s
        if due <= moment.now:
            self._contact.pop(node_id)
            self.registry.remove(node_id)
        else:
            self._reaping[node_id] = None
            self._arm("reap", node_id, due)

    def _on_expire(self, node_id: int, moment: Moment) -> None:
        node = self.registry.nodes.get(node_id)
        if node is not None and node.is_expired(moment.wall_ns):
            self.sessions.node_changed(node_id, Change.WHOLE)
        elif node is not None:
            self.watch_expiry(node, moment)

    def _on_save(self, _subject: int, moment: Moment) -> None:
        self.registry.save_later_changes()
        self.registration.expire_pending(moment.now)
        if len(self._contact) > len(self.registry.nodes):
            self._contact = {one: at for one, at in self._contact.items() if one in self.registry.nodes}
        self._arm("save", 0, moment.now + self.config.save_delay_s)

    # Details of updates

    def _with_hostinfo(self, node: NodeRecord, hostinfo: Hostinfo) -> NodeRecord:
        region = hostinfo.net_info.preferred_derp if hostinfo.net_info is not None else 0
        region = region if 0 < region <= MAX_SMALL_INT else 0
        if hostinfo.net_info is None and node.hostinfo.net_info is not None:
            hostinfo = replace(hostinfo, net_info=node.hostinfo.net_info)
        changed = replace(node, hostinfo=hostinfo, home_derp=region or node.home_derp)
        if hostinfo.hostname != node.hostname:
            changed = replace(changed, hostname=hostinfo.hostname)
            if not node.renamed:
                changed = replace(changed, label=self.registry.label_for(hostinfo.hostname, node.id))
        wanted = tuple(dict.fromkeys(hostinfo.request_tags or ()))
        if wanted and set(wanted) != set(node.tags) and self.registration.may_retag(node, wanted):
            changed = replace(changed, tags=wanted, expiry_ns=None)
        if hostinfo.routable_ips != node.hostinfo.routable_ips:
            changed = replace(changed, approved_routes=self.registry.granted_routes(changed))
        return changed

    def _note_disco(self, node: NodeRecord, disco: str) -> None:
        """Two live daemons with one node key show as disco keys that alternate."""
        seen = self._discos.setdefault(node.id, [])
        if seen and seen[-1] == disco:
            return
        seen.append(disco)
        del seen[:-3]
        if len(seen) == 3 and seen[0] == seen[2] and len(self.sessions.of_node(node.id)) > 1:
            self._duplicates[node.id] = None

    def _tell_health(self, node_id: int) -> None:
        """What the node's user should know: it stands in every map until it is over."""
        node = self.registry.nodes[node_id]
        lines = [DUPLICATE_TEXT] if node_id in self._duplicates else []
        refused = [tag for tag in node.hostinfo.request_tags or () if tag not in node.tags]
        if refused:
            lines.append(f"requested tags [{' '.join(refused)}] are invalid or not permitted; {_kept_owner(node)}")
        self.sessions.set_health(node_id, lines)


def _kept_owner(node: NodeRecord) -> str:
    return f"this machine keeps [{' '.join(node.tags)}]" if node.tags else "this machine stays its user's"


def _difference(old: NodeRecord, new: NodeRecord) -> int:
    """How much of a node is new to its peers; nothing, when only the server cares."""
    paths = {"endpoints": (), "home_derp": 0, "disco_key": "", "cap": 0, "last_seen_ns": None}
    quiet = replace(new.hostinfo, net_info=old.hostinfo.net_info) == old.hostinfo
    leveled = [replace(one, **paths, hostinfo=old.hostinfo if quiet else one.hostinfo) for one in (old, new)]
    if leveled[0] != leveled[1]:
        return Change.WHOLE
    moved = any(getattr(old, name) != getattr(new, name) for name in ("endpoints", "home_derp", "disco_key", "cap"))
    if moved:
        return Change.PATH
    return Change.ONLINE if old.last_seen_ns != new.last_seen_ns else Change.NOTHING


def _disco_text(text: str) -> str:
    """ "" for a key that is absent, zero or malformed."""
    try:
        parsed = DiscoPublic.parse(text)
    except DecodeError:
        return ""
    return "" if parsed.is_zero else str(parsed)


def _usable_endpoints(texts: Iterable[str]) -> tuple[str, ...]:
    """Without link-local and zoned IPv6, duplicates and garbage."""
    found: dict[str, None] = {}
    for text in texts:
        try:
            endpoint = AddrPort.parse(text)
        except DecodeError:
            continue
        if endpoint.port and not (endpoint.ip.version == 6 and endpoint.ip.is_link_local):
            found[str(endpoint)] = None
    return tuple(found)[:MAX_ENDPOINTS]
