"""Fuzz targets: inner packets."""

from __future__ import annotations

from tsd.packet import build, rewrite, tsmp
from tsd.packet.parse import parse


def fuzz_packet(data: bytes) -> None:
    packet = parse(data)
    assert len(packet.payload) <= len(data) and len(packet.transport) <= len(data)
    assert packet.is_tcp_syn in (True, False) and packet.is_icmp_answer in (True, False)
    tsmp.read(packet)
    tsmp.pong_to(packet, 1)
    for answer in (
        build.icmp_echo_reply_to(packet),
        build.icmp_unreachable(packet),
        build.icmp_unreachable(packet, build.UNREACHABLE_PROTOCOL),
        build.tcp_reset_for(packet),
    ):
        assert answer is None or parse(answer).dst == packet.src


def fuzz_packet_rewrite(data: bytes) -> None:
    """The first byte chooses; a new address in, the old one back, and the packet is what it was."""
    packet, is_partial = data[1:], data[:1] < b"\x40"
    parsed = parse(packet)
    for put, old in ((rewrite.with_source, parsed.src), (rewrite.with_destination, parsed.dst)):
        there = put(packet, bytes(range(1, len(old) + 1)) or bytes(4), is_partial=is_partial)
        assert len(there) == len(packet)
        back = put(there, old or bytes(4), is_partial=is_partial)
        assert parse(back).src == parsed.src and parse(back).dst == parsed.dst
