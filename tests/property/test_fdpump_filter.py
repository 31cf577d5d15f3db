"""The pump's filter with its flow table, and the filter behind it, against the filter alone: the same packets get in.

Random histories of hostile packets (lengths that lie, fragments, IPv6 extension headers, every protocol) inside
authentic datagrams, of our own packets, and of rules that change. `TSD_DIFF_STREAMS` sets how many.
"""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections import Counter
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import pytest

import tsnative
from tsd.base.addr import AddrPort
from tsd.dataplane.fdpump import FdPumpOptions, UpKind
from tsd.dataplane.reference import ReferenceCore
from tsd.filter.filter import PacketFilter
from tsd.filter.rules import DEFAULT_PROTOS, Destination, Match
from tsd.hull import Frame
from tsd.packet.build import icmp_echo_request, ip_packet, tcp_packet, udp_packet
from tsd.packet.mss import clamped
from tsd.packet.parse import parse

pytestmark = pytest.mark.skipif(tsnative.native is None, reason="the native core is not built")

STREAMS = max(4, int(os.environ.get("TSD_DIFF_STREAMS", "60")) // 5)
PEER = 1
KEYS = bytes(range(32)), bytes(range(32, 64))
LOCAL = [ip_network(text) for text in ("100.64.0.2/32", "192.0.2.0/24", "fd7a::2/128", "2001:db8::/64")]
OURS = [IPv4Address("100.64.0.2"), IPv4Address("192.0.2.9"), IPv6Address("fd7a::2"), IPv6Address("2001:db8::7")]
THEIRS = [IPv4Address("100.64.0.1"), IPv4Address("100.64.0.9"), IPv6Address("fd7a::1")]
ODD = [IPv4Address(t) for t in ("224.0.0.251", "169.254.3.4", "169.254.169.254", "198.51.100.1")]
ODD6 = [IPv6Address(t) for t in ("ff02::fb", "fe80::1", "2001:db8:9::1")]
PORTS = (22, 53, 80, 1234)
MARK = b"the end of this batch"


def rules(rng: random.Random) -> list[Match]:
    found = []
    for _ in range(rng.randrange(4)):
        prefixes = tuple(
            rng.sample([ip_network(t) for t in ("100.64.0.1/32", "100.64.0.0/24", "fd7a::/16", "::/0")], 2)
        )
        first = rng.choice((0, 22, 53))
        targets = tuple(Destination(net, first, rng.choice((first, 65535))) for net in rng.sample(LOCAL, 2))
        protos = rng.choice((DEFAULT_PROTOS, frozenset({6}), frozenset({17}), frozenset({47, 132}), frozenset({1, 58})))
        found.append(Match(protos, prefixes, targets))
    return found


class History:
    def __init__(self, seed: int) -> None:
        assert tsnative.native is not None
        self.rng = random.Random(seed)
        self.number = 0
        self.host, self.tun = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.near, self.far = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        for sock in (self.host, self.tun, self.near, self.far):
            sock.setblocking(False)
        for sock in (self.near, self.far):
            sock.bind(("127.0.0.1", 0))
        self.core = tsnative.native.NativeCore()
        self.sender, self.model = tsnative.native.NativeCore(), ReferenceCore()
        everything = [ip_network("0.0.0.0/0"), ip_network("::/0")]
        for index, core in enumerate((self.sender, self.core, self.model)):
            core.add_peer(PEER)
            core.set_allowed_ips(PEER, everything)
            mine, other = (0, 1) if index == 0 else (1, 0)
            core.install_session(PEER, 10 + mine, 10 + other, KEYS[mine], KEYS[other], True, self.now())
        self.filter, self.alone = PacketFilter((), LOCAL), PacketFilter((), LOCAL)
        self.guarded: list[int] = []
        self.pump = tsnative.native.FdPump(self.core)
        options = FdPumpOptions(vnet_header=False, udp_gso=False, udp_gro=False, threads=1 + seed % 2)
        self.pump.start(self.tun.fileno(), self.far.fileno(), None, options)
        self.pump.set_path(PEER, AddrPort(IPv4Address("127.0.0.1"), self.near.getsockname()[1]))
        self.change_rules()

    @staticmethod
    def now() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def close(self) -> None:
        self.pump.stop()
        for sock in (self.host, self.tun, self.near, self.far):
            sock.close()

    # --- steps

    def change_rules(self) -> None:
        chosen, shields = rules(self.rng), self.rng.random() < 0.1
        before = self.filter.state
        self.filter = self.filter.replace(chosen, LOCAL, shields_up=shields)
        self.alone = self.alone.replace(chosen, LOCAL, shields_up=shields)
        if self.filter.state is not before:
            self.pump.forget_flows()
        self.pump.set_local(self.filter.local_prefixes)
        self.pump.set_guarded(guarded := [PEER] if self.rng.random() < 0.2 else [])
        if guarded != self.guarded:  # another filter, or other addresses: flows are not carried over
            self.guarded = guarded
            self.filter, self.alone = PacketFilter(chosen, LOCAL), PacketFilter(chosen, LOCAL)
            self.pump.forget_flows()

    def outbound(self) -> None:
        """Ours: each is sealed by the threads, or shown; the filter alone hears of all."""
        for _ in range(self.rng.randrange(1, 12)):
            packet = self.packet(self.rng.choice(OURS), self.rng.choice([*THEIRS, *ODD, *ODD6]))
            if packet:
                self.alone.outbound(parse(packet))
                self.host.send(packet)
        self.host.send(udp_packet(OURS[0].packed, 1, ODD[0].packed, 1, MARK))
        self.serve(lambda kind, data: kind is UpKind.HOST and data.endswith(MARK))

    def inbound(self) -> None:
        """Theirs: what reaches the host must be what the filter alone accepts."""
        wanted: Counter[bytes] = Counter()
        for _ in range(self.rng.randrange(1, 20)):
            packet = self.packet(self.rng.choice(THEIRS), self.rng.choice([*OURS, *OURS, *ODD, *ODD6]))
            for batch in self.sender.seal_to(PEER, [packet], self.now()):
                for opened in self.model.open(batch.datagrams, 0, self.now()).opened:
                    inner = bytes(opened.frame.packet)
                    if self.alone.inbound(parse(clamped(inner, 1280))).accept:
                        wanted[bytes(clamped(inner, 1280))] += 1
                self.near.sendto(batch.datagrams, self.far.getsockname())
        mark = udp_packet(THEIRS[0].packed, 1, ODD[0].packed, 1, MARK)
        (batch,) = self.sender.seal_to(PEER, [mark], self.now())
        self.model.open(batch.datagrams, 0, self.now())
        self.near.sendto(batch.datagrams, self.far.getsockname())
        got = self.serve(lambda kind, data: kind is UpKind.INBOUND and data.endswith(MARK))
        extra, missing = got - wanted, wanted - got
        assert not extra and not missing, ([p.hex() for p in extra], [p.hex() for p in missing])

    def serve(self, is_end: Any) -> Counter[bytes]:
        """Answers what comes up until the mark does; what the host got meanwhile."""
        got: Counter[bytes] = Counter()
        end = time.monotonic() + 20
        is_done = False
        while not is_done:
            assert time.monotonic() < end, self.pump.counters
            select.select([self.pump], [], [], 0.5)
            for up in self.pump.take():
                if is_end(up.kind, up.data):
                    is_done = True
                elif up.kind is UpKind.HOST:
                    self.filter.outbound(parse(up.data))
                elif up.kind is UpKind.INBOUND:
                    self.judge(up.data)
        while select.select([self.host], [], [], 0)[0]:
            got[self.host.recv(70000)] += 1
        return got

    def judge(self, data: bytes) -> None:
        verdict = self.filter.inbound(parse(data))
        if verdict.accept:
            if verdict.is_for_all_like:
                self.pump.allow_like(data)
            self.pump.deliver([Frame(data)])

    # --- packets

    def packet(self, source: Any, target: Any) -> bytes:
        """Different each time, so that none is mistaken for another."""
        rng = self.rng
        if source.version != target.version:
            target = next(ip for ip in [*OURS, *THEIRS] if ip.version == source.version and ip != source)
        self.number += 1
        tag = self.number.to_bytes(4, "big") + rng.randbytes(rng.choice((0, 3, 40)))
        packet = bytearray(self.whole(source.packed, target.packed, tag))
        for _ in range(rng.choice((0, 0, 0, 1, 3))):
            at = rng.randrange(len(packet))
            if not 12 <= at < 40:  # addresses stay
                packet[at] = rng.choice((0, 1, 0x20, 0x45, 0x46, 0xFF, rng.randrange(256)))
        if rng.random() < 0.1:
            packet = packet[: rng.randrange(20, len(packet) + 1)]
        return bytes(packet)

    def whole(self, source: bytes, target: bytes, tag: bytes) -> bytes:
        rng = self.rng
        sport, dport = rng.choice(PORTS), rng.choice(PORTS)
        kind = rng.randrange(9)
        if kind < 2:
            flags = rng.choice((0x02, 0x10, 0x12, 0x04, 0x03, 0x00))
            return tcp_packet(source, sport, target, dport, sequence=self.number * 5000, flags=flags, payload=tag)
        if kind < 4:
            return udp_packet(source, sport, target, dport, tag)
        if kind == 4:
            return icmp_echo_request(source, target, rng.choice((1, 2)), 1, tag)
        if kind == 5:  # any ICMP
            head = bytes((rng.choice((0, 1, 3, 8, 11, 12, 128, 129, 135)), 0, 0, 0))
            return ip_packet(source, target, 1 if len(source) == 4 else 58, head + tag)
        if kind == 6:
            return ip_packet(source, target, rng.choice((2, 47, 50, 99, 132, 255, 0, 43, 60)), rng.randbytes(12) + tag)
        if kind == 7 and len(source) == 16:  # behind a fragment header
            inner = rng.choice((6, 17, 58))
            offset = rng.choice((0, 0, 8, 80, 800)) | rng.randrange(2)
            return ip_packet(
                source, target, 44, bytes((inner, 0, *offset.to_bytes(2, "big"))) + tag + rng.randbytes(30)
            )
        fragment = bytearray(udp_packet(source, sport, target, dport, tag))
        if len(source) == 4:
            fragment[6:8] = rng.choice((0x2000, 0x0001, 0x000A, 0x200B, 0x4000)).to_bytes(2, "big")
        return bytes(fragment)


@pytest.mark.parametrize("seed", range(STREAMS))
def test_the_pump_lets_in_what_the_filter_lets_in(seed: int) -> None:
    history = History(seed)
    try:
        for _ in range(40):
            step = history.rng.choice((history.inbound, history.inbound, history.outbound, history.change_rules))
            step()
        assert not history.pump.counters["up_overflow"]
    finally:
        history.close()
