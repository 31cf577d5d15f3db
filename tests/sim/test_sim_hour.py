"""An hour of traffic: no packet lost in a rekey, no handshake too many, no timer storm, flat memory."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import pytest

from harness.simnode import SimNode
from harness.simtailnet import SimTailnet, run_sim
from harness.simtalk import Datagrams

HOUR_S = 3600
PERIOD_S = 3


@pytest.mark.parametrize("kinds", ["EE", "HH"], ids=["direct", "relayed"])
def test_an_hour_of_rekeys_loses_nothing(tmp_path: Path, kinds: str) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = nodes = await net.nodes(*kinds)
        await a.reaches(b)
        await asyncio.sleep(10)
        assert a.is_direct(b) is (kinds == "EE")
        ends = [await Datagrams.open(node) for node in nodes]
        initiations = [_initiations(node) for node in nodes]
        timers = [node.host.timers_fired for node in nodes]
        blocks: list[int] = []

        def both_ways(index: int) -> None:
            ends[0].send(b"%d" % index, ends[1])
            ends[1].send(b"%d" % index, ends[0])
            if index in (HOUR_S // PERIOD_S // 3, HOUR_S // PERIOD_S - 1):
                blocks.append(_allocated(nodes))

        await net.every(PERIOD_S, HOUR_S, both_ways)
        expected = [b"%d" % index for index in range(HOUR_S // PERIOD_S)]
        assert ends[0].received == ends[1].received == expected

        # The initiator of the first handshake rekeys with the first packet after 120 s, and nobody else does.
        rekeys = HOUR_S // (120 + PERIOD_S)
        assert len(initiations[0]) in (rekeys, rekeys + 1) and initiations[1] == []
        for node, before in zip(nodes, timers, strict=True):
            assert node.host.timers_fired - before < 1.5 * HOUR_S
            assert not node.engine.plane.core.drops and not node.engine.plane.wireguard.drops
        grown = blocks[1] - blocks[0] - sum(len(end.received) for end in ends) * 2 // 3
        assert grown < 1500, "memory grows"
        for end in ends:
            end.close()

    run_sim(scenario, tmp_path)


def _allocated(nodes: list[SimNode]) -> int:
    """Memory blocks in use, without the memory of answered pings, which takes an hour to reach its limit."""
    for node in nodes:
        node.engine.plane.magicsock._discovery._answered.clear()
    gc.collect()
    return sys.getallocatedblocks()


def _initiations(node: SimNode) -> list[int]:
    """Wall times of all initiations that a node makes from now on."""
    source = node.engine._stamps.source
    made: list[int] = []
    stamp = source.stamp

    def note(wall_ns: int) -> bytes:
        made.append(wall_ns)
        return stamp(wall_ns)

    source.stamp = note
    return made
