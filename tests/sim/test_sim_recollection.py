"""A restart goes on with the netmap of the last run, whether or not the coordination server answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness.simcoord import CONTROL_PORT
from harness.simnode import SimNode
from harness.simtailnet import SimTailnet, run_sim
from tsd.engine.account.states import State


def cut_control(net: SimTailnet, is_cut: bool = True) -> None:
    """The relay on the same host stays reachable."""
    net.coord.host.blocked = dict.fromkeys((("tcp", CONTROL_PORT),) if is_cut else ())


def is_marked(node: SimNode) -> bool:
    return any("netmap of" in text for text in node.health)


def test_a_restart_is_running_at_once_and_says_nothing_when_control_answers(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*"EE")
        await a.restart()
        assert await net.until(lambda: a.state is State.RUNNING, 5) < 0.1
        assert a.sees(b) and a.home == 900 and not a.engine.is_control_connected
        assert await a.reaches(b, 5) < 1
        await net.until(lambda: a.engine.is_control_connected, 5)
        await asyncio.sleep(10)
        assert not a.health

    run_sim(scenario, tmp_path)


@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
def test_n26_restarted_nodes_find_each_other_without_control(tmp_path: Path, both: bool) -> None:
    """Each has a new disco key and new ports then, which the other one's netmap does not know."""

    async def scenario(net: SimTailnet) -> None:
        a, b, other = await net.nodes(*"EEE")
        await a.reaches(b)
        await asyncio.sleep(20)
        cut_control(net)
        for node in (a, b) if both else (a,):
            await node.restart()
            await net.until(lambda node=node: node.state is State.RUNNING, 5)  # type: ignore[misc]
        assert await a.reaches(b, 10) < 5
        await net.every(0.5, 10, lambda index: a.ping(b, "TSMP", 1.0))
        assert a.is_direct(b) and b.is_direct(a)
        assert is_marked(a) and not is_marked(other)
        [text] = [text for text in a.health if "netmap of" in text]
        assert "less than a minute ago" in text and "198.51.100.1" in text
        await asyncio.sleep(345)
        assert any("of 5 minutes ago" in text for text in a.health), a.health
        cut_control(net, False)
        await net.until(lambda: a.engine.is_control_connected and b.engine.is_control_connected, 60)
        assert not is_marked(a)
        await a.reaches(b)

    run_sim(scenario, tmp_path)


def test_n26_a_peer_that_was_removed_meanwhile_is_refused_once_control_says_so(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*"EE")
        await asyncio.sleep(20)
        cut_control(net)
        await a.stop()
        [listed] = [one for one in net.coord.change("list_nodes") if one["name"] == b.name]
        await b.stop()
        net.coord.change("delete", str(listed["id"]))
        await a.start()
        await net.until(lambda: a.sees(b), 5)
        cut_control(net, False)
        await net.until(lambda: not a.sees(b), 60)

    run_sim(scenario, tmp_path)


def test_a_node_that_was_deleted_meanwhile_keeps_nothing(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, _ = await net.nodes(*"EE")
        await asyncio.sleep(20)
        await a.stop()
        assert a.netmap_cache.names()
        [listed] = [one for one in net.coord.change("list_nodes") if one["name"] == a.name]
        net.coord.change("delete", str(listed["id"]))
        await a.start()
        await net.until(lambda: a.state is State.NEEDS_LOGIN, 10)
        assert a.engine.tailnet.netmap is None and not a.netmap_cache.names() and not is_marked(a)
        assert not a.engine.tailnet.own_addresses

    run_sim(scenario, tmp_path)


def test_a_key_that_expired_meanwhile_is_respected(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*"EE")
        await asyncio.sleep(20)
        cut_control(net)
        await a.stop()
        await asyncio.sleep(7200)
        await a.start()
        await asyncio.sleep(5)
        assert a.state is State.NEEDS_LOGIN
        assert b.state is State.NEEDS_LOGIN

    run_sim(scenario, tmp_path, node_expiry_s=3600)


def test_logout_takes_the_netmap_along(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, _ = await net.nodes(*"EE")
        await asyncio.sleep(20)
        assert a.netmap_cache.names()
        await a.run(a.backend.logout())
        assert not a.netmap_cache.names()
        await a.restart()
        await asyncio.sleep(20)
        assert not a.netmap_cache.names() and a.state is State.NEEDS_LOGIN

    run_sim(scenario, tmp_path)


def test_after_another_login_the_old_netmap_is_not_used(tmp_path: Path) -> None:
    """The node key is another one; the process ends before the new netmap was written."""

    async def scenario(net: SimTailnet) -> None:
        a, _ = await net.nodes(*"EE")
        await asyncio.sleep(20)
        [name] = a.netmap_cache.names()
        kept = a.netmap_cache.get(name)
        await a.up(net.coord.key())
        await asyncio.sleep(5)
        await a.stop()
        assert a.netmap_cache.get(name) not in (None, kept)
        a.netmap_cache.put(name, kept)
        cut_control(net)
        await a.start()
        await asyncio.sleep(5)
        assert a.engine.tailnet.netmap is None and a.state is not State.RUNNING

    run_sim(scenario, tmp_path)


def test_the_home_relay_stays_while_control_does_not_hear_of_a_change(tmp_path: Path) -> None:
    """Peers look for us where control last said; the relay there still works."""

    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*"HH")
        await asyncio.sleep(20)
        assert a.home == 900
        cut_control(net)
        await a.restart()
        net.coord.host.link.latency_s = 0.3
        a.engine.reach.look("test")
        await asyncio.sleep(10)
        assert a.home == 900
        assert await b.reaches(a, 10) < 5
        cut_control(net, False)
        await net.until(lambda: a.engine.is_control_connected, 60)
        a.engine.reach.look("test")
        await net.until(lambda: a.home == 901, 30)

    run_sim(scenario, tmp_path, relays=1)
