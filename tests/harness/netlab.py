"""Network namespaces for tests with real programs: a hub with a bridge, hosts on it, and no way out of the machine.

Needs root. Every name begins with the lab's prefix, and `close` removes what was made, also after a failed set-up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000
ETC_NETNS = Path("/etc/netns")


def sh(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class NetLab:
    """`add_host("a")` gives the namespace `<prefix>-a` an eth0 with 10.99.0.N/24 and fd99::N/64 on the bridge."""

    def __init__(self, prefix: str, network: str = "10.99.0") -> None:
        self.prefix = prefix
        self.network = network
        self._hosts: dict[str, int] = {}
        self._processes: list[Process] = []
        self.hub = f"{prefix}-hub"
        self._made: list[str] = []
        self._make(self.hub)
        sh("ip", "-n", self.hub, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", self.hub, "link", "set", "br0", "up")

    def __enter__(self) -> NetLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, name: str) -> None:
        sh("ip", "netns", "del", name, check=False)
        folder = ETC_NETNS / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        sh("ip", "netns", "add", name)
        self._made.append(name)
        sh("ip", "-n", name, "link", "set", "lo", "up")

    def add_host(self, short: str) -> str:
        """Returns the namespace's name."""
        name, number = f"{self.prefix}-{short}", len(self._hosts) + 1
        self._make(name)
        self._hosts[name] = number
        port = f"p{number}"
        sh("ip", "-n", self.hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        sh("ip", "-n", self.hub, "link", "set", port, "master", "br0", "up")
        sh("ip", "-n", name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        sh("ip", "-n", name, "addr", "add", f"fd99::{number}/64", "dev", "eth0", "nodad")
        sh("ip", "-n", name, "link", "set", "eth0", "up")
        return name

    def address(self, name: str) -> str:
        return f"{self.network}.{self._hosts[name]}"

    def number(self, name: str) -> int:
        """Last part of its addresses; the hub's interface to it is `p<number>`."""
        return self._hosts[name]

    def start(self, name: str, words: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> Process:
        """Run a program in a namespace; it is ended by `close` at the latest."""
        process = Process(name, words, log, environ)
        self._processes.append(process)
        return process

    def run(self, name: str, *words: str, timeout_s: float = 30.0, check: bool = True) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", name, *words], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        for process in reversed(self._processes):
            process.stop()
        for name in reversed(self._made):
            sh("ip", "netns", "del", name, check=False)
            with contextlib.suppress(OSError):
                (ETC_NETNS / name / "resolv.conf").unlink()
                (ETC_NETNS / name).rmdir()


class Process:
    """A program in a namespace, writing to a log file."""

    def __init__(self, name: str, words: Sequence[str], log: Path, environ: Mapping[str, str] | None) -> None:
        self.log = log
        # The developer's proxies are out of reach in a namespace.
        own = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        full = {**own, "TS_NO_LOGS_NO_SUPPORT": "true", **(environ or {})}
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                ["ip", "netns", "exec", name, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=full
            )

    @property
    def pid(self) -> int:
        """`ip netns exec` replaces itself, so this is the program's own."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            self._popen.send_signal(number)

    def stop(self, timeout_s: float = 10.0) -> None:
        self.send(signal.SIGTERM)
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Sockets made by this thread (and by threads it starts) meanwhile belong to the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        yield
    finally:
        libc.setns(home, CLONE_NEWNET)
        os.close(home)
        os.close(there)


def wait_for(condition: Callable[[], object], timeout_s: float = 15.0, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} not reached within {timeout_s:.0f} s")
        time.sleep(0.05)
