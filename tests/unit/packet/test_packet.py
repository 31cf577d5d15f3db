"""Parsing, building and checksums of inner packets."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from tsd.base.keys import DiscoPublic
from tsd.packet import build, tsmp
from tsd.packet.checksum import adjust, internet_checksum, is_transport_checksum_valid, ones_sum
from tsd.packet.constants import FRAGMENT, ICMP, ICMPV6, SCTP, TCP, TCP_ACK, TCP_SYN, TSMP, UDP, UNKNOWN
from tsd.packet.parse import parse

A4, B4 = bytes([100, 64, 0, 1]), bytes([100, 64, 0, 2])
A6, B6 = ip_address("fd7a:115c:a1e0::1").packed, ip_address("fd7a:115c:a1e0::2").packed
PAIRS = [(A4, B4), (A6, B6)]


def slow_sum(data: bytes) -> int:
    data += bytes(len(data) & 1)
    total = sum(data[i] << 8 | data[i + 1] for i in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff\xff", b"\xff" * 4, b"\x01\x02\x03", bytes(range(256)) * 5 + b"z"])
def test_ones_sum_is_the_word_loop(data: bytes) -> None:
    assert ones_sum(data) == slow_sum(data)


def test_rfc1071_example_and_incremental_update() -> None:
    data = bytes.fromhex("0001f203f4f5f6f7")
    assert ones_sum(data) == 0xDDF2
    changed = bytes.fromhex("0001f203f4f50000")
    assert adjust(internet_checksum(data), 0xF6F7, 0) == internet_checksum(changed)


@pytest.mark.parametrize("pair", PAIRS)
def test_udp_round_trip(pair: tuple[bytes, bytes]) -> None:
    raw = build.udp_packet(pair[0], 5, pair[1], 53, b"hello")
    packet = parse(raw)
    assert (packet.proto, packet.sport, packet.dport) == (UDP, 5, 53)
    assert (packet.src, packet.dst, bytes(packet.payload)) == (*pair, b"hello")
    assert packet.version == (4 if len(pair[0]) == 4 else 6)
    assert str(packet.source).endswith(":5")
    assert is_transport_checksum_valid(packet.src, packet.dst, UDP, packet.transport)
    if packet.version == 4:
        assert ones_sum(raw[:20]) == 0xFFFF


@pytest.mark.parametrize("pair", PAIRS)
def test_tcp_round_trip_and_reset(pair: tuple[bytes, bytes]) -> None:
    raw = build.tcp_packet(pair[0], 50000, pair[1], 22, sequence=7, flags=TCP_SYN, options=b"\x02\x04\x04\xd8")
    packet = parse(raw)
    assert packet.is_tcp_syn and packet.payload_offset - packet.transport_offset == 24
    assert is_transport_checksum_valid(packet.src, packet.dst, TCP, packet.transport)
    reset = build.tcp_reset_for(packet)
    assert reset is not None
    answer = parse(reset)
    assert answer.tcp_flags == 0x14 and int.from_bytes(answer.transport[8:12], "big") == 8
    assert build.tcp_reset_for(answer) is None
    established = parse(build.tcp_packet(pair[0], 1, pair[1], 2, sequence=9, acknowledgement=77, flags=TCP_ACK))
    assert not established.is_tcp_syn
    reset = build.tcp_reset_for(established)
    assert reset is not None and int.from_bytes(parse(reset).transport[4:8], "big") == 77


@pytest.mark.parametrize("pair", PAIRS)
def test_echo_and_unreachable(pair: tuple[bytes, bytes]) -> None:
    request = parse(build.icmp_echo_request(*pair, 1, 2, b"data"))
    assert request.proto == (ICMP if request.version == 4 else ICMPV6)
    assert not request.is_icmp_answer
    raw = build.icmp_echo_reply_to(request)
    assert raw is not None
    reply = parse(raw)
    assert reply.is_icmp_answer and bytes(reply.payload) == bytes(request.payload)
    assert build.icmp_echo_reply_to(reply) is None
    refused = parse(build.udp_packet(pair[0], 1, pair[1], 9, b"x" * 2000))
    raw = build.icmp_unreachable(refused)
    assert raw is not None
    error = parse(raw)
    assert error.is_icmp_answer and error.dst == pair[0] and error.length_bytes <= 1280
    assert build.icmp_unreachable(error) is None
    if error.version == 6:
        assert is_transport_checksum_valid(error.src, error.dst, ICMPV6, error.transport)
    protocol = build.icmp_unreachable(parse(build.ip_packet(*pair, TSMP, bytes(8))), build.UNREACHABLE_PROTOCOL)
    assert protocol is not None
    kinds = {4: (3, 2), 6: (4, 1)}
    assert tuple(parse(protocol).transport[:2]) == kinds[error.version]


def ipv4(proto: int, body: bytes, *, fragment: int = 0, ihl: int = 5, total: int | None = None) -> bytes:
    length = 20 + len(body) if total is None else total
    head = bytes([0x40 | ihl, 0]) + length.to_bytes(2, "big") + bytes(2) + fragment.to_bytes(2, "big")
    return head + bytes([64, proto, 0, 0]) + A4 + B4 + body


def ipv6(proto: int, body: bytes) -> bytes:
    return bytes([0x60, 0, 0, 0]) + len(body).to_bytes(2, "big") + bytes([proto, 64]) + A6 + B6 + body


@pytest.mark.parametrize(
    ("raw", "proto"),
    [
        (b"", UNKNOWN),
        (b"\x45", UNKNOWN),
        (bytes(60), UNKNOWN),
        (ipv4(TCP, bytes(2)), UNKNOWN),
        (ipv4(TCP, b"", ihl=15), UNKNOWN),
        (ipv4(TCP, bytes(20), ihl=4), UNKNOWN),
        (ipv4(UDP, bytes(8), total=100), UNKNOWN),
        (ipv4(UDP, bytes(7)), UNKNOWN),
        (ipv4(UDP, bytes(8)), UDP),
        (ipv4(UDP, bytes(8), fragment=0x2000), UDP),
        (ipv4(UDP, bytes(8), fragment=9), UNKNOWN),
        (ipv4(UDP, bytes(8), fragment=10), FRAGMENT),
        (ipv4(TSMP, bytes(9)), TSMP),
        (ipv4(TSMP, bytes(6)), UNKNOWN),
        (ipv4(TSMP, bytes(9), fragment=0x2000), UNKNOWN),
        (ipv4(255, bytes(9)), UNKNOWN),
        (ipv4(SCTP, bytes(11)), UNKNOWN),
        (ipv4(47, b""), 47),
        (ipv6(0, bytes(48)), UNKNOWN),
        (ipv6(43, bytes(48)), 43),
        (ipv6(44, bytes(7)), UNKNOWN),
        (ipv6(44, bytes([UDP, 0, 0, 1]) + bytes(12)), UDP),
        (ipv6(44, bytes([UDP, 0, 0, 1]) + bytes(8)), UNKNOWN),
        (ipv6(44, bytes([UDP, 0, 0, 9 << 3]) + bytes(12)), UNKNOWN),
        (ipv6(44, bytes([UDP, 0, 0, 10 << 3]) + bytes(12)), FRAGMENT),
        (ipv6(44, bytes([TSMP, 0, 0, 1]) + bytes(12)), UNKNOWN),
        (ipv6(255, bytes(8)), UNKNOWN),
    ],
)
def test_what_cannot_be_judged(raw: bytes, proto: int) -> None:
    assert parse(raw).proto == proto
    assert parse(memoryview(raw + bytes(3))).proto in (proto, UNKNOWN)


def test_tsmp_vectors() -> None:
    ping = bytes.fromhex("4500001d000000004063b1fb6440000164400002700102030405060708")
    assert tsmp.ping(A4, B4, ping[21:]) == ping
    assert tsmp.read(parse(ping)) == tsmp.Ping(bytes(range(1, 9)))
    pong = tsmp.pong_to(parse(ping), 38910)
    # The published pong keeps identification 0; the complement rule gives ffff and the checksum that follows.
    assert pong is not None and pong[:2] + pong[2:4] == bytes.fromhex("4500001f") and pong[4:6] == b"\xff\xff"
    assert pong[12:].hex() == "64400002644000016f010203040506070897fe"
    assert tsmp.read(parse(pong)) == tsmp.Pong(bytes(range(1, 9)), 38910)
    plain = bytes.fromhex("4500001f000000004063b1f964400002644000016f010203040506070897fe")
    assert tsmp.read(parse(plain)) == tsmp.Pong(bytes(range(1, 9)), 38910)
    syn = parse(build.tcp_packet(A4, 50000, B4, 22, sequence=0, flags=TCP_SYN))
    rejected = tsmp.rejection_of(syn, tsmp.REASON_ACL)
    assert rejected.hex() == "4500001b000000004063b1fd6440000264400001210641c3500016"
    assert tsmp.read(parse(rejected)) == tsmp.Rejected(TCP, tsmp.REASON_ACL, 50000, 22)
    disco = "8114fc792761adee2f311c3afe6fda532d9096ad676b66de9f9fb87aa138c62c"
    advert = tsmp.disco_advertisement(A4, bytes([100, 64, 0, 5]), DiscoPublic.parse("discokey:" + disco))
    assert advert.hex() == "45000035000000004063b1e0644000016440000561" + disco
    assert tsmp.read(parse(advert + bytes(11))) == tsmp.DiscoAdvertisement(DiscoPublic.parse("discokey:" + disco))


@pytest.mark.parametrize("pair", PAIRS)
def test_tsmp_over_both_families_and_short_messages(pair: tuple[bytes, bytes]) -> None:
    ping = parse(tsmp.ping(*pair, b"12345678"))
    pong = tsmp.pong_to(ping, 0)
    assert pong is not None and tsmp.read(parse(pong)) == tsmp.Pong(b"12345678", 0)
    assert tsmp.pong_to(parse(pong), 0) is None
    if ping.version == 6:
        assert int.from_bytes(pong[1:4], "big") == 0xFFFFF
    for body in (b"p1234567", b"o1234567", b"a" + bytes(31), b"?" * 40):
        assert tsmp.read(parse(build.ip_packet(*pair, TSMP, body))) is None
    maybe = build.ip_packet(*pair, TSMP, b"!\x06W\0\x01\0\x02\x01more")
    assert tsmp.read(parse(maybe)) == tsmp.Rejected(TCP, tsmp.REASON_HOST_FIREWALL, 1, 2, True)
    assert tsmp.read(parse(build.udp_packet(pair[0], 1, pair[1], 2, b"p12345678"))) is None
