"""New HTTP connections per second through the HTTP proxy, 16 at a time, each with an overlay connection of its own."""

from __future__ import annotations

from typing import Any

from benchmarks.bed import Bed, spread
from benchmarks.report import Row, load_now

BAR = 1.0
WIDTH, SECONDS = 16, 3.0


def measure(bed: Bed, runs: int) -> list[Row]:
    raw: dict[str, list[dict[str, Any]]] = {name: [] for name in bed.pairs}
    for number in range(runs + 1):
        for name, pair in bed.pairs.items():
            got = pair.ask("many", pair.way("http"), seconds=SECONDS if number else 1.0, width=WIDTH)
            if number:
                raw[name].append(got)
    rates = {name: spread([got["per_s"] for got in all_of]) for name, all_of in raw.items()}
    cost = {name: spread([got["cpu_s"] / max(got["done"], 1) * 1e3 for got in all_of]) for name, all_of in raw.items()}
    failed = {name: sum(got["failed"] for got in all_of) for name, all_of in raw.items()}
    detail = {"load": load_now(), "per_s": rates, "cpu_ms_each": cost, "failed": failed}
    ours, name = rates["tsd"]["median"], "New HTTP connections"
    if bed.peer_name not in rates:
        return [Row(name, "per s", ours, detail=detail)]
    peer = rates[bed.peer_name]["median"]
    spent = cost["tsd"]["median"], cost[bed.peer_name]["median"]
    return [
        Row(name, "ratio", ours / max(peer, 0.1), BAR, against=f"{ours:.0f} to {peer:.0f} per s", detail=detail),
        Row(
            "  their CPU time", "ratio", spent[0] / max(spent[1], 0.01), more_is_better=False,
            against=f"{spent[0]:.2f} to {spent[1]:.2f} ms each",
        ),
    ]  # fmt: skip
