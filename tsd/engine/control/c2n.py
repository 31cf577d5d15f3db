"""Calls from the coordination server to this node ("c2n"): an HTTP/1 request inside a PingRequest, answered by POST.

tailscale: ipn/ipnlocal/c2n.go. Handlers are given by the engine; `/echo` is here because servers probe with it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

import h11
from msgspec import Struct

from tsd.base.errors import DecodeError
from tsd.base.log import fields

log = logging.getLogger("tsd.engine.c2n")

HANDLER_TIMEOUT_S = 60.0
MAX_HANDLER_TIMEOUT_S = 3600.0
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class C2nRequest(Struct, frozen=True):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class C2nResponse(Struct, frozen=True):
    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


C2nHandler = Callable[[C2nRequest], Awaitable[C2nResponse]]
Handlers = Mapping[str, C2nHandler]
"""By "METHOD /path", or by "/path" for any method."""


async def _echo(request: C2nRequest) -> C2nResponse:
    return C2nResponse(body=request.body)


async def answer(payload: str, handlers: Handlers) -> bytes:
    """Run the handler for a base64 request and serialise its HTTP/1.1 response. Raises `DecodeError` for garbage."""
    request = parse(payload)
    handler, response = _find(request, {"/echo": _echo, **handlers})
    if handler is not None:
        response = await _run(handler, request)
    return serialise(response)


def _find(request: C2nRequest, handlers: Handlers) -> tuple[C2nHandler | None, C2nResponse]:
    handler = handlers.get(f"{request.method} {request.path}") or handlers.get(request.path)
    if handler is not None:
        return handler, C2nResponse()
    if any(name.endswith(f" {request.path}") for name in handlers):
        return None, C2nResponse(405, b"bad method\n")
    return None, C2nResponse(400, b"unknown c2n path\n")


async def _run(handler: C2nHandler, request: C2nRequest) -> C2nResponse:
    timeout_s = _duration_s(request.headers.get("c2n-handler-timeout", "")) or HANDLER_TIMEOUT_S
    try:
        async with asyncio.timeout(timeout_s):
            return await handler(request)
    except TimeoutError:
        return C2nResponse(504, b"handler timed out\n")
    except Exception:
        log.exception(fields("c2n handler failed", path=request.path))
        return C2nResponse(500, b"internal error\n")


def parse(payload: str) -> C2nRequest:
    """Raises `DecodeError`."""
    try:
        raw = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise DecodeError("c2n", "payload is not base64") from None
    connection = h11.Connection(h11.SERVER)
    request: h11.Request | None = None
    body = bytearray()
    try:
        connection.receive_data(raw)
        connection.receive_data(b"")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
    except h11.RemoteProtocolError as err:
        raise DecodeError("c2n", str(err)) from None
    if request is None:
        raise DecodeError("c2n", "no request in the payload")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
    try:
        split = urlsplit(request.target.decode("latin-1"))
        query = dict(parse_qsl(split.query))
    except ValueError as err:
        raise DecodeError("c2n", str(err)) from None
    return C2nRequest(request.method.decode("latin-1"), split.path, query, headers, bytes(body))


def serialise(response: C2nResponse) -> bytes:
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Status"
    head = (
        f"HTTP/1.1 {response.status} {phrase}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + response.body


def _duration_s(text: str) -> float:
    """A Go duration of one number and unit (what servers send); 0 for anything else."""
    for unit in ("ms", "s", "m", "h"):
        number = text.removesuffix(unit)
        if number != text and number.isascii() and number.replace(".", "", 1).isdecimal():
            return min(float(number) * _UNITS_S[unit], MAX_HANDLER_TIMEOUT_S)
    return 0.0
