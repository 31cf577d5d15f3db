"""One TCP stream while UDP is blocked: everything goes through the same relay, which drops what it cannot queue."""

from __future__ import annotations

import time

from benchmarks.bed import Bed, Pair
from benchmarks.report import Row
from benchmarks.stream import rows_of, transfers
from harness.netlab import wait_for

BAR = 3.0


def measure(bed: Bed, runs: int) -> list[Row]:
    for pair in bed.pairs.values():
        bed.block_udp(pair, True)
    try:
        for pair in bed.pairs.values():
            _wait_for_relay(pair)
        return rows_of(bed, transfers(bed, runs, 16 << 20), "One stream by relay", BAR, None)
    finally:
        for pair in bed.pairs.values():
            bed.block_udp(pair, False)


def _wait_for_relay(pair: Pair) -> None:
    """Until nobody trusts a direct path any more."""
    if pair.near is None or pair.far is None:
        time.sleep(20)
    for near, far in ((pair.near, pair.far), (pair.far, pair.near)):
        if near is not None and far is not None:
            wait_for(lambda near=near, far=far: not (near.peer(far.name) or {}).get("CurAddr"), 60, "the relay")
    pair.ask("get", pair.way("socks"), bytes=1 << 20)
