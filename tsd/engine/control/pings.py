"""PingRequests from the coordination server: liveness, c2n, and pings on its behalf."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

from tsd.base.errors import ControlError, TsdError
from tsd.base.log import fields
from tsd.engine.control.c2n import Handlers, answer
from tsd.tailcfg.mapping import PingRequest, PingResponse
from tsd.tailcfg.wire import encode_json
from tsd.transport.control import ControlClient

log = logging.getLogger("tsd.engine.control")

PING_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 15.0
C2N_REPLY_TIMEOUT_S = 60.0

Pinger = Callable[[str, str], Awaitable[PingResponse]]
"""(ip, one of disco, TSMP, ICMP, peerapi) -> result."""


class ControlPings:
    """Answers each request in a task of its own; a repeated URL is answered once."""

    def __init__(self, client: ControlClient, handlers: Handlers, pinger: Pinger | None) -> None:
        self._client = client
        self._handlers = handlers
        self._pinger = pinger
        self._last_url = ""
        self._tasks: dict[asyncio.Task[None], None] = {}

    def handle(self, request: PingRequest) -> None:
        if not request.url or request.url == self._last_url:
            return
        self._last_url = request.url
        work: Coroutine[Any, Any, None]
        if request.types == "":
            work = self._prove_liveness(request)
        elif request.types == "c2n":
            work = self._answer_c2n(request)
        else:
            work = self._ping_for_server(request)
        task = asyncio.create_task(self._guard(work, request.types or "liveness"))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _guard(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except TsdError as err:
            log.info(fields("ping request of the server failed", kind=what, reason=err))
        except Exception:
            log.exception(fields("ping request of the server failed", kind=what))

    async def _prove_liveness(self, request: PingRequest) -> None:
        if request.url_is_noise:
            await self._client.post(_path(request.url), b"", method="HEAD", timeout_s=REPLY_TIMEOUT_S)
        else:
            await self._client.fetch("HEAD", request.url, timeout_s=REPLY_TIMEOUT_S)

    async def _answer_c2n(self, request: PingRequest) -> None:
        response = await answer(request.payload or "", self._handlers)
        await self._client.post(_path(request.url), response, timeout_s=C2N_REPLY_TIMEOUT_S)

    async def _ping_for_server(self, request: PingRequest) -> None:
        for kind in request.types.split(","):
            result = await self._ping(request.ip, kind)
            body = encode_json(result)
            if request.url_is_noise:
                await self._client.post(_path(request.url), body, timeout_s=REPLY_TIMEOUT_S)
            else:
                await self._client.fetch("POST", request.url, body, timeout_s=REPLY_TIMEOUT_S)

    async def _ping(self, ip: str, kind: str) -> PingResponse:
        if self._pinger is None:
            return PingResponse(type=kind, ip=ip, err="pings are not available")
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                return await self._pinger(ip, kind)
        except TimeoutError:
            return PingResponse(type=kind, ip=ip, err=f"no answer within {PING_TIMEOUT_S:.0f} s")
        except TsdError as err:
            return PingResponse(type=kind, ip=ip, err=str(err))


def _path(url: str) -> str:
    """What is asked over Noise: the host of the URL means nothing there."""
    try:
        split = urlsplit(url)
    except ValueError as err:
        raise ControlError(f"not a URL: {url[:100]!r} ({err})", retryable=False) from None
    return (split.path or "/") + (f"?{split.query}" if split.query else "")


def ping_response(ip: str, kind: str, result: Mapping[str, Any]) -> PingResponse:
    """A PingResult as the server wants it."""
    return PingResponse(
        type=kind,
        ip=ip,
        node_ip=result["NodeIP"],
        node_name=result["NodeName"],
        err=result["Err"],
        latency_seconds=result["LatencySeconds"],
        endpoint=result["Endpoint"],
        derp_region_id=result["DERPRegionID"],
        derp_region_code=result["DERPRegionCode"],
        is_local_ip=bool(result.get("IsLocalIP")),
    )
