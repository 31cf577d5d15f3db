"""When the netmap of the last run is brought back, kept, and forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from harness.loneengine import LoneEngine, lone_engine, peer_json
from tsd.base.clock import ManualClock
from tsd.engine.account.states import State
from tsd.engine.control import recollection
from tsd.engine.control.recollection import WARNING, age_text
from tsplatform.state_file import MemoryStore


class Disk:
    """What outlives a run."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.cache = MemoryStore()
        self.clock = ManualClock()

    @asynccontextmanager
    async def first_run(self, *peers: dict[str, Any]) -> AsyncIterator[LoneEngine]:
        async with lone_engine(store=self.store, netmap_cache=self.cache, clock=self.clock) as lone:
            lone.map(PeersChanged=list(peers))
            yield lone

    @asynccontextmanager
    async def next_run(self) -> AsyncIterator[LoneEngine]:
        async with lone_engine(is_up=False, store=self.store, netmap_cache=self.cache, clock=self.clock) as lone:
            for _ in range(5):
                await asyncio.sleep(0)
            yield lone

    @property
    def name(self) -> str:
        [name] = self.cache.names()
        return name


async def test_the_end_of_a_run_keeps_it_and_the_next_one_goes_on() -> None:
    disk = Disk()
    async with disk.first_run(peer_json(2)):
        assert not disk.cache.names()
    disk.clock.advance(720)
    async with disk.next_run() as lone:
        assert lone.engine.account.state is State.RUNNING
        assert lone.peer_ids() == [2] and lone.routed("100.64.0.2") == 2
        assert lone.engine.reach.home == 1
        disk.clock.advance(6)
        assert "The netmap of 12 minutes ago is in use" in lone.engine.health.texts()[0]
        lone.first_map(peer_json(3))
        assert lone.peer_ids() == [3]
        assert not lone.engine.health.is_broken(WARNING)


async def test_it_is_written_once_for_many_changes_and_seldom() -> None:
    disk = Disk()
    writes: list[bytes | None] = []
    put = disk.cache.put
    disk.cache.put = lambda name, value: (writes.append(value), put(name, value))[1]  # type: ignore[method-assign]
    async with disk.first_run(peer_json(2)) as lone:
        kept = lone.engine.recollection
        assert kept._due - disk.clock.now() == recollection.FIRST_SAVE_S
        kept._stop_timer()
        await recollection.in_slices(kept._save())
        assert len(writes) == 1
        lone.map(PeersChangedPatch=[{"NodeID": 2, "Endpoints": ["192.0.2.77:1"]}])
        assert kept._due - disk.clock.now() == recollection.MOVED_SAVE_S
        lone.map(PeersChanged=[peer_json(3)])
        assert kept._due - disk.clock.now() == recollection.MIN_PAUSE_S
        disk.clock.advance(59)
        lone.map(PeersChanged=[peer_json(4)])
        assert len(writes) == 1
    assert len(writes) == 2
    disk.clock.advance(1)
    async with disk.next_run() as lone:
        assert lone.peer_ids() == [2, 3, 4]
    assert len(writes) == 2, "nothing new was heard"


async def test_the_end_of_a_run_confirms_it_while_control_is_heard() -> None:
    disk = Disk()
    async with disk.first_run(peer_json(2)) as lone:
        kept = lone.engine.recollection
        kept._stop_timer()
        await recollection.in_slices(kept._save())
        disk.clock.advance(86400)
        lone.engine.on_connected(True)
    disk.clock.advance(120)
    async with disk.next_run() as lone:
        assert lone.engine.health.argument(WARNING, "age") == "2 minutes"


@pytest.mark.parametrize("raw", [b"", b"\0" * 100, b"{}", b"\x28\xb5\x2f\xfd rest"])
async def test_a_damaged_file_is_a_line_in_the_log_and_gone(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    async with disk.first_run(peer_json(2)):
        pass
    disk.cache.put(disk.name, raw)
    with caplog.at_level(logging.WARNING):
        async with disk.next_run() as lone:
            assert lone.engine.tailnet.netmap is None and lone.engine.account.state is not State.RUNNING
    assert "the saved netmap is not used" in caplog.text
    assert not disk.cache.names()


async def test_it_is_of_one_profile_login_server_and_node_key() -> None:
    disk = Disk()
    async with disk.first_run(peer_json(2)):
        pass
    name, raw = disk.name, disk.cache.get(disk.name)
    async with disk.next_run() as lone:
        lone.engine.account.new_profile()
        await asyncio.sleep(0)
        assert lone.engine.tailnet.netmap is None
        assert disk.cache.get(name) == raw
        lone.engine.account.switch_profile(name)
        for _ in range(5):
            await asyncio.sleep(0)
        assert lone.peer_ids() == [2]
        lone.engine.account.delete_profile(name)
        assert not disk.cache.names()


async def test_control_that_refuses_the_login_ends_it() -> None:
    for refuse, state in (
        (lambda engine: engine.on_auth_url("https://control.example/login"), State.NEEDS_LOGIN),
        (lambda engine: engine.on_error("this machine is not allowed", True), State.NO_STATE),
    ):
        disk = Disk()
        async with disk.first_run(peer_json(2)):
            pass
        async with disk.next_run() as lone:
            assert lone.engine.account.state is State.RUNNING
            lone.engine.on_error("cannot connect", False)
            assert lone.engine.account.state is State.RUNNING and lone.peer_ids() == [2]
            refuse(lone.engine)
            assert lone.engine.account.state is state
            assert lone.engine.tailnet.netmap is None and not lone.peer_ids() and not disk.cache.names()
            assert lone.hull.router.config.local_addresses == ()  # type: ignore[attr-defined]


async def test_control_may_forbid_it() -> None:
    disk = Disk()
    async with disk.first_run() as lone:
        lone.map(Node=peer_json(1, Key=str(lone.key.public()), CapMap={"disable-cache-network-maps": None}))
    assert not disk.cache.names()


async def test_a_netmap_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recollection, "MAX_BYTES", 100)
    disk = Disk()
    async with disk.first_run(peer_json(2)):
        pass
    assert not disk.cache.names()


async def test_an_ephemeral_node_keeps_nothing() -> None:
    cache = MemoryStore()
    async with lone_engine(netmap_cache=cache, is_ephemeral=True):
        pass
    assert not cache.names()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "less than a minute"),
        (61, "1 minute"),
        (3700, "61 minutes"),
        (7200, "2 hours"),
        (100_000, "27 hours"),
        (3e6, "34 days"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
