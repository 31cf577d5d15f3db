"""From the start of the daemon with a state it knows to `BackendState` Running, by its LocalAPI."""

from __future__ import annotations

import http.client
import json
import socket
import time

from benchmarks.bed import Bed, Pair, cpu_seconds, spread
from benchmarks.report import Row, load_now
from harness.nodes import Node

BAR_S, AIM_S = 1.5, 0.5
_POLL_S = 0.01


class _LocalApi(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("local-tailscaled.sock", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _state(node: Node) -> str:
    """ "" while nobody answers."""
    api = _LocalApi(str(node.socket))
    try:
        api.request("GET", "/localapi/v0/status?peers=false")
        return str(json.loads(api.getresponse().read())["BackendState"])
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    finally:
        api.close()


def _restart(pair: Pair) -> dict[str, float]:
    """Seconds until the LocalAPI answers and until Running, and the CPU time used until then."""
    node = pair.near
    assert node is not None and node.process is not None
    node.stop()
    started = time.perf_counter()
    node.launch()
    answers_s = 0.0
    while (state := _state(node)) != "Running":
        answers_s = answers_s or (time.perf_counter() - started if state else 0.0)
        if time.perf_counter() - started > 30:
            raise RuntimeError(f"{node.name} is not Running after 30 s:\n{node.tail()}")
        time.sleep(_POLL_S)
    running_s = time.perf_counter() - started
    pair.processes[0] = node.process
    return {"answers_s": answers_s or running_s, "running_s": running_s, "cpu_s": cpu_seconds(node.process.pid)}


def measure(bed: Bed, runs: int) -> list[Row]:
    pairs = {name: pair for name, pair in bed.pairs.items() if pair.near is not None}
    took: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
    for _ in range(runs):
        for name, pair in pairs.items():
            took[name].append(_restart(pair))
            time.sleep(1.0)
    shown = {
        name: {key: spread([run[key] for run in all_of]) for key in ("answers_s", "running_s", "cpu_s")}
        for name, all_of in took.items()
    }
    peer = shown.get(bed.peer_name)
    told = f"{bed.peer_name} {peer['running_s']['median']:.2f} s" if peer is not None else ""
    detail = {"load": load_now(), **shown}
    ours = shown["tsd"]
    return [
        Row("Restart to Running", "s", ours["running_s"]["median"], BAR_S, AIM_S, False, told, detail),
        Row("  LocalAPI answers", "s", ours["answers_s"]["median"], more_is_better=False),
    ]
