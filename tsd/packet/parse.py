"""A read-only view of an inner IP packet: addresses, ports, flags. Never raises.

The rules about what counts as unknown are those a packet filter needs (tailscale: `net/packet/packet.go`):
a first fragment must hold its whole transport header, later fragments must not start inside one, and of the IPv6
extension headers only a fragment header right behind the base header is read.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from tsd.base.addr import AddrPort, IPAddress
from tsd.packet.constants import (
    FRAGMENT,
    ICMP,
    ICMP_ECHO_REPLY,
    ICMP_PARAMETER_PROBLEM,
    ICMP_TIME_EXCEEDED,
    ICMP_UNREACHABLE,
    ICMPV6,
    ICMPV6_ECHO_REPLY,
    ICMPV6_PARAMETER_PROBLEM,
    ICMPV6_UNREACHABLE,
    IGMP,
    IPV6_FRAGMENT,
    IPV6_FRAGMENT_HEADER_BYTES,
    IPV6_HEADER_BYTES,
    MIN_FRAGMENT_OFFSET_UNITS,
    SCTP,
    TCP,
    TCP_ACK,
    TCP_SYN,
    TSMP,
    UDP,
    UNKNOWN,
)

_TRANSPORT_MIN_BYTES = {ICMP: 4, IGMP: 8, TCP: 20, UDP: 8, ICMPV6: 4, TSMP: 7, SCTP: 12}
_WITH_PORTS = frozenset((TCP, UDP, SCTP))


class Packet(NamedTuple):
    """One parsed packet; `proto` UNKNOWN means that nothing beyond `version` may be trusted."""

    packet: bytes | bytearray | memoryview
    version: int
    """4, 6, or 0 for what is not IP."""
    proto: int
    src: bytes
    """4 or 16 bytes, as on the wire."""
    dst: bytes
    sport: int
    dport: int
    tcp_flags: int
    transport_offset: int
    payload_offset: int
    """Behind the TCP, UDP or ICMP header; equal to `transport_offset` for protocols without one we read."""
    length_bytes: int
    """What the IP header says; the buffer may be longer (padding)."""
    is_fragment: bool
    """A first or later fragment."""

    @property
    def src_ip(self) -> IPAddress:
        return IPv4Address(self.src) if len(self.src) == 4 else IPv6Address(self.src)

    @property
    def dst_ip(self) -> IPAddress:
        return IPv4Address(self.dst) if len(self.dst) == 4 else IPv6Address(self.dst)

    @property
    def source(self) -> AddrPort:
        return AddrPort(self.src_ip, self.sport)

    @property
    def destination(self) -> AddrPort:
        return AddrPort(self.dst_ip, self.dport)

    @property
    def transport(self) -> memoryview:
        """Transport header and payload."""
        return memoryview(self.packet)[self.transport_offset : self.length_bytes]

    @property
    def payload(self) -> memoryview:
        return memoryview(self.packet)[self.payload_offset : self.length_bytes]

    @property
    def is_tcp_syn(self) -> bool:
        """SYN without ACK: the start of a connection."""
        return self.proto == TCP and self.tcp_flags & (TCP_SYN | TCP_ACK) == TCP_SYN

    @property
    def icmp_type(self) -> int:
        """-1 when it is not ICMP."""
        if self.proto != (ICMP if self.version == 4 else ICMPV6):
            return -1
        return self.packet[self.transport_offset]

    @property
    def is_icmp_answer(self) -> bool:
        """An echo reply or an error: something we asked for."""
        kind = self.icmp_type
        if self.version == 4:
            return kind in (ICMP_ECHO_REPLY, ICMP_UNREACHABLE, ICMP_TIME_EXCEEDED, ICMP_PARAMETER_PROBLEM)
        return kind == ICMPV6_ECHO_REPLY or ICMPV6_UNREACHABLE <= kind <= ICMPV6_PARAMETER_PROBLEM


def parse(packet: bytes | bytearray | memoryview) -> Packet:
    """Total: any bytes give a `Packet`."""
    size = len(packet)
    version = packet[0] >> 4 if size else 0
    if version == 4 and size >= 20:
        return _parse4(packet, size)
    if version == 6 and size >= 40:
        return _parse6(packet, size)
    return Packet(packet, 0, UNKNOWN, b"", b"", 0, 0, 0, 0, 0, size, False)


def running_tcp_destination(packet: bytes | bytearray | memoryview) -> bytes | None:
    """Where a whole TCP packet goes that does not open a connection; None for everything else: ask `parse`."""
    size = len(packet)
    if size >= 40 and packet[0] == 0x45:
        if packet[9] != TCP or packet[6] & 0x3F or packet[7] or not 40 <= packet[2] << 8 | packet[3] <= size:
            return None
        return None if packet[33] & (TCP_SYN | TCP_ACK) == TCP_SYN else bytes(packet[16:20])
    if size >= 60 and packet[0] >> 4 == 6 and packet[6] == TCP and 20 <= packet[4] << 8 | packet[5] <= size - 40:
        return None if packet[53] & (TCP_SYN | TCP_ACK) == TCP_SYN else bytes(packet[24:40])
    return None


def _parse4(packet: bytes | bytearray | memoryview, size: int) -> Packet:
    src, dst = bytes(packet[12:16]), bytes(packet[16:20])
    length = packet[2] << 8 | packet[3]
    offset = (packet[0] & 15) << 2
    proto = packet[9]
    fragment = (packet[6] << 8 | packet[7]) & 0x3FFF
    if length > size or offset < 20 or offset > length:
        proto = UNKNOWN
    elif fragment & 0x1FFF:
        proto = FRAGMENT if fragment & 0x1FFF >= MIN_FRAGMENT_OFFSET_UNITS else UNKNOWN
    elif proto == FRAGMENT or (proto == TSMP and fragment):
        proto = UNKNOWN
    else:
        return _with_transport(packet, 4, proto, src, dst, offset, length, fragment != 0)
    return Packet(packet, 4, proto, src, dst, 0, 0, 0, offset, offset, length, fragment != 0)


def _parse6(packet: bytes | bytearray | memoryview, size: int) -> Packet:
    src, dst = bytes(packet[8:24]), bytes(packet[24:40])
    length = (packet[4] << 8 | packet[5]) + IPV6_HEADER_BYTES
    proto = packet[6]
    offset = IPV6_HEADER_BYTES
    is_fragment = proto == IPV6_FRAGMENT
    if length > size:
        proto = UNKNOWN
    elif is_fragment:
        offset += IPV6_FRAGMENT_HEADER_BYTES
        if offset > length:
            return Packet(packet, 6, UNKNOWN, src, dst, 0, 0, 0, 40, 40, length, True)
        units = (packet[42] << 8 | packet[43]) >> 3
        proto = packet[40]
        if units:
            proto = FRAGMENT if units >= MIN_FRAGMENT_OFFSET_UNITS else UNKNOWN
            return Packet(packet, 6, proto, src, dst, 0, 0, 0, offset, offset, length, True)
    if proto in (UNKNOWN, FRAGMENT) or (proto == TSMP and is_fragment):
        return Packet(packet, 6, UNKNOWN, src, dst, 0, 0, 0, offset, offset, length, is_fragment)
    return _with_transport(packet, 6, proto, src, dst, offset, length, is_fragment)


def _with_transport(
    packet: bytes | bytearray | memoryview,
    version: int,
    proto: int,
    src: bytes,
    dst: bytes,
    offset: int,
    length: int,
    is_fragment: bool,
) -> Packet:
    """Read ports and flags of an unfragmented packet or a first fragment."""
    if length - offset < _TRANSPORT_MIN_BYTES.get(proto, 0):
        return Packet(packet, version, UNKNOWN, src, dst, 0, 0, 0, offset, offset, length, is_fragment)
    if proto not in _WITH_PORTS:
        payload = offset + 4 if proto in (ICMP, ICMPV6) else offset
        return Packet(packet, version, proto, src, dst, 0, 0, 0, offset, payload, length, is_fragment)
    sport = packet[offset] << 8 | packet[offset + 1]
    dport = packet[offset + 2] << 8 | packet[offset + 3]
    if proto == TCP:
        payload = min(offset + (packet[offset + 12] >> 2 & 0x3C), length)
        flags = packet[offset + 13]
    else:
        payload, flags = offset + (8 if proto == UDP else 12), 0
    return Packet(packet, version, proto, src, dst, sport, dport, flags, offset, payload, length, is_fragment)
