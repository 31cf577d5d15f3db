"""One message of the map stream (tailscale: tailcfg/tailcfg.go, MapResponse), and its decoding in two stages.

Stage one cuts the message into parts, stage two decodes peer by peer, so that a bad peer costs only itself and a
large map can be decoded in slices. A bad self node, filter or SSH policy fails the whole message: going on without
them would be guessing. What the fields mean in a delta is `tsd.netmap`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec

from tsd.base.errors import DecodeError
from tsd.tailcfg.derpmap import DERPMap
from tsd.tailcfg.dns import DNSConfig
from tsd.tailcfg.filterrule import FilterRule
from tsd.tailcfg.mapping import ClientVersion, ControlDialPlan, Debug, DisplayMessage, PingRequest, TKAInfo
from tsd.tailcfg.node import Node, PeerChange, decode_node, decode_peer_change
from tsd.tailcfg.ssh import SSHPolicy
from tsd.tailcfg.user import UserProfile
from tsd.tailcfg.wire import Wire, decode_json

T = TypeVar("T")

KEEP_ALIVE = b'{"KeepAlive":true}'
SLICE_NODES = 400


class MapResponse(Wire, frozen=True, gc=False):
    """Absent (None, "", 0) means "unchanged" in every field; see control.md section 4.3."""

    map_session_handle: str = ""
    seq: int = 0
    keep_alive: bool = False
    ping_request: PingRequest | None = None
    pop_browser_url: str = ""
    node: Node | None = None
    derp_map: DERPMap | None = msgspec.field(default=None, name="DERPMap")
    peers: tuple[Node, ...] | None = None
    peers_changed: tuple[Node, ...] | None = None
    peers_removed: tuple[int, ...] | None = None
    peers_changed_patch: tuple[PeerChange, ...] | None = None
    peer_seen_change: dict[int, bool] | None = None
    online_change: dict[int, bool] | None = None
    dns_config: DNSConfig | None = msgspec.field(default=None, name="DNSConfig")
    domain: str = ""
    collect_services: bool | None = None
    packet_filter: tuple[FilterRule, ...] | None = None
    packet_filters: dict[str, tuple[FilterRule, ...] | None] | None = None
    user_profiles: tuple[UserProfile, ...] | None = None
    health: tuple[str, ...] | None = None
    display_messages: dict[str, DisplayMessage | None] | None = None
    ssh_policy: SSHPolicy | None = None
    control_time: str | None = None
    tka_info: TKAInfo | None = None
    domain_data_plane_audit_log_id: str = msgspec.field(default="", name="DomainDataPlaneAuditLogID")
    debug: Debug | None = None
    control_dial_plan: ControlDialPlan | None = None
    client_version: ClientVersion | None = None
    default_auto_update: bool | None = None


class _Parts(Wire, frozen=True, gc=False):
    """MapResponse with everything large or fallible left as raw JSON."""

    map_session_handle: str = ""
    seq: int = 0
    keep_alive: bool = False
    ping_request: msgspec.Raw = msgspec.Raw(b"")
    pop_browser_url: str = ""
    node: msgspec.Raw = msgspec.Raw(b"")
    derp_map: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="DERPMap")
    peers: list[msgspec.Raw] | None = None
    peers_changed: list[msgspec.Raw] | None = None
    peers_removed: tuple[int, ...] | None = None
    peers_changed_patch: list[msgspec.Raw] | None = None
    peer_seen_change: dict[int, bool] | None = None
    online_change: dict[int, bool] | None = None
    dns_config: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="DNSConfig")
    domain: str = ""
    collect_services: bool | None = None
    packet_filter: tuple[FilterRule, ...] | None = None
    packet_filters: dict[str, tuple[FilterRule, ...] | None] | None = None
    user_profiles: list[msgspec.Raw] | None = None
    health: tuple[str, ...] | None = None
    display_messages: msgspec.Raw = msgspec.Raw(b"")
    ssh_policy: SSHPolicy | None = None
    control_time: str | None = None
    tka_info: TKAInfo | None = None
    domain_data_plane_audit_log_id: str = msgspec.field(default="", name="DomainDataPlaneAuditLogID")
    debug: Debug | None = None
    control_dial_plan: msgspec.Raw = msgspec.Raw(b"")
    client_version: msgspec.Raw = msgspec.Raw(b"")
    default_auto_update: bool | None = None


_PLAIN_FIELDS = (
    "map_session_handle", "seq", "keep_alive", "pop_browser_url", "peers_removed", "peer_seen_change", "online_change",
    "domain", "collect_services", "packet_filter", "packet_filters", "health", "ssh_policy", "control_time", "tka_info",
    "domain_data_plane_audit_log_id", "debug", "default_auto_update",
)  # fmt: skip

_TOLERATED: dict[str, type] = {
    "ping_request": PingRequest,
    "derp_map": DERPMap,
    "dns_config": DNSConfig,
    "display_messages": dict[str, DisplayMessage | None],
    "control_dial_plan": ControlDialPlan,
    "client_version": ClientVersion,
}


def decode_map_response(raw: bytes | memoryview, problems: list[str] | None = None) -> MapResponse:
    """Decode in one go. Parts that had to be left out are described in `problems`. Raises `DecodeError`."""
    slices = decode_in_slices(raw, problems)
    while True:
        try:
            next(slices)
        except StopIteration as done:
            response: MapResponse = done.value
            return response


def decode_in_slices(
    raw: bytes | memoryview, problems: list[str] | None = None, slice_nodes: int = SLICE_NODES
) -> Generator[None, None, MapResponse]:
    """The same, pausing after every `slice_nodes` nodes; the generator's return value is the message."""
    found = problems if problems is not None else []
    parts = decode_json(raw, _Parts)
    values: dict[str, Any] = {name: getattr(parts, name) for name in _PLAIN_FIELDS}
    if _has(parts.node):
        values["node"] = decode_node(parts.node)
    for name, kind in _TOLERATED.items():
        part = getattr(parts, name)
        if _has(part):
            values[name] = _decode_or_note(part, partial(decode_json, kind=kind), found, name)
    values["user_profiles"] = _decode_list(parts.user_profiles, _decode_profile, found, "user profile")
    values["peers_changed_patch"] = _decode_list(parts.peers_changed_patch, decode_peer_change, found, "peer change")
    values["peers"] = yield from _decode_nodes(parts.peers, found, slice_nodes)
    values["peers_changed"] = yield from _decode_nodes(parts.peers_changed, found, slice_nodes)
    return MapResponse(**values)


def _decode_nodes(
    raws: list[msgspec.Raw] | None, problems: list[str], slice_nodes: int
) -> Generator[None, None, tuple[Node, ...] | None]:
    if raws is None:
        return None
    nodes: list[Node] = []
    for start in range(0, len(raws), slice_nodes):
        nodes += _decode_list(raws[start : start + slice_nodes], decode_node, problems, "peer") or ()
        if start + slice_nodes < len(raws):
            yield
    return tuple(nodes)


def _decode_list(
    raws: Iterable[msgspec.Raw] | None, decode: Callable[[msgspec.Raw], T], problems: list[str], what: str
) -> tuple[T, ...] | None:
    if raws is None:
        return None
    values: list[T] = []
    for raw in raws:
        value = _decode_or_note(raw, decode, problems, what) if _has(raw) else None
        if value is not None:
            values.append(value)
    return tuple(values)


def _decode_or_note(raw: msgspec.Raw, decode: Callable[[msgspec.Raw], T], problems: list[str], what: str) -> T | None:
    try:
        return decode(raw)
    except DecodeError as err:
        problems.append(f"{what} left out: {err.reason}")
        return None


def _decode_profile(raw: msgspec.Raw) -> UserProfile:
    return decode_json(raw, UserProfile)


def _has(raw: msgspec.Raw) -> bool:
    """Neither absent nor null."""
    view = memoryview(raw)
    return len(view) > 0 and bytes(view[:4]) != b"null"
