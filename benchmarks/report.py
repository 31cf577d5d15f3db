"""What a measurement gives: one row per bar, printed as a table and written as JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """`bar` must be reached, `aim` is what we want; both None: only told. Ratios are ours divided by the peer's."""

    name: str
    unit: str
    measured: float
    bar: float | None = None
    aim: float | None = None
    more_is_better: bool = True
    against: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        if not self._reaches(self.bar):
            return "MISSED"
        return "aim" if self.aim is not None and self._reaches(self.aim) else "bar"

    def _reaches(self, limit: float) -> bool:
        return self.measured >= limit if self.more_is_better else self.measured <= limit


def load_now() -> float:
    return os.getloadavg()[0]


def machine() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_loop_ms": round(python_loop_ms(), 1),
    }


def python_loop_ms() -> float:
    """The best of three fixed loops: how fast this machine is just now (milliseconds in rows depend on it)."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        total = 0
        for number in range(500_000):
            total += number & 7
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def print_table(rows: Sequence[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'bar':>8} {'aim':>8} {'measured':>9}  unit")
    for row in rows:
        sign = "" if row.bar is None else "≥" if row.more_is_better else "≤"
        bar, aim = (sign + _number(value) if value is not None else "" for value in (row.bar, row.aim))
        notes = f"  ({row.against})" if row.against else ""
        print(f"{row.name:{width}}  {bar:>8} {aim:>8} {_number(row.measured):>9}  {row.unit:7} {row.verdict}{notes}")


def write_json(rows: Sequence[Row], path: Path, **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = [asdict(row) | {"verdict": row.verdict} for row in rows]
    path.write_text(json.dumps({"machine": machine(), **more, "rows": shown}, indent=1) + "\n")
