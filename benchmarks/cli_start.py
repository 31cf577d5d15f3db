"""How long tsctl takes from exec to exit, beside a bare interpreter and (if found) the field's CLI, on one fake daemon.

Prints milliseconds (best and median) and the ratio to the bare interpreter. Byte code is compiled first, as an
installation does; `--json FILE` writes the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def measure(command: list[str], env: dict[str, str], runs: int) -> dict[str, float]:
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    took_ms = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
        took_ms.append((time.perf_counter() - started) * 1e3)
    return {"best_ms": round(min(took_ms), 1), "median_ms": round(statistics.median(took_ms), 1)}


def commands(socket_path: str) -> dict[str, list[str]]:
    python, flag = sys.executable, f"--socket={socket_path}"
    found = {
        "bare interpreter": [python, "-c", "pass"],
        "tsctl status": [python, "-m", "tsctl", flag, "status"],
        "tsctl status --json": [python, "-m", "tsctl", flag, "status", "--json"],
        "tsctl ip": [python, "-m", "tsctl", flag, "ip"],
        "import click": [python, "-c", "import click"],
    }
    peers = os.environ.get("TSD_PEER_BIN", "")
    tailscale = shutil.which("tailscale", path=peers) if peers else None
    if tailscale:
        found["tailscale status"] = [tailscale, flag, "status"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tsd") as folder:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPYCACHEPREFIX": f"{folder}/pyc", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        socket_path = f"{folder}/s"
        daemon = subprocess.Popen([sys.executable, str(ROOT / "tests/harness/fakedaemon.py"), socket_path], env=env)
        try:
            while not os.path.exists(socket_path):
                time.sleep(0.05)
            results = {name: measure(command, env, options.runs) for name, command in commands(socket_path).items()}
        finally:
            daemon.terminate()
            daemon.wait()
    bare = results["bare interpreter"]["median_ms"]
    for name, figures in results.items():
        ratio = figures["median_ms"] / bare
        print(f"{name:22} best {figures['best_ms']:6.1f} ms  median {figures['median_ms']:6.1f} ms  x{ratio:.1f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
