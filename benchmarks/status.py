"""From the start of `tsctl status` to its end, beside `tailscale status`."""

from __future__ import annotations

import os

from benchmarks.bed import ROOT, Bed, peer_file, spread, wall_ms
from benchmarks.report import Row, load_now

BAR_MS, AIM_MS = 120.0, 60.0


def measure(bed: Bed, runs: int) -> list[Row]:
    node = bed.pairs["tsd"].near
    assert node is not None
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "platform", "native"))}
    commands = {"tsctl": [*node.cli_words(), f"--socket={node.socket}", "status"], "nothing": ["true"]}
    peer = bed.pairs.get("tailscaled")
    if peer is not None and peer.near is not None:
        commands["tailscale"] = [peer_file("tailscale"), f"--socket={peer.near.socket}", "status"]
    took: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(3 * runs + 1):
        for name, words in commands.items():
            wall, _ = wall_ms(words, node.namespace, environ)
            if number:
                took[name].append(wall)
    shown = {name: spread(values) for name, values in took.items()}
    ours = shown["tsctl"]["median"] - shown["nothing"]["median"]  # without `ip netns exec`
    told = (
        f"tailscale {shown['tailscale']['median'] - shown['nothing']['median']:.0f} ms" if "tailscale" in shown else ""
    )
    return [Row("tsctl status", "ms", ours, BAR_MS, AIM_MS, False, told, {"load": load_now(), **shown})]
