"""The Python core and its parts against slow models."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network

from hypothesis import given, settings
from hypothesis import strategies as st

from tsd.base.addr import IPPrefix
from tsd.dataplane.allowedips import AllowedIps
from tsd.dataplane.classify import Kind, classify
from tsd.dataplane.reference import ReferenceCore
from tsd.dataplane.replay import WINDOW, ReplayWindow
from tsd.dataplane.segments import Coalescer, split
from tsd.hull import Frame
from tsd.packet import build
from tsd.packet.checksum import adjust, internet_checksum, is_transport_checksum_valid, ones_sum
from tsd.packet.constants import TCP, TCP_ACK, TCP_FIN, TCP_PSH
from tsd.packet.parse import parse
from tsd.wireguard.tai64n import Tai64nSource

A4, B4 = bytes([100, 64, 0, 1]), bytes([100, 64, 0, 2])
A6, B6 = IPv6Address("fd7a::1").packed, IPv6Address("fd7a::2").packed


def prefix_of(address: int, length: int, bits: int) -> IPPrefix:
    high = address >> (bits - length) << (bits - length)
    return ip_network((high.to_bytes(bits // 8, "big"), length))


# Few distinct addresses, so that prefixes nest and collide.
small = st.integers(0, 15).map(lambda n: n << 28 | n)
prefixes4 = st.builds(lambda address, length: prefix_of(address, length, 32), small, st.integers(0, 32))
prefixes6 = st.builds(
    lambda address, length: prefix_of(address << 96, length, 128), small, st.sampled_from([0, 1, 3, 32, 64, 128])
)
commands = st.lists(st.tuples(st.integers(1, 4), st.lists(prefixes4 | prefixes6, max_size=5)), max_size=12)


@given(commands, st.lists(small, min_size=1, max_size=8))
def test_allowed_ips_is_a_longest_prefix_list(script: list[tuple[int, list[IPPrefix]]], addresses: list[int]) -> None:
    table = AllowedIps()
    owners: dict[IPPrefix, int] = {}
    for peer, prefixes in script:
        table.replace(peer, prefixes)
        owners = {prefix: owner for prefix, owner in owners.items() if owner != peer}
        owners.update(dict.fromkeys(prefixes, peer))
        for number in addresses:
            for address in (IPv4Address(number), IPv6Address(number << 96)):
                matching = [prefix for prefix in owners if prefix.version == address.version and address in prefix]
                wanted = owners[max(matching, key=lambda prefix: prefix.prefixlen)] if matching else None
                assert table.lookup(address.packed) == wanted


@given(st.lists(st.integers(0, 3 * WINDOW), max_size=200), st.integers(0, 1 << 62))
def test_replay_window_is_a_set_with_an_edge(offsets: list[int], base: int) -> None:
    window = ReplayWindow()
    seen: set[int] = set()
    greatest = 0
    for offset in offsets:
        counter = base + offset
        is_new = counter not in seen and greatest - counter <= WINDOW
        assert window.accept(counter) == is_new
        if is_new:
            seen.add(counter)
            greatest = max(greatest, counter)


@given(st.binary(max_size=2000))
def test_checksum_is_the_word_loop(data: bytes) -> None:
    padded = data + bytes(len(data) & 1)
    total = sum(int.from_bytes(padded[at : at + 2], "big") for at in range(0, len(padded), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    assert ones_sum(data) == total
    if len(data) >= 4:
        word = int.from_bytes(data[:2], "big")
        changed = b"\x12\x34" + data[2:]
        assert adjust(internet_checksum(data), word, 0x1234) % 0xFFFF == internet_checksum(changed) % 0xFFFF


@given(st.binary(max_size=400))
def test_parse_and_classify_never_raise(data: bytes) -> None:
    packet = parse(data)
    assert parse(memoryview(data))[1:] == packet[1:]
    assert 0 <= packet.transport_offset <= max(packet.payload_offset, 0)
    assert isinstance(classify(data), Kind)


tcp_bodies = st.fixed_dictionaries(
    {
        "sequence": st.integers(0, 0xFFFFFFFF),
        "acknowledgement": st.integers(0, 0xFFFFFFFF),
        "flags": st.sampled_from([TCP_ACK, TCP_ACK | TCP_PSH, TCP_ACK | TCP_FIN]),
        "options": st.sampled_from([b"", b"\1" * 12, b"\1" * 40]),
        "payload": st.binary(min_size=0, max_size=5000),
    }
)


@given(tcp_bodies, st.integers(1, 1400), st.booleans())
def test_split_pieces_are_valid_and_add_up(body: dict, unit: int, is_v6: bool) -> None:  # type: ignore[type-arg]
    src, dst = (A6, B6) if is_v6 else (A4, B4)
    whole = build.tcp_packet(src, 1, dst, 2, **body)
    pieces = [parse(piece) for piece in split(whole, unit)]
    assert b"".join(piece.payload for piece in pieces) == body["payload"]
    for index, piece in enumerate(pieces):
        assert len(piece.payload) <= unit
        assert is_transport_checksum_valid(src, dst, TCP, piece.transport)
        sequence = int.from_bytes(piece.transport[4:8], "big")
        assert sequence == (body["sequence"] + index * unit) & 0xFFFFFFFF
        is_last = index == len(pieces) - 1
        assert piece.tcp_flags == (body["flags"] if is_last else TCP_ACK)
    if body["flags"] & TCP_FIN == 0:
        coalescer = Coalescer()
        for piece in pieces:
            coalescer.add(1, bytes(piece.packet))
        merged = [parse(packet) for _, packet, _ in coalescer.take()]
        assert len(merged) == 1 and merged[0].payload == body["payload"]
        assert merged[0].tcp_flags == body["flags"]


segment_flags = st.sampled_from([TCP_ACK, TCP_ACK | TCP_PSH, TCP_ACK | TCP_FIN])
segments = st.tuples(st.integers(0, 1), st.integers(0, 8), segment_flags, st.integers(0, 3))


@given(st.lists(segments, max_size=30))
def test_coalescing_neither_loses_nor_reorders(script: list[tuple[int, int, int, int]]) -> None:
    """Within a flow, the byte stream that leaves is the one that came."""
    coalescer = Coalescer()
    came: dict[int, list[tuple[int, bytes]]] = {0: [], 1: []}
    for flow, position, flags, size in script:
        payload = bytes([position]) * (size * 10)
        coalescer.add(
            1,
            build.tcp_packet(A4, flow, B4, 9, sequence=position * 10, acknowledgement=1, flags=flags, payload=payload),
        )
        came[flow] += [(position * 10 + at, byte) for at, byte in enumerate(payload)]  # type: ignore[misc]
    left: dict[int, list[tuple[int, bytes]]] = {0: [], 1: []}
    for _, raw, unit in coalescer.take():
        packet = parse(raw)
        assert unit == 0 or len(packet.payload) > unit
        sequence = int.from_bytes(packet.transport[4:8], "big")
        left[packet.sport] += [(sequence + at, byte) for at, byte in enumerate(packet.payload)]  # type: ignore[misc]
    assert left == came


frames = st.lists(st.tuples(st.booleans(), st.integers(0, 1252)), max_size=60)


@settings(max_examples=50, deadline=None)
@given(frames, st.randoms(use_true_random=False))
def test_sealed_frames_open_again_in_any_order(script: list[tuple[bool, int]], random) -> None:  # type: ignore[no-untyped-def]
    a, b = ReferenceCore(), ReferenceCore()
    for core, local, remote, keys in ((a, 1, 2, (b"a" * 32, b"b" * 32)), (b, 2, 1, (b"b" * 32, b"a" * 32))):
        core.add_peer(1)
        core.set_allowed_ips(1, [ip_network("0.0.0.0/0"), ip_network("::/0")])
        core.install_session(1, local, remote, *keys, core is a, 0.0)
    packets = [build.udp_packet(*((A6, 1, B6) if is_v6 else (A4, 1, B4)), 2, bytes(size)) for is_v6, size in script]
    datagrams = []
    for sealed in a.seal([Frame(packet) for packet in packets], 1.0).sealed:
        unit = sealed.datagram_bytes
        assert sealed.count == -(-len(sealed.datagrams) // unit) <= 64 and len(sealed.datagrams) <= 65000
        datagrams += [sealed.datagrams[at : at + unit] for at in range(0, len(sealed.datagrams), unit)]
    random.shuffle(datagrams)
    opened = [item.frame.packet for datagram in datagrams for item in b.open(datagram, 0, 1.0).opened]
    assert sorted(opened) == sorted(packets) and not b.drops


@given(st.lists(st.integers(-(10**18), 2 * 10**18), max_size=50))
def test_tai64n_only_grows(walls: list[int]) -> None:
    source = Tai64nSource()
    stamps = [source.stamp(wall) for wall in walls]
    assert all(earlier < later for earlier, later in zip(stamps, stamps[1:], strict=False))  # noqa: RUF007
