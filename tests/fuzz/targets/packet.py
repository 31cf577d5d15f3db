"""Fuzz targets: inner packets."""

from __future__ import annotations

from tsd.packet import build, tsmp
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
