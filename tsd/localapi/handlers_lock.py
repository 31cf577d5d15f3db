"""Tailnet lock (tailscale: `ipn/localapi/tailnetlock.go`): told, not changed: this daemon cannot sign."""

from __future__ import annotations

from tsd.localapi.call import Call, Endpoint, Response, pretty, text

INACTIVE = "tailnet-lock is not active"
_MODIFY = "tailnet-lock modify access denied"


async def status(call: Call) -> Response:
    return pretty(call.backend.tka_status())


async def inactive_log(call: Call) -> Response:
    return text(500, f"reading log failed: {INACTIVE}")


async def inactive(call: Call) -> Response:
    return text(500, INACTIVE)


async def inactive_sign(call: Call) -> Response:
    await call.read_object("invalid JSON body")
    return text(500, f"signing failed: {INACTIVE}")


async def inactive_disable(call: Call) -> Response:
    return text(400, f"tailnet-lock disable failed: {INACTIVE}")


async def unsupported(call: Call) -> Response:
    await call.read_object("invalid JSON body")
    return text(501, "changing tailnet lock is not supported by tsd")


def _post(name: str, handler: object = unsupported, denied: str = "") -> Endpoint:
    return Endpoint(
        f"tka/{name}",
        handler,  # type: ignore[arg-type]
        needs_write=bool(denied),
        denied=denied,
        methods=("POST",),
        wrong_method=(405, "use POST"),
    )


ENDPOINTS = (
    Endpoint("tka/status", status, methods=("GET",), wrong_method=(405, "use GET")),
    Endpoint("tka/log", inactive_log, methods=("GET",), wrong_method=(405, "use GET")),
    _post("init", denied="lock init access denied"),
    _post("modify", denied=_MODIFY),
    _post("sign", inactive_sign, denied="lock sign access denied"),
    _post("wrap-preauth-key", denied=_MODIFY),
    _post("verify-deeplink"),
    _post("disable", inactive_disable, denied=_MODIFY),
    _post("force-local-disable", denied=_MODIFY),
    _post("affected-sigs", inactive),
    _post("generate-recovery-aum", denied="access denied"),
    _post("cosign-recovery-aum", denied="access denied"),
    _post("submit-recovery-aum", denied="access denied"),
)
