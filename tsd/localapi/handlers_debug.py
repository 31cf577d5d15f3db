"""For people who look inside: debug actions, the log tap, stack dumps (tailscale: `ipn/localapi/debug.go`)."""

from __future__ import annotations

import asyncio
import io

from tsd.localapi.call import Call, Endpoint, Response, compact, read_by_writer, text, write_by_post
from tsd.localapi.connection import ClientGone

COMPONENTS = ("magicsock", "sockstats", "syspolicy")


async def debug(call: Call) -> Response:
    action = call.head.get("Debug-Action") or call.value("action")
    if not action:
        return text(400, "missing parameter 'action'")
    body = await call.body.read()
    try:
        content_type, answer = await call.backend.debug(action, body)
    except KeyError:
        return text(400, f'unknown action "{action}"')
    except ValueError as error:
        return text(400, str(error))
    return Response(200, answer, content_type)


async def logtap(call: Call) -> Response | None:
    stream = call.start_stream("text/plain; charset=utf-8")
    try:
        async with call.connection.until_gone():
            await stream.send_json({"text": "[logtap connected]\n"})
            async for line in call.backend.log_tap():
                await stream.send_json(line)
        stream.finish()
    except ClientGone:
        pass
    return None


async def goroutines(call: Call) -> Response:
    """The Python counterpart: where every task stands."""
    out = io.StringIO()
    for task in sorted(asyncio.all_tasks(), key=lambda one: one.get_name()):
        task.print_stack(limit=8, file=out)
    return Response(200, out.getvalue().encode(), "text/plain")


async def component_debug_logging(call: Call) -> Response:
    component = call.value("component")
    known = component in COMPONENTS
    return compact({"Error": "" if known else f'unknown component "{component}"'})


async def optional_features(call: Call) -> Response:
    known = {"dns": True, "portmapper": True, "serve": False, "ssh": False, "taildrop": False, "tailnetlock": True}
    return compact({"Features": known})


async def disconnect_control(call: Call) -> Response:
    await call.backend.debug("break-tcp-conns", b"")
    return Response(200)


async def set_expiry_sooner(call: Call) -> Response:
    expiry = call.value("expiry")
    if not (expiry.isascii() and expiry.isdigit()):
        return text(400, "missing or malformed 'expiry' parameter")
    return text(501, "tsd does not change when its key expires; log in anew, or let an admin expire it")


_DEBUG_DENIED = "debug access denied"

ENDPOINTS = (
    write_by_post("debug", debug, denied=_DEBUG_DENIED, wrong_method=(405, "POST required")),
    read_by_writer("logtap", logtap, denied="logtap access denied", wrong_method=(405, "GET only")),
    Endpoint("goroutines", goroutines, needs_write=True, denied="goroutine dump access denied"),
    Endpoint("component-debug-logging", component_debug_logging, needs_write=True, denied=_DEBUG_DENIED),
    Endpoint("debug-optional-features", optional_features),
    write_by_post("disconnect-control", disconnect_control, wrong_method=(405, "use POST")),
    write_by_post("set-expiry-sooner", set_expiry_sooner, wrong_method=(405, "POST required")),
)
