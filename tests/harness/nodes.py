"""Nodes under test: tsd and the real tailscaled behind one interface, so that the same test judges both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.headscale import peer_binary
from harness.netlab import NetLab, Process, wait_for

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"TS_NO_LOGS_NO_SUPPORT": "true", "TS_DISABLE_PORTMAPPER": "1", "TS_DEBUG_FIREWALL_MODE": "nftables"}


class Node(ABC):
    """One daemon in its namespace. `cli` is tsctl or the real CLI; both speak to both daemons."""

    daemon = ""
    is_userspace = True

    def __init__(self, lab: NetLab, namespace: str, folder: Path, name: str) -> None:
        self.lab = lab
        self.namespace = namespace
        self.folder = folder
        self.name = name
        self.socket = folder / "node.sock"
        self.log = folder / f"{name}.log"
        self.state = ""
        self.environ: dict[str, str] = {}
        self.process: Process | None = None
        folder.mkdir(parents=True, exist_ok=True)

    # --- the daemon

    @abstractmethod
    def daemon_words(self) -> list[str]: ...

    @abstractmethod
    def cli_words(self) -> list[str]: ...

    def flags(self) -> list[str]:
        words = [f"--socket={self.socket}", f"--statedir={self.folder}", "--port=41641"]
        words += [f"--state={self.state}"] if self.state else []
        if self.is_userspace:
            words += ["--tun=userspace-networking", "--socks5-server=127.0.0.1:1055"]
            words += ["--outbound-http-proxy-listen=127.0.0.1:1056"]
        return words

    def launch(self) -> None:
        """As `start`, without waiting."""
        environ = QUIET | self.environ
        self.process = self.lab.start(self.namespace, [*self.daemon_words(), *self.flags()], self.log, environ)

    def start(self) -> Node:
        self.launch()
        self.wait_until_up()
        return self

    def wait_until_up(self) -> None:
        try:
            wait_for(self._is_up, 90, f"{self.name}'s socket")
        except TimeoutError as err:
            raise TimeoutError(f"{err}\n{self.tail()}") from None

    def _is_up(self) -> bool:
        if self.process is not None and not self.process.is_running:
            raise RuntimeError(f"{self.name} ended:\n{self.tail()}")
        return self.socket.exists() and self.answers()

    def answers(self) -> bool:
        return self.call("status", "--json", check=False).returncode == 0

    def stop(self) -> None:
        """SIGTERM, then wait."""
        if self.process is not None:
            self.process.stop()

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.send(signal.SIGKILL)
            wait_for(lambda: self.process is None or not self.process.is_running, 10, "the end of the daemon")

    def freeze(self, seconds: float) -> None:
        assert self.process is not None
        self.process.send(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send(signal.SIGCONT)

    # --- the CLI

    def call(self, *words: str, timeout_s: float = 40.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        line = ["ip", "netns", "exec", self.namespace, *self.cli_words(), f"--socket={self.socket}", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False, env=self._env())
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.tail()}"
            )
        return done

    def _env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/platform:{ROOT}/native"}

    def tail(self) -> str:
        return self.process.tail(60) if self.process is not None else ""

    def up(self, url: str, key: str = "", *flags: str, **kw: Any) -> subprocess.CompletedProcess[str]:
        words = ["up", f"--login-server={url}", f"--hostname={self.name}", *flags]
        words += [f"--auth-key={key}"] if key else []
        return self.call(*words, **kw)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call("status", "--json").stdout)
        return found

    @property
    def state_name(self) -> str:
        return str(self.status()["BackendState"])

    def ips(self) -> list[str]:
        return list(self.status()["TailscaleIPs"] or [])

    @property
    def ip4(self) -> str:
        return next(ip for ip in self.ips() if "." in ip)

    @property
    def ip6(self) -> str:
        return next(ip for ip in self.ips() if ":" in ip)

    def peer(self, name: str) -> dict[str, Any] | None:
        """The status entry of a peer, by its DNS name's first label."""
        peers = (self.status().get("Peer") or {}).values()
        return next((p for p in peers if p["DNSName"].partition(".")[0] == name), None)

    def wait_for_peer(self, name: str, timeout_s: float = 20.0, **wanted: Any) -> dict[str, Any]:
        def fits() -> bool:
            found = self.peer(name)
            return found is not None and all(found.get(key) == value for key, value in wanted.items())

        wait_for(fits, timeout_s, f"{self.name} to see {name} {wanted or ''}")
        found = self.peer(name)
        assert found is not None
        return found

    def ping(self, target: str, *flags: str, check: bool = True, timeout_s: float = 40.0) -> str:
        return self.call("ping", *flags, target, check=check, timeout_s=timeout_s).stdout

    # --- traffic

    def curl(
        self, url: str, *flags: str, via: str = "socks", timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        """Fetch from inside the namespace, through this node's proxy when it is a userspace one."""
        proxy = []
        if self.is_userspace:
            proxy = ["--socks5-hostname", "127.0.0.1:1055"] if via == "socks" else ["--proxy", "http://127.0.0.1:1056"]
        line = ["ip", "netns", "exec", self.namespace, "curl", "-sS", "-m", str(int(timeout_s)), *proxy, *flags, url]
        return subprocess.run(line, capture_output=True, timeout=timeout_s + 10, check=False)

    def serve(self, port: int, folder: Path) -> Process:
        """A web server that takes PUT too, on all of the namespace's addresses."""
        words = [sys.executable, "-m", "harness.webserver", str(port), str(folder)]
        environ = {"PYTHONPATH": str(ROOT / "tests")}
        process = self.lab.start(self.namespace, words, self.folder / f"web{port}.log", environ)
        time.sleep(0.5)
        return process


class TsdNode(Node):
    daemon = "tsd"

    def daemon_words(self) -> list[str]:
        return [sys.executable, "-m", "tsd"]

    def cli_words(self) -> list[str]:
        return [sys.executable, "-m", "tsctl"]

    def start(self) -> Node:
        self.environ.setdefault("PYTHONPATH", f"{ROOT}:{ROOT}/platform:{ROOT}/native")
        return super().start()

    def flags(self) -> list[str]:
        return [*super().flags(), "--verbose=1"]


class TunTsdNode(TsdNode):
    is_userspace = False
    device = "tsd0"

    def flags(self) -> list[str]:
        return [*super().flags(), f"--tun={self.device}"]

    def cleanup(self, result: str = "success") -> str:
        """`tsd --cleanup` as ExecStopPost runs it when the service ended so; what it said."""
        words = [*self.daemon_words(), "--cleanup", f"--socket={self.socket}", f"--statedir={self.folder}"]
        line = ["ip", "netns", "exec", self.namespace, *words]
        environ = self._env() | {"SERVICE_RESULT": result}
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True, env=environ)
        return done.stderr


class TailscaledNode(Node):
    daemon = "tailscaled"

    def daemon_words(self) -> list[str]:
        return [peer_binary("tailscaled")]

    def cli_words(self) -> list[str]:
        return [peer_binary("tailscale")]


class TunTailscaledNode(TailscaledNode):
    is_userspace = False

    def flags(self) -> list[str]:
        return [*super().flags(), "--tun=tailscale0"]


def real_cli(node: Node, *words: str, timeout_s: float = 40.0) -> subprocess.CompletedProcess[str]:
    """The real CLI on any node's socket."""
    line = ["ip", "netns", "exec", node.namespace, peer_binary("tailscale"), f"--socket={node.socket}", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**QUIET, **extra}
