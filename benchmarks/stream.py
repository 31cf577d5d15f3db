"""TCP streams through the overlay, by the SOCKS proxy, both directions: ours against the peer's, alternating."""

from __future__ import annotations

from typing import Any

from benchmarks.bed import Bed, spread
from benchmarks.report import Row, load_now

BAR = 1.5
SIZE_BYTES, MANY = 96 << 20, 8
WAYS = {"put": "upload", "get": "download"}


def transfers(bed: Bed, runs: int, size: int, streams: int = 1) -> dict[str, dict[str, dict[str, Any]]]:
    """direction → contender → what was measured: MB/s and CPU seconds per GB of both daemons."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for action in WAYS:
        raw: dict[str, list[dict[str, Any]]] = {name: [] for name in bed.pairs}
        for number in range(runs + 1):
            for name, pair in bed.pairs.items():
                bytes_now = size if number else size // 8
                got = pair.ask(action, pair.way("socks"), bytes=bytes_now, streams=streams)
                if number:  # the first one warms up
                    raw[name].append(got)
        found[action] = {
            name: {
                "mb_per_s": spread([got["mb_per_s"] for got in all_of]),
                "cpu_s_per_gb": spread([got["cpu_s"] / got["bytes"] * 1e9 for got in all_of]),
                "runs": [round(got["mb_per_s"], 1) for got in all_of],
            }
            for name, all_of in raw.items()
        }
    return found


def rows_of(
    bed: Bed, found: dict[str, dict[str, dict[str, Any]]], what: str, bar: float, aim: float | None
) -> list[Row]:
    rows = []
    for action, contenders in found.items():
        ours = contenders["tsd"]
        peer = contenders.get(bed.peer_name)
        detail = {"load": load_now(), **contenders}
        name = f"{what}, {WAYS[action]}"
        if peer is None:
            rows.append(Row(name, "MB/s", ours["mb_per_s"]["median"], detail=detail))
            continue
        told = f"{ours['mb_per_s']['median']:.0f} to {peer['mb_per_s']['median']:.0f} MB/s"
        ratio = ours["mb_per_s"]["median"] / peer["mb_per_s"]["median"]
        rows.append(Row(name, "ratio", ratio, bar, aim, against=told, detail=detail))
        cost = ours["cpu_s_per_gb"]["median"], peer["cpu_s_per_gb"]["median"]
        told = f"{cost[0]:.1f} to {cost[1]:.1f} s/GB"
        rows.append(Row("  its CPU time", "ratio", cost[0] / max(cost[1], 0.01), more_is_better=False, against=told))
    return rows


def measure(bed: Bed, runs: int) -> list[Row]:
    one = rows_of(bed, transfers(bed, runs, SIZE_BYTES), "One stream by SOCKS", BAR, None)
    return one + rows_of(bed, transfers(bed, runs, SIZE_BYTES, MANY), f"{MANY} streams by SOCKS", BAR, None)
