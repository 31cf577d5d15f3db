"""The virtio header: unfinished checksums, UDP super-segments, and what is written."""

from __future__ import annotations

import random
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsd.dataplane.segments import split
from tsd.packet.build import ip_header, tcp_packet, udp_packet
from tsd.packet.checksum import is_transport_checksum_valid, ones_sum, pseudo_header_sum
from tsd.packet.constants import TCP_ACK, TCP_SYN, UDP
from tsd.packet.parse import parse
from tsplatform.linux import vnet

V4 = bytes((100, 64, 0, 1)), bytes((100, 64, 0, 2))
V6 = bytes.fromhex("fd7a115ca1e0" + "00" * 9 + "01"), bytes.fromhex("fd7a115ca1e0" + "00" * 9 + "02")
PAIRS = pytest.mark.parametrize(("src", "dst"), [V4, V6])


def _header(flags: int = 0, gso: int = 0, size: int = 0, start: int = 0, offset: int = 0) -> bytes:
    return pack("=BBHHHH", flags, gso, 0, size, start, offset)


def _partial(packet: bytes, proto: int, offset: int) -> tuple[bytes, int]:
    """As the kernel hands it over: only the pseudo-header sum in the checksum field; and where its header starts."""
    view = parse(packet)
    start = view.transport_offset
    total = pseudo_header_sum(view.src, view.dst, proto, len(packet) - start)
    at = start + offset
    return packet[:at] + total.to_bytes(2, "big") + packet[at + 2 :], start


def test_a_plain_packet_is_left_alone() -> None:
    packet = udp_packet(*V4[:1], 1, V4[1], 2, b"x")
    found = vnet.frames_from(_header(), packet)
    assert found is not None and found == [(packet, 0)]


@PAIRS
@pytest.mark.parametrize("payload", [b"", b"x", b"odd", bytes(1231)])
def test_an_unfinished_udp_checksum_is_finished(src: bytes, dst: bytes, payload: bytes) -> None:
    whole = udp_packet(src, 1, dst, 2, payload)
    partial, start = _partial(whole, UDP, 6)
    found = vnet.frames_from(_header(vnet.NEEDS_CSUM, start=start, offset=6), partial)
    assert found is not None and found == [(whole, 0)]


def test_a_udp_checksum_of_zero_becomes_all_ones() -> None:
    whole = udp_packet(V4[0], 1, V4[1], 2, udp_packet(V4[0], 1, V4[1], 2, b"\0\0")[26:28])
    assert whole[26:28] == b"\xff\xff"
    partial, start = _partial(whole, UDP, 6)
    found = vnet.frames_from(_header(vnet.NEEDS_CSUM, start=start, offset=6), partial)
    assert found is not None and found[0].packet == whole


@PAIRS
def test_tcp_checksums_are_finished_here_for_a_syn_and_by_the_core_afterwards(src: bytes, dst: bytes) -> None:
    for flags, payload in ((TCP_SYN, b""), (TCP_ACK, b""), (TCP_ACK, b"data")):
        whole = tcp_packet(src, 1, dst, 2, sequence=5, flags=flags, payload=payload)
        partial, start = _partial(whole, 6, 16)
        found = vnet.frames_from(_header(vnet.NEEDS_CSUM, start=start, offset=16), partial)
        assert found is not None and len(found) == 1
        packet, segment_bytes = found[0]
        assert bool(segment_bytes) == (flags == TCP_ACK)
        assert (split(packet, segment_bytes) if segment_bytes else [packet]) == [whole]


@PAIRS
def test_tcp_super_segments_go_to_the_core_as_they_are(src: bytes, dst: bytes) -> None:
    whole = tcp_packet(src, 1, dst, 2, sequence=5, payload=bytes(5000))
    for kind in (vnet.GSO_TCPV4, vnet.GSO_TCPV6, vnet.GSO_TCPV4 | vnet.GSO_ECN):
        assert vnet.frames_from(_header(1, kind, 1200, 20, 16), whole) == [(whole, 1200)]


@PAIRS
@pytest.mark.parametrize(("total", "size"), [(1, 1), (3000, 1200), (2400, 1200), (60000, 1232), (10, 3)])
def test_udp_super_segments_are_cut(src: bytes, dst: bytes, total: int, size: int) -> None:
    payload = random.Random(total).randbytes(total)
    whole = ip_header(src, dst, UDP, 8 + total, identification=0xFFFF, dont_fragment=True)
    whole += pack("!HHHH", 7, 8, 8 + total & 0xFFFF, 0) + payload
    start = len(whole) - total - 8
    found = vnet.frames_from(_header(vnet.NEEDS_CSUM, vnet.GSO_UDP_L4, size, start, 6), whole)
    assert found is not None
    got = b""
    for number, (packet, segment_bytes) in enumerate(found):
        view = parse(packet)
        assert not segment_bytes and view.proto == UDP and (view.sport, view.dport) == (7, 8)
        assert view.length_bytes == len(packet)
        assert is_transport_checksum_valid(view.src, view.dst, UDP, view.transport)
        if view.version == 4:
            assert ones_sum(packet[:20]) == 0xFFFF
            assert int.from_bytes(packet[4:6], "big") == (0xFFFF + number) & 0xFFFF
        got += bytes(view.payload)
    assert got == payload and len(found) == -(-total // size)


@given(st.binary(min_size=10, max_size=10), st.binary(max_size=200))
def test_any_header_with_any_packet_never_raises(header: bytes, packet: bytes) -> None:
    vnet.frames_from(header, packet or b"\x45")


@PAIRS
def test_the_header_of_a_joined_packet(src: bytes, dst: bytes) -> None:
    packet = tcp_packet(src, 1, dst, 2, sequence=5, options=bytes(12), payload=bytes(4000))
    at = 20 if len(src) == 4 else 40
    kind = vnet.GSO_TCPV4 if at == 20 else vnet.GSO_TCPV6
    assert vnet.header_for(packet, 1200) == pack("=BBHHHH", 1, kind, at + 32, 1200, at, 16)
    assert vnet.header_for(udp_packet(src, 1, dst, 2, b"x"), 1200) is None
