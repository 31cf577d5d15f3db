"""Every fuzz target runs over its committed corpus, and over each file cut short and with a byte flipped.

Targets are functions `fuzz_NAME(data)` in `targets/*.py`; corpora are folders `corpus/NAME`. `run.py` searches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
Target = Callable[[bytes], None]


def targets() -> Iterator[tuple[str, Target]]:
    for path in sorted((HERE / "targets").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"fuzz_targets_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name in sorted(vars(module)):
            if name.startswith("fuzz_"):
                yield name.removeprefix("fuzz_"), getattr(module, name)


TARGETS = list(targets())


@pytest.mark.parametrize(("name", "target"), TARGETS, ids=[name for name, _ in TARGETS])
def test_replay(name: str, target: Target) -> None:
    folder = HERE / "corpus" / name
    seeds = [path.read_bytes() for path in sorted(folder.glob("*"))] if folder.is_dir() else []
    for seed in [b"", b"\0", *seeds]:
        target(seed)
        target(seed[: len(seed) // 2])
        for at in range(0, len(seed), max(1, len(seed) // 12)):
            target(seed[:at] + bytes([seed[at] ^ 0xFF]) + seed[at + 1 :])
