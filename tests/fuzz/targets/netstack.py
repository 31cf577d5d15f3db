"""Fuzz targets of the userspace stack and its proxies: foreign bytes never raise, tables stay bounded."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.hull import Frame
from tsd.netstack.fragments import Reassembler
from tsd.netstack.stack import Stack
from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.segment import Header, parse_segment, syn_options, timestamp_option
from tsd.packet.checksum import transport_checksum
from tsplatform.userspace.proxies.http import BadMessage, Head, Source, split_authority
from tsplatform.userspace.proxies.socks5 import parse_datagram

_OWN = ip_address("100.64.0.2")
_PEER = ip_address("100.64.0.1")


def _pieces(data: bytes) -> list[bytes]:
    """Length-prefixed (two bytes) pieces, the last one whatever is left."""
    out = []
    while len(data) > 2 and len(out) < 64:
        size = int.from_bytes(data[:2], "big") % 1500
        out.append(data[2 : 2 + size])
        data = data[2 + size :]
    return out


def fuzz_netstack_receive(data: bytes) -> None:
    """Whole packets, as they come."""
    stack = Stack([_OWN, ip_address("fd7a::2")], 1280, SeededEntropy(1))
    stack.set_subnets([ip_network("10.0.0.0/8")])
    stack.forwards = True
    stack.listen(None, 80, None)
    now = 10.0
    for piece in _pieces(data):
        stack.receive([Frame(piece, 1228 if piece[:1] == b"\x45" and piece[-1:] == b"\x01" else 0)], now)
        stack.take_events()
        stack.take_frames()
        now += 0.1
        stack.on_deadline(now)


def fuzz_netstack_segments(data: bytes) -> None:
    """TCP headers and payloads of one flow, with good checksums: three bytes steer flags and sequence numbers."""
    stack = Stack([_OWN], 1280, SeededEntropy(1))
    stack.listen(None, 80, None)
    header = Header(_PEER.packed, _OWN.packed, 5000, 80, 0)
    stack.receive([Frame(header.build(99, 0, c.SYN, 9000, syn_options(1240, 7, True, (5, 0)), [], 0, 0))], 1.0)
    syn_ack = stack.take_frames()[0].packet
    answer = parse_segment(syn_ack, 20, len(syn_ack))
    assert answer is not None
    now = 1.0
    stack.receive([Frame(header.build(100, answer.seq + 1, c.ACK, 9000, timestamp_option(6, 1), [], 0, 0))], now)
    stack.take_frames()
    connection = next(iter(stack._connections.values()), None)
    if connection is not None:
        connection.write(bytes(20_000))
        stack.touch(connection)
        stack.flush(now)
    for piece in _pieces(data):
        if len(piece) < 4:
            continue
        flags, seq, ack, extra = piece[0], piece[1], piece[2], piece[3] % 11 * 4
        options = piece[4 : 4 + extra]
        options += bytes(-len(options) % 4)
        payload = piece[4 + extra :]
        packet = header.build(
            100 + (seq - 128) * (1 if seq & 1 else 977), answer.seq + 1 + (ack - 64) * (1 if ack & 1 else 501),
            flags & 0x3F, 9000, options, [memoryview(payload)] if payload else [], len(payload), 0,
        )  # fmt: skip
        now += 0.05 * (flags & 3)
        stack.on_deadline(now)
        stack.receive([Frame(packet)], now)
        stack.take_events()
        for frame in stack.take_frames():
            assert len(frame.packet) <= (65535 if frame.segment_bytes else 1280)
        if connection is not None and seq & 4:
            connection.read(100, now)
            stack.touch(connection)
            stack.flush(now)
    assert stack.connection_count <= 2


def fuzz_netstack_fragments(data: bytes) -> None:
    reassembler = Reassembler()
    for n, piece in enumerate(_pieces(data)):
        if len(piece) >= 20:
            reassembler.add(piece, n * 0.5)


def fuzz_netstack_udp(data: bytes) -> None:
    """UDP and ICMP bodies with good checksums."""
    stack = Stack([_OWN], 1280, SeededEntropy(1))
    if len(data) < 8:
        return
    body = bytearray(data[:1200])
    body[6:8] = b"\0\0"
    body[6:8] = transport_checksum(_PEER.packed, _OWN.packed, 17, bytes(body)).to_bytes(2, "big")
    head = bytes((0x45, 0)) + (20 + len(body)).to_bytes(2, "big") + bytes((0, 0, 0, 0, 64, 17, 0, 0))
    head += _PEER.packed + _OWN.packed
    total = -(int.from_bytes(head, "big")) % 65535
    stack.receive([Frame(head[:10] + total.to_bytes(2, "big") + head[12:] + bytes(body))], 1.0)
    stack.take_events()


class _Fed:
    """A stream that gives prepared bytes and swallows what is written."""

    local = remote = AddrPort(_OWN, 1)

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, limit: int) -> bytes:
        taken, self._data = self._data[: min(limit, 7)], self._data[7:] if limit >= 7 else self._data[limit:]
        return taken

    async def write(self, data: bytes | memoryview) -> None: ...

    async def write_eof(self) -> None: ...

    def abort(self) -> None: ...

    async def close(self) -> None: ...


def fuzz_http_proxy_head(data: bytes) -> None:
    async def run() -> None:
        source = Source(_Fed(data))
        try:
            raw = await source.read_head()
            if raw:
                head = Head(raw)
                split_authority(head.line[1], 80)
                framing = head.body_framing()
                if framing is not None:
                    await source.copy_body(framing, _Fed(b""))
        except BadMessage:
            return

    coroutine = run()
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("waits for something that is not its stream")


def fuzz_socks5_datagram(data: bytes) -> None:
    parsed = parse_datagram(data)
    assert parsed is None or (isinstance(parsed[0], str) and 0 <= parsed[1] < 65536)


FUZZ_TARGETS = {
    "netstack_receive": fuzz_netstack_receive,
    "netstack_segments": fuzz_netstack_segments,
    "netstack_fragments": fuzz_netstack_fragments,
    "netstack_udp": fuzz_netstack_udp,
    "http_proxy_head": fuzz_http_proxy_head,
    "socks5_datagram": fuzz_socks5_datagram,
}
