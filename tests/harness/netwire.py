"""Two userspace stacks joined by an impaired wire in virtual time: loss, duplication, reordering, corruption, delay."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from ipaddress import ip_address
from random import Random
from struct import pack_into

from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.hull import Frame
from tsd.netstack.events import Event, Listener, StreamAccepted, SynReceived
from tsd.netstack.stack import Stack
from tsd.netstack.tcp.connection import Connection
from tsd.packet.checksum import transport_checksum

A4, B4 = "100.64.0.1", "100.64.0.2"
A6, B6 = "fd7a:115c:a1e0::1", "fd7a:115c:a1e0::2"


def split(frame: Frame) -> list[bytes]:
    """The packets that a super-segment stands for, with checksums."""
    packet = bytes(frame.packet)
    if not frame.segment_bytes:
        return [packet]
    is_v4 = packet[0] >> 4 == 4
    ip_bytes = 20 if is_v4 else 40
    tcp_bytes = (packet[ip_bytes + 12] >> 4) * 4
    head = ip_bytes + tcp_bytes
    payload = packet[head:]
    seq = int.from_bytes(packet[ip_bytes + 4 : ip_bytes + 8], "big")
    flags = packet[ip_bytes + 13]
    pieces = []
    for at in range(0, len(payload), frame.segment_bytes):
        piece = bytearray(packet[:head] + payload[at : at + frame.segment_bytes])
        if is_v4:
            pack_into("!H", piece, 2, len(piece))
            pack_into("!H", piece, 10, 0)
            total = int.from_bytes(piece[:20], "big") % 65535
            pack_into("!H", piece, 10, -total % 65535)
        else:
            pack_into("!H", piece, 4, len(piece) - 40)
        pack_into("!I", piece, ip_bytes + 4, (seq + at) & 0xFFFFFFFF)
        if at + frame.segment_bytes < len(payload):
            piece[ip_bytes + 13] = flags & ~0x09
        pack_into("!H", piece, ip_bytes + 16, 0)
        src, dst = (piece[12:16], piece[16:20]) if is_v4 else (piece[8:24], piece[24:40])
        pack_into("!H", piece, ip_bytes + 16, transport_checksum(src, dst, 6, bytes(piece[ip_bytes:])))
        pieces.append(bytes(piece))
    return pieces


class Wire:
    """One direction. Probabilities are per packet; `is_whole` carries super-segments unsplit (a perfect pump)."""

    def __init__(
        self,
        seed: int,
        *,
        delay_s: float = 0.01,
        loss: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        corrupt: float = 0.0,
        rate_bytes_s: float = 0.0,
        is_whole: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.delay_s = delay_s
        self.loss = loss
        self.duplicate = duplicate
        self.reorder = reorder
        self.corrupt = corrupt
        self.rate_bytes_s = rate_bytes_s
        self.is_whole = is_whole
        self.is_cut = False
        self.largest_bytes = 0
        self.carried = 0
        self.filter: Callable[[bytes], bytes | None] | None = None
        self._busy_until = 0.0

    def carry(self, frame: Frame, now: float) -> list[tuple[float, Frame]]:
        if self.is_whole:
            return [(now + self.delay_s, frame)]
        arrivals: list[tuple[float, Frame]] = []
        for packet in split(frame):
            self.carried += 1
            self.largest_bytes = max(self.largest_bytes, len(packet))
            arrivals += self._carry_packet(packet, now)
        return arrivals

    def _carry_packet(self, packet: bytes, now: float) -> list[tuple[float, Frame]]:
        rng = self.random
        if self.is_cut or rng.random() < self.loss:
            return []
        kept = self.filter(packet) if self.filter is not None else packet
        if kept is None:
            return []
        if rng.random() < self.corrupt:
            spoiled = bytearray(kept)
            spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
            kept = bytes(spoiled)
        at = now
        if self.rate_bytes_s:
            at = self._busy_until = max(now, self._busy_until) + len(kept) / self.rate_bytes_s
        at += self.delay_s
        if rng.random() < self.reorder:
            at += rng.random() * self.delay_s
        copies = 2 if rng.random() < self.duplicate else 1
        return [(at + i * 1e-6, Frame(kept)) for i in range(copies)]


class Pair:
    """Stacks A and B, their wires, a clock that jumps to the next thing that happens."""

    def __init__(
        self, there: Wire | None = None, back: Wire | None = None, *, mtu_bytes: int = 1280, seed: int = 1
    ) -> None:
        self.now = 1000.0
        self.a = Stack([ip_address(A4), ip_address(A6)], mtu_bytes, SeededEntropy(f"a{seed}"))
        self.b = Stack([ip_address(B4), ip_address(B6)], mtu_bytes, SeededEntropy(f"b{seed}"))
        self.there = there or Wire(1)
        self.back = back or Wire(2)
        self.accepted: list[Connection] = []
        self.attempts: list[SynReceived] = []
        self.events: list[tuple[str, Event]] = []
        self.on_step: Callable[[], None] | None = None
        self._queue: list[tuple[float, int, int, Frame]] = []
        self._count = 0

    def connect(self, port: int = 80, is_v6: bool = False) -> Connection:
        connection = self.a.connect(AddrPort(ip_address(B6 if is_v6 else B4), port), self.now)
        self.flush()
        return connection

    def listen(self, port: int = 80) -> Listener:
        return self.b.listen(None, port, None)

    def establish(self, is_v6: bool = False) -> tuple[Connection, Connection]:
        """A connected pair: (A's end, B's end)."""
        if not self.b._listeners:
            self.listen()
        client = self.connect(is_v6=is_v6)
        count = len(self.accepted)
        assert self.run(until=lambda: len(self.accepted) > count)
        return client, self.accepted[-1]

    def flush(self) -> None:
        for stack, wire, to in ((self.a, self.there, 1), (self.b, self.back, 0)):
            stack.flush(self.now)
            for frame in stack.take_frames():
                for at, carried in wire.carry(frame, self.now):
                    self._count += 1
                    heapq.heappush(self._queue, (at, self._count, to, carried))
        for name, stack in (("a", self.a), ("b", self.b)):
            for event in stack.take_events():
                self.events.append((name, event))
                if isinstance(event, StreamAccepted):
                    self.accepted.append(event.connection)
                elif isinstance(event, SynReceived):
                    self.attempts.append(event)

    def step(self, limit: float) -> bool:
        """Go to the next arrival or deadline, at most to `limit`. False: nothing left before it."""
        times = [d.at for d in (self.a.next_deadline(), self.b.next_deadline()) if d is not None]
        if self._queue:
            times.append(self._queue[0][0])
        if not times or min(times) > limit:
            self.now = limit
            return False
        self.now = max(self.now, min(times))
        batches: list[list[Frame]] = [[], []]
        while self._queue and self._queue[0][0] <= self.now:
            _, _, to, frame = heapq.heappop(self._queue)
            batches[to].append(frame)
        for stack, batch in ((self.a, batches[0]), (self.b, batches[1])):
            if batch:
                stack.receive(batch, self.now)
            stack.on_deadline(self.now)
        self.flush()
        if self.on_step is not None:
            self.on_step()
            self.flush()
        return True

    def run(self, seconds: float = 600.0, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; True when `until` became true."""
        limit = self.now + seconds
        while until is None or not until():
            if not self.step(limit):
                return until is not None and until()
        return True
