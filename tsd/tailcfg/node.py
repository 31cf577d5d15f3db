"""Nodes and their partial changes (tailscale: tailcfg/tailcfg.go, Node and PeerChange).

Keys, prefixes and times stay text, exactly as received: a map may hold 10,000 nodes, and most of their fields are
never looked at. `decode_node` checks those that others rely on, so that later parsing cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tsd.base.addr import parse_number
from tsd.base.errors import DecodeError
from tsd.base.keys import DiscoPublic, NodePublic
from tsd.tailcfg.dns import Resolver
from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.lenient import mended_text
from tsd.tailcfg.wire import REFUSALS, Wire, always, decode_json, is_zero_time, second_look, time_ns, time_text

CapMap = dict[str, tuple[Any, ...] | None]
"""Capability to values; a key with no values is held all the same."""

_LEGACY_DERP = "127.3.3.40:"


class Node(Wire, frozen=True, gc=False):
    """One node of the tailnet: the self node, or a peer. `cap` is its capability version."""

    id: int = always(0)
    stable_id: str = always("")
    name: str = always("")
    user: int = always(0)
    sharer: int = 0
    key: str = always("nodekey:" + "0" * 64)
    key_expiry: str | None = None
    key_signature: str | None = None
    machine: str | None = None
    disco_key: str | None = None
    addresses: tuple[str, ...] | None = always(None)
    allowed_ips: tuple[str, ...] | None = None
    endpoints: tuple[str, ...] | None = None
    legacy_derp: str = msgspec.field(default="", name="DERP")
    home_derp: int = 0
    hostinfo_raw: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Hostinfo")
    created: str | None = None
    cap: int = 0
    tags: tuple[str, ...] | None = None
    primary_routes: tuple[str, ...] | None = None
    last_seen: str | None = None
    online: bool | None = None
    machine_authorized: bool = False
    capabilities: tuple[str, ...] | None = None
    cap_map: CapMap | None = None
    unsigned_peerapi_only: bool = False
    computed_name: str = ""
    computed_name_with_host: str = ""
    data_plane_audit_log_id: str = msgspec.field(default="", name="DataPlaneAuditLogID")
    expired: bool = False
    self_node_v4_masq_addr: str | None = msgspec.field(default=None, name="SelfNodeV4MasqAddrForThisPeer")
    self_node_v6_masq_addr: str | None = msgspec.field(default=None, name="SelfNodeV6MasqAddrForThisPeer")
    is_wireguard_only: bool = False
    is_jailed: bool = False
    exit_node_dns_resolvers: tuple[Resolver, ...] | None = None

    @property
    def hostinfo(self) -> Hostinfo | None:
        """Decoded on each use; None when absent, null or unreadable."""
        raw = bytes(self.hostinfo_raw)
        if not raw or raw == b"null":
            return None
        try:
            return decode_json(raw, Hostinfo)
        except DecodeError:
            return None

    @property
    def node_key(self) -> NodePublic:
        return NodePublic.parse(self.key)

    @property
    def disco(self) -> DiscoPublic | None:
        """None when unknown (absent, null or zero)."""
        if not self.disco_key:
            return None
        parsed = DiscoPublic.parse(self.disco_key)
        return None if parsed.is_zero else parsed

    @property
    def home_region(self) -> int:
        """Home DERP region, from either form; 0 when unknown."""
        if self.home_derp or not self.legacy_derp.startswith(_LEGACY_DERP):
            return self.home_derp
        return parse_number(self.legacy_derp[len(_LEGACY_DERP) :], 65535) or 0

    @property
    def routed_ips(self) -> tuple[str, ...]:
        """Allowed IPs; absent means the addresses."""
        own = self.addresses or ()
        if self.unsigned_peerapi_only or self.allowed_ips is None:
            return own
        return self.allowed_ips

    @property
    def key_expiry_ns(self) -> int | None:
        """Unix time in nanoseconds; None when the key never expires."""
        return time_ns(self.key_expiry)

    @property
    def base_name(self) -> str:
        """First label of the name."""
        return self.name.partition(".")[0]

    def has_cap(self, capability: str) -> bool:
        return capability in (self.cap_map or {}) or capability in (self.capabilities or ())

    def is_expired(self, wall_ns: int) -> bool:
        expiry_ns = self.key_expiry_ns
        return self.expired or (expiry_ns is not None and expiry_ns <= wall_ns)


def next_expiry_ns(nodes: Iterable[Node], now_ns: int) -> int:
    """When the next key expires, 0 for never. Times in UTC sort as texts, so that only one of thousands is read."""
    texts = [node.key_expiry for node in nodes if node.key_expiry]
    now_text = time_text(now_ns)
    earliest = min((text for text in texts if text > now_text and text.endswith("Z")), default="")
    if earliest and time_ns(earliest) is not None:
        texts = [earliest, *(text for text in texts if not text.endswith("Z"))]
    return min((at for at in map(time_ns, texts) if at is not None and at > now_ns), default=0)


def hostinfo_field(hostinfo: Hostinfo | None) -> msgspec.Raw:
    """The value for `Node.hostinfo_raw`."""
    return msgspec.Raw(b"" if hostinfo is None else msgspec.json.encode(hostinfo))


class PeerChange(Wire, frozen=True, gc=False):
    """A change of some fields of a known peer; zero, null and absent all mean "unchanged"."""

    node_id: int = always(0)
    derp_region: int = 0
    cap: int = 0
    cap_map: CapMap | None = None
    endpoints: tuple[str, ...] | None = None
    key: str | None = None
    key_signature: str | None = None
    disco_key: str | None = None
    online: bool | None = None
    last_seen: str | None = None
    key_expiry: str | None = None


_node_decoder = msgspec.json.Decoder(Node)
_HEX_KEY_TAIL = 64


def decode_node(raw: bytes | memoryview | msgspec.Raw) -> Node:
    """Raises `DecodeError` when the node could not be used: bad JSON, no ID, bad key."""
    try:
        node = _node_decoder.decode(raw)
    except REFUSALS as err:
        again = second_look(raw, Node, err)
        if again is None:
            raise DecodeError("tailcfg", f"node: {err}") from None
        node = again
    if node.id <= 0:
        raise DecodeError("tailcfg", f"node {node.name!r} has ID {node.id}")
    _check_key(node.key, "nodekey:")
    if node.disco_key is not None:
        _check_key(node.disco_key, "discokey:")
    if node.hostinfo_raw:
        # A view would keep the whole map message alive.
        msgspec.structs.force_setattr(node, "hostinfo_raw", msgspec.Raw(_unicode(bytes(node.hostinfo_raw))))
    return node


def _unicode(raw: bytes) -> bytes:
    """What is passed on undecoded must not fail those who decode it later."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return mended_text(raw)
    return raw


def decode_peer_change(raw: bytes | memoryview | msgspec.Raw) -> PeerChange:
    """Raises `DecodeError`."""
    change = decode_json(raw, PeerChange)
    if change.key is not None:
        _check_key(change.key, "nodekey:")
    if change.disco_key is not None:
        _check_key(change.disco_key, "discokey:")
    if is_zero_time(change.last_seen) and change.last_seen is not None:
        return msgspec.structs.replace(change, last_seen=None)
    return change


def _check_key(text: str, prefix: str) -> None:
    if len(text) != len(prefix) + _HEX_KEY_TAIL or not text.startswith(prefix):
        raise DecodeError("tailcfg", f"not a {prefix} key")
    try:
        bytes.fromhex(text[len(prefix) :])
    except ValueError:
        raise DecodeError("tailcfg", f"not a {prefix} key") from None
