"""The calls each command makes, in order, are those of the field's own client (or fewer)."""

import json
from pathlib import Path

import pytest

from harness.fakebackend import FakeBackend

EXPECTED = json.loads((Path(__file__).parents[2] / "vectors" / "localapi_calls.json").read_text())["commands"]


@pytest.mark.parametrize("entry", EXPECTED, ids=lambda entry: " ".join(entry["words"])[:50])
def test_call_sequence(entry: dict, tsctl, backend: FakeBackend) -> None:
    if entry.get("stopped"):
        tsctl("down")
    outcome = tsctl(*entry["words"])
    assert outcome.calls == entry["calls"]
    assert outcome.code == entry.get("ours", entry["exit"]), outcome
