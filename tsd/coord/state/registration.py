"""Registration: who may become a node, by auth key or by the administrator's approval.

Spec: control.md section 3 (tailscale: tailcfg RegisterRequest, control/controlclient/direct.go; headscale's texts for
refusals). A node that is known under the same machine key and node key and has not expired needs no credentials, so a
spent or vanished auth key never logs a running node out.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from tsd.base.entropy import Entropy
from tsd.base.errors import DecodeError, TsdError
from tsd.base.keys import NodePublic
from tsd.coord.policy.model import Subject, UserRef
from tsd.coord.state.events import ApprovalWanted, Event, RegisterAnswered
from tsd.coord.state.records import MAX_SMALL_INT, AuthKey, Moment, NodeRecord
from tsd.coord.state.registry import Registry
from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.register import RegisterRequest, RegisterResponse
from tsd.tailcfg.user import Login, User
from tsd.tailcfg.wire import time_ns

MAX_PENDING = 1000
PENDING_S = 3600.0

_AUTH_KEY = re.compile(r"tskey-auth-([a-z2-7]{12})-([a-z2-7]{40})\Z")
_AUTH_ID = re.compile(r"[a-z2-7]{24}\Z")
_TAG = re.compile(r"tag:[A-Za-z][A-Za-z0-9-]*\Z")


class Refused(TsdError):
    """The text goes to the user of the node."""


class Grant(NamedTuple):
    """What lets a node in: an owner, perhaps tags, perhaps the auth key that gave them."""

    user_id: int
    tags: tuple[str, ...] = ()
    ephemeral: bool = False
    auth_key: AuthKey | None = None


@dataclass(slots=True)
class Pending:
    """An interactive login that waits for approval; `waiting` are the held requests."""

    auth_id: str
    machine: str
    request: RegisterRequest
    since: float
    waiting: list[int] = field(default_factory=list)


def random_text(entropy: Entropy, characters: int) -> str:
    """Lower-case base32, five bits a character."""
    raw = entropy((characters * 5 + 7) // 8)
    return base64.b32encode(raw).decode().lower().rstrip("=")[:characters]


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Registration:
    def __init__(self, registry: Registry, outputs: list[Event], entropy: Entropy) -> None:
        self.registry = registry
        self.outputs = outputs
        self.entropy = entropy
        self.pending: dict[str, Pending] = {}

    # Verbs

    def register(self, token: int, machine: str, request: RegisterRequest, moment: Moment) -> int:
        """Answer with `RegisterAnswered`, now or (held followup) later. Returns the node concerned, 0 for none."""
        try:
            return self._register(token, machine, request, moment)
        except Refused as refusal:
            self._answer(token, RegisterResponse(error=str(refusal)))
            return 0

    def cancel(self, token: int) -> None:
        """The client of a held request has gone."""
        for pending in self.pending.values():
            if token in pending.waiting:
                pending.waiting.remove(token)

    def approve(self, auth_id: str, user_id: int, moment: Moment) -> NodeRecord:
        """Let a waiting node in. Raises `Refused`."""
        pending = self.pending.get(auth_id)
        if pending is None:
            raise Refused(f"no node waits under {auth_id!r} (it may have been approved or given up)")
        tags = self._requested_tags(pending.request.hostinfo, user_id)
        waiting, pending.waiting = pending.waiting, []
        node = self._admit(pending.machine, pending.request, Grant(user_id, tags), moment)
        for token in waiting:
            self._answer(token, self._success(node))
        return node

    def expire_pending(self, now: float) -> None:
        for pending in [one for one in self.pending.values() if now - one.since >= PENDING_S]:
            self._drop(pending)

    # Rules, in order

    def _register(self, token: int, machine: str, request: RegisterRequest, moment: Moment) -> int:
        key_text = self._node_key(request.node_key)
        request = replace(request, node_key=key_text)
        node = self._known(key_text, machine)
        expiry_ns = time_ns(request.expiry)
        if expiry_ns is not None and expiry_ns <= moment.wall_ns:
            return self._log_out(token, node, moment)
        if node is not None and not node.is_expired(moment.wall_ns):
            if expiry_ns is not None:
                node = self._shorten(node, expiry_ns)
            self._answer(token, self._success(node))
            return node.id
        if request.auth is not None and request.auth.auth_key:
            grant = self._redeem(request.auth.auth_key.strip(), request, moment)
            node = self._admit(machine, request, grant, moment)
            self._answer(token, self._success(node))
            return node.id
        self._wait_for_approval(token, machine, request, moment)
        return 0

    def _node_key(self, text: str) -> str:
        try:
            parsed = NodePublic.parse(text)
        except DecodeError:
            raise Refused("invalid node key") from None
        if parsed.is_zero:
            raise Refused("node key is zero")
        return str(parsed)

    def _known(self, node_key: str, machine: str) -> NodeRecord | None:
        node_id = self.registry.by_node_key.get(node_key)
        if node_id is None:
            return None
        node = self.registry.nodes[node_id]
        if node.machine_key != machine:
            raise Refused("node exists with a different machine key")
        return node

    def _log_out(self, token: int, node: NodeRecord | None, moment: Moment) -> int:
        if node is not None:
            if node.ephemeral:
                self.registry.remove(node.id)
            elif not node.is_expired(moment.wall_ns):
                self.registry.put(replace(node, expiry_ns=moment.wall_ns))
        self._answer(token, RegisterResponse(node_key_expired=True))
        return 0

    def _shorten(self, node: NodeRecord, expiry_ns: int) -> NodeRecord:
        if node.expiry_ns is not None and expiry_ns > node.expiry_ns:
            raise Refused("extending key is not allowed")
        shorter = replace(node, expiry_ns=expiry_ns)
        self.registry.put(shorter)
        return shorter

    def _redeem(self, text: str, request: RegisterRequest, moment: Moment) -> Grant:
        """What the key grants; it is counted as used only when the node is really let in."""
        auth_key = self._find_key(text)
        if auth_key.revoked:
            raise Refused("authkey revoked")
        if auth_key.expiry_ns is not None and auth_key.expiry_ns <= moment.wall_ns:
            raise Refused("authkey expired")
        if auth_key.uses and not auth_key.reusable:
            raise Refused("authkey already used")
        wanted = self._valid_tags(request.hostinfo)
        extra = tuple(tag for tag in wanted if tag not in auth_key.tags)
        if extra and not self._owns_all(auth_key.user_id, auth_key.tags, extra):
            raise Refused(f"requested tags [{' '.join(extra)}] are invalid or not permitted")
        tags = tuple(dict.fromkeys((*auth_key.tags, *extra)))
        return Grant(auth_key.user_id, tags, auth_key.ephemeral, auth_key)

    def _find_key(self, text: str) -> AuthKey:
        match = _AUTH_KEY.match(text.partition("--TL")[0])
        ident, secret = (match[1], match[2]) if match else ("", "")
        found = next((one for one in self.registry.auth_keys.values() if one.ident == ident), None)
        if found is None or not hmac.compare_digest(found.secret_hash, hash_secret(secret)):
            raise Refused("invalid pre auth key")
        return found

    def _wait_for_approval(self, token: int, machine: str, request: RegisterRequest, moment: Moment) -> None:
        known = None
        if request.followup:
            auth_id = request.followup.rstrip("/").rpartition("/")[2]
            if not _AUTH_ID.match(auth_id):
                raise Refused("invalid registration ID")
            known = self.pending.get(auth_id)
        if known is not None and known.machine == machine and known.request.node_key == request.node_key:
            known.request = request
            known.waiting.append(token)
            return
        pending = self._new_pending(machine, request, moment)
        self._answer(token, RegisterResponse(auth_url=f"{self.registry.config.public_url}/register/{pending.auth_id}"))

    def _new_pending(self, machine: str, request: RegisterRequest, moment: Moment) -> Pending:
        for pending in self.pending.values():
            if pending.machine == machine and pending.request.node_key == request.node_key:
                pending.request = request
                return pending
        if len(self.pending) >= MAX_PENDING:
            self._drop(min(self.pending.values(), key=lambda one: one.since))
        pending = Pending(random_text(self.entropy, 24), machine, request, moment.now)
        self.pending[pending.auth_id] = pending
        hostname = request.hostinfo.hostname if request.hostinfo is not None else ""
        self.outputs.append(ApprovalWanted(pending.auth_id, hostname))
        return pending

    def _drop(self, pending: Pending) -> None:
        del self.pending[pending.auth_id]
        for token in pending.waiting:
            self._answer(token, RegisterResponse(error="registration timed out"))

    # Tags

    def _valid_tags(self, hostinfo: Hostinfo | None) -> tuple[str, ...]:
        wanted = (hostinfo.request_tags if hostinfo is not None else None) or ()
        bad = [tag for tag in wanted if not _TAG.match(tag)]
        if bad:
            raise Refused(f"requested tags [{' '.join(bad)}] are invalid or not permitted")
        return tuple(dict.fromkeys(wanted))

    def _owns_all(self, user_id: int, own_tags: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
        user = self.registry.users.get(user_id)
        ref = UserRef(user.login_name, user.name, user.is_admin) if user is not None else None
        person, machine = Subject(0, ref, (), ()), Subject(0, None, own_tags, ())
        compiled = self.registry.visibility.compiled
        return all(compiled.may_tag(person, tag) or (own_tags and compiled.may_tag(machine, tag)) for tag in wanted)

    def _requested_tags(self, hostinfo: Hostinfo | None, user_id: int) -> tuple[str, ...]:
        wanted = self._valid_tags(hostinfo)
        if wanted and not self._owns_all(user_id, (), wanted):
            raise Refused(f"requested tags [{' '.join(wanted)}] are invalid or not permitted")
        return wanted

    def may_retag(self, node: NodeRecord, wanted: tuple[str, ...]) -> bool:
        """Whether a running node may take `wanted` without a new login."""
        return all(_TAG.match(tag) for tag in wanted) and self._owns_all(node.user_id, node.tags, wanted)

    # Letting in

    def _admit(self, machine: str, request: RegisterRequest, grant: Grant, moment: Moment) -> NodeRecord:
        registry = self.registry
        hostinfo = request.hostinfo or Hostinfo()
        old = self._same_node(machine, request, grant)
        node = self._renewed(old, request, grant) if old is not None else self._fresh(machine, request, grant, moment)
        node = replace(
            node,
            hostinfo=hostinfo,
            hostname=hostinfo.hostname,
            cap=min(request.version, MAX_SMALL_INT),
            expiry_ns=self._expiry(node, moment),
            last_seen_ns=moment.wall_ns,
        )
        node = replace(node, approved_routes=registry.granted_routes(node))
        if grant.auth_key is not None:
            registry.save_key(replace(grant.auth_key, uses=grant.auth_key.uses + 1))
        registry.put(node)
        for pending in [one for one in self.pending.values() if one.machine == machine]:
            self._drop(pending)  # approved later, it would put the node key of a login given up in place of this one
        return node

    def _same_node(self, machine: str, request: RegisterRequest, grant: Grant) -> NodeRecord | None:
        """The node that this registration renews: the same machine, by key or by owner."""
        candidates = [self.registry.nodes[one] for one in self.registry.by_machine.get(machine, ())]
        for wanted in (request.node_key, request.old_node_key):
            for node in candidates:
                if node.node_key == wanted:
                    return node
        return next((node for node in candidates if node.user_id == grant.user_id), None)

    def _renewed(self, old: NodeRecord, request: RegisterRequest, grant: Grant) -> NodeRecord:
        hostname = request.hostinfo.hostname if request.hostinfo is not None else ""
        is_renamed = old.renamed or hostname == old.hostname
        return replace(
            old,
            node_key=request.node_key,
            label=old.label if is_renamed else self.registry.label_for(hostname, old.id),
            user_id=grant.user_id,
            tags=grant.tags,
            ephemeral=grant.ephemeral or request.ephemeral,
            auth_key_id=grant.auth_key.id if grant.auth_key is not None else old.auth_key_id,
        )

    def _fresh(self, machine: str, request: RegisterRequest, grant: Grant, moment: Moment) -> NodeRecord:
        registry = self.registry
        addresses = registry.pool.allocate(registry.by_address)
        hostname = request.hostinfo.hostname if request.hostinfo is not None else ""
        return NodeRecord(
            id=registry.new_id("nodes"),
            machine_key=machine,
            node_key=request.node_key,
            user_id=grant.user_id,
            label=registry.label_for(hostname),
            addresses=tuple(map(str, addresses)),
            tags=grant.tags,
            created_ns=moment.wall_ns,
            ephemeral=grant.ephemeral or request.ephemeral,
            auth_key_id=grant.auth_key.id if grant.auth_key is not None else 0,
        )

    def _expiry(self, node: NodeRecord, moment: Moment) -> int | None:
        expiry_s = self.registry.config.node_expiry_s
        return None if node.tags or not expiry_s else moment.wall_ns + int(expiry_s * 1e9)

    # Answers

    def _answer(self, token: int, response: RegisterResponse) -> None:
        self.outputs.append(RegisterAnswered(token, response))

    def _success(self, node: NodeRecord) -> RegisterResponse:
        owner = node.owner_id
        login = self.registry.login_name(owner)
        user = self.registry.users.get(owner)
        shown = user.name if user is not None else login
        return RegisterResponse(
            user=User(id=owner, display_name=shown),
            login=Login(id=owner, provider="tsd", login_name=login, display_name=shown),
            machine_authorized=True,
        )
