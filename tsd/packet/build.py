"""Builders of whole inner packets: IP headers, UDP, TCP segments, ICMP echo and errors (RFC 791, 8200, 768, 9293).

Addresses are raw (4 or 16 bytes); their length chooses the family.
"""

from __future__ import annotations

from struct import pack

from tsd.packet.checksum import internet_checksum, transport_checksum
from tsd.packet.constants import (
    ICMP,
    ICMP_ECHO_REPLY,
    ICMP_ECHO_REQUEST,
    ICMP_UNREACHABLE,
    ICMPV6,
    ICMPV6_ECHO_REPLY,
    ICMPV6_ECHO_REQUEST,
    ICMPV6_UNREACHABLE,
    IPV4_HEADER_BYTES,
    IPV6_HEADER_BYTES,
    TCP,
    TCP_ACK,
    TCP_FIN,
    TCP_RST,
    TCP_SYN,
    UDP,
)
from tsd.packet.parse import Packet

UNREACHABLE_NET = 0
UNREACHABLE_HOST = 1
UNREACHABLE_PROTOCOL = 2
UNREACHABLE_PORT = 3
UNREACHABLE_ADMIN = 13

_ICMPV6_CODES = {UNREACHABLE_NET: 0, UNREACHABLE_HOST: 3, UNREACHABLE_PORT: 4, UNREACHABLE_ADMIN: 1}
_ICMP_QUOTE_BYTES = 576 - 28
_ICMPV6_QUOTE_BYTES = 1280 - 48


def ip_header(
    src: bytes,
    dst: bytes,
    proto: int,
    payload_bytes: int,
    *,
    identification: int = 0,
    ttl: int = 64,
    traffic_class: int = 0,
    dont_fragment: bool = False,
) -> bytes:
    """An IPv4 header with its checksum, or an IPv6 header (`identification` is then the flow label)."""
    if len(src) == 16:
        first_word = 0x60000000 | traffic_class << 20 | identification & 0xFFFFF
        return pack("!IHBB16s16s", first_word, payload_bytes, proto, ttl, src, dst)
    length = IPV4_HEADER_BYTES + payload_bytes
    flags = 0x4000 if dont_fragment else 0
    head = pack("!BBHHHBB", 0x45, traffic_class, length, identification & 0xFFFF, flags, ttl, proto)
    return head + pack("!H4s4s", internet_checksum(head + src + dst), src, dst)


def ip_packet(src: bytes, dst: bytes, proto: int, payload: bytes, *, identification: int = 0, ttl: int = 64) -> bytes:
    return ip_header(src, dst, proto, len(payload), identification=identification, ttl=ttl) + payload


def udp_packet(src: bytes, sport: int, dst: bytes, dport: int, payload: bytes) -> bytes:
    head = pack("!HHHH", sport, dport, 8 + len(payload), 0)
    checksum = transport_checksum(src, dst, UDP, head + payload) or 0xFFFF
    return ip_packet(src, dst, UDP, head[:6] + checksum.to_bytes(2, "big") + payload)


def tcp_packet(
    src: bytes,
    sport: int,
    dst: bytes,
    dport: int,
    *,
    sequence: int,
    acknowledgement: int = 0,
    flags: int = TCP_ACK,
    window: int = 65535,
    options: bytes = b"",
    payload: bytes = b"",
) -> bytes:
    """`options` must be a multiple of four bytes."""
    offset_words = 5 + len(options) // 4
    head = pack("!HHIIBBHHH", sport, dport, sequence, acknowledgement, offset_words << 4, flags, window, 0, 0)
    checksum = transport_checksum(src, dst, TCP, head + options + payload)
    segment = head[:16] + checksum.to_bytes(2, "big") + head[18:] + options + payload
    return ip_packet(src, dst, TCP, segment)


def tcp_reset_for(refused: Packet) -> bytes | None:
    """The RST that refuses a segment (RFC 9293, section 3.10.7.1); None for a RST, which is never answered."""
    if refused.proto != TCP or refused.tcp_flags & TCP_RST:
        return None
    header = refused.transport
    sequence = int.from_bytes(header[4:8], "big")
    acknowledgement = int.from_bytes(header[8:12], "big")
    ports = (refused.dst, refused.dport, refused.src, refused.sport)
    if refused.tcp_flags & TCP_ACK:
        return tcp_packet(*ports, sequence=acknowledgement, flags=TCP_RST, window=0)
    taken = len(refused.payload) + bool(refused.tcp_flags & TCP_SYN) + bool(refused.tcp_flags & TCP_FIN)
    return tcp_packet(
        *ports, sequence=0, acknowledgement=(sequence + taken) & 0xFFFFFFFF, flags=TCP_RST | TCP_ACK, window=0
    )


def icmp_packet(src: bytes, dst: bytes, kind: int, code: int, rest: bytes, *, ttl: int = 64) -> bytes:
    """`rest` is everything behind the checksum. The family decides between ICMP and ICMPv6."""
    head = bytes((kind, code, 0, 0)) + rest
    if len(src) == 16:
        proto, checksum = ICMPV6, transport_checksum(src, dst, ICMPV6, head)
    else:
        proto, checksum = ICMP, internet_checksum(head)
    return ip_packet(src, dst, proto, head[:2] + checksum.to_bytes(2, "big") + rest, ttl=ttl)


def icmp_echo_request(src: bytes, dst: bytes, identifier: int, sequence: int, payload: bytes = b"") -> bytes:
    kind = ICMP_ECHO_REQUEST if len(src) == 4 else ICMPV6_ECHO_REQUEST
    return icmp_packet(src, dst, kind, 0, pack("!HH", identifier, sequence) + payload)


def icmp_echo_reply_to(request: Packet) -> bytes | None:
    """The reply to an echo request; None when it is not one."""
    wanted = ICMP_ECHO_REQUEST if request.version == 4 else ICMPV6_ECHO_REQUEST
    if request.icmp_type != wanted or request.is_fragment:
        return None
    kind = ICMP_ECHO_REPLY if request.version == 4 else ICMPV6_ECHO_REPLY
    return icmp_packet(request.dst, request.src, kind, 0, bytes(request.payload))


def icmp_unreachable(about: Packet, code: int = UNREACHABLE_PORT, src: bytes = b"") -> bytes | None:
    """Destination unreachable for a packet, sent from `src` (default: its destination). None when it must not be
    answered: ICMP errors and later fragments (RFC 1122, section 3.2.2). Codes are those of IPv4."""
    if about.version == 0 or about.is_icmp_answer or not about.src or about.proto in (0, 255):
        return None
    source = src or about.dst
    if about.version == 6:
        quoted = bytes(memoryview(about.packet)[: min(about.length_bytes, _ICMPV6_QUOTE_BYTES)])
        if code == UNREACHABLE_PROTOCOL:
            return icmp_packet(source, about.src, 4, 1, (IPV6_HEADER_BYTES - 34).to_bytes(4, "big") + quoted)
        return icmp_packet(source, about.src, ICMPV6_UNREACHABLE, _ICMPV6_CODES.get(code, 0), bytes(4) + quoted)
    quoted = bytes(memoryview(about.packet)[: min(about.length_bytes, _ICMP_QUOTE_BYTES)])
    return icmp_packet(source, about.src, ICMP_UNREACHABLE, code, bytes(4) + quoted)
