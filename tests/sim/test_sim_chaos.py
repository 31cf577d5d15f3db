"""Trouble by dice; afterwards everybody reaches everybody, as directly as the NATs allow."""

from __future__ import annotations

import asyncio
from itertools import combinations
from pathlib import Path

import pytest

from harness.simchaos import Chaos, is_direct_by_table, kind_of
from harness.simtailnet import SimTailnet, run_sim
from tsd.engine.account.states import State


async def trouble(net: SimTailnet, kinds: str, seconds: float) -> None:
    nodes = await net.nodes(*kinds)
    chaos = Chaos(net, nodes)
    try:
        await chaos.run(seconds)
        await chaos.calm()
        await asyncio.sleep(60)
        await net.until(lambda: all(node.state is State.RUNNING for node in nodes), 30)
        pairs = list(combinations(nodes, 2))
        await asyncio.gather(*(a.reaches(b, 20) for a, b in pairs))
        for _ in range(60):
            await asyncio.gather(*(a.ping(b, "TSMP", 1.0) for a, b in pairs))
            await asyncio.sleep(0.5)
        for a, b in pairs:
            what = f"{a.name} ({kind_of(a)}) - {b.name} ({kind_of(b)}): {a.path(b)}, {b.path(a)}"
            assert a.is_direct(b) is b.is_direct(a) is is_direct_by_table(a, b), what
        for node in nodes:
            told = [text for text in node.health if "clock of this machine" not in text or not node.clock.wrong_s]
            assert node.engine.is_control_connected and not told, (node.name, told)
    except BaseException as err:
        err.add_note("what happened:\n" + "\n".join(chaos.log[-40:]))
        for node in nodes:
            told = (node.state, node.home, node.engine.is_control_connected, node.engine.control_error, node.health)
            err.add_note(f"{node.name}: {told}")
        raise


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_trouble_by_dice(tmp_path: Path, seed: int) -> None:
    run_sim(lambda net: trouble(net, "PEHX", 300), tmp_path, seed, relays=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_much_trouble_by_dice(tmp_path: Path, seed: int) -> None:
    run_sim(lambda net: trouble(net, "PEEHHX", 1800), tmp_path, seed, relays=1)
