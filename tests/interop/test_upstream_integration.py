"""The field's own integration suite against tsd: what passes today must pass tomorrow.

tests/vectors/upstream_integration.json lists the results that pass, and why the others do not. What fails is run once
more before it counts: some of these tests race with timers. The usual run takes the expected passes only; the soak run
takes everything and also fails when a result is better than the list says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.gosuite import GoSuite, launcher
from harness.headscale import peer_binary
from harness.netlab import NetLab

pytestmark = [pytest.mark.peers, pytest.mark.root]
EXPECTED = json.loads((Path(__file__).parents[1] / "vectors" / "upstream_integration.json").read_text())
UNWANTED = [
    name
    for name in (*EXPECTED["fail"], *EXPECTED["skip"])
    if not any(passing.startswith(f"{name}/") for passing in EXPECTED["pass"])
]
TIMEOUT_S = 420


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[GoSuite]:
    binary, cli = peer_binary("integration.test"), peer_binary("tailscale")
    with NetLab(f"tsdUi{os.getpid()}", "10.201.0") as lab:
        yield GoSuite(lab, tmp_path, binary=binary, daemon=launcher(tmp_path), cli=cli)


def judge(suite: GoSuite, found: dict[str, str], folder: Path) -> dict[str, str]:
    """`found` with a second chance for what should have passed; the count goes to the test's output."""
    again = [name for name in EXPECTED["pass"] if found.get(name) != "PASS"]
    if again:
        print("once more:", *again)
        tops = sorted({name.partition("/")[0] for name in again})
        found = found | suite.run(tops, UNWANTED, timeout_s=TIMEOUT_S)
    passed = sum(1 for verdict in found.values() if verdict == "PASS")
    print(f"upstream integration suite: {passed} of {len(found)} results pass")
    bad = [name for name in EXPECTED["pass"] if found.get(name) != "PASS"]
    assert not bad, f"failed twice (logs in {folder}): {bad}"
    return found


@pytest.mark.timeout(2 * TIMEOUT_S + 60)
def test_expected_passes(suite: GoSuite, tmp_path: Path) -> None:
    judge(suite, suite.run(unwanted=UNWANTED, timeout_s=TIMEOUT_S), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_whole_suite(suite: GoSuite, tmp_path: Path) -> None:
    found = judge(suite, suite.run(timeout_s=2 * TIMEOUT_S), tmp_path)
    better = [name for name in EXPECTED["fail"] if found.get(name) == "PASS"]
    assert not better, f"move these to the passes: {better}"
    unknown = set(found) - set(EXPECTED["pass"]) - set(EXPECTED["fail"]) - set(EXPECTED["skip"])
    assert not unknown, f"results that the list does not know: {sorted(unknown)}"
