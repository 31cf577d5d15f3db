"""Tailnet lock switched off on one node: for one lock, and for good, but for no other one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.lockcontrol import Json, LockControl, first_map, locked, signed_peer, tell, until
from harness.lockkeys import new_genesis, trusted
from harness.loneengine import LoneEngine, peer_json
from tsd.engine.lock import lock as lock_module
from tsd.engine.lock.lock import UNVERIFIED
from tsd.engine.lock.orders import LockOrders
from tsd.tka.authority import Authority
from tsplatform.state_file import MemoryStore


def begin_anew(control: LockControl) -> None:
    """Another lock, which trusts key 9 alone."""
    control.genesis = new_genesis(trusted(9), signer=9, state_id=(5, 6))
    control.authority = Authority.bootstrap(control.genesis)


async def switched_off(lone: LoneEngine, control: LockControl) -> None:
    await first_map(lone, control, signed_peer(2), signed_peer(3, signer=9), peer_json(4))
    assert lone.peer_ids() == [2]
    LockOrders(lone.engine).disable_here()
    assert lone.peer_ids() == [2, 3, 4]


@pytest.mark.parametrize("is_off_between", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
async def test_the_next_lock_is_obeyed(is_off_between: bool, is_first: bool) -> None:
    control = LockControl()
    async with locked(control) as lone:
        await switched_off(lone, control)
        if is_off_between:
            await tell(lone, TKAInfo={"Disabled": True})
            assert lone.peer_ids() == [2, 3, 4]
        begin_anew(control)
        if is_first:
            await first_map(lone, control, signed_peer(2), signed_peer(3, signer=9), peer_json(4))
        else:
            await tell(lone, TKAInfo=control.info())
        await until(lambda: lone.peer_ids() == [3])
        assert lone.engine.lock.authority is not None


async def test_the_lock_that_is_switched_off_here_stays_off_when_it_changes() -> None:
    control = LockControl()
    async with locked(control) as lone:
        await switched_off(lone, control)
        control.change(add=(trusted(5),))
        await tell(lone, TKAInfo=control.info())
        assert lone.peer_ids() == [2, 3, 4] and lone.engine.lock.authority is None
        asked = len(control.asked)
        await first_map(lone, control, signed_peer(2), signed_peer(3, signer=9), peer_json(4))
        assert lone.peer_ids() == [2, 3, 4] and len(control.asked) == asked


async def test_who_switched_one_lock_off_lets_nobody_in_while_the_next_one_cannot_be_verified() -> None:
    control, store = LockControl(), MemoryStore()
    async with locked(control, store=store) as lone:
        await switched_off(lone, control)
        begin_anew(control)
        control.do_bootstrap = lambda request: {"GenesisAUM": "AAAA"}  # type: ignore[method-assign]
        await tell(lone, TKAInfo=control.info())
        assert lone.peer_ids() == [] and lone.engine.health.is_broken(UNVERIFIED)
        LockOrders(lone.engine).disable_here()
        assert lone.peer_ids() == [2, 3, 4] and not lone.engine.health.is_broken(UNVERIFIED)
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(4))
        assert lone.peer_ids() == [] and lone.engine.health.is_broken(UNVERIFIED)


async def test_a_slow_answer_about_the_next_lock_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_S", 0.01)
    control, store = LockControl(), MemoryStore()
    async with locked(control, store=store) as lone:
        await switched_off(lone, control)
    gate = slowed(control)
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(4))
        assert lone.peer_ids() == [] and lone.engine.health.is_broken(UNVERIFIED)
        gate.set()
        await until(lambda: lone.peer_ids() == [2, 4])
        assert not lone.engine.health.is_broken(UNVERIFIED)


def slowed(control: LockControl) -> asyncio.Event:
    """Control answers once the event is set."""
    gate, ask = asyncio.Event(), control.ask

    async def slow(path: str, request: Json) -> Json:
        await gate.wait()
        return await ask(path, request)

    control.ask = slow  # type: ignore[method-assign]
    return gate


async def test_a_sync_under_way_does_not_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_S", 0.01)
    control, store = LockControl(), MemoryStore()
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(4))
        control.change(add=(trusted(5),))
        gate = asyncio.Event()
        offer = lone.engine.lock.exchange.offer

        async def slow_offer(*arguments: Any) -> Any:
            await gate.wait()
            return await offer(*arguments)

        lone.engine.lock.exchange.offer = slow_offer  # type: ignore[method-assign]
        await tell(lone, TKAInfo=control.info())
        running = lone.engine.lock._attempt
        assert running is not None and not running.done()
        LockOrders(lone.engine).disable_here()
        gate.set()
        await asyncio.wait({running})
        await until(lambda: lone.peer_ids() == [2, 4])
        assert lone.engine.lock.authority is None and not chains(store)


def chains(store: MemoryStore) -> list[str]:
    return [name for name in store.names() if name.startswith("_tsd-lock/")]


async def test_a_stored_chain_of_a_lock_that_is_switched_off_is_not_obeyed() -> None:
    control, store = LockControl(), MemoryStore()
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(4))
        [name] = chains(store)
        chain = store.get(name)
        LockOrders(lone.engine).disable_here()
    store.put(name, chain)
    async with locked(control, store=store) as lone:
        assert lone.engine.lock.authority is None
        await first_map(lone, control, signed_peer(2), peer_json(4))
        assert lone.peer_ids() == [2, 4]


async def damaged(control: LockControl, store: MemoryStore, *, is_switched_off: bool) -> None:
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(4))
        [name] = chains(store)
        if is_switched_off:
            LockOrders(lone.engine).disable_here()
    store.put(name, b"AAAA")


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_damaged_chain_is_gone_for_good(is_known: bool) -> None:
    """Either control tells that its lock is the one that was switched off, or the user says it to a blind node."""
    control, store = LockControl(), MemoryStore()
    await damaged(control, store, is_switched_off=is_known)
    control.is_down = not is_known
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(4))
        if not is_known:
            assert lone.peer_ids() == []
            LockOrders(lone.engine).disable_here()
        assert lone.peer_ids() == [2, 4] and not chains(store)
    async with locked(control, store=store) as lone:
        await first_map(lone, control, signed_peer(2), peer_json(4), TKAInfo=None)
        assert lone.peer_ids() == [2, 4]
