"""Bundles of datagrams in relay packets: what goes in comes out, and strangers' bytes are left as they are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tsd.dataplane.classify import Kind, classify
from tsd.derp import frames
from tsd.derp.bundle import DATAGRAMS, bundles, unbundle
from tsd.engine.path.datapath import _RUN_PACKETS, _runs


def cut(data: bytes | memoryview, size: int) -> list[bytes]:
    return [bytes(data[at : at + size]) for at in range(0, len(data), size)]


@settings(max_examples=60)
@given(st.integers(1, 40000), st.integers(1, 130), st.integers(0, 40000))
def test_round_trip(size: int, count: int, tail: int) -> None:
    datagrams = (b"\x04\0\0\0" + bytes(range(256)) * 300)[:65000]
    datagrams = datagrams[: min(size * count, 64000) + min(tail, size - 1)]
    packets = bundles(datagrams, size)
    found: list[bytes] = []
    for packet in packets:
        assert len(packet) <= frames.MAX_PACKET_BYTES
        piece, unit = unbundle(packet) or (packet, len(packet))
        found += cut(piece, unit)
        assert len(cut(piece, unit)) <= DATAGRAMS
    assert found == cut(datagrams, size)


def test_single_datagrams_stay_as_they_are() -> None:
    assert bundles(b"abc", 3) == [b"abc"] and bundles(b"abc", 0) == [b"abc"] and bundles(b"", 0) == []
    assert bundles(bytes(99), 49)[0][6:] == bytes(99)
    assert [len(packet) for packet in bundles(bytes(16 * 40) + b"x", 40)] == [646, 1]
    assert bundles(bytes(20), 10) == [bytes(10), bytes(10)]


def test_no_other_node_takes_a_bundle_for_something_else() -> None:
    for packet in bundles(bytes(4000), 1000):
        assert classify(packet) is Kind.UNKNOWN_TYPE


@given(st.binary(max_size=60))
def test_broken_bundles_never_raise(rest: bytes) -> None:
    found = unbundle(b"tsd\x01" + rest)
    assert found is None or (found[1] >= 32 and len(found[0]) > 0)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([64, 700, 1312]), st.integers(1, 40), st.integers(0, 699))))
def test_runs_keep_order_and_never_hide_a_short_one_inside(batches: list[tuple[bool, int, int, int]]) -> None:
    packets: list[bytes] = []
    for number, (bundled, size, count, tail) in enumerate(batches):
        datagrams = bytes([number % 250]) * (size * count + min(tail, size - 1))
        packets += bundles(datagrams, size) if bundled else cut(datagrams, size)
    wanted: list[bytes] = []
    for packet in packets:
        piece, unit = unbundle(packet) or (packet, len(packet))
        wanted += cut(piece, unit)
    found: list[bytes] = []
    for run, size in _runs(packets):
        assert len(cut(b"".join(run), size)) <= max(_RUN_PACKETS, DATAGRAMS)
        found += cut(b"".join(run), size)
    assert found == wanted
