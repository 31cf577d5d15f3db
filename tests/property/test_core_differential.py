"""The native core against the Python one: identical bytes, verdicts, drops and timers for random streams of operations.

Each step goes to both cores of both ends; what one end seals (also damaged, replayed, mixed with foreign datagrams)
is opened by the other. `TSD_DIFF_STREAMS` sets how many streams are run.
"""

from __future__ import annotations

import os
import random
from ipaddress import ip_network
from typing import Any

import pytest

import tsnative
from tsd.dataplane.pump import Core, OpenResult, Sealed, SealResult
from tsd.dataplane.reference import ReferenceCore
from tsd.hull import Frame
from tsd.packet.build import icmp_echo_request, tcp_packet, udp_packet

pytestmark = pytest.mark.skipif(tsnative.native is None, reason="the native core is not built")

STREAMS = int(os.environ.get("TSD_DIFF_STREAMS", "60"))
PEERS = (1, 2, 3, 70_000_000_000)


def make_cores(kernel: str, mtu_bytes: int) -> tuple[Core, Core]:
    assert tsnative.native is not None
    return ReferenceCore(mtu_bytes), tsnative.native.NativeCore(mtu_bytes, kernel)


def plain(result: Any) -> Any:
    """Results as comparable values."""
    if isinstance(result, SealResult):
        refused = [(peer, bytes(frame[0]), frame[1]) for peer, frame in result.no_session]
        return [tuple(s) for s in result.sealed], refused, result.attention
    if isinstance(result, OpenResult):
        opened = [(peer, bytes(frame[0]), frame[1]) for peer, frame in result.opened]
        return opened, list(result.others), result.authenticated, result.confirmed, result.attention
    return result


class Pair:
    """One end, twice."""

    def __init__(self, kernel: str, mtu_bytes: int) -> None:
        self.cores = make_cores(kernel, mtu_bytes)

    def __getattr__(self, verb: str) -> Any:
        def both(*arguments: Any) -> Any:
            expected, actual = (getattr(core, verb)(*arguments) for core in self.cores)
            assert plain(actual) == plain(expected), verb
            return expected

        return both

    def check(self) -> None:
        expected, actual = self.cores
        assert {k: v for k, v in actual.drops.items() if v} == {k: v for k, v in expected.drops.items() if v}
        for peer in (*PEERS, 99):
            assert actual.activity(peer) == expected.activity(peer)


class Stream:
    """A random history of two ends."""

    def __init__(self, seed: int, kernel: str) -> None:
        self.rng = random.Random(seed)
        self.mtu_bytes = self.rng.choice([1280, 1280, 1500, 1281, 576])
        self.ends = Pair(kernel, self.mtu_bytes), Pair(kernel, self.mtu_bytes)
        self.now = self.rng.choice([0.0, 1000.0])
        self.index = 0
        self.wire: list[tuple[int, bytes, int]] = []
        """(end that sealed, datagrams, size of one)"""
        self.flows: dict[Any, int] = {}
        for end in self.ends:
            for peer in PEERS:
                end.add_peer(peer)
        self.allowed()
        for peer in PEERS[:3]:
            self.session(peer)

    def step(self) -> None:
        weights = {self.session: 4, self.seal: 12, self.seal_to: 2, self.open: 12, self.hostile: 3, self.rare: 1}
        self.rng.choices(list(weights), list(weights.values()))[0]()
        self.now += self.rng.choice([0.0, 0.0, 0.001, 0.001, 0.5, self.rng.choice([1.0, 10.0, 100.0])])
        for end in self.ends:
            end.check()

    def addresses(self, peer: int) -> tuple[bytes, bytes]:
        number = PEERS.index(peer) + 1
        return bytes([100, 64, 0, number]), bytes.fromhex("fd7a115ca1e0") + bytes(9) + bytes([number])

    def allowed(self) -> None:
        for end in self.ends:
            for peer in PEERS:
                v4, v6 = self.addresses(peer)
                singles = self.rng.random() < 0.5
                prefixes: list[Any] = [v4, v6] if singles else [ip_network(v4), ip_network((v6, 128))]
                for _ in range(self.rng.randrange(4)):
                    length = self.rng.choice([0, 1, 7, 8, 9, 16, 24, 31, 32])
                    prefixes.append(ip_network((self.rng.randbytes(4), length), strict=False))
                    prefixes.append(ip_network((b"\xfd\x7a" + self.rng.randbytes(14), length * 4), strict=False))
                self.rng.shuffle(prefixes)
                end.set_allowed_ips(peer, prefixes)
        for _ in range(20):
            address = self.rng.choice([self.rng.randbytes(4), b"\xfd\x7a" + self.rng.randbytes(14), b"abc"])
            self.ends[0].route(address)

    def session(self, peer: int = 0) -> None:
        peer = peer or self.rng.choice(PEERS)
        keys = self.rng.randbytes(32), self.rng.randbytes(32)
        local, remote = self.rng.sample(range(1, 0xFFFFFFFF), 2)
        first, second = self.rng.sample(self.ends, 2)
        if self.rng.random() < 0.95:
            first.install_session(peer, local, remote, keys[0], keys[1], True, self.now)
        if self.rng.random() < 0.95:
            second.install_session(peer, remote, local, keys[1], keys[0], False, self.now)

    def frame(self) -> Frame:
        family = self.rng.randrange(2)
        src = self.addresses(self.rng.choice(PEERS))[family]
        dst = self.addresses(self.rng.choice(PEERS))[family]
        if self.rng.random() < 0.8:
            src = dst
        if self.rng.random() < 0.05:
            dst = self.rng.randbytes(len(dst))
        kind = self.rng.choice(["tcp", "tcp", "tcp", "super", "super", "udp", "icmp", "odd"])
        if kind in ("tcp", "super"):
            return self.tcp(src, dst, kind == "super")
        body = self.rng.randbytes(self.rng.choice([0, 1, 15, 16, 100, 1200, 1232, 1252]))
        packet = udp_packet(src, 1, dst, 2, body) if kind == "udp" else icmp_echo_request(src, dst, 1, 2, body)
        return Frame(damage(self.rng, packet) if kind == "odd" else packet, self.rng.choice([0] * 9 + [500]))

    def tcp(self, src: bytes, dst: bytes, is_super: bool) -> Frame:
        port = self.rng.randrange(2)
        key = (src, dst, port)
        sequence = self.flows.setdefault(key, self.rng.choice([0, 0xFFFFFF00, 12345]))
        size = self.rng.choice([1, 2, 700, 1000, 1000, 1000, 1240])
        if is_super:
            size = self.rng.choice([0, 1, 999, 1000, 1001, 4000, 30000, 60000, 65435])
        options = bytes.fromhex("0101080a0000000100000002") if port else b""
        if self.rng.random() < 0.05:
            options = self.rng.randbytes(8)
        flags = self.rng.choice([0x10] * 40 + [0x18, 0x18, 0x11, 0x02, 0x90, 0x99, 0x14])
        packet = tcp_packet(
            src,
            port,
            dst,
            80,
            sequence=sequence,
            acknowledgement=7 + (self.rng.random() < 0.03),
            flags=flags,
            window=9 + (self.rng.random() < 0.03),
            options=options,
            payload=self.rng.randbytes(size),
        )
        if self.rng.random() < 0.95:
            self.flows[key] = sequence + size & 0xFFFFFFFF
        if self.rng.random() < 0.03:
            packet = damage(self.rng, packet)
        return Frame(packet, self.rng.choice([1000, 1000, 1228, 999, 300, 30001, 64841]) if is_super else 0)

    def burst(self) -> list[Frame]:
        if self.rng.random() < 0.5:
            return [self.frame() for _ in range(self.rng.randrange(12))]
        peer, family = self.rng.choice(PEERS), self.rng.randrange(2)
        address = self.addresses(peer)[family]
        return [self.tcp(address, address, False) for _ in range(self.rng.randrange(40))]

    def seal(self) -> None:
        frames = [Frame(self.rng.choice([bytes, bytearray, memoryview])(p), s) for p, s in self.burst()]
        at = self.rng.randrange(2)
        self.keep(at, self.ends[at].seal(frames, self.now).sealed)

    def seal_to(self) -> None:
        packets = [self.rng.choice([b"", bytes(self.frame().packet), b"x"]) for _ in range(self.rng.randrange(4))]
        at = self.rng.randrange(2)
        self.keep(at, self.ends[at].seal_to(self.rng.choice(PEERS), packets, self.now))

    def keep(self, end: int, sealed: list[Sealed]) -> None:
        self.wire += [(end, s.datagrams, s.datagram_bytes) for s in sealed]

    def open(self) -> None:
        for _ in range(self.rng.randrange(8)):
            if not self.wire:
                return
            at = self.rng.randrange(min(3, len(self.wire))) if self.rng.random() < 0.3 else 0
            end, datagrams, unit = self.wire[at] if self.rng.random() < 0.1 else self.wire.pop(at)
            if self.rng.random() < 0.1:
                datagrams = damage(self.rng, datagrams)
            if self.rng.random() < 0.05:
                unit = self.rng.choice([0, 1, 31, 32, 33, 100, 70000])
            if self.wire and unit and len(datagrams) % unit == 0 and self.rng.random() < 0.5:
                datagrams += self.wire.pop(0)[1]
            if self.rng.random() < 0.05:
                end = 1 - end
            if len(datagrams) // (unit or 1) < 5000:
                self.ends[1 - end].open(datagrams, unit, self.now)
        del self.wire[:-30]

    def hostile(self) -> None:
        """Datagrams that are no transport data, or lie about it; and authentic ones with a broken inside."""
        magic = bytes.fromhex(self.rng.choice(["5453f09f92ac", "04000000", "01000000", "000101002112a442", "0080"]))
        body = magic + self.rng.randbytes(self.rng.choice([0, 2, 26, 28, 58, 86, 142, 144, 300]))
        if self.rng.random() < 0.3:
            inner = self.rng.choice([b"\x7a\x11", b"\x7a\x12"])
            body = b"\0\x80" + inner + self.rng.choice([b"\0\0\7\0", b"\0\0\0\1"]) + body[: self.rng.randrange(20)]
        self.rng.choice(self.ends).open(body, self.rng.choice([0, 0, 20, 40]), self.now)
        packets = [damage(self.rng, bytes(self.frame().packet)) for _ in range(4)]
        at = self.rng.randrange(2)
        self.keep(at, self.ends[at].seal_to(self.rng.choice(PEERS), packets, self.now))

    def rare(self) -> None:
        choice = self.rng.randrange(4)
        peer, end = self.rng.choice(PEERS), self.rng.choice(self.ends)
        if choice == 0:
            end.drop_sessions(peer)
        elif choice == 1:
            end.remove_peer(peer)
            end.add_peer(peer)
        elif choice == 2:
            self.now += 200.0
        self.allowed()


def damage(rng: random.Random, raw: bytes) -> bytes:
    """Flipped bits, a cut, lying lengths, extension headers, fragments, options."""
    out = bytearray(raw)
    for _ in range(rng.randrange(1, 3)):
        if not out:
            break
        choice = rng.randrange(8)
        if choice == 0:
            del out[rng.randrange(len(out)) :]
        elif choice == 1:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        elif choice == 2:
            out[rng.randrange(min(len(out), 60))] = rng.choice([0, 1, 6, 0x45, 0x60, 0xFF])
        elif choice == 3 and len(out) > 10:
            at = 2 if out[0] >> 4 == 4 else 4
            out[at : at + 2] = rng.choice(
                [b"\0\0", b"\xff\xff", b"\0\x14", (len(out) + rng.randrange(-3, 3)).to_bytes(2, "big")]
            )
        elif choice == 4 and len(out) > 10 and out[0] >> 4 == 4:
            out[6:8] = rng.choice([b"\x20\0", b"\0\1", b"\x40\0", b"\x80\0"])
        elif choice == 5 and out[0] >> 4 == 6 and len(out) > 40:
            out[40:40] = bytes([out[6], 0, 0, 0, 0, 0, 0, 1])
            out[6] = rng.choice([44, 0, 60])
        elif choice == 6 and out[0] >> 4 == 4:
            out[0] = 0x40 | rng.randrange(16)
        else:
            out += rng.randbytes(rng.randrange(20))
    return bytes(out)


@pytest.mark.parametrize("seed", range(STREAMS))
def test_same_bytes_and_verdicts(seed: int) -> None:
    assert tsnative.native is not None
    kernels = tsnative.native.kernels()
    stream = Stream(seed, kernels[seed % len(kernels)])
    for _ in range(80):
        stream.step()
