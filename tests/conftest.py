"""For all tests: the event loop under test, and loud skips for what this machine does not have."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

# Daemons under test never ask the router of the machine they run on; tests of the port mapper bring their own.
os.environ.setdefault("TS_DISABLE_PORTMAPPER", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loop-sensitive", action="store_true", help="only async tests and those marked `loops`")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop as in production, or asyncio with TSD_LOOP=asyncio."""
    if os.environ.get("TSD_LOOP") == "asyncio":
        return {"asyncio": asyncio.new_event_loop}
    import uvloop

    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--loop-sensitive"):
        kept = [item for item in items if _is_loop_sensitive(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    reasons = {name: reason for name, reason in (("root", _no_root()), ("peers", _no_peers())) if reason}
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _is_loop_sensitive(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    return item.get_closest_marker("loops") is not None or inspect.iscoroutinefunction(function)


def _no_root() -> str:
    if os.geteuid() != 0:
        return "needs root"
    return "" if shutil.which("ip") else "needs ip (iproute2)"


def _no_peers() -> str:
    folder = os.environ.get("TSD_PEER_BIN", "")
    return "" if folder and Path(folder).is_dir() else "TSD_PEER_BIN names no folder with real peers"
