"""As much of systemd as a `Type=notify` service meets: environment, notify socket, watchdog, restart, ExecStopPost.

Runs the commands of the real unit file with other paths in them. Standards: sd_notify(3), systemd.service(5).
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.nodes import ROOT

UNIT = ROOT / "packaging" / "systemd" / "tsd.service"


def unit_settings(path: Path = UNIT) -> dict[str, str]:
    """Directives by name; the last of several wins."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


class Supervisor:
    """One service. `replaced` maps paths of the unit to those of the test; `flags` is $FLAGS of the defaults file."""

    def __init__(
        self, folder: Path, replaced: Mapping[str, str], flags: str, *, watchdog_s: float = 0.0, netns: str = ""
    ) -> None:
        self.folder = folder
        self.log = folder / "journal.log"
        self.unit = unit_settings()
        self._replaced = dict(replaced)
        self._flags = flags
        self._watchdog_s = watchdog_s
        self._prefix = ["ip", "netns", "exec", netns] if netns else []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self.messages: list[dict[str, str]] = []
        self.status = ""
        self.watchdog_kills = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._last_ping: float | None = None
        """None until READY=1: the watchdog counts from there."""
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    # --- commands of the unit

    def command(self, key: str) -> list[str]:
        text = self.unit[key].replace("${PORT}", "0").replace("$FLAGS", self._flags)
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        words = shlex.split(text)
        return [
            *self._prefix,
            *([sys.executable, "-m", "tsd"] if words[0] == "/usr/bin/tsd" else words[:1]),
            *words[1:],
        ]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._last_ping = None
            self.process = subprocess.Popen(
                self.command("ExecStart"), stdout=log, stderr=log, env=self._env(log.fileno())
            )

    def _env(self, log: int) -> dict[str, str]:
        found = os.fstat(log)
        env = {
            **os.environ,
            "TS_NO_LOGS_NO_SUPPORT": "true",
            "PYTHONPATH": f"{ROOT}:{ROOT}/platform:{ROOT}/native",
            "NOTIFY_SOCKET": str(self.folder / "notify"),
            "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}",
        }
        if self._watchdog_s:
            env["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        return env

    def reload(self) -> None:
        self._send(signal.SIGHUP)

    def stop(self) -> int:
        """The exit code of the service; ExecStopPost has run when it returns."""
        self._is_ending.set()
        self._send(signal.SIGTERM)
        assert self.process is not None
        code = self.process.wait(30)
        self._clean_up("exit-code" if code else "success")
        return code

    def close(self) -> None:
        self._is_ending.set()
        self._send(signal.SIGKILL)
        self._thread.join(5)
        self._socket.close()

    def _clean_up(self, result: str) -> None:
        with self.log.open("ab") as log:
            subprocess.run(
                self.command("ExecStopPost"),
                stdout=log,
                stderr=log,
                env=self._env(log.fileno()) | {"SERVICE_RESULT": result},
                timeout=60,
                check=True,
            )

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    # --- what the service says

    def _watch(self) -> None:
        while not self._is_ending.is_set():
            if select.select([self._socket], [], [], 0.05)[0]:
                self._hear(self._socket.recv(4096).decode())
            if self._is_overdue() and not self._is_ending.is_set():
                self._kill_and_restart()
        while select.select([self._socket], [], [], 0.5)[0]:
            self._hear(self._socket.recv(4096).decode())

    def _is_overdue(self) -> bool:
        last = self._last_ping
        return bool(self._watchdog_s) and last is not None and time.monotonic() - last > self._watchdog_s

    def _hear(self, text: str) -> None:
        message = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        if "1" in (message.get("WATCHDOG"), message.get("READY")):
            self._last_ping = time.monotonic()
        self.status = message.get("STATUS", self.status)
        self.messages.append(message)

    def _kill_and_restart(self) -> None:
        assert self.process is not None
        self.watchdog_kills += 1
        self._send(signal.SIGABRT)
        self._send(signal.SIGCONT)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            self.process.wait(5)
        self._clean_up("watchdog")
        if self.unit["Restart"] == "on-failure":
            self.start()

    def has(self, key: str, value: str = "1") -> bool:
        return any(message.get(key) == value for message in self.messages)

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} not reached; heard {self.messages[-20:]}\n{self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
