"""The pump on descriptors from Python: socket pairs for TUNs, loopback sockets, and what comes up."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, ip_network

import pytest

import tsnative
from tsd.base.addr import AddrPort
from tsd.dataplane.fdpump import FdPump, FdPumpOptions, Upcall, UpKind
from tsd.dataplane.pump import Other
from tsd.hull import Frame
from tsd.packet.build import icmp_echo_request, udp_packet

pytestmark = pytest.mark.skipif(tsnative.native is None, reason="the native core is not built")

PEER, SERVICE = 1, 2
NEAR, FAR, OURS = (IPv4Address(text) for text in ("100.64.0.1", "100.64.0.2", "100.100.100.100"))
PLAIN = FdPumpOptions(vnet_header=False, udp_gso=False, udp_gro=False, ring_bytes=1 << 20)


def clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class End:
    def __init__(self, number: int) -> None:
        assert tsnative.native is not None
        self.host, self.tun = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        for sock in (self.host, self.tun, self.udp):
            sock.setblocking(False)
        self.core = tsnative.native.NativeCore()
        for peer in (PEER, SERVICE):
            self.core.add_peer(peer)
        self.core.set_allowed_ips(PEER, [ip_network("100.64.0.0/10")])
        self.core.set_allowed_ips(SERVICE, [ip_network(f"{OURS}/32")])
        self.pump: FdPump = tsnative.native.FdPump(self.core)
        self.number = number
        self.kept: list[Upcall] = []

    @property
    def address(self) -> AddrPort:
        ip, port = self.udp.getsockname()
        return AddrPort(IPv4Address(ip), port)

    def start(self) -> None:
        self.pump.start(self.tun.fileno(), self.udp.fileno(), None, PLAIN)
        self.pump.set_local([ip_network("100.64.0.0/10")])

    def install(self) -> None:
        keys = bytes(range(32)), bytes(range(32, 64))
        self.core.install_session(
            PEER, 10 + self.number, 11 - self.number, keys[self.number], keys[1 - self.number], True, clock()
        )

    def expect(self, kind: UpKind, seconds: float = 60.0) -> Upcall:
        """The next message of a kind; others are put aside."""
        end = time.monotonic() + seconds
        while True:
            for at, message in enumerate(self.kept):
                if message.kind is kind:
                    return self.kept.pop(at)
            assert time.monotonic() < end, (kind, self.kept, self.pump.counters)
            select.select([self.pump], [], [], 0.2)
            self.kept += self.pump.take()

    def receive(self, seconds: float = 60.0) -> bytes | None:
        """What the host gets."""
        return self.host.recv(70000) if select.select([self.host], [], [], seconds)[0] else None

    def close(self) -> None:
        self.pump.stop()
        for sock in (self.host, self.tun, self.udp):
            sock.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    pair = End(0), End(1)
    for one in pair:
        one.start()
    yield pair
    for one in pair:
        one.close()


def ping(sequence: int = 1) -> bytes:
    return icmp_echo_request(NEAR.packed, FAR.packed, 7, sequence, b"x" * 50)


def test_without_a_session_frames_come_up_to_be_staged(ends: tuple[End, End]) -> None:
    near, _ = ends
    near.host.send(ping())
    assert near.expect(UpKind.STAGE)[1:4] == (PEER, ping(), 0)
    service = udp_packet(NEAR.packed, 5000, OURS.packed, 53, b"query")
    near.host.send(service)
    assert near.expect(UpKind.STAGE)[1:3] == (SERVICE, service)
    stray = udp_packet(NEAR.packed, 5000, bytes((192, 0, 2, 1)), 53, b"query")
    near.host.send(stray)
    assert near.expect(UpKind.HOST).data == stray


def test_relay_path_and_verdict(ends: tuple[End, End]) -> None:
    near, far = ends
    near.install(), far.install()
    near.host.send(ping())
    sealed = near.expect(UpKind.SEALED)
    assert sealed.peer == PEER and sealed.unit == len(sealed.data) == 32 + 80
    (opened,) = far.core.open(sealed.data, sealed.unit, clock()).opened
    assert bytes(opened.frame.packet) == ping()
    far.pump.deliver([opened.frame])
    assert far.receive() == ping()
    near.pump.set_path(PEER, far.address, up=True)
    near.host.send(ping(2))
    near.expect(UpKind.SEALED)
    asked = far.expect(UpKind.INBOUND)
    assert (asked.peer, asked.data) == (PEER, ping(2))
    assert far.expect(UpKind.HEARD).source == near.address
    far.pump.allow_like(asked.data)
    near.host.send(ping(3))
    assert far.receive() == ping(3)
    far.pump.set_guarded([PEER])
    near.host.send(ping(4))
    assert far.expect(UpKind.INBOUND).data == ping(4)
    assert far.core.activity(PEER).rx_packets == 4 and near.core.activity(PEER).tx_packets == 4


def test_one_core_two_callers_never_share_a_nonce(ends: tuple[End, End]) -> None:
    near, far = ends
    near.install(), far.install()
    near.pump.set_path(PEER, far.address)
    far.pump.allow_like(ping())
    seen = []
    for number in range(50):
        near.host.send(ping(number))
        seen += near.core.seal([Frame(ping(1000 + number))], clock()).sealed
    counters = {int.from_bytes(batch.datagrams[8:16], "little") for batch in seen}
    got = [far.receive() for _ in range(50)]
    assert None not in got and len(counters) == 50
    assert not far.core.open(b"".join(batch.datagrams for batch in seen), seen[0].datagram_bytes, clock()).others
    assert far.core.drops.get("replay", 0) == 0 and far.core.activity(PEER).rx_packets == 100


def test_others_come_up_with_their_source(ends: tuple[End, End]) -> None:
    near, far = ends
    disco = b"TS\xf0\x9f\x92\xac" + bytes(60)
    near.udp.sendto(disco, far.udp.getsockname())
    message = far.expect(UpKind.OTHER)
    assert (message.detail, message.data, message.source) == (Other.DISCO, disco, near.address)


def test_stop_is_final_and_the_core_goes_on(ends: tuple[End, End]) -> None:
    near, _ = ends
    near.install()
    near.pump.stop()
    near.pump.stop()
    with pytest.raises(RuntimeError):
        near.pump.take()
    assert near.core.seal([Frame(ping())], clock()).sealed
    near.start()
    near.host.send(ping())
    assert near.expect(UpKind.SEALED)


def test_attention_is_thinned_but_the_last_change_is_told(ends: tuple[End, End]) -> None:
    near, far = ends
    near.install(), far.install()
    for one, other in ((near, far), (far, near)):
        one.pump.set_path(PEER, other.address)
        one.pump.allow_like(ping())
    began = time.monotonic()
    for number in range(40):
        near.host.send(ping(number))
        assert far.receive()
        far.host.send(ping(number))
        assert near.receive()
    near.expect(UpKind.ATTENTION)
    time.sleep(0.5)
    near.kept += near.pump.take()
    told = [message for message in near.kept if message.kind is UpKind.ATTENTION]
    assert 1 <= len(told) < 20 + 20 * (time.monotonic() - began)
    assert near.core.activity(PEER).first_unreplied_receive > 0
