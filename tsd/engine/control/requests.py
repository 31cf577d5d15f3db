"""What we ask of control: a login, a logout, the map, an update about ourselves (tailscale: tailcfg/tailcfg.go)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tsd.base.keys import DiscoPublic, LockPublic, NodePrivate
from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import LOGOUT_EXPIRY, RegisterAuth, RegisterRequest


@dataclass(frozen=True, slots=True)
class SelfReport:
    """What the server should know about us; equal reports are sent once."""

    hostinfo: Hostinfo
    disco_key: DiscoPublic | None = None
    endpoints: tuple[tuple[str, int], ...] = ()
    """(ip:port, endpoint type) as in `tsd.tailcfg.mapping`."""
    debug_flags: tuple[str, ...] = ()
    tka_head: str = ""


def register_request(
    report: SelfReport,
    capability_version: int,
    node_key: NodePrivate,
    *,
    old_node_key: NodePrivate | None,
    auth_key: str,
    followup: str,
    is_ephemeral: bool,
    lock_key: LockPublic | None,
    signature: str = "",
) -> RegisterRequest:
    """`followup`: the login URL that somebody was sent to; `signature`: of the node key, for a locked tailnet."""
    request = RegisterRequest(
        version=capability_version,
        node_key=str(node_key.public()),
        auth=RegisterAuth(auth_key=auth_key) if auth_key else None,
        followup=followup,
        hostinfo=report.hostinfo,
        ephemeral=is_ephemeral,
    )
    changes: dict[str, str] = {}
    if old_node_key is not None:
        changes["old_node_key"] = str(old_node_key.public())
    if lock_key is not None:
        changes["nl_key"] = str(lock_key)
    if signature:
        changes["node_key_signature"] = signature
    return _changed(request, **changes)


def as_logout(request: RegisterRequest) -> RegisterRequest:
    """The same request, but the key is finished."""
    return _changed(request, expiry=LOGOUT_EXPIRY)


def map_request(report: SelfReport, capability_version: int, node_key: NodePrivate, *, is_poll: bool) -> MapRequest:
    """The map stream, or (not `is_poll`) only news about ourselves."""
    request = MapRequest(
        version=capability_version,
        compress="zstd",
        keep_alive=True,
        node_key=str(node_key.public()),
        stream=is_poll,
        omit_peers=not is_poll,
        hostinfo=report.hostinfo,
        endpoints=tuple(endpoint for endpoint, _ in report.endpoints) or None,
        endpoint_types=tuple(kind for _, kind in report.endpoints) or None,
        tka_head=report.tka_head,
        debug_flags=report.debug_flags or None,
    )
    return request if report.disco_key is None else _changed(request, disco_key=str(report.disco_key))


_Request = TypeVar("_Request", RegisterRequest, MapRequest)


def _changed(request: _Request, **changes: str) -> _Request:
    return msgspec.structs.replace(request, **changes) if changes else request
