"""The field's own integration suite as a judge: its compiled test binary, with tsd as the daemon and the real CLI.

The suite asks a `go` command in $GOROOT/bin to build daemon and CLI; a stand-in copies ours there instead. It runs in
a network namespace of its own, without any way out. Facts: tailscale: tstest/integration/integration.go.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.netlab import NetLab, sh

ROOT = Path(__file__).resolve().parents[2]
_RESULT = re.compile(r"^\s*--- (PASS|FAIL|SKIP): (\S+)", re.MULTILINE)
_NOT_FOR_THE_SUITE = ("TS_NO_LOGS_NO_SUPPORT", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "GOROOT", "TMPDIR")
PARALLEL = "2"


def launcher(folder: Path) -> Path:
    """One executable file that runs this source tree, with compiled modules kept as an installation has them."""
    path = folder / "tsd-as-tailscaled"
    cache = folder / "pycache"
    roots = [str(ROOT), str(ROOT / "platform"), str(ROOT / "native")]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.dont_write_bytecode, sys.pycache_prefix = False, {str(cache)!r}\n"
        f"sys.path[:0] = {roots!r}\nfrom tsd.daemon.cli import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    warm = f"import sys; sys.dont_write_bytecode, sys.path[:0] = False, {roots!r}; import tsd.daemon.compose"
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
    subprocess.run([sys.executable, "-c", warm], check=True, env=environ)
    return path


class GoSuite:
    """`run` some of the tests, or all."""

    def __init__(self, lab: NetLab, folder: Path, *, binary: str, daemon: Path, cli: str) -> None:
        self._lab = lab
        self._folder = folder
        self._binary = binary
        self._namespace = lab.add_host("suite")
        gateway = lab.address(self._namespace).rpartition(".")[0] + ".254"
        sh("ip", "-n", self._namespace, "route", "add", "default", "via", gateway)
        self._go_root = folder / "goroot"
        self._stand_in(daemon, cli)

    def _stand_in(self, daemon: Path, cli: str) -> None:
        path = self._go_root / "bin" / "go"
        path.parent.mkdir(parents=True)
        path.write_text(
            f'#!/bin/sh\n[ "$1" = install ] || exit 1\ncp {daemon} "$GOBIN/tailscaled" && cp {cli} "$GOBIN/tailscale"\n'
        )
        path.chmod(0o755)

    def run(self, wanted: Iterable[str] = (), unwanted: Iterable[str] = (), *, timeout_s: int) -> dict[str, str]:
        """PASS, FAIL or SKIP by test name. A crash of the suite loses the tests that had not ended."""
        flags = ["-test.v", f"-test.parallel={PARALLEL}", f"-test.timeout={timeout_s}s", "-verbose-tailscaled"]
        flags += [f"-test.run={pattern(wanted)}"] if wanted else []
        flags += [f"-test.skip={pattern(unwanted)}"] if unwanted else []
        log = self._folder / f"suite-{len(list(self._folder.glob('suite-*.log')))}.log"
        with log.open("wb") as out:
            subprocess.run(
                ["ip", "netns", "exec", self._namespace, self._binary, *flags],
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=self._folder, env=self._environ(), timeout=timeout_s + 30, check=False,
            )  # fmt: skip
        return results(log.read_text(errors="replace"))

    def _environ(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_SUITE}
        return kept | {"GOROOT": str(self._go_root), "HOME": str(self._folder), "TMPDIR": "/tmp"}


def pattern(names: Iterable[str]) -> str:
    """Go's way to choose exactly these tests: alternatives of slash-separated parts."""
    return "|".join("/".join(f"^{re.escape(part)}$" for part in name.split("/")) for name in names)


def results(text: str) -> dict[str, str]:
    return {name: verdict for verdict, name in _RESULT.findall(text)}
