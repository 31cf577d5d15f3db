"""Cutting TCP super-segments and putting TCP segments together (what NICs call TSO and GRO), in Python.

The rules are those of the Linux TUN path in WireGuard (wireguard-go: `tun/offload_linux.go`), with these choices of
ours: CWR stays on the first piece only; only appending, never prepending; windows, IPv6 flow labels and urgent
pointers must be equal too; the IPv4 header checksum is verified before a merge hides it.
A merged packet carries the folded pseudo-header sum in its TCP checksum field, as a kernel that finishes it expects.
"""

from __future__ import annotations

from tsd.packet.checksum import internet_checksum, ones_sum, pseudo_header_sum

MAX_MERGED_BYTES = 65535
_TCP = 6
_FIN_PSH = 0x09
_PSH = 0x08
_ACK = 0x10
_CWR = 0x80


def split(packet: bytes | bytearray | memoryview, segment_bytes: int) -> list[bytes]:
    """Cut a TCP packet into pieces of `segment_bytes` payload with every length and checksum right.

    The lengths in the IP header of the input are ignored. Empty when it is not an unfragmented TCP packet.
    """
    view = memoryview(packet)
    size = len(view)
    is_v4 = size > 0 and view[0] >> 4 == 4
    ip_bytes = (view[0] & 15) << 2 if is_v4 else 40
    if not _is_tcp(view, size, is_v4, ip_bytes) or segment_bytes <= 0:
        return []
    header_bytes = ip_bytes + (view[ip_bytes + 12] >> 2 & 0x3C)
    if header_bytes < ip_bytes + 20 or header_bytes > size:
        return []
    src, dst = (view[12:16], view[16:20]) if is_v4 else (view[8:24], view[24:40])
    sequence = int.from_bytes(view[ip_bytes + 4 : ip_bytes + 8], "big")
    identification = int.from_bytes(view[4:6], "big")
    flags = view[ip_bytes + 13]
    pieces = []
    for index, start in enumerate(range(header_bytes, max(size, header_bytes + 1), segment_bytes)):
        end = min(start + segment_bytes, size)
        piece = bytearray(view[:header_bytes])
        piece += view[start:end]
        if is_v4:
            piece[2:4] = len(piece).to_bytes(2, "big")
            piece[4:6] = (identification + index & 0xFFFF).to_bytes(2, "big")
            piece[10:12] = b"\0\0"
            piece[10:12] = internet_checksum(piece[:ip_bytes]).to_bytes(2, "big")
        else:
            piece[4:6] = (len(piece) - 40).to_bytes(2, "big")
        piece[ip_bytes + 4 : ip_bytes + 8] = (sequence + start - header_bytes & 0xFFFFFFFF).to_bytes(4, "big")
        piece[ip_bytes + 13] = flags & ~((0 if end == size else _FIN_PSH) | (_CWR if index else 0))
        piece[ip_bytes + 16 : ip_bytes + 18] = b"\0\0"
        pseudo = pseudo_header_sum(src, dst, _TCP, len(piece) - ip_bytes)
        checksum = internet_checksum(memoryview(piece)[ip_bytes:], pseudo)
        piece[ip_bytes + 16 : ip_bytes + 18] = checksum.to_bytes(2, "big")
        pieces.append(bytes(piece))
    return pieces


def _is_tcp(view: memoryview, size: int, is_v4: bool, ip_bytes: int) -> bool:
    if is_v4:
        return ip_bytes >= 20 and size >= ip_bytes + 20 and view[9] == _TCP and not (view[6] & 0x3F or view[7])
    return size >= 60 and view[0] >> 4 == 6 and view[6] == _TCP


class _Merge:
    """One packet, or several that will leave as one."""

    __slots__ = (
        "chunks",
        "first",
        "header_bytes",
        "ip_bytes",
        "is_closed",
        "next",
        "peer",
        "psh",
        "size",
        "unit",
        "verified",
    )

    def __init__(self, peer: int, packet: bytes) -> None:
        self.peer = peer
        self.first = packet
        self.chunks: list[bytes] = []
        self.is_closed = True

    def open(self, ip_bytes: int, header_bytes: int) -> None:
        """Prepare for appending: called for candidates only."""
        packet = self.first
        self.size = len(packet)
        self.ip_bytes = ip_bytes
        self.header_bytes = header_bytes
        self.unit = self.size - header_bytes
        self.next = int.from_bytes(packet[ip_bytes + 4 : ip_bytes + 8], "big") + self.unit & 0xFFFFFFFF
        self.psh = packet[ip_bytes + 13] & _PSH
        self.is_closed = self.psh != 0
        self.verified = False

    def fits(self, packet: bytes, ip_bytes: int, header_bytes: int) -> bool:
        """Whether `packet` continues this one, checksums apart."""
        payload = len(packet) - header_bytes
        first, at = self.first, ip_bytes
        return (
            not self.is_closed
            and payload <= self.unit
            and self.size + payload <= MAX_MERGED_BYTES
            and header_bytes == self.header_bytes
            and int.from_bytes(packet[at + 4 : at + 8], "big") == self.next
            and packet[at + 8 : at + 13] == first[at + 8 : at + 13]
            and packet[at + 14 : at + 16] == first[at + 14 : at + 16]
            and packet[at + 18 : header_bytes] == first[at + 18 : header_bytes]
            and (_same_ipv4(packet, first) if at == 20 else packet[:4] == first[:4] and packet[7] == first[7])
        )

    def append(self, packet: bytes) -> None:
        payload = packet[self.header_bytes :]
        self.chunks.append(payload)
        self.size += len(payload)
        self.next = self.next + len(payload) & 0xFFFFFFFF
        self.psh = packet[self.ip_bytes + 13] & _PSH
        self.is_closed = self.psh != 0 or len(payload) < self.unit

    def finish(self) -> tuple[bytes, int]:
        """The packet and its segment size, 0 when nothing was appended."""
        if not self.chunks:
            return self.first, 0
        at = self.ip_bytes
        head = bytearray(self.first[: self.header_bytes])
        if at == 20:
            head[2:4] = self.size.to_bytes(2, "big")
            head[10:12] = b"\0\0"
            head[10:12] = internet_checksum(head[:20]).to_bytes(2, "big")
            pseudo = pseudo_header_sum(head[12:16], head[16:20], _TCP, self.size - at)
        else:
            head[4:6] = (self.size - 40).to_bytes(2, "big")
            pseudo = pseudo_header_sum(head[8:24], head[24:40], _TCP, self.size - at)
        head[at + 13] |= self.psh
        head[at + 16 : at + 18] = pseudo.to_bytes(2, "big")
        return b"".join((head, self.first[self.header_bytes :], *self.chunks)), self.unit


def _same_ipv4(packet: bytes, first: bytes) -> bool:
    """Type of service, DF and TTL."""
    return packet[1] == first[1] and packet[6:9] == first[6:9]


class Coalescer:
    """Collects the packets of one batch; within a flow nothing is ever reordered."""

    __slots__ = ("_flows", "_merges")

    def __init__(self) -> None:
        self._merges: list[_Merge] = []
        self._flows: dict[tuple[int, bytes], _Merge] = {}

    def add(self, peer: int, packet: bytes) -> None:
        """`packet` is a whole IP packet without padding."""
        merge = _Merge(peer, packet)
        at, proto = (20, packet[9]) if packet[0] >> 4 == 4 else (40, packet[6])
        if proto != _TCP or len(packet) < at + 20 or self._add_tcp(merge, packet, at):
            self._merges.append(merge)

    def take(self) -> list[tuple[int, bytes, int]]:
        """(peer, packet, segment_bytes) in the order in which each first packet came."""
        return [(merge.peer, *merge.finish()) for merge in self._merges]

    def _add_tcp(self, merge: _Merge, packet: bytes, at: int) -> bool:
        """False when the packet went into an earlier one."""
        # Addresses and ports lie side by side: bytes 12-23 of IPv4 without options, 8-43 of IPv6.
        flow = (merge.peer, packet[12:24] if at == 20 else packet[8:44])
        if not _is_candidate(packet, at):
            if at == 20 and packet[0] != 0x45:
                ports = (packet[0] & 15) << 2
                flow = (merge.peer, packet[12:20] + packet[ports : ports + 4])
            self._flows.pop(flow, None)
            return True
        header_bytes = at + (packet[at + 12] >> 2 & 0x3C)
        former = self._flows.get(flow)
        if former is not None and former.fits(packet, at, header_bytes):
            if not _verified(packet, at):
                del self._flows[flow]
                return True
            if former.verified or _verified(former.first, at):
                former.verified = True
                former.append(packet)
                return False
        merge.open(at, header_bytes)
        self._flows[flow] = merge
        return True


def _is_candidate(packet: bytes, at: int) -> bool:
    """Plain data: no IP options or fragments, flags exactly ACK or ACK+PSH, at least one byte of payload."""
    if at == 20 and (packet[0] != 0x45 or packet[6] & 0x3F or packet[7]):
        return False
    header_bytes = packet[at + 12] >> 2 & 0x3C
    return packet[at + 13] & ~_PSH == _ACK and header_bytes >= 20 and len(packet) > at + header_bytes


def _verified(packet: bytes, at: int) -> bool:
    if at == 20:
        if ones_sum(packet[:20]) != 0xFFFF:
            return False
        pseudo = pseudo_header_sum(packet[12:16], packet[16:20], _TCP, len(packet) - 20)
    else:
        pseudo = pseudo_header_sum(packet[8:24], packet[24:40], _TCP, len(packet) - 40)
    return ones_sum(memoryview(packet)[at:], pseudo) == 0xFFFF
