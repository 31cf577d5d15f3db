"""The network changes under running traffic: roaming, NAT reboots, sleep, cables pulled, boxes that swallow packets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from harness.simnat import Nat
from harness.simnode import SimNode
from harness.simtailnet import SimTailnet, run_sim
from harness.simtalk import Sink, Talk, content, transfer
from tsd.engine.account.states import State

Change = Callable[[SimTailnet, SimNode], Awaitable[None]]


async def under_traffic(net: SimTailnet, kinds: str, change: Change, seconds: float = 40.0) -> tuple[Talk, Talk]:
    """Both ping each other; after 15 s `change` happens to the second one. The talks with their outages."""
    a, b = await net.nodes(*kinds)
    await a.reaches(b)
    talks = Talk(a, b), Talk(b, a)
    async with talks[0].going(), talks[1].going():
        await asyncio.sleep(15)
        assert a.is_direct(b) is b.is_direct(a) is (kinds in ("PE", "EE"))
        await change(net, b)
        await asyncio.sleep(seconds)
    assert all(talk.longest_s < 100_000 for talk in talks), "it never came back"
    return talks


def roam(address: str, kind: str = "") -> Change:
    async def change(net: SimTailnet, node: SimNode) -> None:
        node.host.roam(address, nat=Nat.of(kind, "203.0.113.220") if kind else None)

    return change


@pytest.mark.parametrize(
    ("kinds", "change", "is_direct"),
    [
        ("PE", roam("203.0.113.220"), True),
        ("EE", roam("203.0.113.220"), True),
        ("EE", roam("10.99.0.2", "E"), True),
        ("EE", roam("10.99.0.2", "H"), False),
        ("HH", roam("10.99.0.2", "H"), False),
        ("HH", roam("203.0.113.220"), True),
    ],
    ids=["to the open", "from NAT to the open", "NAT to NAT", "to a hard NAT", "hard to hard", "hard to the open"],
)
def test_roaming_interrupts_for_two_seconds_at_most(
    tmp_path: Path, kinds: str, change: Change, is_direct: bool
) -> None:
    async def scenario(net: SimTailnet) -> None:
        there, back = await under_traffic(net, kinds, change)
        assert max(there.longest_s, back.longest_s) <= 2.0
        assert there.a.is_direct(there.b) is there.b.is_direct(there.a) is is_direct
        assert there.b.engine.is_control_connected and not there.b.health
        await net.until(lambda: str(there.b.host.ip) in str(there.a.peer(there.b).node.endpoints), 1)

    run_sim(scenario, tmp_path)


def test_a_transfer_survives_roaming(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "E")
        sink = await Sink(b).open()
        await a.reaches(b)
        sending = asyncio.create_task(transfer(a, sink, content(3 << 20), pace_bytes_per_s=256 << 10))
        await asyncio.sleep(3)
        a.host.roam("10.99.0.2", nat=Nat.of("H", "203.0.113.220"))
        await asyncio.sleep(3)
        b.host.roam("203.0.113.221")
        assert await sending < 30
        assert sink.received == 3 << 20

    run_sim(scenario, tmp_path)


@pytest.mark.parametrize("address", ["", "203.0.113.230"], ids=["ports", "address too"])
@pytest.mark.parametrize("kinds", ["EE", "HH"])
def test_p04_a_nat_that_reboots_silently(tmp_path: Path, kinds: str, address: str) -> None:
    async def scenario(net: SimTailnet) -> None:
        async def change(net: SimTailnet, node: SimNode) -> None:
            node.host.nat.reboot(address)
            net.net.connect_nat(node.host.nat)

        there, back = await under_traffic(net, kinds, change)
        assert max(there.longest_s, back.longest_s) < 10
        assert there.a.is_direct(there.b) is there.b.is_direct(there.a) is (kinds == "EE")

    run_sim(scenario, tmp_path)


@pytest.mark.parametrize("how", ["suspend", "freeze"])
@pytest.mark.parametrize("kinds", ["EE", "HH"])
def test_p02_ten_minutes_of_sleep_with_the_nat_state_gone(tmp_path: Path, kinds: str, how: str) -> None:
    async def scenario(net: SimTailnet) -> None:
        links: list[float] = []

        async def change(net: SimTailnet, node: SimNode) -> None:
            bind = node.engine.reach.sockets.bind
            node.engine.reach.sockets.bind = lambda: (links.append(net.loop.time()), bind())  # type: ignore[func-returns-value]
            getattr(node.host, how)()
            node.host.nat.reboot()
            await asyncio.sleep(600)
            node.host.resume()
            links.insert(0, net.loop.time())

        there, back = await under_traffic(net, kinds, change)
        awake_at, rebound_at = links[0], links[1]
        assert rebound_at - awake_at <= 5.5, "the gap in time is seen within 5 s"
        for talk in (there, back):
            assert max(end for _, end in talk.outages()) - awake_at < 10
        assert there.a.is_direct(there.b) is (kinds == "EE")

    run_sim(scenario, tmp_path)


def test_a_short_freeze_costs_nothing_but_its_time(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        async def change(net: SimTailnet, node: SimNode) -> None:
            node.host.freeze()
            await asyncio.sleep(15)
            node.host.resume()

        there, back = await under_traffic(net, "EE", change)
        assert there.longest_s < 17 and back.longest_s < 17 and there.a.is_direct(there.b)

    run_sim(scenario, tmp_path)


def test_p03_without_an_interface_nothing_spins_and_all_is_back_at_once(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        async def change(net: SimTailnet, node: SimNode) -> None:
            node.host.plug(False)
            await asyncio.sleep(20)
            wakes = node.host.wakes
            await asyncio.sleep(580)
            assert node.host.wakes - wakes < 2 * 580 + 580, "two of our own pings a second, and less than one more"
            assert any("network" in text for text in node.health)
            node.host.plug(True)
            plugged.append(net.loop.time())

        plugged: list[float] = []
        there, back = await under_traffic(net, "EE", change)
        assert max(end for talk in (there, back) for _, end in talk.outages()) - plugged[0] < 2
        assert there.b.health == []

    run_sim(scenario, tmp_path)


def test_udp_blocked_and_freed_under_traffic(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        async def change(net: SimTailnet, node: SimNode) -> None:
            node.host.link.udp_blocked = True
            await asyncio.sleep(20)
            node.host.link.udp_blocked = False

        there, back = await under_traffic(net, "EE", change)
        assert max(there.longest_s, back.longest_s) < 9, "trust lapses 6.5 s after the last pong"
        assert there.a.is_direct(there.b) and there.b.is_direct(there.a)

    run_sim(scenario, tmp_path)


@pytest.mark.parametrize("directions", [(True, False), (True,), (False,)], ids=["both ways", "inbound", "outbound"])
def test_w09_a_box_that_swallows_data_but_not_disco(tmp_path: Path, directions: tuple[bool, ...]) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "E")
        await a.reaches(b)
        talk = Talk(a, b)
        async with talk.going():
            await asyncio.sleep(15)
            assert a.is_direct(b)
            b.host.link.scrubs = lambda datagram, is_in: datagram[:4] == b"\x04\x00\x00\x00" and is_in in directions
            await asyncio.sleep(240)
        [(begin, end)] = talk.outages()
        assert end - begin < 40
        assert all(net.net.trace.sent(node.name, "disco ping") < 300 for node in (a, b)), "no storm of pings"
        assert a.is_direct(b) is (True not in directions) and b.is_direct(a) is (False not in directions)
        b.host.link.scrubs = None
        async with talk.going():
            await asyncio.sleep(300)
        assert a.is_direct(b) and b.is_direct(a) and len(talk.outages()) == 1

    run_sim(scenario, tmp_path)


@pytest.mark.parametrize("kinds", ["EE", "HH"])
def test_a_daemon_that_restarts_is_reached_again(tmp_path: Path, kinds: str) -> None:
    """Its disco key is another one; the session of the peer is useless (W06)."""

    async def scenario(net: SimTailnet) -> None:
        async def change(net: SimTailnet, node: SimNode) -> None:
            before = node.engine.disco_private.public()
            await node.restart()
            await net.until(lambda: node.state is State.RUNNING, 5)
            assert node.engine.disco_private.public() != before

        there, back = await under_traffic(net, kinds, change)
        assert max(there.longest_s, back.longest_s) < 4
        assert there.a.is_direct(there.b) is (kinds == "EE")

    run_sim(scenario, tmp_path)


@pytest.mark.parametrize("kinds", ["EE", "HH"])
def test_transfers_over_a_bad_line_arrive_whole(tmp_path: Path, kinds: str) -> None:
    """5 % of the datagrams lost, 5 % out of order, 5 % twice, at each end."""

    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes(*kinds)
        sinks = [await Sink(node).open() for node in (a, b)]
        await a.reaches(b)
        await asyncio.sleep(5)
        for node in (a, b):
            node.host.link.loss = node.host.link.reorder = node.host.link.duplicate = 0.05
        data = content(512 << 10)
        await asyncio.gather(transfer(a, sinks[1], data), transfer(b, sinks[0], data))

    run_sim(scenario, tmp_path)


def test_a_new_disco_key_while_running(tmp_path: Path) -> None:
    """As `tsctl debug rotate-disco-key` asks for; every peer learns of it and finds the direct path again."""

    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("P", "E")
        await a.reaches(b)
        before = b.engine.disco_private
        talk = Talk(a, b)
        async with talk.going():
            await asyncio.sleep(5)
            await b.run(b.backend.debug("rotate-disco-key", b""))
            await asyncio.sleep(20)
        after = b.engine.disco_private
        assert after != before and b.engine.tailnet.rules.filter.own_disco_key == after.public().raw
        assert talk.longest_s <= 10.0
        peer = a.peer(b)
        assert peer is not None and peer.node.disco == after.public(), "control was told"
        assert a.is_direct(b) and b.is_direct(a) and not b.health

    run_sim(scenario, tmp_path)
