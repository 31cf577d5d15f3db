"""Whole engines on the simulated internet: joining, and which pairs find a direct path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from harness.simnat import Nat
from harness.simnode import SimNode
from harness.simtailnet import SimTailnet, run_sim
from tsd.dataplane.pump import Core
from tsd.dataplane.reference import ReferenceCore
from tsd.engine.account.states import State

DIRECT = {
    "P": "PAEFHX",
    "A": "PAEFHX",
    "E": "PAEF",
    "F": "PAEF",
    "H": "PA",
    "X": "PAX",
    "B": "",
}
"""Which classes reach which directly: the table of NAT kinds in the protocol notes."""


async def converse(a: SimNode, b: SimNode, seconds: float = 8.0) -> None:
    for _ in range(round(seconds)):
        await a.ping(b, "TSMP", 2.0)
        await asyncio.sleep(1.0)


def assert_path(a: SimNode, b: SimNode, is_direct: bool) -> None:
    what = f"{a.name} -> {b.name}: {a.path(b)}"
    assert a.is_direct(b) is b.is_direct(a) is is_direct, what


@pytest.mark.parametrize("core", [None, ReferenceCore], ids=["native", "python"])
def test_ten_engines_join_and_find_the_paths_of_the_table(tmp_path: Path, core: Callable[[], Core] | None) -> None:
    async def scenario(net: SimTailnet) -> None:
        nodes = await net.nodes(*"PAEEFHHXXB")
        assert net.loop.time() - 1000 < 5
        assert all(node.state is State.RUNNING and node.home == 900 and not node.health for node in nodes)
        pairs = list(combinations(nodes, 2))
        answers = await asyncio.gather(*(a.ping(b) for a, b in pairs))
        assert [answer["Err"] for answer in answers] == [""] * len(pairs)
        await asyncio.gather(*(converse(a, b) for a, b in pairs))
        for a, b in pairs:
            kind_a, kind_b = a.name[0].upper(), b.name[0].upper()
            assert_path(a, b, kind_b in DIRECT[kind_a])
        for a, b in pairs[:9] + pairs[-3:]:
            for kind in ("TSMP", "ICMP", "peerapi"):
                assert (await a.ping(b, kind))["Err"] == ""
        pongs = await asyncio.gather(*(a.ping(b) for a, b in pairs))
        for (a, b), pong in zip(pairs, pongs, strict=True):
            assert bool(pong["Endpoint"]) is a.is_direct(b) and bool(pong["DERPRegionID"]) is not a.is_direct(b)

    run_sim(scenario, tmp_path, seed=1, new_core=core)


def test_the_first_packet_arrives_though_the_peer_has_no_path_yet(tmp_path: Path) -> None:
    """A handshake that could not be sent is repeated when the relay of the peer becomes known, not 5 s later."""

    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "H")
        assert a.peer(b).node.home_region == 0
        assert await a.reaches(b) < 0.5
        (other,) = await net.nodes("B")
        assert await a.reaches(other) < 1.5 and await other.reaches(b) < 0.5, "one retry when the relay says: not here"

    run_sim(scenario, tmp_path)


def test_direct_in_both_directions_within_a_second(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "E")
        await asyncio.sleep(1)
        await a.reaches(b)
        await net.until(lambda: a.is_direct(b) and b.is_direct(a), 1.0)

    run_sim(scenario, tmp_path)


def test_neighbours_behind_one_hard_nat_use_their_lan(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        nat = Nat.of("H", "203.0.113.200")
        a, b = (net.add(net.net.host(f"lan{i}", f"192.168.7.{i}", nat=nat)) for i in (2, 3))
        await net.bring_up([a, b])
        await converse(a, b)
        assert (str(a.path(b).cur_addr), str(b.path(a).cur_addr)) == ("192.168.7.3:41641", "192.168.7.2:41641")

    run_sim(scenario, tmp_path)


def test_equal_private_addresses_in_two_lans_do_not_confuse(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        nats = [Nat.of("E", f"203.0.113.20{i}") for i in (1, 2)]
        a, b = (net.add(net.net.host(f"lan{i}", "192.168.7.2", nat=nat)) for i, nat in enumerate(nats))
        await net.bring_up([a, b])
        await converse(a, b)
        assert str(a.path(b).cur_addr).startswith("203.0.113.202:") and b.is_direct(a)

    run_sim(scenario, tmp_path)


@pytest.mark.parametrize("hairpins", [False, True])
def test_two_homes_behind_one_carrier_nat_need_its_hairpin(tmp_path: Path, hairpins: bool) -> None:
    async def scenario(net: SimTailnet) -> None:
        carrier = Nat.of("E", "203.0.113.200", hairpins=hairpins)
        homes = [Nat.of("E", f"100.70.0.{i}", outer=carrier) for i in (2, 3)]
        a, b = (net.add(net.net.host(f"home{i}", f"192.168.{i}.2", nat=nat)) for i, nat in enumerate(homes))
        far = net.add(net.host("E", "far"))
        await net.bring_up([a, b, far])
        await asyncio.gather(converse(a, b), converse(a, far))
        assert_path(a, b, hairpins)
        assert_path(a, far, True)

    run_sim(scenario, tmp_path)


def test_ipv6_on_both_ends_makes_hard_nats_direct(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b, v4_only = (net.add(net.host("H", v6=has_v6)) for has_v6 in (True, True, False))
        await net.bring_up([a, b, v4_only])
        await asyncio.gather(converse(a, b), converse(a, v4_only))
        assert str(a.path(b).cur_addr).startswith("[2001:db8:") and b.is_direct(a)
        assert_path(a, v4_only, False)

    run_sim(scenario, tmp_path)


def test_a_mapping_that_timed_out_while_idle_comes_back_with_the_next_traffic(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = (net.add(net.host("E")) for _ in range(2))
        for node in (a, b):
            node.host.nat.idle_s = 15
        await net.bring_up([a, b])
        await converse(a, b)
        assert_path(a, b, True)
        await asyncio.sleep(200)
        assert_path(a, b, False)
        assert await a.reaches(b) < 0.5
        await converse(a, b)
        assert_path(a, b, True)

    run_sim(scenario, tmp_path)


def test_an_idle_tailnet_hardly_wakes_up(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        nodes = await net.nodes("E", "E", "H")
        await converse(nodes[0], nodes[1])
        await asyncio.sleep(700)
        before = [node.host.wakes for node in nodes]
        datagrams = net.net.trace.count
        await asyncio.sleep(600)
        assert max(node.host.wakes - was for node, was in zip(nodes, before, strict=True)) < 0.4 * 600
        assert net.net.trace.count == datagrams, "no datagram leaves an idle node"

    run_sim(scenario, tmp_path)
