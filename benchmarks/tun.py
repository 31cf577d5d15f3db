"""The fast path on kernel TUNs: contenders on one bridge, alternating in one run, measured with iperf3 and ping.

Contenders: `limit` (a probe that does the least work; --limit or TSD_BENCH_LIMIT: folder with limit.c and aead.c),
`tsd` and with TSD_PEER_BIN `tailscaled` in headscale's tailnet, without it `tsd` in `tsd coord`'s; `tsd-relay` and
`tailscaled-relay`: by the relay alone; `pump` (our `FdPump` at both ends with fixed keys; `pump1`: one thread,
`pump-many`: beside 1,000 peers with sessions and 10,000 allowed IPs), `wireguard-go`. Needs root and iperf3; nothing
leaves the machine. Prints medians, minima, maxima and ratios; JSON in benchmarks/out/tun.json. CPU seconds are those of
both daemons and both iperf3.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from benchmarks.run import boost  # noqa: E402
from harness.coordproc import CoordProcess  # noqa: E402
from harness.headscale import ALLOW_ALL, Headscale, peer_binary  # noqa: E402
from harness.netlab import NetLab, Process, sh, wait_for  # noqa: E402
from harness.nodes import Node, TunTailscaledNode, TunTsdNode  # noqa: E402

PYTHONPATH = os.pathsep.join(str(ROOT / part) for part in ("", "platform", "native", "tests"))
MTU, GSO_BYTES, PORT = 1280, 60000, 5000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DEFAULT = ("limit", "tsd", "wireguard-go", "tailscaled")
OTHERS = ("tsd-relay", "tailscaled-relay", "pump", "pump1", "pump-many")
MANY = ("--more-peers=1000", "--more-prefixes=10000")
METRICS = ("tcp1", "tcp8", "reverse", "both", "udp64_kpps", "ping_us", "cpu_s_per_gb")
UNITS = "Gbit/s; kpps delivered; us; CPU s per GB"


@dataclass
class Contender:
    name: str
    near: str
    far: str
    far_ip: str
    processes: list[Process]
    kib_for_each_peer: float = 0.0

    def cpu_s(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self.processes)


def has_peers() -> bool:
    return (Path(os.environ.get("TSD_PEER_BIN", "/nowhere")) / "tailscaled").is_file()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Bed:
    def __init__(self, lab: NetLab, folder: Path, options: argparse.Namespace, cleanup: ExitStack) -> None:
        self.lab = lab
        self.folder = folder
        self.options = options
        self.control: tuple[str, str] | None = None
        self.cleanup = cleanup

    def build(self, name: str) -> Contender | None:
        """None, with a line that says why, when it cannot take part here."""
        kinds: dict[str, Callable[[str], Contender | None]] = {
            "limit": self._limit, "pump": self._pump, "pump1": self._pump, "pump-many": self._pump,
            "wireguard-go": self._wireguard_go, "tailscaled": self._tailnet, "tsd": self._tailnet,
            "tailscaled-relay": self._tailnet, "tsd-relay": self._tailnet,
        }  # fmt: skip
        built = kinds[name](name)
        if built is not None:
            words = ["iperf3", "-s", "-p", "5201"]
            self.lab.start(built.far, words, self.folder / f"iperf-{name}.log")
        return built

    def _hosts(self, name: str) -> tuple[str, str]:
        return self.lab.add_host(f"{name}-a"), self.lab.add_host(f"{name}-b")

    def _start(self, host: str, name: str, words: list[str]) -> Process:
        return self.lab.start(host, words, self.folder / f"{host}-{name}.log", {"PYTHONPATH": PYTHONPATH})

    def _raise(self, host: str, device: str, address: str) -> None:
        wait_for(lambda: device in sh("ip", "-n", host, "-br", "link"), 15, f"{device} in {host}")
        sh("ip", "-n", host, "addr", "add", f"{address}/24", "dev", device)
        sh("ip", "-n", host, "link", "set", device, "mtu", str(MTU), "gso_max_size", str(GSO_BYTES), "up")

    def _limit(self, name: str) -> Contender | None:
        source = self.options.limit
        if source is None or not (source / "limit.c").is_file():
            print("limit: no source (--limit FOLDER or TSD_BENCH_LIMIT)", file=sys.stderr)
            return None
        program = self.folder / "limit"
        sources = [str(source / part) for part in ("limit.c", "aead.c")]
        subprocess.run(["cc", "-w", "-O3", "-o", str(program), *sources, "-lpthread"], check=True)
        near, far = self._hosts(name)
        ends = [(near, far, "100.64.1.1"), (far, near, "100.64.1.2")]
        processes = []
        for own, other, address in ends:
            words = [str(program), "lim0", self.lab.address(own), str(PORT), self.lab.address(other), str(PORT)]
            processes.append(self._start(own, name, words))
            self._raise(own, "lim0", address)
        return Contender(name, near, far, "100.64.1.2", processes)

    def _pump(self, name: str) -> Contender:
        near, far = self._hosts(name)
        net = f"100.64.{('pump', 'pump1', 'pump-many').index(name) + 5}"
        processes = []
        for own, other, number in ((near, far, 1), (far, near, 2)):
            words = [sys.executable, "-m", "benchmarks.fdpump_end", "pump0", f"{self.lab.address(own)}:{PORT}"]
            words += [f"{self.lab.address(other)}:{PORT}", f"--addresses={net}.{number}"]
            words += [f"--threads={1 if name == 'pump1' else 2}"] + (["--first"] if number == 1 else [])
            words += MANY if name == "pump-many" else ()
            processes.append(self._start(own, name, words))
            self._raise(own, "pump0", f"{net}.{number}")
        found = re.search(r"KiB for each peer: ([\d.]+)", processes[0].tail())
        return Contender(name, near, far, f"{net}.2", processes, float(found[1]) if found else 0.0)

    def _wireguard_go(self, name: str) -> Contender | None:
        if not (shutil.which("wireguard-go") and shutil.which("wg")):
            print("wireguard-go: not installed", file=sys.stderr)
            return None
        near, far = self._hosts("wg")
        private = [sh("wg", "genkey").strip() for _ in range(2)]
        public = [
            subprocess.run(["wg", "pubkey"], input=key, capture_output=True, text=True, check=True).stdout.strip()
            for key in private
        ]
        processes = []
        for i, (own, other) in enumerate(((near, far), (far, near))):
            device = f"wgq{os.getpid() % 1000}{i}"  # its control socket is named after it, on the host
            processes.append(self._start(own, name, ["wireguard-go", "-f", device]))
            self._raise(own, device, f"100.64.4.{i + 1}")
            key = self.folder / f"wg{i}"
            key.write_text(private[i])
            words = ["wg", "set", device, "private-key", str(key), "listen-port", str(PORT), "peer", public[1 - i]]
            self.lab.run(own, *words, "allowed-ips", "0.0.0.0/0", "endpoint", f"{self.lab.address(other)}:{PORT}")
        return Contender(name, near, far, "100.64.4.2", processes)

    def _control(self) -> tuple[str, str]:
        """URL and key of the tailnet that all daemons are in."""
        if self.control is None:
            hub = self.lab.add_host("h")
            address = self.lab.address(hub)
            self.control = self._headscale(hub, address) if has_peers() else self._coord(hub, address)
        return self.control

    def _coord(self, hub: str, address: str) -> tuple[str, str]:
        coord = CoordProcess(
            self.folder / "coord", netns=hub, address=address, control_port=8080, derp_port=3340, stun_port=3478
        )
        self.cleanup.callback(coord.start().stop)
        return coord.url, coord.auth_key(reusable=True)

    def _headscale(self, hub: str, address: str) -> tuple[str, str]:
        relay = [peer_binary("derper"), f"-a={address}:4443", "-http-port=-1", "-certmode=manual"]
        relay += [f"-hostname={address}", f"-certdir={self.folder / 'certs'}", f"-c={self.folder / 'derper.key'}"]
        self.lab.start(hub, [*relay, "-stun-port=3478"], self.folder / "derper.log")
        headscale = Headscale(self.lab, hub, self.folder / "headscale").start()
        headscale.set_policy(ALLOW_ALL)
        return headscale.url, headscale.create_key(headscale.create_user("bench"), reusable=True)

    def _tailnet(self, name: str) -> Contender | None:
        if name.startswith("tailscaled") and not has_peers():
            print(f"{name}: needs TSD_PEER_BIN", file=sys.stderr)
            return None
        url, key = self._control()
        is_relayed = name.endswith("-relay")
        kind: type[Node] = TunTailscaledNode if name.startswith("tailscaled") else TunTsdNode
        prefix = f"{self.lab.prefix}-"
        nodes = [kind(self.lab, host, self.folder / host, host.removeprefix(prefix)) for host in self._hosts(name)]
        for node in nodes:
            node.environ |= {"TS_DEBUG_NEVER_DIRECT_UDP": "1"} if is_relayed else {}
            node.start()
            node.up(url, key)
        near, far = nodes
        near.wait_for_peer(far.name)
        way = "via DERP" if is_relayed else "via 10."
        wait_for(lambda: way in near.ping(far.ip4, "--c=3", check=False), 60, f"{name}: a path {way}")
        processes = [node.process for node in nodes if node.process is not None]
        return Contender(name, near.namespace, far.namespace, far.ip4, processes)


def iperf(lab: NetLab, one: Contender, seconds: int, *flags: str) -> dict[str, Any]:
    """The end of iperf3's report, and the CPU seconds that daemons and both iperf3 took."""
    before, start = one.cpu_s(), time.monotonic()
    words = ["iperf3", "-J", "-c", one.far_ip, "-p", "5201", "-t", str(seconds), *flags]
    for _ in range(5):
        text = lab.run(one.near, *words, timeout_s=seconds + 60, check=False)
        report: dict[str, Any] = json.loads(text)
        if "error" not in report:
            break
        time.sleep(0.5)  # the server is still busy with the last one
    else:
        raise RuntimeError(f"{one.name}: {report['error']}")
    end: dict[str, Any] = report["end"]
    used = end["cpu_utilization_percent"]
    clients_s = (used["host_total"] + used["remote_total"]) / 100 * (time.monotonic() - start)
    end["cpu_s"] = one.cpu_s() - before + clients_s
    return end


def gbit(end: dict[str, Any], key: str = "sum_received") -> float:
    return float(end[key]["bits_per_second"]) / 1e9


def measure(lab: NetLab, one: Contender, seconds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    end = iperf(lab, one, seconds)
    found["tcp1"] = gbit(end)
    found["cpu_s_per_gb"] = end["cpu_s"] / (end["sum_received"]["bytes"] / 1e9)
    found["tcp8"] = gbit(iperf(lab, one, seconds, "-P", "8"))
    found["reverse"] = gbit(iperf(lab, one, seconds, "-R"))
    both = iperf(lab, one, seconds, "--bidir")
    found["both"] = gbit(both) + gbit(both, "sum_received_bidir_reverse")
    udp = iperf(lab, one, seconds, "-u", "-b", "0", "-l", "64")["sum"]
    found["udp64_kpps"] = udp["packets"] * (1 - udp["lost_percent"] / 100) / udp["seconds"] / 1e3
    pings = lab.run(one.near, "ping", "-q", "-i", "0.01", "-c", "100", one.far_ip, timeout_s=30, check=False)
    average = re.search(r"= [\d.]+/([\d.]+)/", pings)
    found["ping_us"] = float(average[1]) * 1000 if average else float("nan")
    return found


def summary(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        metric: {"min": min(values), "median": statistics.median(values), "max": max(values)}
        for metric in METRICS
        if (values := [found[metric] for found in rounds])
    }


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'':14}" + "".join(f"{metric:>22}" for metric in METRICS) + f"   ({UNITS})")
    for name, found in results.items():
        cells = [f"{v['median']:.2f} [{v['min']:.2f}-{v['max']:.2f}]" for v in (found[m] for m in METRICS)]
        print(f"{name:14}" + "".join(f"{cell:>22}" for cell in cells))
    for ours in (name for name in results if name.startswith(("pump", "tsd"))):
        for other in (name for name in results if name != ours):
            ratios = (results[ours][m]["median"] / results[other][m]["median"] for m in METRICS)
            print(
                f"{ours + ' / ' + other:>26}" + "".join(f"  {m} {r:.2f}" for m, r in zip(METRICS, ratios, strict=True))
            )


def answers(lab: NetLab, one: Contender) -> bool:
    return " 0% packet loss" in lab.run(one.near, "ping", "-c", "1", "-W", "1", one.far_ip, check=False)


@contextmanager
def running(options: argparse.Namespace) -> Iterator[tuple[NetLab, list[Contender]]]:
    folder = tempfile.TemporaryDirectory(prefix="tsdQ")
    with folder, NetLab(f"tsdQ{os.getpid() % 1000}", "10.78.0") as lab, ExitStack() as cleanup:
        bed = Bed(lab, Path(folder.name), options, cleanup)
        contenders = [built for name in options.contenders if (built := bed.build(name)) is not None]
        for one in contenders:
            wait_for(partial(answers, lab, one), 30, f"{one.name}: an answer")
        yield lab, contenders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contenders", nargs="*", default=DEFAULT, help=f"of {', '.join((*DEFAULT, *OTHERS))}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    known = os.environ.get("TSD_BENCH_LIMIT")
    parser.add_argument("--limit", type=Path, default=Path(known) if known else None)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "out" / "tun.json")
    parser.add_argument("--boost", action="store_true", help="raise the priority of the whole run")
    options = parser.parse_args()
    if options.boost:
        boost()
    loads, found = [os.getloadavg()[0]], {}
    with running(options) as (lab, contenders):
        found = {one.name: [] for one in contenders}
        for number in range(options.rounds):
            for one in contenders:
                found[one.name].append(measure(lab, one, options.seconds))
            loads.append(os.getloadavg()[0])
            print(f"round {number + 1} of {options.rounds}, load {loads[-1]:.1f}", file=sys.stderr)
    results = {name: summary(rounds) for name, rounds in found.items()}
    show(results)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    kernel = os.uname().release
    memory = {one.name: one.kib_for_each_peer for one in contenders if one.kib_for_each_peer}
    print("".join(f"{name}: {kib} KiB for each peer\n" for name, kib in memory.items()), end="")
    report = {"kernel": kernel, "cores": os.cpu_count(), "load": loads, "rounds": found, "summary": results}
    report["kib_for_each_peer"] = memory
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
