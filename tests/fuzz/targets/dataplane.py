"""Fuzz targets: what the packet pump sees from both sides."""

from __future__ import annotations

from ipaddress import ip_network

from tsd.dataplane.classify import classify
from tsd.dataplane.reference import ReferenceCore
from tsd.dataplane.segments import Coalescer, split
from tsd.hull import Frame
from tsd.packet.parse import parse

KEY_A, KEY_B = b"a" * 32, b"b" * 32
EVERYTHING = [ip_network("0.0.0.0/0"), ip_network("::/0")]


def _core(local: int, remote: int, send: bytes, receive: bytes) -> ReferenceCore:
    core = ReferenceCore()
    core.add_peer(1)
    core.set_allowed_ips(1, EVERYTHING)
    core.install_session(1, local, remote, send, receive, True, 0.0)
    return core


def fuzz_core_open(data: bytes) -> None:
    """The first two bytes choose a segment size; the rest comes from the underlay."""
    core = _core(0x04040404, 2, KEY_A, KEY_B)
    size = int.from_bytes(data[:2], "big") % 300
    result = core.open(data[2:], size, 1.0)
    assert not result.opened and not result.authenticated
    classify(data)


def fuzz_core_inner(data: bytes) -> None:
    """Plaintexts of an authentic peer, cut at 0xFF 0x00."""
    sender, receiver = _core(1, 2, KEY_A, KEY_B), _core(2, 1, KEY_B, KEY_A)
    plaintexts = data.split(b"\xff\x00")[:40]
    for sealed in sender.seal_to(1, plaintexts, 1.0):
        for item in receiver.open(sealed.datagrams, sealed.datagram_bytes, 1.0).opened:
            packet = parse(item.frame.packet)
            assert packet.version in (4, 6) and packet.length_bytes == len(item.frame.packet)


def fuzz_core_seal(data: bytes) -> None:
    """A frame of the host, perhaps a super-segment."""
    core = _core(1, 2, KEY_A, KEY_B)
    core.seal([Frame(data[2:], int.from_bytes(data[:2], "big"))], 1.0)


def fuzz_segments(data: bytes) -> None:
    """What was cut and put together again carries the same bytes."""
    pieces = split(data, 100)
    coalescer = Coalescer()
    for piece in pieces:
        coalescer.add(1, piece)
    for _, packet, _ in coalescer.take():
        assert parse(packet).version in (4, 6)
