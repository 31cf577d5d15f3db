"""`make fuzz`: search with every fuzz target for a while.

With atheris installed (`pip install atheris`) the search is guided by coverage; without it, files of the corpus are
mutated at random, from a printed seed. A crash leaves its input in `build/fuzz/` and ends the run with exit code 1.
New inputs are not added to the committed corpus: choose what to keep.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOUND = ROOT / "build" / "fuzz"
sys.path[:0] = [str(ROOT), str(ROOT / "platform"), str(ROOT / "native"), str(HERE.parent), str(HERE)]

Target = Callable[[bytes], None]

MAX_BYTES = 4096
# Ours, and the libraries that see foreign bytes for us.
INSTRUMENTED = ["tsd", "tsplatform", "tsctl", "h11", "h2", "hpack", "hyperframe", "dns"]
# One input that takes this long, or a process that grows this big, counts as a crash.
LIMITS = ("-timeout=30", "-rss_limit_mb=2048", f"-max_len={MAX_BYTES}")


def main() -> int:
    parser = argparse.ArgumentParser(description="search with every fuzz target")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each target")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--target", default="", help="only these, with commas between them")
    parser.add_argument("--atheris", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    logging.disable(logging.CRITICAL)
    if options.atheris:
        return guided(options.target, rest)
    wanted = [name for name in options.target.split(",") if name]
    chosen = choose(load_targets(), wanted)
    FOUND.mkdir(parents=True, exist_ok=True)
    is_guided = importlib.util.find_spec("atheris") is not None
    print(
        f"{len(chosen)} targets, {options.seconds:.0f} s each, " + ("atheris" if is_guided else f"seed {options.seed}")
    )
    broken = [
        name
        for name, target in chosen
        if not (
            spawn_guided(name, options.seconds) if is_guided else mutate(name, target, options.seconds, options.seed)
        )
    ]
    print(f"{len(chosen) - len(broken)} without a crash, {len(broken)} with: {' '.join(broken)}")
    return 1 if broken else 0


def choose(known: list[tuple[str, Target]], wanted: list[str]) -> list[tuple[str, Target]]:
    """All of them, or the wanted ones in the order in which they were asked for."""
    table = dict(known)
    unknown = [name for name in wanted if name not in table]
    if unknown:
        sys.exit(f"no such target: {' '.join(unknown)}; there are: {' '.join(table)}")
    return [(name, table[name]) for name in wanted] or known


def load_targets() -> list[tuple[str, Target]]:
    from test_corpus_replay import TARGETS

    return TARGETS


def corpus(name: str) -> list[bytes]:
    folder = HERE / "corpus" / name
    return [path.read_bytes() for path in sorted(folder.glob("*"))] if folder.is_dir() else []


def mutate(name: str, target: Target, seconds: float, seed: int) -> bool:
    """Whether no input raised."""
    dice = random.Random(f"{seed}/{name}")
    seeds = corpus(name) or [b""]
    count, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        data = mutated(dice, dice.choice(seeds), seeds)
        count += 1
        try:
            target(data)
        except Exception as err:
            path = FOUND / f"{name}-{count}"
            path.write_bytes(data)
            print(f"  {name}: {type(err).__name__}: {err} (input {path.relative_to(ROOT)})", flush=True)
            return False
    print(f"  {name}: {count} inputs", flush=True)
    return True


def mutated(dice: random.Random, data: bytes, seeds: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(out) + 1)
        match dice.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << dice.randrange(8)
            case 1:
                del out[at : at + dice.randrange(1, 17)]
            case 2:
                out[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 3:
                out[at : at + 2] = dice.choice((b"\0\0", b"\xff\xff", b"\x7f\xff", b"\x80\0"))
            case 4:
                out[at:at] = out[at : at + dice.randrange(1, 33)]
            case _:
                other = dice.choice(seeds)
                start = dice.randrange(len(other) + 1)
                out[at:at] = other[start : start + dice.randrange(1, 65)]
    return bytes(out[:MAX_BYTES])


def spawn_guided(name: str, seconds: float) -> bool:
    """atheris ends its process at a crash, so each target gets its own."""
    folder = FOUND / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--atheris", f"--target={name}", f"-max_total_time={seconds:.0f}"]
    seeds = HERE / "corpus" / name
    command += [f"-artifact_prefix={FOUND}/{name}-", *LIMITS, str(folder), *([str(seeds)] if seeds.is_dir() else [])]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    (FOUND / f"{name}.log").write_text(done.stdout + done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("Done", " ===", "#")) or "Error" in line]
    coverage = [line.split(" ft:")[0].split("cov: ")[-1] for line in done.stderr.splitlines() if " cov: " in line]
    print(f"  {name}: {lines[-1] if lines else 'no output'}, {coverage[-1] if coverage else 0} edges", flush=True)
    return done.returncode == 0


def guided(name: str, arguments: list[str]) -> int:
    import atheris

    if name.startswith("native_"):
        with contextlib.suppress(ImportError):
            import tsnative  # noqa: F401  (its extension module is found by the finder that goes next)
    # Finders of editable installs hide the sources from the instrumentation.
    sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
    with atheris.instrument_imports(include=INSTRUMENTED):
        target = dict(load_targets())[name]
    atheris.Setup([sys.argv[0], *arguments], target)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
