"""The map poll (tailscale: tailcfg/tailcfg.go, MapRequest and the small parts of MapResponse)."""

from __future__ import annotations

import msgspec

from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.wire import CAPABILITY_VERSION, Wire, always

ENDPOINT_UNKNOWN, ENDPOINT_LOCAL, ENDPOINT_STUN, ENDPOINT_PORTMAP, ENDPOINT_STUN_LOCAL_PORT, ENDPOINT_EXPLICIT = range(
    6
)


class MapRequest(Wire, frozen=True, gc=False):
    """`stream` opens the poll; `omit_peers` without it is a lite update (endpoints, hostinfo, disco key)."""

    version: int = always(CAPABILITY_VERSION)
    compress: str = ""
    keep_alive: bool = False
    node_key: str = always("")
    disco_key: str = always("discokey:" + "0" * 64)
    stream: bool = False
    hostinfo: Hostinfo | None = always(None)
    map_session_handle: str = ""
    map_session_seq: int = 0
    endpoints: tuple[str, ...] | None = None
    endpoint_types: tuple[int, ...] | None = None
    tka_head: str = ""
    read_only: bool = False
    omit_peers: bool = False
    debug_flags: tuple[str, ...] | None = None
    connection_handle_for_test: str = ""


class PingRequest(Wire, frozen=True, gc=False):
    """A wish of the server: HEAD a URL, answer a c2n call, or ping `ip`. `payload` is base64."""

    url: str = always("")
    url_is_noise: bool = msgspec.field(default=False, name="URLIsNoise")
    log: bool = False
    types: str = ""
    ip: str = ""
    payload: str | None = None


class PingResponse(Wire, frozen=True, gc=False):
    type: str = always("")
    ip: str = ""
    node_ip: str = msgspec.field(default="", name="NodeIP")
    node_name: str = ""
    err: str = ""
    latency_seconds: float = 0.0
    endpoint: str = ""
    peer_relay: str = ""
    derp_region_id: int = msgspec.field(default=0, name="DERPRegionID")
    derp_region_code: str = msgspec.field(default="", name="DERPRegionCode")
    peerapi_port: int = 0
    is_local_ip: bool = False


class DisplayMessageAction(Wire, frozen=True, gc=False):
    url: str = always("")
    label: str = always("")


class DisplayMessage(Wire, frozen=True, gc=False):
    """A health text of the server; `severity` is high, medium or low."""

    title: str = always("")
    text: str = always("")
    severity: str = always("")
    impacts_connectivity: bool = False
    primary_action: DisplayMessageAction | None = None


class TKAInfo(Wire, frozen=True, gc=False):
    head: str = ""
    disabled: bool = False


class Debug(Wire, frozen=True, gc=False):
    sleep_seconds: float = 0.0
    disable_log_tail: bool = False
    exit: int | None = None


class ClientVersion(Wire, frozen=True, gc=False):
    running_latest: bool = False
    latest_version: str = ""
    urgent_security_update: bool = False
    notify: bool = False
    notify_url: str = ""
    notify_text: str = ""


class ControlIPCandidate(Wire, frozen=True, gc=False):
    ip: str = ""
    ace_host: str = ""
    dial_start_delay_sec: float = 0.0
    dial_timeout_sec: float = 0.0
    priority: int = 0


class ControlDialPlan(Wire, frozen=True, gc=False):
    candidates: tuple[ControlIPCandidate, ...] | None = always(None)


class DERPAdmitClientRequest(Wire, frozen=True, gc=False):
    node_public: str = always("")
    source: str = always("")


class DERPAdmitClientResponse(Wire, frozen=True, gc=False):
    allow: bool = always(False)
