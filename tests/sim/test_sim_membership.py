"""Nodes are removed, expire, come twice; the policy changes under running flows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness.simtailnet import SimTailnet, run_sim
from harness.simtalk import Talk, echo, echo_service
from tsd.engine.account.states import State
from tsplatform.state_file import MemoryStore

OPEN = '{"acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}]}'
ONLY_9 = '{"acls": [{"action": "accept", "src": ["*"], "dst": ["*:9"]}]}'


def test_a_removed_node_is_out_at_once_and_needs_a_new_login(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "H")
        await a.reaches(b)
        old_ip = b.ip4
        net.coord.change("delete", b.name)
        await net.until(lambda: a.engine.tailnet.peers.by_address(old_ip) is None, 0.2)
        assert (await a.ping(old_ip))["Err"] == "no matching peer"
        assert (await b.ping(a, "TSMP", 2))["Err"]
        await net.until(lambda: b.state is State.NEEDS_LOGIN and b.engine.account.auth_url, 5)
        await asyncio.sleep(60)
        assert len(net.coord.change("list_nodes")) == 1, "it does not come back by the key it used once"
        net.coord.change("approve", b.engine.account.auth_url, "")
        await net.until(lambda: b.state is State.RUNNING, 2)
        assert b.ip4 != old_ip and a.sees(b)
        await a.reaches(b)

    run_sim(scenario, tmp_path)


def test_a_log_out_leaves_no_warnings_behind(tmp_path: Path) -> None:
    """The relay that goes with the login is no fault."""

    async def scenario(net: SimTailnet) -> None:
        (a,) = await net.nodes("E")
        await net.until(lambda: a.engine.plane is not None and a.engine.reach.home)
        await asyncio.sleep(5)
        await a.run(a.backend.logout())
        await asyncio.sleep(60)
        assert a.engine.health.texts() == []

    run_sim(scenario, tmp_path)


def test_an_ephemeral_node_that_was_away_too_long_comes_back_by_itself(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        (a,) = await net.nodes("E")
        b = net.add(net.host("E"), is_ephemeral=True)
        await net.bring_up([b], ephemeral=True)
        await net.until(lambda: a.sees(b))
        b.host.plug(False)
        await net.until(lambda: len(net.coord.change("list_nodes")) == 1, 1200, "the ephemeral node is deleted")
        b.host.plug(True)
        await net.until(lambda: b.state is State.RUNNING and a.sees(b) and b.engine.is_control_connected, 30)
        await a.reaches(b)
        await b.stop()
        await net.until(lambda: len(net.coord.change("list_nodes")) == 1, 1)

    run_sim(scenario, tmp_path, ephemeral_timeout_s=60.0)


def test_a_node_that_the_administrator_expires(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "E")
        await echo_service(b)
        stream = await a.connect(b, 7)
        assert await echo(a, stream) == b"hello"
        net.coord.change("expire", b.name)
        await net.until(lambda: b.state is State.NEEDS_LOGIN, 0.5)
        assert (await a.ping(b))["Err"] == "peer's node key has expired"
        with pytest.raises(TimeoutError):
            await echo(a, stream)
        await b.up(net.coord.key())
        await net.until(lambda: b.state is State.RUNNING, 2)
        assert await echo(a, stream, timeout_s=20) == b"hellohello", "TCP goes on under the new key"

    run_sim(scenario, tmp_path)


def test_keys_expire_by_the_clock_without_a_word_from_control(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "E")
        await a.reaches(b)
        net.coord.host.blocked = {("tcp", 8080): None}
        await asyncio.sleep(590)
        assert a.state is State.RUNNING and not (await a.ping(b))["Err"]
        await net.until(lambda: a.state is b.state is State.NEEDS_LOGIN, 15)

    run_sim(scenario, tmp_path, node_expiry_s=600.0)


def test_the_policy_changes_under_running_flows(tmp_path: Path) -> None:
    """Flows that run may go on, as upstream has it; new ones obey at once, in both directions of the change."""

    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "E")
        await echo_service(b)
        running = await a.connect(b, 7)
        assert await echo(a, running) == b"hello"
        await net.coord.server.set_policy(ONLY_9)
        await asyncio.sleep(0.5)
        with pytest.raises(PermissionError, match="access rules"):
            await a.connect(b, 7, timeout_s=0.5)
        assert b.engine.plane.datapath.traffic.inbound_drops["acl"] > 0
        assert await echo(a, running) == b"hello"
        assert not (await a.ping(b, "TSMP"))["Err"], "pings are not filtered"
        await net.coord.server.set_policy(OPEN)
        await asyncio.sleep(0.5)
        assert await echo(a, await a.connect(b, 7, timeout_s=3)) == b"hello"

    run_sim(scenario, tmp_path)


@pytest.mark.parametrize("kinds", ["EE", "HH"])
def test_w13_two_machines_with_one_copied_state(tmp_path: Path, kinds: str) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*kinds)
        await a.reaches(b)
        copy = MemoryStore()
        for name in b.store.names():
            copy.put(name, b.store.get(name))
        twin = net.add(net.host("E", "twin"), store=copy)
        await twin.start()
        await net.until(lambda: twin.state is State.RUNNING)
        assert twin.ip4 == b.ip4
        timers = {node.name: node.host.timers_fired for node in (a, b, twin)}
        handshakes = [net.net.trace.sent(node.name, "wg init") for node in (a, b, twin)]
        talks = [Talk(b, a, 1.0), Talk(twin, a, 1.0)]
        async with talks[0].going(), talks[1].going():
            await asyncio.sleep(300)
        for node in (a, b, twin):
            assert node.host.timers_fired - timers[node.name] < 5 * 300
        assert sum(net.net.trace.sent(n.name, "wg init") for n in (a, b, twin)) - sum(handshakes) < 150
        assert net.coord.server.derp.router.drops["duplicate login"] < 5, "no storm of logins"
        for node in (b, twin):
            assert any("another machine uses the same node key" in text for text in node.health)
        await twin.stop()
        await net.until(lambda: not b.health, 60)
        assert await b.reaches(a) < 12

    run_sim(scenario, tmp_path)
