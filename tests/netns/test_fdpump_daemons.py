"""Two `tsd` with TUNs and the pump's threads between them: what happens to flows while Python stands still, on a bad
network, when sends fail, when rules change, and when links go down.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tsnative
from harness.coordproc import CoordProcess
from harness.hoststate import answered
from harness.impair import ImpairedLab
from harness.netlab import wait_for
from harness.nodes import ROOT, Node, TunTsdNode
from harness.stallingtsd import STALL_S

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun"),
    pytest.mark.skipif(shutil.which("iperf3") is None, reason="needs iperf3"),
    pytest.mark.skipif(tsnative.native is None, reason="the native core is not built"),
]


class StallingNode(TunTsdNode):
    mtu_bytes = 1280

    def flags(self) -> list[str]:
        return [*super().flags(), f"--mtu={self.mtu_bytes}"]

    def daemon_words(self) -> list[str]:
        return [sys.executable, "-m", "harness.stallingtsd"]

    def start(self) -> Node:
        self.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "platform", "native", "tests"))
        return super().start()


class Pair:
    def __init__(self, lab: ImpairedLab, folder: Path, url: str, key: str) -> None:
        self.lab = lab
        self.folder = folder
        self.url, self.key = url, key
        self.near, self.far = (StallingNode(lab, f"{lab.prefix}-{name}", folder / name, name) for name in "ab")
        for node in (self.near, self.far):
            node.start()
            self.up(node)
        lab.start(self.far.namespace, ["iperf3", "-s"], folder / "iperf.log")
        self.near.wait_for_peer(self.far.name)
        self.wait_for_path("via 10.")

    def up(self, node: Node, *flags: str) -> None:
        node.up(self.url, self.key, *flags)

    def wait_for_path(self, words: str) -> None:
        """Data passes, and the last answer of the path's own ping came that way."""

        def is_there() -> bool:
            return bool(self.pings("-c", "1", "-W", "1")) and words in self.near.ping(
                self.far.ip4, "--c=1", "--until-direct=false", check=False
            )

        wait_for(is_there, 60, f"a path {words}\n{self.near.tail()}")

    def counters(self, node: Node) -> dict[str, int]:
        rows = (line.split() for line in node.call("debug", "metrics").stdout.splitlines())
        return {row[0].removeprefix("tsd_pump_"): int(row[1]) for row in rows if row[0].startswith("tsd_pump_")}

    def drops(self, node: Node) -> dict[str, int]:
        rows = (line.split() for line in node.call("debug", "metrics").stdout.splitlines())
        return {
            row[0].removeprefix("tsd_core_drops_"): int(row[1]) for row in rows if row[0].startswith("tsd_core_drops_")
        }

    def iperf(self, *flags: str, timeout_s: float = 60.0) -> dict[str, Any]:
        words = ["iperf3", "-J", "-c", self.far.ip4, *flags]
        found: dict[str, Any] = json.loads(self.lab.run(self.near.namespace, *words, timeout_s=timeout_s))
        return found

    def pings(self, *flags: str) -> int:
        return answered(self.lab.run(self.near.namespace, "ping", *flags, self.far.ip4, check=False))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ImpairedLab(f"tsdP{os.getpid()}", "10.97.6", seed=4) as lab:
        hub, folder = lab.add_host("h"), tmp_path_factory.mktemp("pumps")
        lab.add_host("a"), lab.add_host("b")
        lab.plug_in()
        with CoordProcess(
            folder / "coord", netns=hub, address=lab.address(hub), control_port=8080, derp_port=3340, stun_port=3478
        ) as coord:
            yield Pair(lab, folder, coord.url, coord.auth_key(reusable=True))


def test_flows_go_on_while_both_daemons_stand_still(pair: Pair) -> None:
    """What happens in the seconds in which nobody in Python can do anything, told by the flows' own clocks."""
    assert pair.pings("-c", "3", "-i", "0.2") == 3
    seconds = STALL_S + 5
    words = ["iperf3", "-J", "-t", str(seconds), "-c", pair.far.ip4]
    stream = pair.lab.start(pair.near.namespace, words, pair.folder / "stream.log")
    words = ["ping", "-D", "-i", "0.2", "-c", str(5 * seconds), pair.far.ip4]
    pings = pair.lab.start(pair.near.namespace, words, pair.folder / "ping.log")
    wait_for(lambda: (pair.folder / "ping.log").read_text().count("seq=") > 3, 15, "answers")
    for node in (pair.near, pair.far):
        assert node.process is not None
        node.process.send(signal.SIGUSR2)
    wait_for(lambda: not (stream.is_running or pings.is_running), seconds + 30, "the end of the flows")
    stalls = [_stall_of(node) for node in (pair.near, pair.far)]
    start, end = max(stall[0] for stall in stalls), min(stall[1] for stall in stalls)
    assert end - start > STALL_S - 2, stalls
    answers = [float(text) for text in re.findall(r"\[([\d.]+)\] .* icmp_seq", (pair.folder / "ping.log").read_text())]
    meanwhile = [at for at in answers if start < at < end]
    assert len(meanwhile) > (end - start) * 5 * 0.8, (stalls, answers)
    report = json.loads((pair.folder / "stream.log").read_text())
    began = report["start"]["timestamp"]["timesecs"]
    sums = [one["sum"] for one in report["intervals"]]
    moved = [one["bytes"] for one in sums if began + one["start"] > start and began + one["end"] < end]
    assert len(moved) >= STALL_S - 3 and min(moved) > max(one["bytes"] for one in sums) / 50, (stalls, sums)
    pair.wait_for_path("via 10.")


def _stall_of(node: Node) -> tuple[float, float]:
    text = node.log.read_text()
    start, end = re.search(r"stalled ([\d.]+)", text), re.search(r"going on ([\d.]+)", text)
    assert start and end, text
    return float(start[1]), float(end[1])


def test_loss_reordering_and_duplicates(pair: Pair) -> None:
    before = pair.drops(pair.far)
    pair.lab.impair(loss=0.03, reorder=0.1, duplicate=0.1)
    assert pair.iperf("-t", "2")["end"]["sum_received"]["bytes"] > 100_000
    assert pair.pings("-c", "40", "-i", "0.05", "-W", "1") >= 30
    pair.lab.impair()
    after = pair.drops(pair.far)
    assert after.get("replay", 0) > before.get("replay", 0), (before, after)  # what came twice is let in once
    assert pair.pings("-c", "10", "-i", "0.1", "-W", "1") == 10


def test_rubbish_of_any_size(pair: Pair) -> None:
    before = pair.drops(pair.far)
    text = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for size in (0, 1, 2, 3, 4, 15, 16, 31, 32, 148, 1400):\n"
        "    for first in (0, 1, 2, 3, 4, 84):\n"
        "        s.sendto(bytes([first]) + bytes(size) if size else b'', (sys.argv[1], 41641))\n"
    )
    pair.lab.run(f"{pair.lab.prefix}-h", sys.executable, "-c", text, pair.lab.address(pair.far.namespace))
    assert pair.pings("-c", "5", "-i", "0.1", "-W", "1") == 5
    after = pair.drops(pair.far)
    assert after["short"] > before.get("short", 0) and after["no_session"] > before.get("no_session", 0)


def test_sends_that_the_firewall_refuses_go_by_relay(pair: Pair) -> None:
    """Who hears of it first, the pump with a packet or the engine with a ping of its own, is a matter of luck."""
    errors = pair.counters(pair.near)["udp_send_errors"]

    def is_noticed() -> bool:
        return pair.counters(pair.near)["udp_send_errors"] > errors or "reason=EPERM" in pair.near.tail()

    for line in (
        "add table ip stop",
        "add chain ip stop out { type filter hook output priority 0; }",
        "add rule ip stop out udp dport 41641 drop",
    ):
        pair.lab.run(pair.near.namespace, "nft", line)
    try:
        wait_for(lambda: pair.pings("-c", "1", "-W", "1"), 40, f"an answer by relay\n{pair.near.tail()}")
        wait_for(is_noticed, 40, "a refused send")
        wait_for(lambda: pair.pings("-c", "10", "-i", "0.1", "-W", "2") >= 8, 60, f"answers\n{pair.near.tail()}")
    finally:
        pair.lab.run(pair.near.namespace, "nft", "delete table ip stop")
    pair.wait_for_path("via 10.")
    wait_for(lambda: _sends_directly(pair), 40, f"direct sends\n{pair.near.tail()}")


def _sends_directly(pair: Pair) -> bool:
    sent = pair.counters(pair.near)["udp4_datagrams_sent"]
    return pair.pings("-c", "5", "-i", "0.1", "-W", "1") > 0 and pair.counters(pair.near)["udp4_datagrams_sent"] > sent


@pytest.mark.parametrize("device", ["tsd0", "eth0"])
def test_devices_go_down_and_up(pair: Pair, device: str) -> None:
    pair.lab.run(pair.far.namespace, "ip", "link", "set", device, "down")
    assert pair.pings("-c", "3", "-i", "0.2", "-W", "1") == 0
    pair.lab.run(pair.far.namespace, "ip", "link", "set", device, "up")
    if device == "eth0":  # the kernel forgot what belongs to no address of its own
        pair.lab.run(pair.far.namespace, "ip", "addr", "add", "fd99::3/64", "dev", "eth0", "nodad", check=False)
    wait_for(lambda: pair.pings("-c", "1", "-W", "1"), 40, f"an answer\n{pair.far.tail()}")
    if device == "tsd0":
        assert pair.counters(pair.far)["tun_write_errors"] > 0
    wait_for(lambda: pair.pings("-c", "10", "-i", "0.1", "-W", "2") == 10, 60, f"all answers\n{pair.far.tail()}")


def test_shields_stop_new_flows_and_keep_running_ones(pair: Pair) -> None:
    words = ["iperf3", "-J", "-t", "6", "-c", pair.far.ip4]
    stream = pair.lab.start(pair.near.namespace, words, pair.folder / "shielded.log")
    wait_for(lambda: _has_stream(pair), 10, "the stream")
    pair.far.call("set", "--shields-up")
    wait_for(lambda: not pair.pings("-c", "1", "-W", "1"), 20, "shields")
    said = pair.near.curl(f"http://{pair.far.ip4}:5201/", timeout_s=3)
    assert said.returncode in (7, 28), said
    wait_for(lambda: not stream.is_running, 30, "the end of the stream")
    report = json.loads((pair.folder / "shielded.log").read_text())
    assert report["end"]["streams"][0]["receiver"]["bytes"] > 1 << 20, report["end"]
    pair.far.call("set", "--shields-up=false")
    wait_for(lambda: pair.pings("-c", "1", "-W", "1"), 20, "an answer")


def _has_stream(pair: Pair) -> bool:
    return pair.near.ip4 in pair.lab.run(pair.far.namespace, "ss", "-tn")


def test_logout_and_login_again(pair: Pair) -> None:
    pair.near.call("logout")
    wait_for(lambda: not pair.pings("-c", "1", "-W", "1"), 10, "silence")
    pair.up(pair.near)
    pair.near.wait_for_peer(pair.far.name)
    pair.wait_for_path("via 10.")
    assert pair.near.status()["Pump"].endswith("own threads")
    wait_for(lambda: _sends_directly(pair), 40, f"direct sends\n{pair.near.tail()}")


@contextlib.contextmanager
def _narrow(pair: Pair, most_bytes: int) -> Iterator[None]:
    """Every larger datagram vanishes without a word, both ways."""
    for node in (pair.near, pair.far):
        for line in (
            "add table ip narrow",
            "add chain ip narrow in { type filter hook input priority 0; }",
            f"add rule ip narrow in udp dport 41641 meta length > {most_bytes} drop",
        ):
            pair.lab.run(node.namespace, "nft", line)
    try:
        yield
    finally:
        for node in (pair.near, pair.far):
            pair.lab.run(node.namespace, "nft", "delete table ip narrow")


def test_f12_a_narrow_path_is_noticed_measured_and_left_for_the_relay(pair: Pair) -> None:
    """No flag says so: padded pings find out, bulk data goes on, and the flag that would help is named."""
    near, far = pair.near, pair.far
    with _narrow(pair, 1200):
        for node in (far, near):
            node.stop()
            node.start()
        wait_for(
            lambda: pair.pings("-c", "1", "-W", "1") and "--mtu=1136" in str(near.status()["Health"]),
            60,
            f"the warning\n{near.tail()}",
        )
        wait_for(lambda: "--mtu=1136" in str(far.status()["Health"]), 60, f"the other's warning\n{far.tail()}")
        for flags in ((), ("-R",)):
            moved = pair.iperf("-n", "4M", *flags)["end"]["sum_received"]["bytes"]
            assert moved > 1 << 20, (flags, moved)
        found = near.call("doctor", check=False).stdout
        assert "an MTU black hole. Fix: let ICMP" in found and "--mtu=1136" in found, found


def test_f12_a_narrow_path_carries_bulk_data_when_one_side_says_so(pair: Pair) -> None:
    """Every datagram above 1200 bytes vanishes without a word; `--mtu` of one side makes both send less."""
    near = pair.near
    assert isinstance(near, StallingNode)
    near.stop()
    near.mtu_bytes = 1100
    near.start()
    with _narrow(pair, 1200):
        pair.wait_for_path("via 10.")
        for flags in ((), ("-R",)):
            moved = pair.iperf("-n", "4M", *flags)["end"]["sum_received"]["bytes"]
            assert moved > 1 << 18, (flags, moved)  # the end of the stream is still in the sender's buffer
        assert "mtu 1100" in pair.lab.run(near.namespace, "ip", "link", "show", "tsd0")
