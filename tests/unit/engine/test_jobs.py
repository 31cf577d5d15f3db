"""Jobs that pause: order, failures, and a large network map on a whole engine."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from harness.loneengine import LoneEngine, lone_engine, peer_json
from tsd.base.clock import ManualClock
from tsd.engine.jobs import Jobs, Steps

MANY = 700


class _Desk:
    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.jobs = Jobs(ManualClock(), lambda work: self.tasks.append(asyncio.ensure_future(work)))
        self.done: list[str] = []

    def job(self, name: str, pauses: int = 0, failure: Exception | None = None) -> Steps:
        for count in range(pauses):
            self.done.append(f"{name}{count}")
            yield
        if failure is not None:
            raise failure
        self.done.append(name)

    async def settle(self) -> None:
        await asyncio.gather(*self.tasks)


async def test_jobs_without_pause_are_done_at_once() -> None:
    desk = _Desk()
    desk.jobs.submit(desk.job("a"))
    assert desk.done == ["a"] and not desk.tasks


async def test_what_is_submitted_meanwhile_waits() -> None:
    desk = _Desk()
    desk.jobs.submit(desk.job("a", 2))
    desk.jobs.submit(desk.job("b"))
    assert desk.done == ["a0"]
    await desk.settle()
    assert desk.done == ["a0", "a1", "a", "b"] and gc.isenabled()


async def test_failures_before_the_first_pause_are_the_callers() -> None:
    desk = _Desk()
    with pytest.raises(ValueError, match="no"):
        desk.jobs.submit(desk.job("a", 0, ValueError("no")))
    desk.jobs.submit(desk.job("b", 1, ValueError("late")))
    desk.jobs.submit(desk.job("c"))
    await desk.settle()
    assert desk.done == ["b0", "c"]


async def test_clear_forgets_also_the_job_that_has_begun() -> None:
    desk = _Desk()
    desk.jobs.submit(desk.job("a", 3))
    desk.jobs.submit(desk.job("b"))
    desk.jobs.clear()
    desk.jobs.submit(desk.job("c"))
    await desk.settle()
    assert desk.done == ["a0", "c"]


def many_peers(**changes: Any) -> list[dict[str, Any]]:
    def one(number: int) -> dict[str, Any]:
        ip, ip6 = f"100.70.{number >> 8}.{number & 255}/32", f"fd7a:115c:a1e0::9:{number:x}/128"
        key, disco = f"nodekey:{number + 7:064x}", f"discokey:{number + 7:064x}"
        fresh = {"Addresses": [ip, ip6], "AllowedIPs": [ip, ip6], "Key": key, "DiscoKey": disco}
        return (
            peer_json(1)
            | {"ID": number, "StableID": f"n{number}", "Name": f"n{number}.tail.example."}
            | fresh
            | changes
        )

    return [one(number) for number in range(2, MANY + 2)]


async def settled(lone: LoneEngine) -> None:
    while lone.engine.tailnet.is_busy:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_large_map_is_worked_in_with_what_follows_it() -> None:
    async with lone_engine() as lone:
        lone.first_map(*many_peers())
        assert lone.engine.tailnet.is_busy
        lone.map(PeersRemoved=[3])
        lone.map(PeersChangedPatch=[{"NodeID": 4, "Online": False}])
        lone.backend._engine.account.edit_prefs({"RouteAll": True, "RouteAllSet": True})
        await settled(lone)
        assert lone.peer_ids() == [2, *range(4, MANY + 2)]
        assert lone.routed("100.70.0.2") == 2 and lone.routed("100.70.0.3") is None
        assert lone.engine.tailnet.plan.wishes is not None and lone.engine.tailnet.plan.wishes.accept_routes
        peer = lone.engine.tailnet.peers.by_id(4)
        assert peer is not None and peer.node.online is False
        names = lone.engine.resolver.lookup(f"n{MANY}.tail.example")
        assert [str(ip) for ip in names] == [f"100.70.{MANY >> 8}.{MANY & 255}", f"fd7a:115c:a1e0::9:{MANY:x}"]


async def test_another_identity_ends_the_work_on_a_large_map() -> None:
    async with lone_engine() as lone:
        lone.first_map(*many_peers())
        lone.engine.identity_changed()
        await settled(lone)
        assert lone.peer_ids() == [] and lone.engine.tailnet.netmap is None


async def test_idle_peers_cost_magicsock_nothing_and_are_known_when_they_speak() -> None:
    async with lone_engine() as lone:
        lone.first_map(*many_peers())
        await settled(lone)
        plane = lone.engine.plane
        assert plane is not None
        peer = lone.engine.tailnet.peers.by_id(5)
        assert peer is not None and not plane.magicsock.has_peer(peer.handle)
        plane._enlist_disco(bytes.fromhex(f"{12:064x}"))
        assert plane.magicsock.has_peer(peer.handle)
