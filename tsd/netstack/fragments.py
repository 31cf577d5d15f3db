"""IP fragments: bounded reassembly (RFC 791, RFC 8200 section 4.5, RFC 5722: overlaps void the datagram) and cutting.

Whole datagrams come back as one packet without fragment fields. Time-outs are silent: no ICMP is sent.
"""

from __future__ import annotations

from tsd.packet.build import ip_header
from tsd.packet.checksum import internet_checksum

_TIMEOUT_S = 30.0
_MAX_DATAGRAMS = 64
_MAX_PIECES = 64
_MAX_TOTAL_BYTES = 1 << 20
_V6_FRAGMENT = 44


class _Partial:
    __slots__ = ("expires_at", "header", "is_broken", "pieces", "proto", "size", "total")

    def __init__(self, expires_at: float) -> None:
        self.expires_at = expires_at
        self.pieces: dict[int, bytes] = {}
        self.header = b""
        self.proto = 0
        self.total = -1
        self.size = 0
        self.is_broken = False


class Reassembler:
    """Keyed by source, destination, protocol and identification; the oldest datagram gives way."""

    def __init__(self) -> None:
        self._partials: dict[bytes, _Partial] = {}
        self._held_bytes = 0

    def add(self, packet: bytes, now: float) -> bytes | None:
        """The whole packet when `packet` completes it. Anything malformed is ignored."""
        if packet[0] >> 4 == 4:
            return self._add_v4(packet, now)
        return self._add_v6(packet, now)

    def _add_v4(self, packet: bytes, now: float) -> bytes | None:
        header_bytes = (packet[0] & 15) * 4
        total = int.from_bytes(packet[2:4], "big")
        if header_bytes < 20 or not header_bytes <= total <= len(packet):
            return None
        field = int.from_bytes(packet[6:8], "big")
        key = packet[12:20] + packet[9:10] + packet[4:6]
        body = packet[header_bytes:total]
        partial = self._insert(key, (field & 0x1FFF) * 8, body, bool(field & 0x2000), packet[:20], packet[9], now)
        if partial is None:
            return None
        payload = self._take(key, partial)
        head = partial.header
        return ip_header(head[12:16], head[16:20], head[9], len(payload), ttl=head[8], traffic_class=head[1]) + payload

    def _add_v6(self, packet: bytes, now: float) -> bytes | None:
        total = 40 + int.from_bytes(packet[4:6], "big")
        if len(packet) < 48 or not 48 <= total <= len(packet):
            return None
        field = int.from_bytes(packet[42:44], "big")
        key = packet[8:40] + packet[44:48]
        body = packet[48:total]
        partial = self._insert(key, field & 0xFFF8, body, bool(field & 1), packet[:40], packet[40], now)
        if partial is None:
            return None
        payload = self._take(key, partial)
        head = partial.header
        return head[:4] + len(payload).to_bytes(2, "big") + bytes((partial.proto,)) + head[7:40] + payload

    def _insert(
        self, key: bytes, offset: int, body: bytes, is_more: bool, header: bytes, proto: int, now: float
    ) -> _Partial | None:
        self._expire(now)
        partial = self._partials.get(key)
        if partial is None:
            self._make_room(len(body))
            partial = self._partials[key] = _Partial(now + _TIMEOUT_S)
        if partial.is_broken:
            return None
        end = offset + len(body)
        if partial.pieces.get(offset) == body:
            return None
        is_bad = not body or (is_more and len(body) & 7) or end > 65515 or len(partial.pieces) >= _MAX_PIECES
        is_overlap = any(offset < at + len(piece) and at < end for at, piece in partial.pieces.items())
        is_past_end = 0 <= partial.total < end or (not is_more and 0 <= partial.total != end)
        if is_bad or is_overlap or is_past_end:
            self._void(partial)
            return None
        partial.pieces[offset] = body
        partial.size += len(body)
        self._held_bytes += len(body)
        if not is_more:
            partial.total = end
        if offset == 0:
            partial.header = header
            partial.proto = proto
        return partial if partial.size == partial.total and partial.header else None

    def _void(self, partial: _Partial) -> None:
        """Keep the entry until it expires, so that the rest of a bad datagram is not taken for a new one."""
        self._held_bytes -= partial.size
        partial.size = 0
        partial.pieces.clear()
        partial.is_broken = True

    def _take(self, key: bytes, partial: _Partial) -> bytes:
        del self._partials[key]
        self._held_bytes -= partial.size
        return b"".join(partial.pieces[at] for at in sorted(partial.pieces))

    def _expire(self, now: float) -> None:
        while self._partials:
            key = next(iter(self._partials))
            if self._partials[key].expires_at > now:
                return
            self._held_bytes -= self._partials.pop(key).size

    def _make_room(self, size: int) -> None:
        while self._partials and (len(self._partials) >= _MAX_DATAGRAMS or self._held_bytes + size > _MAX_TOTAL_BYTES):
            self._held_bytes -= self._partials.pop(next(iter(self._partials))).size


def cut(packet: bytes, mtu_bytes: int, identification: int) -> list[bytes]:
    """`packet` (no extension headers) as fragments of at most `mtu_bytes`; the packet itself when it fits."""
    if len(packet) <= mtu_bytes:
        return [packet]
    if packet[0] >> 4 == 4:
        room = (mtu_bytes - 20) & ~7
        return [_cut_v4(packet, at, room, identification) for at in range(0, len(packet) - 20, room)]
    room = (mtu_bytes - 48) & ~7
    return [_cut_v6(packet, at, room, identification) for at in range(0, len(packet) - 40, room)]


def _cut_v4(packet: bytes, at: int, room: int, identification: int) -> bytes:
    body = packet[20 + at : 20 + at + room]
    more = 0x2000 if 20 + at + room < len(packet) else 0
    head = bytearray(packet[:20])
    head[2:4] = (20 + len(body)).to_bytes(2, "big")
    head[4:6] = (identification & 0xFFFF).to_bytes(2, "big")
    head[6:8] = (more | at >> 3).to_bytes(2, "big")
    head[10:12] = b"\0\0"
    head[10:12] = internet_checksum(head).to_bytes(2, "big")
    return bytes(head) + body


def _cut_v6(packet: bytes, at: int, room: int, identification: int) -> bytes:
    body = packet[40 + at : 40 + at + room]
    more = 1 if 40 + at + room < len(packet) else 0
    fragment = bytes((packet[6], 0)) + (at | more).to_bytes(2, "big") + (identification & 0xFFFFFFFF).to_bytes(4, "big")
    head = packet[:4] + (8 + len(body)).to_bytes(2, "big") + bytes((_V6_FRAGMENT,)) + packet[7:40]
    return head + fragment + body
