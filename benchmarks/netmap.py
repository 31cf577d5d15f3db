"""A map of 10,000 peers on a whole engine without a network: how long it takes, and how long the loop stands still.

`python -m benchmarks.netmap [--peers N]` prints JSON. Decoding the message is part of it, as it is when it comes from
a server; its pieces are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.report import Row, load_now

BAR_APPLY_MS, BAR_STALL_MS, BAR_DELTA_MS = 300.0, 50.0, 5.0
PEERS = 10_000


def measure(runs: int) -> list[Row]:
    """In a process of its own, which is as fresh as a daemon."""
    words = [sys.executable, "-m", "benchmarks.netmap", f"--runs={runs}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True, env=dict(os.environ))
    found: dict[str, Any] = json.loads(done.stdout)
    detail = {"load": load_now(), **found}
    slowest = max(found["deltas_ms"], key=found["deltas_ms"].get)
    return [
        Row("10,000 peers: apply", "ms", found["apply_ms"], BAR_APPLY_MS, None, False, "", detail),
        Row("  decode the message", "ms", found["decode_ms"], more_is_better=False),
        Row("  longest stall", "ms", found["stall_ms"], BAR_STALL_MS, None, False),
        Row("  slowest delta", "ms", found["deltas_ms"][slowest], BAR_DELTA_MS, None, False, slowest),
        Row("  memory", "MiB", found["rss_mib"], more_is_better=False),
    ]


# --- the process of its own


def peer(number: int, **changes: Any) -> dict[str, Any]:
    """A node as control servers send it."""
    high, low = number >> 8, number & 255
    addresses = [f"100.{64 + (number >> 16)}.{high & 255}.{low}/32", f"fd7a:115c:a1e0::{high:x}:{low:x}/128"]
    return {
        "ID": number,
        "StableID": f"n{number}CNTRL",
        "Name": f"host-{number}.tail.example.",
        "User": 7,
        "Key": f"nodekey:{number * 7919 + 1:064x}",
        "KeyExpiry": f"2099-03-{number % 28 + 1:02d}T01:02:03Z",
        "DiscoKey": f"discokey:{number * 104729 + 1:064x}",
        "Addresses": addresses,
        "AllowedIPs": addresses,
        "Endpoints": [f"192.0.2.{low}:41641", f"10.{high & 255}.{low}.7:41641"],
        "HomeDERP": 1,
        "Hostinfo": {
            "OS": "linux",
            "Hostname": f"host-{number}",
            "Services": [{"Proto": "peerapi4", "Port": 1}, {"Proto": "peerapi6", "Port": 1}],
        },
        "Created": "2026-01-01T00:00:00Z",
        "Cap": 130,
        "LastSeen": "2026-11-01T00:00:00Z",
        "Online": number % 2 == 0,
        "MachineAuthorized": True,
        "CapMap": {"https://tailscale.com/cap/is-admin": None},
    } | changes


def first_message(own_key: str, peers: int) -> dict[str, Any]:
    from harness import loneengine

    return {
        "Node": loneengine.peer_json(1, Key=own_key, Endpoints=None, DiscoKey=None),
        "DERPMap": loneengine.DERP_MAP,
        "Domain": "example.com",
        "PacketFilter": loneengine.FILTER,
        "DNSConfig": {"Proxied": True, "Domains": ["tail.example"]},
        "UserProfiles": [{"ID": 7, "LoginName": "lab@example.com", "DisplayName": "Lab"}],
        "Peers": [peer(number) for number in range(2, peers + 2)],
    }


def deltas() -> dict[str, list[dict[str, Any]]]:
    """Each twice, different from what is there."""
    return {
        "online": [{"PeersChangedPatch": [{"NodeID": 77, "Online": value}]} for value in (True, False)],
        "endpoints": [{"PeersChangedPatch": [{"NodeID": 78, "Endpoints": [f"192.0.2.9:{n}"]}]} for n in (1, 2)],
        "renamed": [{"PeersChanged": [peer(79, Name=f"renamed-{n}.tail.example.")]} for n in (1, 2)],
        "removed": [{"PeersRemoved": [number]} for number in (80, 81)],
        "added": [{"PeersChanged": [peer(number)]} for number in (80, 81)],
        "filter": [
            {"PacketFilter": [{"SrcIPs": ["*"], "DstPorts": [{"IP": "*", "Ports": ports}]}]} for ports in _PORTS
        ],
    }


_PORTS = [{"First": 0, "Last": 65535}, {"First": 1, "Last": 22}]


class _Stalls:
    """The longest time between two turns of the loop."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest_ms = max(self.longest_ms, (now - last) * 1e3)
            last = now

    def stop(self) -> float:
        self._task.cancel()
        return self.longest_ms


async def once(peers: int) -> dict[str, Any]:
    import tsnative
    from harness.loneengine import lone_engine
    from tsd.base.clock import SystemClock
    from tsd.tailcfg.mapresponse import decode_map_response
    from tsd.transport.map_stream import decode_map_response_sliced

    async with lone_engine(is_up=False, clock=SystemClock()) as lone:
        lone.engine.options.new_core = tsnative.load
        lone.register()
        raw = json.dumps(first_message(str(lone.key.public()), peers)).encode()
        await asyncio.sleep(0)
        stalls = _Stalls()
        started = time.perf_counter()
        message = await decode_map_response_sliced(raw)
        decoded = time.perf_counter()
        lone.engine.on_map(message, True)
        while lone.engine.tailnet.is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0)
        applied = time.perf_counter()
        await asyncio.sleep(0.05)
        stall_ms = stalls.stop()
        took: dict[str, float] = {}
        for name, messages in deltas().items():
            for delta in messages:
                message = decode_map_response(json.dumps(delta).encode())
                begun = time.perf_counter()
                lone.engine.on_map(message, False)
                took[name] = max(took.get(name, 0.0), (time.perf_counter() - begun) * 1e3)
                await asyncio.sleep(0)
        assert len(lone.engine.tailnet.peers) == peers
    return {
        "message_mb": len(raw) / 1e6,
        "decode_ms": (decoded - started) * 1e3,
        "apply_ms": (applied - decoded) * 1e3,
        "stall_ms": stall_ms,
        "deltas_ms": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    runs = [asyncio.run(once(options.peers)) for _ in range(options.runs)]
    middle = len(runs) // 2
    found: dict[str, Any] = {key: sorted(run[key] for run in runs)[middle] for key in runs[0] if key != "deltas_ms"}
    names = runs[0]["deltas_ms"]
    found["deltas_ms"] = {name: sorted(run["deltas_ms"][name] for run in runs)[middle] for name in names}
    found["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found["runs"] = runs
    print(json.dumps(found))


if __name__ == "__main__":
    main()
