"""Our WireGuard against wireguard-go in two network namespaces, and what tshark makes of a capture.

Names start with tsdA. Nothing leaves the machine: the namespaces have one veth pair and no route out.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.wgnode import WgNode
from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import NodePrivate
from tsd.packet.build import icmp_echo_reply_to, icmp_echo_request, udp_packet
from tsd.packet.parse import parse
from tsd.wireguard.cookie import MacStamp

pytestmark = [pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(120)]

NS_OURS, NS_THEIRS = f"tsdA{os.getpid()}-ours", f"tsdA{os.getpid()}-wg"
INTERFACE = "tsdAwg0"
OUR_UNDERLAY, THEIR_UNDERLAY = "10.99.71.1", "10.99.71.2"
OUR_PORT, THEIR_PORT = 51871, 51872
OUR_IP, THEIR_IP = "100.64.0.1", "100.64.0.2"
CLONE_NEWNET = 0x40000000


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root")


def sh(*words: str, check: bool = True, text: str | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, input=text, timeout=30, check=False)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def open_in_namespace(name: str) -> socket.socket:
    """A UDP socket that lives in a namespace; the calling thread comes back to its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{name}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        finally:
            libc.setns(home.fileno(), CLONE_NEWNET)


class WireGuardGo:
    """wireguard-go with one peer, and our node behind a real socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.private = NodePrivate.generate(SeededEntropy("wireguard-go"))
        self.clock = ManualClock(time.monotonic(), time.time_ns())
        self.node = WgNode("ours", OUR_IP, self.clock)
        self.sock = open_in_namespace(NS_OURS)
        self.sock.bind((OUR_UNDERLAY, OUR_PORT))
        self.sock.setblocking(False)
        self.seen: list[tuple[bool, bytes]] = []
        """(came in, datagram)"""
        self._started = time.monotonic()
        self._jumped_s = 0.0
        self._elapsed = 0.0

    def configure(self) -> None:
        """Also makes wireguard-go forget any session."""
        public = base64.b64encode(self.node.private.public().raw).decode()
        key = self.folder / "key"
        key.write_text(base64.b64encode(self.private.raw).decode())
        self.wg("set", INTERFACE, "peer", public, "remove")
        self.wg("set", INTERFACE, "private-key", str(key), "listen-port", str(THEIR_PORT), "peer", public,
                "allowed-ips", f"{OUR_IP}/32", "endpoint", f"{OUR_UNDERLAY}:{OUR_PORT}")  # fmt: skip

    def wg(self, *words: str) -> str:
        return sh("ip", "netns", "exec", NS_THEIRS, "wg", *words)

    def add_to_node(self) -> None:
        theirs = WgNode("theirs", THEIR_IP, self.clock)
        theirs.private = self.private
        self.node.add_peer(1, theirs)

    def jump(self, seconds: float) -> None:
        """Only our side grows older; not within 20 ms of a handshake, which would look like a flood to them."""
        time.sleep(0.03)
        self._jumped_s += seconds
        self._turn()

    def pump(self, until: Callable[[], bool], seconds: float = 10.0) -> None:
        """Move datagrams and run our timers until something is true."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, f"timed out; drops {self.node.wg.drops} {self.node.core.drops}"
            self._turn()

    def _turn(self) -> None:
        elapsed = time.monotonic() - self._started + self._jumped_s
        self.clock.advance(elapsed - self._elapsed)
        self._elapsed = elapsed
        self.node.wake(self.clock.now())
        self._send_all()
        select.select([self.sock], [], [], 0.02)
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram, source = self.sock.recvfrom(65535)
                self.seen.append((True, datagram))
                self.node.take(datagram, source)
                self._answer_pings()
                self._send_all()

    def _send_all(self) -> None:
        flights, self.node.out = self.node.out, []
        for flight in flights:
            self.seen.append((False, flight.datagram))
            self.sock.sendto(flight.datagram, (THEIR_UNDERLAY, THEIR_PORT))
        for _, reply in self.node.replies:
            self.seen.append((False, reply))
            self.sock.sendto(reply, (THEIR_UNDERLAY, THEIR_PORT))
        self.node.replies.clear()

    def _answer_pings(self) -> None:
        for _, packet in self.node.received:
            reply = icmp_echo_reply_to(parse(packet))
            if reply is not None:
                self.node.send(reply)

    def replies(self) -> int:
        return sum(1 for _, packet in self.node.received if parse(packet).is_icmp_answer)

    def ping_them(self, sequence: int, payload: bytes = b"") -> None:
        self.node.send(icmp_echo_request(self.node.address, parse_ip4(THEIR_IP), 7, sequence, payload))

    def types(self, came_in: bool) -> list[int]:
        return [datagram[0] for incoming, datagram in self.seen if incoming == came_in]


def parse_ip4(text: str) -> bytes:
    return socket.inet_aton(text)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[None]:
    need("wireguard-go", "wg", "ip", "ping")
    for name in (NS_OURS, NS_THEIRS):
        sh("ip", "netns", "del", name, check=False)
        folder = Path("/etc/netns") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "resolv.conf").write_text("")
        sh("ip", "netns", "add", name)
    sh("ip", "-n", NS_OURS, "link", "add", "tsdAv0", "type", "veth", "peer", "name", "tsdAv1", "netns", NS_THEIRS)
    for name, link, address in ((NS_OURS, "tsdAv0", OUR_UNDERLAY), (NS_THEIRS, "tsdAv1", THEIR_UNDERLAY)):
        sh("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
        sh("ip", "-n", name, "link", "set", link, "up")
        sh("ip", "-n", name, "link", "set", "lo", "up")
    daemon = subprocess.Popen(
        ["ip", "netns", "exec", NS_THEIRS, "wireguard-go", "-f", INTERFACE],
        env={**os.environ, "LOG_LEVEL": "error", "WG_PROCESS_FOREGROUND": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            if Path(f"/run/wireguard/{INTERFACE}.sock").exists():
                break
            time.sleep(0.05)
        sh("ip", "-n", NS_THEIRS, "address", "add", f"{THEIR_IP}/24", "dev", INTERFACE)
        sh("ip", "-n", NS_THEIRS, "link", "set", INTERFACE, "up")
        yield
    finally:
        daemon.terminate()
        daemon.wait(10)
        for name in (NS_OURS, NS_THEIRS):
            sh("ip", "netns", "del", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.fixture
def other(namespaces: None, tmp_path: Path) -> Iterator[WireGuardGo]:
    made = WireGuardGo(tmp_path)
    made.configure()
    made.add_to_node()
    yield made
    made.sock.close()


def test_we_initiate_and_data_flows_both_ways(other: WireGuardGo) -> None:
    other.ping_them(1)
    other.pump(lambda: other.replies() == 1)
    assert other.types(came_in=False)[:2] == [1, 4] and other.types(came_in=True)[:2] == [2, 4]
    for sequence in range(2, 60):
        other.ping_them(sequence, bytes(sequence * 20))
    other.pump(lambda: other.replies() == 59)
    assert not other.wg("show", INTERFACE, "latest-handshakes").endswith("\t0\n")
    assert not other.node.core.drops


def test_they_initiate(other: WireGuardGo) -> None:
    done: list[int] = []
    command = ["ip", "netns", "exec", NS_THEIRS, "ping", "-c", "3", "-i", "0.2", "-W", "3", OUR_IP]
    thread = threading.Thread(target=lambda: done.append(subprocess.run(command, stdout=subprocess.DEVNULL).returncode))
    thread.start()
    other.pump(lambda: bool(done))
    thread.join()
    assert done == [0]
    assert other.types(came_in=True)[0] == 1 and other.types(came_in=False)[0] == 2
    assert not other.node.core.activity(1).is_initiator


def test_rekey_by_us(other: WireGuardGo) -> None:
    other.ping_them(1)
    other.pump(lambda: other.replies() == 1)
    for round_number in range(3):
        other.jump(121)
        other.ping_them(10 * round_number)
        other.pump(lambda wanted=2 + 2 * round_number: other.replies() >= wanted)
        other.pump(lambda wanted=2 + round_number: other.types(came_in=True).count(2) == wanted)
        other.ping_them(10 * round_number + 1)
        other.pump(lambda wanted=3 + 2 * round_number: other.replies() == wanted)
    assert other.types(came_in=False).count(1) == 4


def test_session_too_old_for_us(other: WireGuardGo) -> None:
    other.ping_them(1)
    other.pump(lambda: other.replies() == 1)
    other.jump(181)
    other.ping_them(2)
    other.pump(lambda: other.replies() == 2)
    assert other.types(came_in=False).count(1) == 2


def test_their_cookie_under_load(other: WireGuardGo) -> None:
    macs = MacStamp(other.private.public().raw)
    entropy = SeededEntropy("flood")
    # Real handshakes of strangers up to the static key, so that each costs them a Diffie-Hellman.
    flood = [macs.stamp(b"\1\0\0\0" + entropy(112), 0.0) for _ in range(3000)]
    stop = threading.Event()
    flooder = open_in_namespace(NS_OURS)

    def run() -> None:
        while not stop.is_set():
            for datagram in flood:
                flooder.sendto(datagram, (THEIR_UNDERLAY, THEIR_PORT))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        time.sleep(0.3)
        other.ping_them(1)
        other.pump(lambda: 3 in other.types(came_in=True), 20)
        cookies = [datagram for came_in, datagram in other.seen if came_in and datagram[0] == 3]
        assert cookies and other.node.wg.drops["cookie"] == 0
        other.pump(lambda: other.replies() >= 1, 90)
    finally:
        stop.set()
        thread.join()
        flooder.close()
    initiations = [datagram for came_in, datagram in other.seen if not came_in and datagram[0] == 1]
    assert initiations[0][-16:] == bytes(16) and initiations[-1][-16:] != bytes(16)


def test_our_cookie_under_load(other: WireGuardGo) -> None:
    macs = MacStamp(other.node.private.public().raw)
    entropy = SeededEntropy("flood")
    loaded = [True]

    def keep_loaded() -> None:
        for _ in range(200):
            other.node.take(macs.stamp(b"\1\0\0\0" + entropy(112), 0.0), "elsewhere")
        other.node.replies.clear()

    command = ["ip", "netns", "exec", NS_THEIRS, "ping", "-c", "8", "-i", "1", "-W", "1", OUR_IP]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as ping:

        def is_done() -> bool:
            if loaded[0]:
                keep_loaded()
            return ping.poll() is not None

        other.pump(is_done, 20)
    assert 3 in other.types(came_in=False), "we demanded a cookie"
    initiations = [datagram for came_in, datagram in other.seen if came_in and datagram[0] == 1]
    assert initiations[0][-16:] == bytes(16) and initiations[-1][-16:] != bytes(16)
    assert 2 in other.types(came_in=False) and ping.returncode == 0


def write_pcap(path: Path, datagrams: list[tuple[bool, bytes]]) -> None:
    """Raw-IP capture (LINKTYPE_RAW)."""
    ours, theirs = parse_ip4(OUR_UNDERLAY), parse_ip4(THEIR_UNDERLAY)
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 101))
        for index, (came_in, datagram) in enumerate(datagrams):
            ends = (theirs, THEIR_PORT, ours, OUR_PORT) if came_in else (ours, OUR_PORT, theirs, THEIR_PORT)
            packet = udp_packet(*ends, datagram)
            file.write(struct.pack("<IIII", 1_700_000_000 + index, 0, len(packet), len(packet)) + packet)


def test_tshark_decrypts_with_our_key_log(other: WireGuardGo, tmp_path: Path) -> None:
    need("tshark")
    keylog = tmp_path / "keys"
    with keylog.open("w") as file:
        other.node.wg._write_keylog = file.write  # type: ignore[assignment]
        other.ping_them(1, b"find me")
        other.pump(lambda: other.replies() == 1)
    capture = tmp_path / "capture.pcap"
    write_pcap(capture, other.seen)
    fields = ["wg.type", "icmp.type", "_ws.malformed"]
    out = sh("tshark", "-r", str(capture), "-o", f"wg.keylog_file:{keylog}", "-d", f"udp.port=={THEIR_PORT},wg",
             "-T", "fields", "-E", "separator=|",
             *[word for field in fields for word in ("-e", field)])  # fmt: skip
    rows = [line.split("|") for line in out.splitlines()]
    assert [row[0] for row in rows[:2]] == ["1", "2"]
    assert [row[1] for row in rows if row[0] == "4" and row[1]] == ["8", "0"]
    assert all(not row[2] for row in rows)
    verbose = sh(
        "tshark", "-r", str(capture), "-o", f"wg.keylog_file:{keylog}", "-d", f"udp.port=={THEIR_PORT},wg", "-V"
    )
    assert "Handshake decryption successful: True" in verbose or "decryption successful" in verbose.lower()
