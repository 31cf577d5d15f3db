"""`make test`: every check in one go; the last line counts the tests.

1. ruff, mypy --strict, import-linter. 2. All tests on uvloop: those that only compute, then those that need the machine
(root, namespaces, third-party peers). 3. The tests that depend on the event loop again on asyncio. Files run side by
side: each has namespaces and ports of its own. Standard library only; exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALONE = "root or interop or peers"
LINTS = (
    ("ruff", ("ruff", "check", "-q", ".")),
    ("ruff format", ("ruff", "format", "-q", "--check", ".")),
    ("mypy --strict", ("mypy",)),
    ("import-linter", ("lint-imports",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="run every check")
    parser.add_argument("--lint-only", action="store_true")
    parser.add_argument("--no-lint", action="store_true")
    parser.add_argument("--soak", action="store_true", help="also the long runs")
    parser.add_argument("paths", nargs="*", help="only these tests")
    options = parser.parse_args()
    os.chdir(ROOT)
    broken = [] if options.no_lint else [name for name, command in LINTS if not lint(name, command)]
    counts: Counter[str] = Counter()
    began = time.monotonic()
    if not options.lint_only:
        broken += run_tests(options.paths or ["tests"], "" if options.soak else " and not soak", counts)
    for name in broken:
        print(f"FAILED: {name}")
    if not options.lint_only:
        print(
            f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
            f" in {time.monotonic() - began:.0f} s"
        )
    return 1 if broken or counts["failed"] else 0


def lint(name: str, command: tuple[str, ...]) -> bool:
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr, flush=True)
    return done.returncode == 0


def run_tests(paths: list[str], not_soak: str, counts: Counter[str]) -> list[str]:
    workers = str(min(4, os.cpu_count() or 1))
    groups = [
        ("tests on uvloop", "uvloop", ["-m", f"not ({ALONE}){not_soak}"]),
        ("tests that need the machine", "uvloop", ["-m", f"({ALONE}){not_soak}"]),
        ("loop-sensitive tests on asyncio", "asyncio", ["--loop-sensitive", "-m", f"not ({ALONE}){not_soak}"]),
    ]
    side_by_side = ["-n", workers, "--dist=loadfile"]
    runs = [(name, {"TSD_LOOP": loop}, [*side_by_side, *arguments]) for name, loop, arguments in groups]
    return [name for name, env, arguments in runs if not pytest(name, env, [*arguments, *paths], counts)]


def pytest(name: str, env: dict[str, str], arguments: list[str], counts: Counter[str]) -> bool:
    """Run once; what failed gets a second try alone, because real time, kernels and third-party peers can be slow.

    A test that passes only then is named as flaky: that is news to look into, not noise.
    """
    print(f"\n== {name}", flush=True)
    first: Counter[str] = Counter()
    code = run_once(env, arguments, first)
    if code == 1:
        print(f"\n== {name}: {first['failed']} failed, once more alone", flush=True)
        second: Counter[str] = Counter()
        again = [*without_workers(arguments), "--last-failed", "--last-failed-no-failures=none"]
        code = run_once(env, again, second)
        if second["passed"]:
            print(f"FLAKY: {second['passed']} of {first['failed']} passed at the second try: {name}", flush=True)
        first.update(passed=second["passed"], failed=second["failed"] - first["failed"])
    counts.update(first)
    # 5: nothing was selected, as with a path that has no such tests.
    return code in (0, 5)


def run_once(env: dict[str, str], arguments: list[str], counts: Counter[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-rfEs", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, env={**os.environ, **env}).returncode
        if report.exists():
            count(report, counts)
    return code


def without_workers(arguments: list[str]) -> list[str]:
    """The same run in one process."""
    kept = list(arguments)
    if "-n" in kept:
        at = kept.index("-n")
        del kept[at : at + 2]
    return [word for word in kept if not word.startswith("--dist")]


def count(report: Path, counts: Counter[str]) -> None:
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        counts.update(passed=total - skipped - failed, failed=failed, skipped=skipped)


if __name__ == "__main__":
    sys.exit(main())
