"""TCP segments on the wire: parsing into `Segment`, building whole IP packets from a per-connection `Header`.

Spec: RFC 9293 (format), RFC 7323 (timestamps, window scale), RFC 2018 (SACK), RFC 8200 (IPv6). Does not judge
sequence numbers. Malformed options end the option list, as all stacks do; a malformed header gives None.
"""

from __future__ import annotations

from struct import Struct

from tsd.netstack.tcp.constants import MAX_WINDOW_SHIFT

Buffer = bytes | bytearray | memoryview

_TCP = Struct("!HHIIBBHHH")
_TIMESTAMP = Struct("!III")
_NOP_NOP_TIMESTAMP = 0x0101080A
_V4 = Struct("!BBHHHBBH8sHHIIHHHH")
_V6 = Struct("!IHBB32sHHIIHHHH")
_DONT_FRAGMENT = 0x4000


def ones_sum(data: Buffer) -> int:
    """The one's-complement sum of 16-bit words, as a number modulo 65535."""
    value = int.from_bytes(data, "big")
    return (value << 8 if len(data) & 1 else value) % 65535


class Segment:
    """One received TCP segment (or a coalesced run of segments); sequence numbers as on the wire."""

    __slots__ = (
        "ack",
        "flags",
        "has_timestamp",
        "mss",
        "payload",
        "piece_bytes",
        "sack_permitted",
        "sacks",
        "seq",
        "ts_echo",
        "ts_value",
        "window",
        "window_shift",
    )

    def __init__(self, seq: int, ack: int, flags: int, window: int, payload: Buffer) -> None:
        self.seq = seq
        self.ack = ack
        self.flags = flags
        self.window = window
        self.payload = payload
        self.piece_bytes = 0
        self.has_timestamp = False
        self.ts_value = 0
        self.ts_echo = 0
        self.mss = 0
        self.window_shift = -1
        self.sack_permitted = False
        self.sacks: list[tuple[int, int]] = []


def parse_segment(packet: Buffer, offset: int, end: int) -> Segment | None:
    """The TCP segment in `packet[offset:end]`, or None when its header does not fit."""
    if end - offset < 20:
        return None
    _sport, _dport, seq, ack, data_offset, flags, window, _sum, _urgent = _TCP.unpack_from(packet, offset)
    header_bytes = (data_offset >> 4) * 4
    start = offset + header_bytes
    if header_bytes < 20 or start > end:
        return None
    segment = Segment(seq, ack, flags, window, memoryview(packet)[start:end])
    if header_bytes == 32:
        kind, value, echo = _TIMESTAMP.unpack_from(packet, offset + 20)
        if kind == _NOP_NOP_TIMESTAMP:
            segment.has_timestamp = True
            segment.ts_value = value
            segment.ts_echo = echo
            return segment
    if header_bytes > 20:
        _parse_options(segment, bytes(packet[offset + 20 : start]))
    return segment


def _parse_options(segment: Segment, options: bytes) -> None:
    at = 0
    end = len(options)
    while at < end:
        kind = options[at]
        if kind == 0:
            return
        if kind == 1:
            at += 1
            continue
        if at + 1 >= end:
            return
        size = options[at + 1]
        if size < 2 or at + size > end:
            return
        _parse_option(segment, kind, options[at + 2 : at + size])
        at += size


def _parse_option(segment: Segment, kind: int, body: bytes) -> None:
    size = len(body)
    if kind == 2 and size == 2:
        segment.mss = int.from_bytes(body, "big")
    elif kind == 3 and size == 1:
        segment.window_shift = min(body[0], MAX_WINDOW_SHIFT)
    elif kind == 4 and size == 0:
        segment.sack_permitted = True
    elif kind == 5 and size and size % 8 == 0:
        segment.sacks = [
            (int.from_bytes(body[i : i + 4], "big"), int.from_bytes(body[i + 4 : i + 8], "big"))
            for i in range(0, size, 8)
        ]
    elif kind == 8 and size == 8:
        segment.has_timestamp = True
        segment.ts_value = int.from_bytes(body[:4], "big")
        segment.ts_echo = int.from_bytes(body[4:], "big")


def timestamp_option(value: int, echo: int) -> bytes:
    return _TIMESTAMP.pack(_NOP_NOP_TIMESTAMP, value, echo)


def sack_option(blocks: list[tuple[int, int]]) -> bytes:
    """NOP NOP SACK with wire-width edges."""
    edges = b"".join((a & 0xFFFFFFFF).to_bytes(4, "big") + (b & 0xFFFFFFFF).to_bytes(4, "big") for a, b in blocks)
    return bytes((1, 1, 5, 2 + len(edges))) + edges


def syn_options(mss: int, window_shift: int, sack_permitted: bool, timestamp: tuple[int, int] | None) -> bytes:
    """Options of a SYN or SYN-ACK; a negative `window_shift` leaves window scaling out."""
    parts = [bytes((2, 4)) + mss.to_bytes(2, "big")]
    if window_shift >= 0:
        parts.append(bytes((1, 3, 3, window_shift)))
    if timestamp is not None:
        parts.append(timestamp_option(*timestamp))
    if sack_permitted:
        parts.append(bytes((1, 1, 4, 2)))
    return b"".join(parts)


class Header:
    """Addresses and ports of one direction of a flow; builds complete IP packets.

    IPv4 identification counts up per piece of a super-segment, so that the pieces get distinct ones.
    """

    __slots__ = ("_addresses", "_fixed_sum", "_identification", "_ip_sum", "_pseudo_sum", "ip_bytes", "lport", "rport")

    def __init__(self, local: bytes, remote: bytes, lport: int, rport: int, identification: int) -> None:
        self._addresses = local + remote
        self.lport = lport
        self.rport = rport
        self._identification = identification
        self.ip_bytes = 20 if len(local) == 4 else 40
        self._pseudo_sum = ones_sum(self._addresses) + 6
        self._ip_sum = 0x4500 + _DONT_FRAGMENT + 0x4006 + self._pseudo_sum - 6
        self._fixed_sum = self._pseudo_sum + lport + rport

    def build(
        self,
        seq: int,
        ack: int,
        flags: int,
        window: int,
        options: bytes,
        payload: list[memoryview],
        payload_bytes: int,
        segment_bytes: int,
    ) -> bytes:
        """One packet. The TCP checksum is left zero when `segment_bytes` > 0 (the pump fills it in per piece)."""
        tcp_bytes = 20 + len(options) + payload_bytes
        offset_flags = ((20 + len(options)) << 10) | flags
        checksum = 0
        if not segment_bytes:
            checksum = self._checksum(seq, ack, offset_flags, window, options, payload, tcp_bytes)
        if self.ip_bytes == 20:
            header = self._pack_v4(tcp_bytes, seq, ack, offset_flags, window, checksum)
            self._identification += -(-payload_bytes // segment_bytes) if segment_bytes else 1
        else:
            header = _V6.pack(
                0x60000000, tcp_bytes, 6, 64, self._addresses, self.lport, self.rport,
                seq & 0xFFFFFFFF, ack & 0xFFFFFFFF, offset_flags, window, checksum, 0,
            )  # fmt: skip
        if not payload_bytes:
            return header + options
        return b"".join((header, options, *payload))

    def _pack_v4(self, tcp_bytes: int, seq: int, ack: int, offset_flags: int, window: int, checksum: int) -> bytes:
        total = 20 + tcp_bytes
        ident = self._identification & 0xFFFF
        return _V4.pack(
            0x45, 0, total, ident, _DONT_FRAGMENT, 64, 6, -(self._ip_sum + total + ident) % 65535,
            self._addresses, self.lport, self.rport, seq & 0xFFFFFFFF, ack & 0xFFFFFFFF,
            offset_flags, window, checksum, 0,
        )  # fmt: skip

    def _checksum(
        self,
        seq: int,
        ack: int,
        offset_flags: int,
        window: int,
        options: bytes,
        payload: list[memoryview],
        tcp_bytes: int,
    ) -> int:
        # 2**16 is 1 modulo 65535, so wider fields may be added as they are.
        total = self._fixed_sum + tcp_bytes + (seq & 0xFFFFFFFF) + (ack & 0xFFFFFFFF) + offset_flags + window
        if options:
            total += int.from_bytes(options, "big")
        if payload:
            total += ones_sum(payload[0] if len(payload) == 1 else b"".join(payload))
        return -total % 65535
