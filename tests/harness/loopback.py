"""Real daemon processes on this machine's loopback: no root, no namespaces. One `Daemon` is one state folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / part) for part in (".", "platform", "native"))
START_S = 40.0

Done = subprocess.CompletedProcess[str]


def clean_environ(**more: str) -> dict[str, str]:
    """Without what would change the outcome: proxies, drop-in mode, knobs of other daemons."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith(("TS_", "TSD_COMPAT", "TSD_SOCKET", "NOTIFY_"))
    }
    return {**kept, "PYTHONPATH": PATHS, **more}


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} not reached within {timeout_s:.0f} s")
        time.sleep(0.05)


class Daemon:
    """`tsd --tun=userspace-networking` and `tsctl` on its socket."""

    def __init__(self, folder: Path, *flags: str, state: str = "", socket_path: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.socket = socket_path or folder / "s"
        self.state = state or str(folder / "tsd.state")
        self.flags = flags
        self.log = folder / "log"
        self.prefix: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def words(self) -> list[str]:
        where = [f"--state={self.state}", f"--statedir={self.folder}", f"--socket={self.socket}", "--port=0"]
        return [*self.prefix, sys.executable, "-m", "tsd", "--tun=userspace-networking", *where, *self.flags]

    def start(self, environ: Mapping[str, str] | None = None) -> Daemon:
        """Returns when the LocalAPI answers."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.words(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
                env=clean_environ(**(environ or {})),
            )  # fmt: skip

        def answers() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"tsd ended with {self.process.returncode}:\n{self.text()}")
            return self._listens() and self.cli("status", "--json", "--peers=false").returncode == 0

        wait_until(answers, START_S, "the LocalAPI")
        return self

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(str(self.socket))
            except OSError:
                return False
        return True

    def run_once(self, timeout_s: float = 40.0) -> Done:
        """A start that is expected to end by itself."""
        return subprocess.run(
            self.words(), capture_output=True, text=True, timeout=timeout_s, check=False, env=clean_environ()
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    # --- tsctl

    def cli_words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "tsctl", f"--socket={self.socket}", *words]

    def cli(self, *words: str, timeout_s: float = 60.0) -> Done:
        return subprocess.run(
            self.cli_words(*words), capture_output=True, text=True, timeout=timeout_s, check=False, env=clean_environ()
        )

    def ok(self, *words: str) -> str:
        """Standard output of a command that must succeed."""
        done = self.cli(*words)
        assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}\n{self.text()}"
        return done.stdout

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ok("status", "--json"))
        return found

    @property
    def state_name(self) -> str:
        return str(self.status()["BackendState"])

    def identity(self) -> tuple[str, str, list[str]]:
        me = self.status()["Self"]
        return me["ID"], me["PublicKey"], me["TailscaleIPs"]
