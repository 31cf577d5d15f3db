"""Speed of the whole core: seal and open, native against Python, in one run, alternating.

64 KiB-class TCP super-segments (bulk data) and single 64-byte UDP packets (small packets), one peer and, with
`--peers`, many. Prints a table, `--json FILE` writes it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import tsnative
from tsd.dataplane.pump import Core, Sealed
from tsd.dataplane.reference import ReferenceCore
from tsd.hull import Frame
from tsd.packet.build import tcp_packet, udp_packet

SEGMENT_BYTES = 1240
SEGMENTS = 48
BURST = 32


def address(peer: int) -> bytes:
    return bytes([100, 64 + (peer >> 16), peer >> 8 & 255, peer & 255])


def ends(make: Callable[[], Core], peers: int) -> tuple[Core, Core]:
    """Two cores that share a session per peer number, each other's addresses allowed."""
    pair = make(), make()
    keys = bytes(range(32)), bytes(range(1, 33))
    for peer in range(1, peers + 1):
        for side, core in enumerate(pair):
            core.add_peer(peer)
            raw = address(peer)
            more = [ip_network((bytes([10, peer >> 8 & 255, peer & 255, n << 4]), 28)) for n in range(9)]
            core.set_allowed_ips(peer, [ip_network((raw, 32)), *(more if peers > 1 else [])])
            indices = (peer, peer + 1000000) if side == 0 else (peer + 1000000, peer)
            core.install_session(peer, *indices, keys[side], keys[1 - side], side == 0, 1.0)
    return pair


def frames_for(kind: str, peers: int) -> list[Frame]:
    owner = address(peers)
    if kind == "bulk":
        payload = bytes(range(256)) * (SEGMENT_BYTES * SEGMENTS // 256 + 1)
        packet = tcp_packet(owner, 1, owner, 2, sequence=1, payload=payload[: SEGMENT_BYTES * SEGMENTS])
        return [Frame(packet, SEGMENT_BYTES)] * 4
    packets = [udp_packet(address(i % peers + 1), 1, address(i % peers + 1), 2, bytes(64)) for i in range(BURST)]
    return [Frame(packet) for packet in packets]


def measure(pair: tuple[Core, Core], frames: list[Frame], budget_s: float) -> dict[str, float]:
    """Best slice of seal and of open: payload Gbit/s and packets/s."""
    size = sum(len(frame.packet) for frame in frames)
    best_seal = best_open = float("inf")
    count = 0
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline:
        start = time.process_time()
        sealed: list[Sealed] = pair[0].seal(frames, 2.0).sealed
        middle = time.process_time()
        opened = [pair[1].open(s.datagrams, s.datagram_bytes, 2.0) for s in sealed]
        end = time.process_time()
        if not all(result.opened for result in opened):
            raise SystemExit("a packet did not arrive")
        count = sum(s.count for s in sealed)
        best_seal, best_open = min(best_seal, middle - start), min(best_open, end - middle)
    return {
        "seal_gbit_s": size * 8 / best_seal / 1e9,
        "open_gbit_s": size * 8 / best_open / 1e9,
        "seal_pps": count / best_seal,
        "open_pps": count / best_open,
    }


def contenders() -> dict[str, Callable[[], Core]]:
    makers: dict[str, Callable[[], Core]] = {}
    native = tsnative.native
    if native is not None:
        for kernel in native.kernels():
            makers[f"native ({kernel})"] = lambda name=kernel: native.NativeCore(1280, name)  # type: ignore[misc]
    makers["python"] = ReferenceCore
    return makers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--peers", type=int, default=1000, help="peers of the second half, ten prefixes each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'core':<18} {'load':<6} {'peers':>6} {'seal':>9} {'open':>9} Gbit/s {'seal':>9} {'open':>9} kpps")
    for peers in (1, options.peers):
        for kind in ("bulk", "small"):
            for name, make in contenders().items():
                result = measure(ends(make, peers), frames_for(kind, peers), options.seconds)
                rows.append({"core": name, "load": kind, "peers": peers, **result})
                speeds = f"{result['seal_gbit_s']:9.2f} {result['open_gbit_s']:9.2f}       "
                rates = f"{result['seal_pps'] / 1e3:9.0f} {result['open_pps'] / 1e3:9.0f}"
                print(f"{name:<18} {kind:<6} {peers:>6} {speeds}{rates}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
