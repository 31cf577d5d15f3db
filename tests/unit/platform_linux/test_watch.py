"""When changes of routing lead to a comparison: debounced, paced, and less often when a comparison is expensive."""

from __future__ import annotations

import asyncio
import socket
from unittest import mock

import pytest

from tsplatform.linux import watch
from tsplatform.linux.watch import RoutingWatch


@pytest.mark.parametrize(("cost_s", "pause_s"), [(0.0, 0.1), (0.02, 0.4)])
async def test_changes_without_end_cost_little(monkeypatch: pytest.MonkeyPatch, cost_s: float, pause_s: float) -> None:
    monkeypatch.setattr(watch, "DEBOUNCE_S", 0.01)
    monkeypatch.setattr(watch, "PACE_S", 0.1)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    seen: list[int] = []
    with mock.patch("tsplatform.netlink.open_changes", return_value=ours):
        watching = RoutingWatch(lambda: seen.append(1), lambda: True, "tsd0", lambda: cost_s)
        watching.start()
        started = asyncio.get_running_loop().time()
        for _ in range(25):
            theirs.send(b"change")
            await asyncio.sleep(0.02)
        took_s = asyncio.get_running_loop().time() - started
        watching.stop()
    theirs.close()
    assert 1 <= len(seen) <= took_s / pause_s + 2
