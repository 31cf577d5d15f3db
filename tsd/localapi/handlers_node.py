"""Reading the node: status, the notification bus, whois, ping, dial, DERP map, metrics (tailscale: `ipn/localapi`)."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable

from tsd.base.addr import parse_number
from tsd.base.errors import ConfigError, TsdError, reason_of
from tsd.base.notify import parse_mask
from tsd.hull import Stream
from tsd.localapi import schema
from tsd.localapi.backend import ApiError
from tsd.localapi.call import JSON, TEXT, Call, Endpoint, Response, compact, json_error, pretty, text
from tsd.localapi.connection import ClientGone, Connection

PIPE_BYTES = 65536


async def status(call: Call) -> Response:
    return call.status_answer(call.flag("peers", True))


async def watch_ipn_bus(call: Call) -> Response | None:
    try:
        mask = parse_mask(call.value("mask"))
    except ConfigError as error:
        return text(400, str(error))
    watch = call.backend.watch(mask)
    try:
        stream = call.start_stream(JSON)
        async with call.connection.until_gone():
            async for notify in watch:
                await stream.send_json(notify)
        stream.finish()
    except ClientGone:
        pass
    finally:
        watch.close()
    return None


async def whois(call: Call) -> Response:
    addr = call.value("addr")
    if not addr:
        return text(400, "missing 'addr' parameter")
    if addr.startswith("nodekey:"):
        if not is_node_key(addr):
            return text(400, "invalid nodekey in 'addr' parameter")
    elif not is_ip_or_ip_port(addr):
        return text(400, "invalid 'addr' parameter")
    scope = call.value("dst_ip")
    if scope and not is_ip_or_ip_port(scope):
        return text(400, "invalid 'dst_ip' parameter")
    found = call.backend.whois(addr, call.value("proto"))
    return text(404, "no match for IP:port") if found is None else pretty(found)


def is_node_key(value: str) -> bool:
    digits = value.removeprefix("nodekey:")
    return len(digits) == 64 and set(digits) <= set("0123456789abcdefABCDEF")


def is_ip_or_ip_port(value: str) -> bool:
    host = value
    if value.startswith("["):
        host, _, port = value[1:].partition("]:")
        if not _is_port(port):
            return False
    elif value.count(":") == 1:
        host, _, port = value.partition(":")
        if not _is_port(port):
            return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return parse_number(value, 65535) is not None


async def ping(call: Call) -> Response:
    ip, kind, size_text = call.value("ip"), call.value("type"), call.value("size")
    if not ip:
        return text(400, "missing 'ip' parameter")
    try:
        ipaddress.ip_address(ip)
    except ValueError:
        return text(400, "invalid IP")
    if not kind:
        return text(400, "missing 'type' parameter")
    size = parse_number(size_text or "0", 1 << 31)
    if size is None:
        return text(400, "invalid 'size' parameter")
    if size and kind != "disco":
        return text(400, "'size' parameter is only supported with disco pings")
    if size > schema.MAX_PING_BYTES:
        return text(400, f"maximum value for 'size' is {schema.MAX_PING_BYTES}")
    async with call.connection.until_gone():
        try:
            return compact(await call.backend.ping(ip, kind, size))
        except ApiError:
            raise
        except TsdError as error:
            return json_error(500, str(error))


async def dial(call: Call) -> Response | None:
    host, port_text = call.head.get("Dial-Host"), call.head.get("Dial-Port")
    is_upgrade = call.head.has_token("Connection", "upgrade")
    if not is_upgrade or call.head.get("Upgrade").lower() != schema.DIAL_PROTOCOL:
        return text(400, "bad ts-dial upgrade")
    if not host or not _is_port(port_text):
        return text(400, "missing Dial-Host or Dial-Port header")
    network = call.head.get("Dial-Network", "tcp")
    try:
        async with call.connection.until_gone():
            target = await call.backend.dial(network, host, int(port_text))
    except ApiError:
        raise
    except ClientGone:
        raise
    except (TsdError, OSError) as error:
        message = reason_of(error)
        known = message.startswith(("resolve failure", "dial failure"))
        return text(502, message if known else f"dial failure: {message or type(error).__name__}")
    if isinstance(target, str):
        return Response(200, headers=(("Dial-Self", "true"), ("Dial-Addr", target)))
    headers = (("Upgrade", schema.DIAL_PROTOCOL), ("Connection", "upgrade"))
    await pipe(call.take_over(101, headers), target)
    return None


async def pipe(connection: Connection, stream: Stream) -> None:
    """Copy both ways, half-closes included, until both directions have ended or one breaks."""
    tasks = [asyncio.ensure_future(_pump_up(connection, stream)), asyncio.ensure_future(_pump_down(connection, stream))]
    try:
        await asyncio.gather(*tasks)
        await stream.close()
    except (OSError, TsdError):
        stream.abort()
        connection.transport.abort()
    except asyncio.CancelledError:
        stream.abort()
        raise
    finally:
        for task in tasks:
            task.cancel()


async def _pump_up(connection: Connection, stream: Stream) -> None:
    while data := await connection.read(PIPE_BYTES):
        await stream.write(data)
    if connection.is_lost:
        raise ClientGone("client hung up")
    await stream.write_eof()


async def _pump_down(connection: Connection, stream: Stream) -> None:
    while data := await stream.read(PIPE_BYTES):
        connection.write(data)
        await connection.drain()
    if not connection.is_lost and connection.transport.can_write_eof():
        connection.transport.write_eof()


async def derpmap(call: Call) -> Response:
    return pretty(call.backend.derp_map())


async def services(call: Call) -> Response:
    found = call.backend.services()
    return text(503, "no netmap") if found is None else compact(found)


async def peer_by_id(call: Call) -> Response:
    node_id = _positive(call.value("id"))
    if node_id is None:
        return text(400, "invalid 'id' parameter")
    found = call.backend.node_by_id(node_id)
    return text(404, "no peer with that NodeID") if found is None else pretty(found)


async def user_profile(call: Call) -> Response:
    user_id = _positive(call.value("id"))
    if user_id is None:
        return text(400, "invalid 'id' parameter")
    found = call.backend.user_profile(user_id)
    return text(404, "no user with that UserID") if found is None else pretty(found)


def _positive(value: str) -> int | None:
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else 0
    return number or None


async def cert_domains(call: Call) -> Response:
    return compact(call.backend.cert_domains())


async def user_metrics(call: Call) -> Response:
    return Response(200, call.backend.user_metrics().encode(), "text/plain;version=0.0.4;charset=utf-8")


async def client_metrics(call: Call) -> Response:
    return Response(200, call.backend.client_metrics().encode(), "text/plain")


async def suggest_exit_node(call: Call) -> Response:
    try:
        return compact(call.backend.suggest_exit_node())
    except ApiError:
        raise
    except TsdError as error:
        return json_error(500, str(error))


async def bugreport(call: Call) -> Response | None:
    marker = call.backend.bugreport(call.value("note")).encode() + b"\n"
    if not call.flag("record", False):
        return Response(200, marker, "text/plain")
    stream = call.start_stream(TEXT)
    await stream.send(marker)
    async for _ in call.body:
        pass
    await stream.send(call.backend.bugreport("end of recording").encode() + b"\n")
    stream.finish()
    return None


async def _warning(found: str | Awaitable[str]) -> Response:
    return compact({"Warning": found if isinstance(found, str) else await found})


async def check_ip_forwarding(call: Call) -> Response:
    return await _warning(call.backend.check_ip_forwarding())


async def firewall_wiring(call: Call) -> Response:
    """Ours: for `--netfilter-mode=nodivert`."""
    return compact({"Lines": call.backend.firewall_wiring()})


async def no_warning(call: Call) -> Response:
    return await _warning("")


async def check_so_mark(call: Call) -> Response:
    return compact({"UseSOMark": True})


ENDPOINTS = (
    Endpoint("status", status),
    Endpoint("watch-ipn-bus", watch_ipn_bus),
    Endpoint("whois", whois),
    Endpoint("ping", ping, methods=("POST",), wrong_method=(400, "want POST")),
    Endpoint("dial", dial, methods=("POST",), wrong_method=(405, "POST required")),
    Endpoint("derpmap", derpmap, methods=("GET",), wrong_method=(400, "want GET")),
    Endpoint("services", services, methods=("GET",), wrong_method=(405, "only GET allowed")),
    Endpoint("peer-by-id", peer_by_id),
    Endpoint("user-profile", user_profile),
    Endpoint("cert-domains", cert_domains),
    Endpoint("usermetrics", user_metrics),
    Endpoint("metrics", client_metrics, needs_write=True, denied="metric access denied"),
    Endpoint("suggest-exit-node", suggest_exit_node, methods=("GET", "POST"), wrong_method=(405, "want POST")),
    Endpoint("bugreport", bugreport, methods=("POST",), wrong_method=(405, "only POST allowed")),
    Endpoint("check-ip-forwarding", check_ip_forwarding),
    Endpoint("firewall-wiring", firewall_wiring),
    Endpoint("check-udp-gro-forwarding", no_warning),
    Endpoint("check-so-mark-in-use", check_so_mark),
)
