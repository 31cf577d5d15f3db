"""The virtio-net header of a TUN with offloads: super-segments and unfinished checksums, in and out. Pure.

Layout: linux/virtio_net.h (struct virtio_net_hdr, native byte order, 10 bytes). What the kernel hands us may be a TCP
super-segment (the core cuts it), a UDP one (USO, cut here), or one packet whose transport checksum holds only the
pseudo-header sum (NEEDS_CSUM, finished here, or by the core for running TCP connections).
"""

from __future__ import annotations

from struct import Struct

from tsd.hull import Frame
from tsd.packet.checksum import internet_checksum, ones_sum

HEADER = Struct("=BBHHHH")
HEADER_BYTES = HEADER.size
PLAIN = bytes(HEADER_BYTES)

NEEDS_CSUM = 1
GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, GSO_ECN = 0, 1, 4, 5, 0x80
_TCP, _UDP = 6, 17
_TCP_CSUM_AT, _UDP_CSUM_AT = 16, 6
_SYN = 0x02
_WHOLE = 65535


def frames_from(header: bytes | bytearray, packet: bytes) -> list[Frame] | None:
    """What one read of the device means to the core; None when header and packet do not fit each other."""
    flags, gso, _, segment_bytes, start, offset = HEADER.unpack(header)
    gso &= ~GSO_ECN
    if gso == GSO_NONE:
        if not flags & NEEDS_CSUM:
            return [Frame(packet)]
        return _finished(packet, start, offset)
    if gso in (GSO_TCPV4, GSO_TCPV6):
        return [Frame(packet, segment_bytes)] if segment_bytes else None
    if gso == GSO_UDP_L4:
        pieces = split_udp(packet, start, segment_bytes)
        return [Frame(piece) for piece in pieces] if pieces else None
    return None


def _finished(packet: bytes, start: int, offset: int) -> list[Frame] | None:
    at = start + offset
    if at + 2 > len(packet):
        return None
    is_plain = packet[0] >> 4 == 4 or start == 40
    if is_plain and offset == _TCP_CSUM_AT and start + 20 <= len(packet) and not packet[start + 13] & _SYN:
        # A running connection: one piece of a "super-segment" gets its checksum from the core.
        return [Frame(packet, _WHOLE)]
    checksum = internet_checksum(memoryview(packet)[start:]) or 0xFFFF
    return [Frame(b"".join((packet[:at], checksum.to_bytes(2, "big"), packet[at + 2 :])))]


def split_udp(packet: bytes, start: int, segment_bytes: int) -> list[bytes]:
    """Datagrams of a UDP super-segment (`start`: where its UDP header is); empty when it is none."""
    size, payload_at = len(packet), start + 8
    is_v4 = packet[0] >> 4 == 4 if size else False
    if not segment_bytes or payload_at >= size or start < (20 if is_v4 else 40):
        return []
    ports = packet[start : start + 4]
    addresses = packet[12:20] if is_v4 else packet[8:40]
    base_sum = ones_sum(addresses, ones_sum(ports, _UDP))
    view = memoryview(packet)
    head_sum = ones_sum(packet[:2] + packet[6:10] + packet[12:start]) if is_v4 else 0
    identification = int.from_bytes(packet[4:6], "big")
    pieces = []
    for index, at in enumerate(range(payload_at, size, segment_bytes)):
        payload = view[at : at + segment_bytes]
        length = 8 + len(payload)
        checksum = internet_checksum(payload, base_sum + 2 * length) or 0xFFFF
        udp = b"".join((ports, length.to_bytes(2, "big"), checksum.to_bytes(2, "big"), payload))
        if is_v4:
            number = identification + index & 0xFFFF
            total = start + length
            sum4 = 0xFFFF - ((head_sum + total + number) % 0xFFFF or 0xFFFF)
            lengths = total.to_bytes(2, "big") + number.to_bytes(2, "big")
            ip = b"".join((packet[:2], lengths, packet[6:10], sum4.to_bytes(2, "big"), packet[12:start]))
        else:
            ip = b"".join((packet[:4], (start - 40 + length).to_bytes(2, "big"), packet[6:start]))
        pieces.append(ip + udp)
    return pieces


def header_for(packet: bytes | bytearray | memoryview, segment_bytes: int) -> bytes | None:
    """The header under which a coalesced TCP packet is written; None when it is not plain TCP.

    Its checksum field must hold the folded pseudo-header sum, as the core leaves it.
    """
    is_v4 = packet[0] >> 4 == 4
    start = (packet[0] & 15) << 2 if is_v4 else 40
    if packet[9 if is_v4 else 6] != _TCP or len(packet) < start + 20:
        return None
    header_bytes = start + (packet[start + 12] >> 2 & 0x3C)
    gso = GSO_TCPV4 if is_v4 else GSO_TCPV6
    return HEADER.pack(NEEDS_CSUM, gso, header_bytes, segment_bytes, start, _TCP_CSUM_AT)
