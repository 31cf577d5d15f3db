"""Cutting TCP super-segments and putting TCP segments together (what NICs call TSO and GRO), in Python.

The rules are those of the Linux TUN path in WireGuard (wireguard-go: `tun/offload_linux.go`), with these choices of
ours: CWR stays on the first piece only; only appending, never prepending; windows, IPv6 flow labels and urgent
pointers must be equal too; the IPv4 header checksum is verified before a merge hides it.
A merged packet carries the folded pseudo-header sum in its TCP checksum field, as a kernel that finishes it expects.
"""

from __future__ import annotations

from struct import pack

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
    template = _Template(bytes(view[:header_bytes]), ip_bytes, is_v4)
    pieces = []
    for index, start in enumerate(range(header_bytes, max(size, header_bytes + 1), segment_bytes)):
        end = min(start + segment_bytes, size)
        cleared = (0 if end == size else _FIN_PSH) | (_CWR if index else 0)
        pieces.append(template.fill(view[start:end], index, start - header_bytes, cleared))
    return pieces


class _Template:
    """The headers of a super-segment, with sums taken once, so that each piece costs one pass over its payload."""

    __slots__ = (
        "_flags",
        "_header_bytes",
        "_identification",
        "_ip_bytes",
        "_ip_sum",
        "_parts",
        "_sequence",
        "_tcp_sum",
    )

    def __init__(self, head: bytes, ip_bytes: int, is_v4: bool) -> None:
        at = ip_bytes
        self._header_bytes = len(head)
        self._identification = int.from_bytes(head[4:6], "big") if is_v4 else -1
        self._sequence = int.from_bytes(head[at + 4 : at + 8], "big")
        self._flags = head[at + 13]
        self._parts = (
            head[:2] if is_v4 else head[:4],
            head[6:10],
            head[12 : at + 4] if is_v4 else head[6 : at + 4],
            head[at + 8 : at + 13],
            head[at + 14 : at + 16],
            head[at + 18 :],
        )
        self._ip_sum = ones_sum(head[:2] + head[6:10] + head[12:at])
        addresses = head[12:20] if is_v4 else head[8:40]
        fixed = head[at : at + 4] + head[at + 8 : at + 13] + b"\0" + head[at + 14 : at + 16] + head[at + 18 :]
        self._tcp_sum = ones_sum(addresses, ones_sum(fixed, _TCP - at + len(head)))

    def fill(self, payload: memoryview, index: int, offset: int, cleared_flags: int) -> bytes:
        """The piece number `index`, whose payload starts `offset` bytes into the whole."""
        first, middle, ends, offsets, window, rest = self._parts
        sequence = self._sequence + offset & 0xFFFFFFFF
        flags = self._flags & ~cleared_flags
        varying = self._tcp_sum + (sequence >> 16) + (sequence & 0xFFFF) + flags + len(payload)
        tcp = offsets + bytes((flags,)) + window + internet_checksum(payload, varying).to_bytes(2, "big")
        sealed = (ends, sequence.to_bytes(4, "big"), tcp, rest, payload)
        length = self._header_bytes + len(payload)
        if self._identification < 0:
            return b"".join((first, (length - 40).to_bytes(2, "big"), *sealed))
        identification = self._identification + index & 0xFFFF
        checksum = 0xFFFF - ((self._ip_sum + length + identification) % 0xFFFF or 0xFFFF)
        return b"".join((first, pack("!HH", length, identification), middle, checksum.to_bytes(2, "big"), *sealed))


def _is_tcp(view: memoryview, size: int, is_v4: bool, ip_bytes: int) -> bool:
    if is_v4:
        return ip_bytes >= 20 and size >= ip_bytes + 20 and view[9] == _TCP and not (view[6] & 0x3F or view[7])
    return size >= 60 and view[0] >> 4 == 6 and view[6] == _TCP


class _Merge:
    """A segment of plain data, and those that follow it and will leave with it."""

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

    def __init__(self, peer: int, packet: bytes, ip_bytes: int, header_bytes: int) -> None:
        self.peer = peer
        self.first = packet
        self.chunks: list[bytes] = []
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

    __slots__ = ("_flows", "_items")

    def __init__(self) -> None:
        self._items: list[tuple[int, bytes, int] | _Merge] = []
        self._flows: dict[tuple[int, bytes], _Merge] = {}

    def add(self, peer: int, packet: bytes) -> None:
        """`packet` is a whole IP packet without padding."""
        at, proto = (20, packet[9]) if packet[0] >> 4 == 4 else (40, packet[6])
        if proto != _TCP or len(packet) < at + 20:
            self._items.append((peer, packet, 0))
        else:
            self._add_tcp(peer, packet, at)

    def take(self) -> list[tuple[int, bytes, int]]:
        """(peer, packet, segment_bytes) in the order in which each first packet came."""
        return [item if isinstance(item, tuple) else (item.peer, *item.finish()) for item in self._items]

    def _add_tcp(self, peer: int, packet: bytes, at: int) -> None:
        # Addresses and ports lie side by side: bytes 12-23 of IPv4 without options, 8-43 of IPv6.
        flow = (peer, packet[12:24] if at == 20 else packet[8:44])
        if not _is_candidate(packet, at):
            if at == 20 and packet[0] != 0x45:
                ports = (packet[0] & 15) << 2
                flow = (peer, packet[12:20] + packet[ports : ports + 4])
            self._flows.pop(flow, None)
            self._items.append((peer, packet, 0))
            return
        header_bytes = at + (packet[at + 12] >> 2 & 0x3C)
        former = self._flows.get(flow)
        if former is not None and former.fits(packet, at, header_bytes):
            if not _verified(packet, at):
                del self._flows[flow]
                self._items.append((peer, packet, 0))
                return
            if former.verified or _verified(former.first, at):
                former.verified = True
                former.append(packet)
                return
        merge = _Merge(peer, packet, at, header_bytes)
        self._flows[flow] = merge
        self._items.append(merge)


def _is_candidate(packet: bytes, at: int) -> bool:
    """Plain data: no IP options or fragments, flags exactly ACK or ACK+PSH, at least one byte of payload."""
    if at == 20 and (packet[0] != 0x45 or packet[6] & 0x3F or packet[7]):
        return False
    header_bytes = packet[at + 12] >> 2 & 0x3C
    return packet[at + 13] & ~_PSH == _ACK and header_bytes >= 20 and len(packet) > at + header_bytes


def _verified(packet: bytes, at: int) -> bool:
    """Whether header and TCP checksum are right. Candidates have no IP options: addresses touch the TCP header."""
    size = len(packet)
    if at == 20:
        return ones_sum(packet[:20]) == 0xFFFF and ones_sum(packet[12:], _TCP + size - 20) == 0xFFFF
    return ones_sum(packet[8:], _TCP + size - 40) == 0xFFFF
