"""What the daemon tells `tsctl doctor`: facts that only it has. Judged and put into words by tsctl.doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

_PROXY_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")


async def doctor_facts(engine: Engine) -> dict[str, Any]:
    """Go-style names, as everything on the LocalAPI."""
    store = engine.options.hull.store
    return {
        "Hull": await engine.options.hull.report(),
        "Health": engine.health.state()["Warnings"] or {},
        "ControlConnected": engine.is_control_connected,
        "ControlError": engine.health.argument("not-in-map-poll", "error"),
        "State": {"Where": store.where, "IsDurable": store.is_durable},
        # With userinfo: only for who may change the daemon anyway.
        "Environ": {name: value for name in _PROXY_VARIABLES if (value := engine.options.environ.get(name))},
    }
