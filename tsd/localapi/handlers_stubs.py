"""What the field's clients may ask for and this daemon does not do: the right status, and harmless answers where a
client goes on without (metrics upload, update check, policy)."""

from __future__ import annotations

from tsd.localapi.call import JSON, TEXT, Call, Endpoint, Handler, Response, compact, pretty, text

NOT_HERE = "this feature is not part of tsd"


def _missing(name: str, denied: str = "", methods: tuple[str, ...] = (), wrong: str = "unsupported method") -> Endpoint:
    async def answer(call: Call) -> Response:
        return text(501, NOT_HERE)

    return Endpoint(name, answer, needs_write=bool(denied), denied=denied, methods=methods, wrong_method=(405, wrong))


def _constant(value: object, content_type: str = JSON) -> Handler:
    async def answer(call: Call) -> Response:
        response = compact(value)
        response.content_type = content_type
        return response

    return answer


async def upload_client_metrics(call: Call) -> Response:
    await call.read_json("invalid JSON body")
    return compact({})


async def routecheck(call: Call) -> Response:
    return text(503, "route checks are not part of tsd")


async def policy(call: Call) -> Response:
    scope = call.path.removeprefix("policy/") or "Device"
    if scope != "Device":
        return text(400, f'"{scope}" is not a valid scope')
    return pretty({"Summary": {"Scope": "Device"}})


async def id_token(call: Call) -> Response:
    if not call.value("aud"):
        return text(400, "no audience requested")
    return text(501, NOT_HERE)


async def pprof(call: Call) -> Response:
    return text(404, "no such profile: use py-spy on the daemon's process")


async def nothing(call: Call) -> Response:
    return Response(200)


_DEBUG = "debug access denied"

ENDPOINTS = (
    Endpoint("upload-client-metrics", upload_client_metrics, methods=("POST",)),
    Endpoint("appc-route-info", _constant({}), methods=("GET",), wrong_method=(405, "use GET")),
    Endpoint("routecheck", routecheck, methods=("POST",), wrong_method=(405, "want POST")),
    Endpoint("update/check", _constant({"RunningLatest": True}, TEXT), methods=("GET",)),
    Endpoint("update/progress", _constant([], TEXT), methods=("GET",)),
    _missing("update/install", methods=("POST",), wrong="only POST allowed"),
    Endpoint("policy/", policy),
    Endpoint("id-token", id_token, needs_write=True, denied="id-token access denied"),
    Endpoint("pprof", pprof, needs_write=True, denied="profile access denied"),
    Endpoint("prefs/service-clients", _constant({})),
    Endpoint("pins", _constant({})),
    Endpoint("conn25/state", _constant({"configured": False})),
    Endpoint("set-gui-visible", nothing, methods=("POST",), wrong_method=(405, "use POST")),
    Endpoint("drive/shares", _constant(None, TEXT), methods=("GET",)),
    _missing("drive/fileserver-address", methods=("PUT",), wrong="only PUT allowed"),
    _missing("set-udp-gro-forwarding", denied="UDP GRO forwarding set access denied"),
    _missing("set-dns", denied="access denied", methods=("POST",)),
    _missing("handle-push-message", denied="handle push message not allowed", methods=("POST",)),
    _missing("set-push-device-token", denied="set push device token access denied", methods=("POST",)),
    _missing(
        "alpha-set-device-attrs",
        denied="set-device-attrs access denied",
        methods=("PATCH",),
        wrong="only PATCH allowed",
    ),
    _missing("debug-log", methods=("POST",)),
    _missing("debug-derp-region", denied=_DEBUG, methods=("POST",)),
    _missing("debug-portmap", denied=_DEBUG),
    _missing("debug-capture", denied=_DEBUG, methods=("POST",)),
    _missing("debug-dial-types", denied="debug-dial-types access denied", methods=("POST",)),
    _missing("debug-peer-endpoint-changes"),
    _missing("debug-packet-filter-rules", denied=_DEBUG),
    _missing("debug-packet-filter-matches", denied=_DEBUG),
    _missing("debug-bus-events", denied="event bus access denied"),
    _missing("debug-bus-graph"),
    _missing("debug-bus-queues"),
    _missing("debug-rotate-disco-key", denied=_DEBUG, methods=("POST",)),
    Endpoint("debug-peer-relay-sessions", _constant({"UDPPort": None, "Sessions": None}, TEXT)),
    _missing("dev-set-state-store", denied=_DEBUG, methods=("POST",), wrong="POST required"),
)
