"""The tables of the tailnet in memory, with their indexes; every lasting change leaves as a `Save`.

One listener (the map sessions) is told which node changed and how. Nothing here looks at all nodes because one changed,
except a new policy, which concerns everybody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from tsd.base.addr import IPAddress, parse_prefix
from tsd.base.log import fields
from tsd.coord.policy.compile import CompiledPolicy
from tsd.coord.policy.model import DEFAULT_POLICY, Policy, Subject, UserRef
from tsd.coord.state.addresses import AddressPool
from tsd.coord.state.config import CoordConfig
from tsd.coord.state.events import Event, Save
from tsd.coord.state.naming import label_for, unique_label
from tsd.coord.state.records import TAGGED_LOGIN, TAGGED_USER_ID, AuthKey, NodeRecord, User, problem
from tsd.coord.state.visibility import PrimaryRoutes, Visibility

log = logging.getLogger("tsd.coord")

MAX_KEPT_KEYS = 1000


class Change:
    """How a node changed, as bits; plain integers, because every poll is noted for every change."""

    NOTHING: Final = 0
    ONLINE: Final = 1
    PATH: Final = 2  # endpoints, home region, disco key, capability version
    WHOLE: Final = 4


class Listener(Protocol):
    def node_changed(self, node_id: int, change: int) -> None: ...
    def node_removed(self, node_id: int) -> None: ...
    def sources_changed(self, node_id: int, rules: int) -> None: ...
    def filter_changed(self, node_id: int) -> None: ...
    def policy_changed(self) -> None: ...


class Registry:
    def __init__(self, config: CoordConfig, outputs: list[Event], listener: Listener) -> None:
        self.config = config
        self.outputs = outputs
        self.listener = listener
        self.pool = AddressPool(config.prefix_v4, config.prefix_v6)
        self.nodes: dict[int, NodeRecord] = {}
        self.users: dict[int, User] = {}
        self.auth_keys: dict[int, AuthKey] = {}
        self.by_node_key: dict[str, int] = {}
        self.by_machine: dict[str, dict[int, None]] = {}
        self.by_label: dict[str, int] = {}
        self.by_address: dict[IPAddress, int] = {}
        self.online: dict[int, None] = {}
        self.routers = PrimaryRoutes()
        self.visibility = Visibility(CompiledPolicy(DEFAULT_POLICY))
        self.unsaved: dict[int, None] = {}
        self._last_ids = {"users": 0, "auth_keys": 0, "nodes": 0}

    # Loading

    def load(self, users: Iterable[User], auth_keys: Iterable[AuthKey], nodes: Iterable[NodeRecord]) -> None:
        """Take over the store's records. A node that cannot be served is left out with a log line."""
        for user in users:
            self.users[user.id] = user
            self.reserve_id("users", user.id)
        for auth_key in auth_keys:
            self.auth_keys[auth_key.id] = auth_key
            self.reserve_id("auth_keys", auth_key.id)
        for node in nodes:
            self.reserve_id("nodes", node.id)
            reason = problem(node) or self._clash(node)
            if reason:
                log.warning(fields("node left out", node=node.id, reason=reason))
                continue
            for address in node.ips:
                self.pool.note_used(address)
            self._index(node)
            self.visibility.put(self.subject(node))
            self.routers.update(node.id, node.routes, is_online=False)

    def _clash(self, node: NodeRecord) -> str:
        if node.node_key in self.by_node_key:
            return "node key of another node"
        if any(address in self.by_address for address in node.ips):
            return "address of another node"
        return "name of another node" if node.label in self.by_label else ""

    def reserve_id(self, table: str, used: int) -> None:
        """IDs are never given out twice, not even after a deletion."""
        self._last_ids[table] = max(self._last_ids[table], used)

    def restore_ids(self, last_ids: dict[str, int]) -> None:
        for table, used in last_ids.items():
            self.reserve_id(table, used)

    def new_id(self, table: str) -> int:
        self._last_ids[table] += 1
        return self._last_ids[table]

    def label_for(self, hostname: str, node_id: int = 0) -> str:
        """The free label for `hostname`; the node's own counts as free."""
        return unique_label(label_for(hostname), _OthersLabels(self.by_label, node_id))

    # Users and keys

    def user_named(self, name: str) -> User | None:
        wanted = name.lower().removesuffix("@")
        return next((u for u in self.users.values() if wanted in (u.name.lower(), u.login_name.lower())), None)

    def ensure_user(self, name: str, wall_ns: int) -> User:
        """The user of that name, made when new; the first one is the administrator."""
        found = self.user_named(name)
        if found is not None:
            return found
        short = name.removesuffix("@")
        login = short if "@" in short else f"{short}@{self.config.base_domain}"
        user = User(self.new_id("users"), short.partition("@")[0], login, wall_ns, is_admin=not self.users)
        self.users[user.id] = user
        self.outputs.append(Save("users", user.id, msgspec.json.encode(user)))
        return user

    def save_key(self, auth_key: AuthKey) -> None:
        self.auth_keys[auth_key.id] = auth_key
        self.outputs.append(Save("auth_keys", auth_key.id, msgspec.json.encode(auth_key)))
        if len(self.auth_keys) > MAX_KEPT_KEYS:
            self._forget_a_spent_key()

    def _forget_a_spent_key(self) -> None:
        """Machines that make a key for every node would fill the store; the oldest that lets nobody in goes."""
        spent = (one for one in self.auth_keys.values() if one.revoked or (one.uses and not one.reusable))
        oldest = min(spent, key=lambda one: one.id, default=None)
        if oldest is not None:
            del self.auth_keys[oldest.id]
            self.outputs.append(Save("auth_keys", oldest.id, None))

    def login_name(self, user_id: int) -> str:
        if user_id == TAGGED_USER_ID:
            return TAGGED_LOGIN
        user = self.users.get(user_id)
        return user.login_name if user is not None else f"user-{user_id}"

    # Nodes

    def subject(self, node: NodeRecord) -> Subject:
        user = self.users.get(node.user_id) if not node.tags else None
        ref = UserRef(user.login_name, user.name, user.is_admin) if user is not None else None
        return Subject(node.id, ref, node.tags, node.ips, node.routes)

    def put(self, node: NodeRecord, change: int = Change.WHOLE) -> None:
        """Add or replace a node: indexes, store, listeners."""
        self._unindex(self.nodes.get(node.id))
        self._index(node)
        if change & Change.WHOLE:
            self.save(node.id)
            self._update_routes(node)
            rules, is_filter_changed = self.visibility.put(self.subject(node))
            if rules:
                self.listener.sources_changed(node.id, rules)
            if is_filter_changed:
                self.listener.filter_changed(node.id)
        else:
            self.unsaved[node.id] = None
        if change:
            self.listener.node_changed(node.id, change)

    def remove(self, node_id: int) -> None:
        node = self.nodes.pop(node_id)
        self.online.pop(node_id, None)
        self.unsaved.pop(node_id, None)
        self._unindex(node)
        rules = self.visibility.remove(node_id)
        self.listener.sources_changed(node_id, rules)
        self._note_routers(self.routers.update(node_id, (), is_online=False), node_id)
        self.outputs.append(Save("nodes", node_id, None))
        self.listener.node_removed(node_id)

    def set_online(self, node: NodeRecord, is_online: bool) -> None:
        if is_online == (node.id in self.online):
            return
        if is_online:
            self.online[node.id] = None
        else:
            self.online.pop(node.id)
        self._update_routes(node)
        self.unsaved[node.id] = None
        self.listener.node_changed(node.id, Change.ONLINE)

    def save(self, node_id: int) -> None:
        self.unsaved.pop(node_id, None)
        node = self.nodes[node_id]
        self.outputs.append(Save("nodes", node_id, msgspec.json.encode(node)))

    def save_later_changes(self) -> None:
        """Write what changed without need for haste: endpoints, last contact."""
        for node_id in list(self.unsaved):
            self.save(node_id)

    def set_policy(self, policy: Policy) -> None:
        """Compare everybody with the new rules, once."""
        fresh = Visibility(CompiledPolicy(policy))
        for node in self.nodes.values():
            fresh.put(self.subject(node))
        self.visibility = fresh
        self.approve_automatically(self.nodes.values())
        self.listener.policy_changed()

    def approve_automatically(self, nodes: Iterable[NodeRecord]) -> None:
        """Add the routes that the policy approves without an administrator."""
        for node in list(nodes):
            granted = self.granted_routes(node)
            if granted != node.approved_routes:
                self.put(replace(node, approved_routes=granted))

    def granted_routes(self, node: NodeRecord) -> tuple[str, ...]:
        compiled, subject = self.visibility.compiled, self.subject(node)
        extra = [text for text in node.advertised if compiled.approves_route(subject, parse_prefix(text))]
        return tuple(dict.fromkeys((*node.approved_routes, *extra)))

    def _update_routes(self, node: NodeRecord) -> None:
        changed = self.routers.update(node.id, node.routes, node.id in self.online)
        self._note_routers(changed, node.id)

    def _note_routers(self, changed: list[int], cause: int) -> None:
        for node_id in changed:
            if node_id in self.nodes or node_id == cause:
                self.listener.node_changed(node_id, Change.WHOLE)

    def _index(self, node: NodeRecord) -> None:
        self.nodes[node.id] = node
        self.by_node_key[node.node_key] = node.id
        self.by_machine.setdefault(node.machine_key, {})[node.id] = None
        self.by_label[node.label] = node.id
        for address in node.ips:
            self.by_address[address] = node.id

    def _unindex(self, node: NodeRecord | None) -> None:
        if node is None:
            return
        self.by_node_key.pop(node.node_key, None)
        self.by_label.pop(node.label, None)
        for address in node.ips:
            self.by_address.pop(address, None)
        machines = self.by_machine.get(node.machine_key, {})
        machines.pop(node.id, None)
        if not machines:
            self.by_machine.pop(node.machine_key, None)


class _OthersLabels:
    def __init__(self, labels: dict[str, int], node_id: int) -> None:
        self._labels = labels
        self._node_id = node_id

    def __contains__(self, label: object) -> bool:
        return self._labels.get(str(label), self._node_id) != self._node_id
