"""AEAD speed: the native batch kernels against OpenSSL's EVP interface, in one run, alternating.

The C driver (native/tests/test_aead.c) is compiled with `cc` and finds libcrypto at run time; without one the
Python-level `cryptography` call is the yardstick. Prints a table, `--json FILE` writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BATCHES = [(44, 1296), (44, 96), (44, 512), (1, 1296), (1, 96)]


def c_results(kernel: str) -> list[dict[str, Any]]:
    """One row per batch and size, nanoseconds per packet."""
    sources = [str(path) for path in sorted((ROOT / "native" / "src").glob("aead*.c"))]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bench"
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-std=gnu11", "-O3", "-o", str(program), str(ROOT / "native/tests/test_aead.c"), *sources]
        subprocess.run([*command, "-ldl"], check=True)
        output = subprocess.run([program, "bench", kernel], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def library_ns(count: int, size: int) -> float:
    """Best time per packet of `cryptography` called from Python, 0 when it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    except ImportError:
        return 0.0
    cipher = ChaCha20Poly1305(bytes(range(32)))
    text = bytes(size)
    nonces = [bytes(4) + i.to_bytes(8, "little") for i in range(count)]
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter_ns()
        for nonce in nonces:
            cipher.encrypt(nonce, text, None)
        best = min(best, (time.perf_counter_ns() - start) / count)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", default="", help="avx2 or portable (default: the fastest here)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    measured = {(row["batch"], row["bytes"]): row for row in c_results(options.kernel)}
    print(f"{'batch':>9} {'seal':>7} {'open':>7} {'EVP':>7} {'python':>7}   seal/EVP  open/EVP   (ns per packet)")
    for count, size in BATCHES:
        row = {**measured[count, size], "cryptography_ns": library_ns(count, size)}
        yardstick = row["evp_ns"] or row["cryptography_ns"]
        row["seal_ratio"], row["open_ratio"] = yardstick / row["seal_ns"], yardstick / row["open_ns"]
        rows.append(row)
        times = f"{row['seal_ns']:7.0f} {row['open_ns']:7.0f} {row['evp_ns']:7.0f} {row['cryptography_ns']:7.0f}"
        print(f"{count:>3}x{size:<5} {times}   {row['seal_ratio']:7.2f}x {row['open_ratio']:8.2f}x   {row['kernel']}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
