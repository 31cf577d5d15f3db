"""Relays and the coordination server go away and come back; peers go on meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from harness.simcoord import CONTROL_PORT, RELAY_PORT, STUN_PORT
from harness.simtailnet import SimTailnet, run_sim
from harness.simtalk import Talk
from tsd.engine.account.states import State
from tsd.tailcfg.derpmap import DERPMap


def block(net: SimTailnet, *ports: tuple[str, int]) -> None:
    """Datagrams and streams of these ports of the coordination server's host vanish; none: all pass again."""
    net.coord.host.blocked = dict.fromkeys(ports)


RELAY = (("tcp", RELAY_PORT), ("udp", STUN_PORT))


def test_direct_traffic_survives_the_relay_and_relayed_traffic_comes_back(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        e1, e2, h1, h2 = await net.nodes(*"EEHH")
        direct, relayed = Talk(e1, e2), Talk(h1, h2)
        async with direct.going(), relayed.going():
            await asyncio.sleep(20)
            assert direct.longest_s == relayed.longest_s == 0.0
            assert e1.is_direct(e2) and not h1.is_direct(h2)
            block(net, *RELAY)
            await asyncio.sleep(60)
            assert ["relay tsd" in text for text in h1.health] == [True], h1.health
            cut_at = net.loop.time()
            block(net)
            await asyncio.sleep(30)
        assert direct.longest_s == 0.0
        [(_, back_at)] = relayed.outages()
        assert back_at - cut_at < 21, "the back-off ends at 20 s"
        assert all(node.home == 900 and not node.health for node in (e1, e2, h1, h2))

    run_sim(scenario, tmp_path)


def test_the_first_packet_to_a_peer_does_not_wait_for_a_relay_that_is_gone(tmp_path: Path) -> None:
    """The handshake left by the relay, since no direct path was known; it is made again when one is found."""

    async def scenario(net: SimTailnet) -> None:
        near, public = await net.nodes(*"EP")
        block(net, ("tcp", RELAY_PORT))
        await asyncio.sleep(1)
        assert await near.reaches(public) < 2.5

    run_sim(scenario, tmp_path, relays=1)


@pytest.mark.parametrize("ports", [RELAY, RELAY[:1]], ids=["relay and STUN", "relay only"])
def test_f17_a_lost_home_relay_is_replaced_and_peers_learn_it(
    tmp_path: Path, ports: tuple[tuple[str, int], ...]
) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = nodes = await net.nodes(*"HH")
        await a.reaches(b)
        assert a.home == b.home == 900
        talk = Talk(a, b)
        async with talk.going():
            await asyncio.sleep(5)
            block(net, *ports)
            await net.until(lambda: a.home == b.home == 901, 120)
            await net.until(lambda: a.peer(b).node.home_region == b.peer(a).node.home_region == 901)
            await asyncio.sleep(5)
        assert 0 < talk.longest_s < 60
        assert all(not node.health for node in nodes)
        block(net)

    run_sim(scenario, tmp_path, relays=1)


def test_traffic_goes_on_without_the_coordination_server(tmp_path: Path) -> None:
    """Its process is gone for two minutes; the relay stands on another host. Changes arrive afterwards."""

    async def scenario(net: SimTailnet) -> None:
        block(net, *RELAY)
        e1, e2, h1, h2 = nodes = await net.nodes(*"EEHH")
        assert [node.home for node in nodes] == [901] * 4
        talks = [Talk(e1, e2), Talk(h1, h2)]
        async with talks[0].going(), talks[1].going():
            await asyncio.sleep(10)
            await net.coord.stop()
            await net.until(lambda: not any(node.engine.is_control_connected for node in nodes), 5)
            await asyncio.sleep(120)
            assert all("refused" in node.engine.control_error for node in nodes)
            assert all(node.state is State.RUNNING for node in nodes)
            await net.coord.start()
            took_s = await net.until(lambda: all(node.engine.is_control_connected for node in nodes), 60)
            assert took_s <= 45, "the back-off ends at 30 s, times 1.5"
            net.coord.change("rename", e2.name, "fresh")
            await net.until(lambda: e1.peer(e2).node.base_name == "fresh" and h1.peer(e2).node.base_name == "fresh", 1)
            (late,) = await net.nodes("P")
            await net.until(lambda: all(node.sees(late) for node in nodes), 1)
            await h1.reaches(late)
        assert [talk.longest_s for talk in talks] == [0.0, 0.0]
        assert not any(node.health for node in nodes)

    run_sim(scenario, tmp_path, relays=1)


def test_n06_a_silent_map_stream_is_noticed_after_two_minutes(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*"EE")
        await a.reaches(b)
        block(net, ("tcp", CONTROL_PORT))
        took_s = await net.until(lambda: not a.engine.is_control_connected, 200)
        assert 110 < took_s <= 125 and a.backend.status()["Self"]["Online"] is False
        wakes = a.host.wakes
        await asyncio.sleep(500)
        assert a.host.wakes - wakes < 500, "no storm of dials"
        assert any("coordination server does not answer" in text for text in a.health)
        await a.reaches(b)
        block(net)
        await net.until(lambda: a.engine.is_control_connected and b.engine.is_control_connected, 60)
        assert a.health == []

    run_sim(scenario, tmp_path)


def test_n24_relay_maps_that_are_absent_empty_or_without_our_home(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = nodes = await net.nodes(*"HH")
        await a.reaches(b)
        registry = net.coord.server.coordinator.registry
        whole = registry.config.derp_map

        async def serve(derp_map: DERPMap | None) -> None:
            registry.config = replace(registry.config, derp_map=derp_map)
            for node in nodes:
                node.call(node.engine.control.reconnect)
            await asyncio.sleep(20)
            await a.reaches(b, 5)

        for derp_map in (None, DERPMap(regions={}), DERPMap()):
            await serve(derp_map)
            assert a.home == 900 and a.engine.plane.derp.is_connected(900)
        assert any("relay map" in text for text in a.health)
        await serve(whole)
        assert a.health == []
        await serve(DERPMap(regions={901: whole.region(901)}))
        assert a.home == b.home == 901 and a.engine.plane.derp.is_connected(901)

    run_sim(scenario, tmp_path, relays=1)


def test_w12_a_relay_that_forgot_us_while_the_stream_stays_open(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*"HH")
        await a.reaches(b)
        router = net.coord.server.derp.router
        ours = b.engine.plane.node_private.public().raw
        for connection in [number for number, client in router._clients.items() if client.key == ours]:
            router.disconnect(connection, net.loop.time())
        assert (await a.ping(b, "TSMP"))["Err"] == "timeout"
        assert await a.reaches(b, 60) < 45

    run_sim(scenario, tmp_path)


def test_s12_a_wrong_clock_does_not_stop_handshakes(tmp_path: Path) -> None:
    """W18: a node restarts a year in the past; another one is set back while it runs."""

    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*"EE")
        await a.reaches(b)
        await asyncio.sleep(4000)
        await a.stop()
        a.clock.wrong_s = -365 * 86400.0
        await a.start()
        await net.until(lambda: a.state is State.RUNNING)
        assert await a.reaches(b) < 1 and await b.reaches(a) < 1
        b.clock.wrong_s = 73 * 365 * 86400.0
        await asyncio.sleep(300)
        assert await a.reaches(b) < 1
        a.clock.wrong_s = b.clock.wrong_s = 0.0
        await asyncio.sleep(300)
        assert await b.reaches(a) < 1

    run_sim(scenario, tmp_path)
