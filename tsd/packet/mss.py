"""The largest segment that a TCP peer may be told of (RFC 9293, 3.7.1): what fits the tunnel, whoever forwards. Total.

The same rules in C: native/src/mss.c.
"""

from __future__ import annotations

from tsd.packet.constants import TCP, TCP_SYN

_END, _FILLER, _MSS = 0, 1, 2


def clamped(packet: bytes | bytearray | memoryview, mtu_bytes: int) -> bytes | bytearray | memoryview:
    """The packet; of a SYN, or a SYN and ACK, that names more than fits, one that names less."""
    ip_bytes = _tcp_at(packet)
    if not ip_bytes or not packet[ip_bytes + 13] & TCP_SYN:
        return packet
    header = (packet[ip_bytes + 12] >> 4) * 4
    at = _find(packet, ip_bytes + 20, ip_bytes + header) if ip_bytes + header <= len(packet) else 0
    most = mtu_bytes - 20 - (20 if packet[0] >> 4 == 4 else 40)
    if not at or most <= 0 or int.from_bytes(packet[at : at + 2], "big") <= most:
        return packet
    changed = bytearray(packet)
    before, after = bytes(changed[at : at + 2]), most.to_bytes(2, "big")
    changed[at : at + 2] = after
    _mend(changed, ip_bytes + 16, before, after, is_odd=bool((at - ip_bytes) & 1))
    return changed


def _tcp_at(packet: bytes | bytearray | memoryview) -> int:
    """Where the TCP header starts; 0 when there is none, or not all of it."""
    if len(packet) < 40:
        return 0
    if packet[0] >> 4 == 4:
        at = (packet[0] & 15) * 4
        if packet[9] != TCP or at < 20 or (packet[6] << 8 | packet[7]) & 0x1FFF:
            return 0
    elif packet[0] >> 4 == 6 and packet[6] == TCP:
        at = 40
    else:
        return 0
    return at if len(packet) >= at + 20 else 0


def _find(packet: bytes | bytearray | memoryview, at: int, end: int) -> int:
    """Where the value of the MSS option is, or 0."""
    while at < end and packet[at] != _END:
        if packet[at] == _FILLER:
            at += 1
            continue
        if at + 1 >= end or packet[at + 1] < 2 or at + packet[at + 1] > end:
            return 0
        if packet[at] == _MSS and packet[at + 1] == 4:
            return at + 2
        at += packet[at + 1]
    return 0


def _mend(packet: bytearray, at: int, before: bytes, after: bytes, *, is_odd: bool) -> None:
    """RFC 1624; bytes on an odd place count the other way round."""
    if is_odd:
        before, after = before[::-1], after[::-1]
    total = 0xFFFF ^ int.from_bytes(packet[at : at + 2], "big")
    total += (0xFFFF ^ int.from_bytes(before, "big")) + int.from_bytes(after, "big")
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    packet[at : at + 2] = (0xFFFF ^ total).to_bytes(2, "big")
