"""Hostile bytes never raise out of the rooms that face the underlay, and what we encode decodes to itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsd.base.addr import AddrPort, decode_ip16
from tsd.derp.frames import FrameSplitter, frame, send_packets
from tsd.magicsock.choice import Quality, is_better
from tsd.stun.messages import decode_reply, encode_reply

_PATH = Path(__file__).parent.parent / "fuzz" / "targets" / "underlay.py"
_SPEC = importlib.util.spec_from_file_location("underlay_targets", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
TARGETS = [getattr(_MODULE, name) for name in sorted(vars(_MODULE)) if name.startswith("fuzz_")]

ADDRESSES = st.builds(
    lambda raw, port: AddrPort(decode_ip16(raw), port), st.binary(min_size=16, max_size=16), st.integers(0, 65535)
)
FRAMES = st.lists(
    st.builds(lambda kind, body: frame(kind, body), st.integers(0, 255), st.binary(max_size=80)), max_size=6
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.__name__)
@settings(max_examples=60, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=300), FRAMES.map(b"".join), st.binary(max_size=120).map(lambda b: b"TS\xf0\x9f\x92\xac" + b)
    )
)
def test_target(target, data: bytes) -> None:
    target(data)


@given(ADDRESSES, st.binary(min_size=12, max_size=12))
def test_stun_round_trip(address: AddrPort, txid: bytes) -> None:
    assert decode_reply(encode_reply(txid, address)) == (txid, address)


@given(st.binary(min_size=1, max_size=400), st.integers(1, 90))
def test_batches_are_framed_whole(datagrams: bytes, size: int) -> None:
    raw = send_packets(bytes(32), datagrams, size)
    got = [f.payload[32:] for f in FrameSplitter().feed(raw)]
    assert got == [datagrams[i : i + size] for i in range(0, len(datagrams), size)]


@given(ADDRESSES, ADDRESSES, st.integers(0, 10**9), st.integers(0, 10**9))
def test_two_addresses_are_never_both_better(a: AddrPort, b: AddrPort, x: int, y: int) -> None:
    one, two = Quality(a, x), Quality(b, y)
    assert not (is_better(one, two) and is_better(two, one))
