"""Hypothesis: no bytes make the stack or the proxies' parsers raise; the reassembly agrees with a simple model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.targets.netstack import FUZZ_TARGETS
from tsd.netstack.tcp.buffers import ReceiveBuffer, SendBuffer
from tsd.netstack.tcp.scoreboard import Scoreboard

CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus"
PIECES = st.lists(st.binary(max_size=200), max_size=12).map(
    lambda parts: b"".join(len(p).to_bytes(2, "big") + p for p in parts)
)


@pytest.mark.parametrize("name", sorted(FUZZ_TARGETS))
def test_corpus_is_survived(name: str) -> None:
    for path in sorted((CORPUS / name).iterdir()):
        FUZZ_TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", sorted(FUZZ_TARGETS))
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.one_of(PIECES, st.binary(max_size=400)))
def test_never_raises(name: str, data: bytes) -> None:
    FUZZ_TARGETS[name](data)


@pytest.mark.parametrize("name", ["netstack_receive", "netstack_segments", "netstack_fragments"])
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_spoiled_corpus_never_raises(name: str, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted((CORPUS / name).iterdir())))
    spoiled = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    FUZZ_TARGETS[name](bytes(spoiled))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), max_size=40), st.integers(1, 50))
def test_receive_buffer_agrees_with_a_set_of_bytes(pieces: list[tuple[int, int]], limit: int) -> None:
    stream = bytes(n * 7 & 255 for n in range(400))
    buffer = ReceiveBuffer(0)
    have: set[int] = set()
    got = b""
    for start, size in pieces:
        buffer.insert(start, memoryview(stream)[start : start + size])
        have.update(range(start, start + size))
        edge = next(n for n in range(500) if n not in have)
        assert buffer.next == edge
        assert buffer.early_bytes == sum(1 for n in have if n > edge)
        starts = [(run.start, run.end) for run in buffer.runs]
        assert starts == sorted(starts) and all(a[1] < b[0] for a, b in pairwise(starts))
        assert {n for a, b in starts for n in range(a, b)} == {n for n in have if n > edge}
        got += buffer.read(limit)
    got += buffer.read(1000)
    assert got == stream[: buffer.next]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=6000), st.integers(0, 3000)), max_size=20), st.data())
def test_send_buffer_agrees_with_bytes(steps: list[tuple[bytes, int]], data: st.DataObject) -> None:
    buffer = SendBuffer(100)
    model = b""
    acked = 0
    for written, ack in steps:
        if written:
            buffer.append(written)
            model += written
        acked = min(acked + ack, len(model))
        buffer.acknowledge(100 + acked)
        assert len(buffer) == len(model) - acked
        if acked < len(model):
            start = data.draw(st.integers(acked, len(model) - 1))
            end = data.draw(st.integers(start + 1, len(model)))
            assert b"".join(buffer.slices(100 + start, 100 + end)) == model[start:end]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 100), st.integers(0, 2)), max_size=25),
)
def test_scoreboard_counts_match_its_records(sizes: list[int], steps: list[tuple[int, int, int]]) -> None:
    board = Scoreboard()
    at = 0
    for n, size in enumerate(sizes):
        board.add(at, at + size, n * 0.01, n)
        at += size
    una = 0
    delivered = 0
    for n, (start, size, kind) in enumerate(steps):
        now = 1.0 + n * 0.01
        if kind == 0 and start < at:
            delivered += board.sack(max(start, una), min(start + size, at), now, 0)
        elif kind == 1 and una < start <= at:
            delivered += board.acknowledge(start, now, 0)
            una = start
        else:
            board.detect_losses(now, 0.05, False, 10)
            i = board.first_lost()
            if i >= 0:
                board.note_retransmitted(i, now, n)
        records = board.records
        assert board.sacked_bytes == sum(r.end - r.seq for r in records if r.is_sacked)
        assert board.lost_bytes == sum(r.end - r.seq for r in records if r.is_lost)
        assert not records or (records[0].seq == una and records[-1].end == at)
        assert all(a.end == b.seq for a, b in pairwise(records))
        assert delivered == una + board.sacked_bytes
