"""A lossy LAN for tests: hosts on TAP devices of one userspace switch that drops, reorders and duplicates UDP frames.

TAPs without offloads give whole frames with finished checksums, which a veth read by AF_PACKET would not. Only UDP is
impaired (WireGuard, disco, STUN); the coordination server and the relay, on TCP, are not. The fate of the frames comes
from a seed. `ImpairedLab` is a `NetLab` whose hosts hang on the switch, a process: `python -m harness.impair SEED NS…`.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.netlab import NetLab, inside, sh

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 2048
_FRAMES_PER_WAKE = 64
_UDP = 17
_NOTHING = {"loss": 0.0, "reorder": 0.0, "duplicate": 0.0, "delay_s": 0.0}
_REORDER_S = (0.002, 0.03)


class Switch:
    """Ports are TAPs; learns addresses. `knobs` are probabilities per UDP frame, and a delay for all of them."""

    def __init__(self, seed: int, namespaces: list[str]) -> None:
        self.knobs: dict[str, float] = dict(_NOTHING)
        self.counts = {"frames": 0, "lost": 0, "reordered": 0, "duplicated": 0}
        self._random = random.Random(seed)
        self._ports = [open_tap(name) for name in namespaces]
        self._learned: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._serial = 0

    def serve(self) -> None:
        """Until standard input ends; a line there is new knobs in JSON, answered with the counts so far."""
        selector = selectors.DefaultSelector()
        for port in self._ports:
            selector.register(port, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in selector.select(wait_s):
                if key.fileobj is not sys.stdin:
                    self._drain(key.fd)
                elif not self._command(sys.stdin.readline()):
                    return
            self._release()

    def _command(self, line: str) -> bool:
        if not line:
            return False
        self.knobs = _NOTHING | json.loads(line)
        print(json.dumps(self.counts), flush=True)
        return True

    def _drain(self, port: int) -> None:
        for _ in range(_FRAMES_PER_WAKE):
            try:
                frame = os.read(port, _FRAME_BYTES)
            except BlockingIOError:
                return
            self._learned[frame[6:12]] = port
            if is_udp(frame):
                self._impair(port, frame)
            else:
                self._forward(port, frame)

    def _impair(self, port: int, frame: bytes) -> None:
        knobs, counts, chance = self.knobs, self.counts, self._random.random
        counts["frames"] += 1
        if chance() < knobs["loss"]:
            counts["lost"] += 1
            return
        delay_s = knobs["delay_s"]
        if chance() < knobs["reorder"]:
            counts["reordered"] += 1
            delay_s += self._random.uniform(*_REORDER_S)
        if chance() < knobs["duplicate"]:
            counts["duplicated"] += 1
            self._later(delay_s + self._random.uniform(0, _REORDER_S[1]), port, frame)
        if delay_s:
            self._later(delay_s, port, frame)
        else:
            self._forward(port, frame)

    def _later(self, delay_s: float, port: int, frame: bytes) -> None:
        self._serial += 1
        heapq.heappush(self._late, (time.monotonic() + delay_s, self._serial, port, frame))

    def _release(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, port, frame = heapq.heappop(self._late)
            self._forward(port, frame)

    def _forward(self, port: int, frame: bytes) -> None:
        target = self._learned.get(frame[:6])
        for out in self._ports if target is None else (target,):
            if out != port:
                try:
                    os.write(out, frame)
                except OSError:  # the device is down, or full
                    pass


def is_udp(frame: bytes) -> bool:
    if frame[12:14] == b"\x08\x00":
        return frame[23] == _UDP
    return frame[12:14] == b"\x86\xdd" and frame[20] == _UDP


def open_tap(namespace: str) -> int:
    """A TAP named eth0 in the namespace; it lives as long as the descriptor."""
    with inside(namespace):
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return port


class ImpairedLab(NetLab):
    """`add_host` all hosts, then `plug_in`; `impair(loss=0.05, reorder=0.05, duplicate=0.05)` from then on."""

    def __init__(self, prefix: str, network: str, seed: int) -> None:
        super().__init__(prefix, network)
        self._seed = seed
        self._switch: subprocess.Popen[str] | None = None

    def add_host(self, short: str) -> str:
        name = f"{self.prefix}-{short}"
        self._make(name)
        self._hosts[name] = len(self._hosts) + 1
        return name

    def plug_in(self) -> None:
        words = [sys.executable, "-m", "harness.impair", str(self._seed), *self._hosts]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        pipe = subprocess.PIPE
        self._switch = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environ)
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == "ready\n"
        for name, number in self._hosts.items():
            sh("ip", "-n", name, "link", "set", "eth0", "txqueuelen", "5000", "mtu", "1500", "up")
            sh("ip", "-n", name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            sh("ip", "-n", name, "addr", "add", f"fd99::{number}/64", "dev", "eth0", "nodad")

    def impair(self, **knobs: float) -> dict[str, Any]:
        """The counts until now."""
        assert self._switch is not None and self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(knobs) + "\n")
        self._switch.stdin.flush()
        counts: dict[str, Any] = json.loads(self._switch.stdout.readline())
        return counts

    def close(self) -> None:
        super().close()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()


if __name__ == "__main__":
    Switch(int(sys.argv[1]), sys.argv[2:]).serve()
