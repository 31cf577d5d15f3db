"""What the server keeps: users, auth keys, nodes. Plain structs; one JSON document each in the store.

Keys are text on purpose: a damaged record must not stop the others from loading (`problem` finds it instead).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tsd.base.addr import IPAddress, IPPrefix, parse_ip, parse_prefix
from tsd.base.errors import DecodeError
from tsd.base.keys import DiscoPublic, MachinePublic, NodePublic
from tsd.coord.state.naming import is_label
from tsd.tailcfg.hostinfo import Hostinfo

TAGGED_USER_ID = 2147455555
MAX_SMALL_INT = (1 << 31) - 1
"""Capability versions and region IDs beyond this are nonsense, and some decoders refuse them."""
TAGGED_LOGIN = "tagged-devices"


class Moment(NamedTuple):
    """`now` drives timers; `wall_ns` is what expiry and people read."""

    now: float
    wall_ns: int


class User(msgspec.Struct, omit_defaults=True, frozen=True):
    id: int
    name: str
    login_name: str
    created_ns: int = 0
    is_admin: bool = False


class AuthKey(msgspec.Struct, omit_defaults=True, frozen=True):
    """`secret_hash` is SHA-256 of the secret half; `ident` is the public half."""

    id: int
    ident: str
    secret_hash: str
    user_id: int
    tags: tuple[str, ...] = ()
    reusable: bool = False
    ephemeral: bool = False
    created_ns: int = 0
    expiry_ns: int | None = None
    uses: int = 0
    revoked: bool = False


class NodeRecord(msgspec.Struct, omit_defaults=True, frozen=True):
    """A node (immutable: `Registry.put` a changed copy).

    `hostname` is what it calls itself, `label` its MagicDNS name, `renamed` that an administrator chose that name.
    """

    id: int
    machine_key: str
    node_key: str
    user_id: int
    label: str
    addresses: tuple[str, ...]
    hostname: str = ""
    renamed: bool = False
    tags: tuple[str, ...] = ()
    disco_key: str = ""
    endpoints: tuple[str, ...] = ()
    home_derp: int = 0
    cap: int = 0
    hostinfo: Hostinfo = Hostinfo()
    created_ns: int = 0
    expiry_ns: int | None = None
    last_seen_ns: int | None = None
    ephemeral: bool = False
    approved_routes: tuple[str, ...] = ()
    auth_key_id: int = 0

    @property
    def owner_id(self) -> int:
        """The user shown for it; tagged nodes belong to nobody."""
        return TAGGED_USER_ID if self.tags else self.user_id

    @property
    def ips(self) -> tuple[IPAddress, ...]:
        return tuple(parse_ip(text) for text in self.addresses)

    @property
    def advertised(self) -> tuple[str, ...]:
        """Routes it offers, those that parse."""
        return valid_prefixes(self.hostinfo.routable_ips)

    @property
    def routes(self) -> tuple[IPPrefix, ...]:
        """Offered and approved."""
        return tuple(parse_prefix(text) for text in self.advertised if text in self.approved_routes)

    def is_expired(self, wall_ns: int) -> bool:
        return self.expiry_ns is not None and self.expiry_ns <= wall_ns


def valid_prefixes(texts: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(text for text in texts or () if is_prefix(text))


def is_prefix(text: str) -> bool:
    try:
        parse_prefix(text)
    except DecodeError:
        return False
    return "/" in text


def problem(node: NodeRecord) -> str:
    """Why this node cannot be served, "" when it can."""
    try:
        if NodePublic.parse(node.node_key).is_zero or MachinePublic.parse(node.machine_key).is_zero:
            return "key is zero"
        if node.disco_key:
            DiscoPublic.parse(node.disco_key)
        if not node.ips:
            return "no address"
    except DecodeError as err:
        return str(err)
    if node.id <= 0:
        return f"ID {node.id}"
    return "" if is_label(node.label) else f"illegal name {node.label!r}"


def decode_record(document: bytes, kind: type[User] | type[AuthKey] | type[NodeRecord]) -> User | AuthKey | NodeRecord:
    """Raises `DecodeError`."""
    try:
        record: User | AuthKey | NodeRecord = msgspec.json.decode(document, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise DecodeError("coord", f"{kind.__name__}: {err}") from None
    return record
