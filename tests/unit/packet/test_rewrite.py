"""Another address in a packet: every checksum that covers it stays right."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from tsd.packet import build
from tsd.packet.checksum import is_transport_checksum_valid, ones_sum, pseudo_header_sum
from tsd.packet.constants import ICMPV6, TCP, TCP_ACK, UDP
from tsd.packet.parse import parse
from tsd.packet.rewrite import with_destination, with_source

A4, B4, N4 = bytes([100, 64, 0, 1]), bytes([100, 64, 0, 2]), bytes([100, 64, 255, 254])
A6, B6, N6 = (ip_address(text).packed for text in ("fd7a:115c:a1e0::1", "fd7a:115c:a1e0::2", "fd7a:115c:a1e0::1a"))
FAMILIES = [(A4, B4, N4), (A6, B6, N6)]


def assert_valid(packet: bytes, proto: int) -> None:
    view = parse(packet)
    if view.version == 4:
        assert ones_sum(packet[:20]) == 0xFFFF
    assert is_transport_checksum_valid(view.src, view.dst, proto, bytes(view.transport))


@pytest.mark.parametrize(("src", "dst", "new"), FAMILIES)
@pytest.mark.parametrize("proto", [TCP, UDP])
@pytest.mark.parametrize("size", [0, 1, 300])
def test_source_and_destination(src: bytes, dst: bytes, new: bytes, proto: int, size: int) -> None:
    payload = bytes(range(256))[:size].ljust(size, b"z")
    if proto == UDP:
        packet = build.udp_packet(src, 5000, dst, 53, payload)
    else:
        packet = build.tcp_packet(src, 5000, dst, 80, sequence=7, flags=TCP_ACK, payload=payload)
    assert_valid(packet, proto)
    renamed = with_source(packet, new)
    assert parse(renamed).src == new and parse(renamed).dst == dst
    assert_valid(renamed, proto)
    redirected = with_destination(packet, new)
    assert parse(redirected).dst == new and parse(redirected).src == src
    assert_valid(redirected, proto)
    assert with_source(renamed, src) == packet


def test_icmpv6_is_covered_and_icmpv4_is_not() -> None:
    assert_valid(with_source(build.icmp_echo_request(A6, B6, 1, 2), N6), ICMPV6)
    echo = build.icmp_echo_request(A4, B4, 1, 2)
    renamed = with_source(echo, N4)
    assert renamed[20:] == echo[20:] and ones_sum(renamed[:20]) == 0xFFFF


def test_udp_without_checksum_stays_without() -> None:
    packet = bytearray(build.udp_packet(A4, 1, B4, 2, b"hello"))
    packet[26:28] = b"\0\0"
    assert with_source(packet, N4)[26:28] == b"\0\0"


def test_udp_checksum_never_becomes_zero() -> None:
    for low in range(0, 65536, 97):
        payload = low.to_bytes(2, "big")
        renamed = with_source(build.udp_packet(A4, 1, B4, 2, payload), N4)
        assert renamed[26:28] != b"\0\0"
        assert_valid(renamed, UDP)


def test_partial_checksum_is_the_pseudo_header_of_the_new_addresses() -> None:
    packet = bytearray(build.tcp_packet(A4, 1, B4, 2, sequence=1, flags=TCP_ACK, payload=bytes(3000)))
    length = len(packet) - 20
    packet[36:38] = pseudo_header_sum(A4, B4, TCP, length).to_bytes(2, "big")
    redirected = with_destination(packet, N4, is_partial=True)
    assert int.from_bytes(redirected[36:38], "big") == pseudo_header_sum(A4, N4, TCP, length)


def test_later_fragments_and_other_families_keep_their_payload() -> None:
    fragment = bytearray(build.udp_packet(A4, 1, B4, 2, bytes(64)))
    fragment[6:8] = (0x2000 | 100).to_bytes(2, "big")
    assert with_source(fragment, N4)[20:] == fragment[20:]
    assert with_source(b"", N4) == b""
    packet = build.udp_packet(A4, 1, B4, 2, b"x")
    assert with_source(packet, N6) == packet
