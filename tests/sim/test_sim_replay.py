"""The same seed gives the same run, to the last datagram; a failed run shows itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.simtailnet import SimTailnet, run_sim
from tsd.dataplane.pump import Core
from tsd.dataplane.reference import ReferenceCore

Run = tuple[str, int, float]


async def busy_minute(net: SimTailnet) -> Run:
    """Ten engines over bad lines, a roam, a restart of the server; what it left in the trace."""
    nodes = await net.nodes(*"PAEEFHHXBE")
    for node in nodes:
        node.host.link.loss = node.host.link.reorder = node.host.link.duplicate = 0.02
    for first, second in ((0, 5), (2, 3), (6, 7), (8, 9), (1, 4)):
        await nodes[first].ping(nodes[second], "TSMP", 3.0)
    nodes[2].host.roam("203.0.113.240")
    await net.coord.stop()
    await asyncio.sleep(5)
    await net.coord.start()
    for first, second in ((2, 3), (9, 2), (5, 8)):
        await nodes[first].ping(nodes[second], "ICMP", 3.0)
    await asyncio.sleep(40)
    return net.net.trace.digest, net.net.trace.count, net.loop.time()


def run(folder: Path, name: str, seed: int = 7, core: Callable[[], Core] | None = None) -> Run:
    return run_sim(busy_minute, folder / name, seed, new_core=core)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("first"), "run")


def test_the_same_seed_gives_the_same_datagrams_on_either_core(tmp_path: Path, first: Run) -> None:
    assert run(tmp_path, "python", core=ReferenceCore) == first
    assert first[1] > 200


def test_another_process_with_other_hashes_replays_the_run(tmp_path: Path, first: Run) -> None:
    program = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "import importlib.util as u; spec = u.spec_from_file_location('replay', sys.argv[1])\n"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(repr(module.run(Path(sys.argv[2]), 'again')))\n"
    )
    command = [sys.executable, "-c", program, __file__, str(tmp_path), *sys.path]
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == repr(first), done.stderr


@pytest.mark.skipif("TSD_SIM_SEED" in os.environ, reason="one seed is replayed")
def test_another_seed_gives_another_run(tmp_path: Path, first: Run) -> None:
    assert run(tmp_path, "eight", seed=8)[0] != first[0]


def test_a_failure_names_the_seed_and_draws_the_last_datagrams(tmp_path: Path) -> None:
    async def scenario(net: SimTailnet) -> None:
        a, b = await net.nodes("E", "E")
        await a.reaches(b)
        raise AssertionError("on purpose")

    with pytest.raises(AssertionError, match="on purpose") as caught:
        run_sim(scenario, tmp_path, seed=42)
    (note,) = caught.value.__notes__
    assert note.startswith("seed ") and "stun request" in note and "disco ping" in note
