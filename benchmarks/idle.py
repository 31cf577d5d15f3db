"""A node that nobody talks to: memory, and how often it wakes up."""

from __future__ import annotations

import time

from benchmarks.bed import Bed, Pair, context_switches, cpu_seconds, rss_mib
from benchmarks.report import Row, load_now
from harness.netlab import Process

BAR_MIB, AIM_MIB = 80.0, 45.0
BAR_PER_S = 4.0
SETTLE_S, WATCH_S = 60.0, 30.0


def measure(bed: Bed, runs: int) -> list[Row]:
    """`runs` only shortens it: with 1, half as long."""
    time.sleep(SETTLE_S if runs > 1 else SETTLE_S / 2)
    watch_s = WATCH_S if runs > 1 else WATCH_S / 2
    pids = {f"{name} {end}": process.pid for name, pair in bed.pairs.items() for end, process in _ends(pair)}
    before = {name: (context_switches(pid), cpu_seconds(pid)) for name, pid in pids.items()}
    time.sleep(watch_s)
    found = {
        name: {
            "rss_mib": round(rss_mib(pid), 1),
            "switches_per_s": round((context_switches(pid) - before[name][0]) / watch_s, 2),
            "cpu_percent": round((cpu_seconds(pid) - before[name][1]) / watch_s * 100, 3),
        }
        for name, pid in pids.items()
    }
    ours = [entry for name, entry in found.items() if name.startswith("tsd ")]
    peer = [entry for name, entry in found.items() if name.startswith(f"{bed.peer_name} ")]
    detail = {"load": load_now(), **found}

    def told(key: str) -> str:
        return f"{bed.peer_name} {max(entry[key] for entry in peer):.1f}" if peer else ""

    rss, switches = (max(entry[key] for entry in ours) for key in ("rss_mib", "switches_per_s"))
    return [
        Row("Idle memory", "MiB", rss, BAR_MIB, AIM_MIB, False, told("rss_mib"), detail),
        Row("Idle wake-ups", "per s", switches, BAR_PER_S, BAR_PER_S, False, told("switches_per_s")),
    ]


def _ends(pair: Pair) -> list[tuple[str, Process]]:
    return list(zip(("near", "far"), pair.processes, strict=True))
