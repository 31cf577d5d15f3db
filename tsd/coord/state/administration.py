"""What the administrator can ask and do; answers are plain dicts for JSON. Faults are `ConfigError`s of one line."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from tsd.base.errors import ConfigError
from tsd.coord.policy.load import load
from tsd.coord.state.coordinator import Coordinator
from tsd.coord.state.naming import is_label
from tsd.coord.state.records import AuthKey, Moment, NodeRecord, is_prefix
from tsd.coord.state.registration import Refused, hash_secret, random_text
from tsd.tailcfg.wire import time_text

_TAG = re.compile(r"tag:[A-Za-z][A-Za-z0-9-]*\Z")
_USER = re.compile(r"[A-Za-z0-9._+-]{1,64}(?:@[A-Za-z0-9.-]{0,190})?\Z")


class Administration:
    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.registry = coordinator.registry

    # Auth keys

    def create_key(
        self,
        moment: Moment,
        *,
        user: str = "",
        tags: tuple[str, ...] = (),
        reusable: bool = False,
        ephemeral: bool = False,
        expiry_s: float | None = 86400.0,
    ) -> dict[str, Any]:
        """The one time that the secret is shown, under "key"."""
        for tag in tags:
            if not _TAG.match(tag):
                raise ConfigError(f"tag {tag!r} must look like tag:name")
        if expiry_s is not None and expiry_s <= 0:
            raise ConfigError("expiry must be longer than nothing")
        owner = self.registry.ensure_user(self._user_name(user), moment.wall_ns)
        entropy = self.coordinator.entropy
        ident, secret = random_text(entropy, 12), random_text(entropy, 40)
        auth_key = AuthKey(
            id=self.registry.new_id("auth_keys"),
            ident=ident,
            secret_hash=hash_secret(secret),
            user_id=owner.id,
            tags=tuple(dict.fromkeys(tags)),
            reusable=reusable,
            ephemeral=ephemeral,
            created_ns=moment.wall_ns,
            expiry_ns=None if expiry_s is None else moment.wall_ns + int(expiry_s * 1e9),
        )
        self.registry.save_key(auth_key)
        return {**self.describe_key(auth_key, moment), "key": f"tskey-auth-{ident}-{secret}"}

    def list_keys(self, moment: Moment) -> list[dict[str, Any]]:
        return [self.describe_key(one, moment) for _id, one in sorted(self.registry.auth_keys.items())]

    def revoke_key(self, wanted: str, moment: Moment) -> dict[str, Any]:
        """By number, or by the whole key or its public part."""
        for auth_key in self.registry.auth_keys.values():
            if wanted == str(auth_key.id) or auth_key.ident in wanted.split("-"):
                revoked = replace(auth_key, revoked=True)
                self.registry.save_key(revoked)
                return self.describe_key(revoked, moment)
        raise ConfigError(f"no auth key {wanted!r}; 'tsd coord keys list' shows them")

    def describe_key(self, auth_key: AuthKey, moment: Moment) -> dict[str, Any]:
        return {
            "id": auth_key.id,
            "prefix": f"tskey-auth-{auth_key.ident}",
            "user": self.registry.login_name(auth_key.user_id),
            "tags": list(auth_key.tags),
            "reusable": auth_key.reusable,
            "ephemeral": auth_key.ephemeral,
            "created": time_text(auth_key.created_ns),
            "expiry": None if auth_key.expiry_ns is None else time_text(auth_key.expiry_ns),
            "uses": auth_key.uses,
            "state": _key_state(auth_key, moment.wall_ns),
        }

    def _user_name(self, name: str) -> str:
        chosen = name or self.coordinator.config.default_user
        if not _USER.match(chosen):
            raise ConfigError(f"user name {chosen!r} must be letters, digits and . _ + -, perhaps with @domain")
        return chosen

    # Nodes

    def list_nodes(self, moment: Moment) -> list[dict[str, Any]]:
        return [self.describe_node(node, moment) for _id, node in sorted(self.registry.nodes.items())]

    def list_pending(self) -> list[dict[str, Any]]:
        """Interactive logins that wait for `nodes approve`."""
        return [
            {"id": one.auth_id, "hostname": one.request.hostinfo.hostname if one.request.hostinfo else ""}
            for one in self.coordinator.registration.pending.values()
        ]

    def describe_node(self, node: NodeRecord, moment: Moment) -> dict[str, Any]:
        carries = self.registry.routers.carries
        return {
            "id": node.id,
            "name": node.label,
            "fqdn": f"{node.label}.{self.coordinator.config.base_domain}",
            "hostname": node.hostname,
            "user": self.registry.login_name(node.owner_id),
            "tags": list(node.tags),
            "addresses": list(node.addresses),
            "nodeKey": node.node_key,
            "machineKey": node.machine_key,
            "online": node.id in self.registry.online,
            "lastSeen": None if node.last_seen_ns is None else time_text(node.last_seen_ns),
            "expiry": None if node.expiry_ns is None else time_text(node.expiry_ns),
            "expired": node.is_expired(moment.wall_ns),
            "ephemeral": node.ephemeral,
            "created": time_text(node.created_ns),
            "homeDERP": node.home_derp,
            "endpoints": list(node.endpoints),
            "os": node.hostinfo.os,
            "version": node.hostinfo.ipn_version,
            "advertisedRoutes": list(node.advertised),
            "approvedRoutes": list(node.approved_routes),
            "primaryRoutes": [str(r) for r in node.routes if r.prefixlen and carries(node.id, r)],
        }

    def find_node(self, wanted: str) -> NodeRecord:
        """By ID, name, FQDN, address or node key."""
        registry = self.registry
        label = wanted.lower().removesuffix(".").removesuffix("." + self.coordinator.config.base_domain)
        for node in registry.nodes.values():
            if wanted in (str(node.id), node.node_key) or label == node.label or wanted in node.addresses:
                return node
        raise ConfigError(f"no node {wanted!r}; 'tsd coord nodes list' shows them")

    def approve(self, auth_id: str, user: str, moment: Moment) -> dict[str, Any]:
        """Finish an interactive login; takes the ID or the whole URL."""
        owner = self.registry.ensure_user(self._user_name(user), moment.wall_ns)
        try:
            node = self.coordinator.registration.approve(auth_id.rstrip("/").rpartition("/")[2], owner.id, moment)
        except Refused as refusal:
            raise ConfigError(str(refusal)) from None
        self.coordinator.touch(node, moment)
        self.coordinator.watch_expiry(node, moment)
        return self._changed(node, moment)

    def expire(self, wanted: str, moment: Moment) -> dict[str, Any]:
        """The node must log in again."""
        node = replace(self.find_node(wanted), expiry_ns=moment.wall_ns)
        self.registry.put(node)
        return self._changed(node, moment)

    def rename(self, wanted: str, name: str, moment: Moment) -> dict[str, Any]:
        """An empty name gives the node the name of its host again."""
        node = self.find_node(wanted)
        lowered = name.lower()
        if not name:
            label = self.registry.label_for(node.hostname, node.id)
        elif not is_label(lowered):
            raise ConfigError(f"name {name!r} must be 1-63 letters, digits and hyphens, no hyphen at the ends")
        elif self.registry.by_label.get(lowered, node.id) != node.id:
            raise ConfigError(f"name {lowered!r} is taken by another node")
        else:
            label = lowered
        node = replace(node, label=label, renamed=bool(name))
        self.registry.put(node)
        return self._changed(node, moment)

    def approve_routes(self, wanted: str, routes: tuple[str, ...], moment: Moment) -> dict[str, Any]:
        """Replace the approved set; routes need not be advertised yet. Exit: 0.0.0.0/0 (brings ::/0 along)."""
        node = self.find_node(wanted)
        for route in routes:
            if not is_prefix(route):
                raise ConfigError(f"route {route!r} must be a prefix like 10.0.0.0/24, without host bits")
        chosen = dict.fromkeys(routes)
        if "0.0.0.0/0" in chosen or "::/0" in chosen:
            chosen.update({"0.0.0.0/0": None, "::/0": None})
        node = replace(node, approved_routes=tuple(chosen))
        self.registry.put(node)
        return self._changed(node, moment)

    def delete(self, wanted: str, moment: Moment) -> dict[str, Any]:
        node = self.find_node(wanted)
        described = self.describe_node(node, moment)
        self.registry.remove(node.id)
        self.coordinator.settle(moment)
        return described

    def _changed(self, node: NodeRecord, moment: Moment) -> dict[str, Any]:
        self.coordinator.settle(moment)
        return self.describe_node(node, moment)

    # Users and policy

    def list_users(self) -> list[dict[str, Any]]:
        return [
            {"id": one.id, "name": one.name, "loginName": one.login_name, "admin": one.is_admin}
            for one in self.registry.users.values()
        ]

    def set_policy(self, text: str, moment: Moment) -> None:
        """Raises `PolicyError` and keeps the old policy."""
        self.registry.set_policy(load(text))
        self.coordinator.settle(moment)


def _key_state(auth_key: AuthKey, wall_ns: int) -> str:
    if auth_key.revoked:
        return "revoked"
    if auth_key.expiry_ns is not None and auth_key.expiry_ns <= wall_ns:
        return "expired"
    return "used" if auth_key.uses and not auth_key.reusable else "valid"
