"""What the coordination server may ask this node beyond `/echo` (tailscale: ipn/ipnlocal/c2n.go).

Only answers that a daemon of this kind can give truthfully: prefs, netmap, health, counters, tasks, updates (none).
Everything else stays "unknown c2n path".
"""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any

import msgspec

from tsd.base.errors import DecodeError, ProtocolError
from tsd.engine.control.c2n import C2nHandler, C2nRequest, C2nResponse
from tsd.netmap.netmap import apply
from tsd.tailcfg.mapresponse import decode_map_response

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

NO_LOG_UPLOAD = "no log flusher wired up\n"


class _NetmapQuestion(msgspec.Struct):
    candidate: msgspec.Raw = msgspec.Raw(b"")
    omit_fields: list[str] | None = msgspec.field(default=None, name="omitFields")


def c2n_handlers(engine: Engine) -> dict[str, C2nHandler]:
    """Handlers by method and path, for `tsd.engine.control.c2n.answer`."""
    asked = _Questions(engine)
    return {
        "/debug/prefs": asked.prefs,
        "/debug/metrics": asked.metrics,
        "/debug/health": asked.health,
        "/debug/goroutines": asked.tasks,
        "GET /debug/netmap": asked.netmap,
        "POST /debug/netmap": asked.netmap,
        "POST /logtail/flush": asked.flush_logs,
        "GET /update": asked.update,
    }


class _Questions:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def prefs(self, request: C2nRequest) -> C2nResponse:
        return _json(self._engine.account.prefs.to_go())

    async def metrics(self, request: C2nRequest) -> C2nResponse:
        return C2nResponse(200, self._engine.inspection.client_metrics().encode(), "text/plain")

    async def health(self, request: C2nRequest) -> C2nResponse:
        return _json(self._engine.health.state())

    async def tasks(self, request: C2nRequest) -> C2nResponse:
        """Python's counterpart of a goroutine dump."""
        out = io.StringIO()
        for task in sorted(asyncio.all_tasks(), key=lambda one: one.get_name()):
            task.print_stack(limit=8, file=out)
        return C2nResponse(200, out.getvalue().encode(), "text/plain")

    async def flush_logs(self, request: C2nRequest) -> C2nResponse:
        return C2nResponse(500, NO_LOG_UPLOAD.encode())

    async def update(self, request: C2nRequest) -> C2nResponse:
        return _json({"Enabled": False, "Supported": False, "Started": False})

    async def netmap(self, request: C2nRequest) -> C2nResponse:
        """The netmap in force; with a candidate MapResponse also the netmap that it alone would give."""
        try:
            asked = msgspec.json.decode(request.body, type=_NetmapQuestion) if request.body else _NetmapQuestion()
            candidate = self._candidate(bytes(asked.candidate))
        except (msgspec.MsgspecError, DecodeError, ProtocolError) as err:
            return C2nResponse(400, f"failed to decode request body: {err}\n".encode())
        hidden = frozenset(asked.omit_fields or ())
        shown = {"current": _without(self._engine.inspection.netmap(), hidden)}
        if candidate is not None:
            shown["candidate"] = _without(candidate, hidden)
        return _json(shown)

    def _candidate(self, raw: bytes) -> dict[str, Any] | None:
        if not raw or raw == b"null":
            return None
        message = decode_map_response(raw)
        netmap, _ = apply(None, message, wall_ns=self._engine.options.clock.wall_ns(), is_first=True)
        return self._engine.inspection.netmap(netmap)


def _without(netmap: dict[str, Any] | None, hidden: frozenset[str]) -> dict[str, Any] | None:
    return netmap and {name: value for name, value in netmap.items() if name not in hidden}


def _json(value: Any) -> C2nResponse:
    return C2nResponse(200, msgspec.json.encode(value), "application/json")
