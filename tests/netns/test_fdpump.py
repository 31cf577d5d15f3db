"""Two `FdPump`s on kernel TUNs in network namespaces: ping, TCP and UDP in both families, also without offloads, with a
TUN that is down for a while, and after hostile datagrams.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.netlab import NetLab, Process, inside, sh, wait_for

ROOT = Path(__file__).resolve().parents[2]
PORT = 5000
OVERLAY = {"a": ("100.64.7.1", "fd7a:115c:a1e0::71"), "b": ("100.64.7.2", "fd7a:115c:a1e0::72")}

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun"),
    pytest.mark.skipif(shutil.which("iperf3") is None, reason="needs iperf3"),
]


class Tunnel:
    """`a` and `b` with a pump each, fixed keys."""

    def __init__(self, lab: NetLab, folder: Path, v6: bool, *flags: str) -> None:
        self.lab = lab
        self.folder = folder
        self.hosts = {name: lab.add_host(name) for name in "ab"}
        self.underlay = {
            name: f"fd99::{number}" if v6 else lab.address(self.hosts[name]) for number, name in enumerate("ab", 1)
        }
        self.ends = {name: self._start(name, v6, *flags) for name in "ab"}
        for name in "ab":
            self._raise(name)
        wait_for(lambda: self.ping("b", 0, "-c", "1", "-W", "1") == 1, 15, "an answer")

    def _start(self, name: str, v6: bool, *flags: str) -> Process:
        own, other = (f"[{ip}]:{PORT}" if v6 else f"{ip}:{PORT}" for ip in self._underlay_of(name))
        words = [sys.executable, "-m", "benchmarks.fdpump_end", "pump0", own, other, "--addresses", *OVERLAY[name]]
        words += ["--first"] if name == "a" else []
        path = os.pathsep.join(str(ROOT / part) for part in ("", "platform", "native"))
        return self.lab.start(self.hosts[name], [*words, *flags], self.folder / f"{name}.log", {"PYTHONPATH": path})

    def _underlay_of(self, name: str) -> tuple[str, str]:
        return self.underlay[name], self.underlay["b" if name == "a" else "a"]

    def _raise(self, name: str) -> None:
        host = self.hosts[name]
        wait_for(lambda: "pump0" in sh("ip", "-n", host, "-br", "link"), 15, "the device")
        ip4, ip6 = OVERLAY[name]
        sh("ip", "-n", host, "addr", "add", f"{ip4}/24", "dev", "pump0")
        sh("ip", "-n", host, "addr", "add", f"{ip6}/64", "dev", "pump0", "nodad")
        sh("ip", "-n", host, "link", "set", "pump0", "mtu", "1280", "up")

    def ping(self, to: str, family: int, *flags: str) -> int:
        """Answers that came."""
        host = self.hosts["a" if to == "b" else "b"]
        text = self.lab.run(host, "ping", "-q", *flags, OVERLAY[to][family], check=False)
        found = re.search(r"(\d+) received", text)
        return int(found[1]) if found else 0

    def iperf(self, family: int, *flags: str) -> dict[str, Any]:
        server = self.lab.start(self.hosts["b"], ["iperf3", "-s", "-1"], self.folder / "iperf.log")
        wait_for(lambda: ":5201" in self.lab.run(self.hosts["b"], "ss", "-ltn"), 10, "iperf3")
        text = self.lab.run(self.hosts["a"], "iperf3", "-J", "-c", OVERLAY["b"][family], *flags)
        server.stop()
        end: dict[str, Any] = json.loads(text)["end"]
        return end

    def report(self, name: str) -> dict[str, Any]:
        self.ends[name].stop()
        found: dict[str, Any] = json.loads(self.ends[name].tail(1))
        return found


@pytest.fixture(params=["v4", "v6", "v4-one-thread", "v4-plain"])
def tunnel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tunnel]:
    flags = {"v4-one-thread": ["--threads=1"], "v4-plain": ["--plain"]}.get(request.param, [])
    with NetLab(f"tsdQ{os.getpid()}", "10.77.0") as lab:
        yield Tunnel(lab, tmp_path, request.param == "v6", *flags)


def test_carries_both_families_and_survives(tunnel: Tunnel) -> None:
    for family in (0, 1):
        assert tunnel.ping("b", family, "-c", "3", "-i", "0.2", "-W", "2") == 3
        assert tunnel.ping("a", family, "-c", "3", "-i", "0.2", "-W", "2", "-s", "8000") == 3
        assert tunnel.iperf(family, "-n", "20M")["sum_received"]["bytes"] >= 10 << 20
        udp = tunnel.iperf(family, "-u", "-b", "20M", "-l", "1000", "-t", "1")["sum"]
        assert udp["packets"] > 100 and udp["lost_percent"] < 20
    assert tunnel.iperf(0, "-R", "-n", "20M", "-P", "4")["sum_received"]["bytes"] >= 10 << 20
    _throw_rubbish(tunnel)
    assert tunnel.ping("b", 0, "-c", "3", "-i", "0.2", "-W", "2") == 3
    for name in "ab":
        report = tunnel.report(name)
        counters, drops = report["counters"], report["drops"]
        assert counters["up_overflow"] == 0 and counters["tun_write_errors"] == 0 and counters["udp_send_errors"] == 0
        assert set(drops) <= {"short", "no_session", "auth", "unknown_type", "bad_length"}
        assert (drops.get("auth", 0) > 0) == (name == "b")
    assert report["upcalls"]["INBOUND"] < 200  # asked about once for each flow, then known


def _throw_rubbish(tunnel: Tunnel) -> None:
    rng = random.Random(4)
    with inside(tunnel.hosts["a"]):
        sock = socket.socket(socket.AF_INET6 if ":" in tunnel.underlay["b"] else socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        for _ in range(500):
            text = bytearray(rng.randbytes(rng.choice([0, 1, 16, 31, 32, 100, 1312])))
            if len(text) >= 32 and rng.random() < 0.7:
                text[:8] = bytes((4, 0, 0, 0, rng.choice((10, 11, 12)), 0, 0, 0))
            sock.sendto(text, (tunnel.underlay["b"], PORT))


def test_device_and_link_down_and_up_again(tmp_path: Path) -> None:
    with NetLab(f"tsdQ{os.getpid()}", "10.77.0") as lab:
        tunnel = Tunnel(lab, tmp_path, False)
        for device in ("pump0", "eth0"):
            host = tunnel.hosts["b"]
            sh("ip", "-n", host, "link", "set", device, "down")
            assert tunnel.ping("b", 0, "-c", "2", "-i", "0.2", "-W", "1") == 0
            before = _cpu_ticks(tunnel.ends["b"].pid)
            time.sleep(0.5)
            assert _cpu_ticks(tunnel.ends["b"].pid) - before < 20  # it does not spin
            sh("ip", "-n", host, "link", "set", device, "up")
            wait_for(lambda: tunnel.ping("b", 0, "-c", "1", "-W", "1") == 1, 15, f"an answer after {device}")
        report = tunnel.report("b")
        assert report["counters"]["tun_write_errors"] > 0


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_python_blocked_for_seconds(tmp_path: Path) -> None:
    """The process is not asked: a thread that holds the GIL must not matter to flows that are known."""
    with NetLab(f"tsdQ{os.getpid()}", "10.77.0") as lab:
        tunnel = Tunnel(lab, tmp_path, False)
        for name in "ab":
            tunnel.ends[name].send(signal.SIGUSR1)  # holds the GIL for 3 s
        time.sleep(0.3)
        assert tunnel.ping("b", 0, "-c", "10", "-i", "0.2", "-W", "1") == 10
        wait_for(lambda: "held" in tunnel.ends["b"].tail(), 10, "the end of the stall")
