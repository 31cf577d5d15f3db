"""Stamps of handshakes over restarts with clocks that go wrong."""

from __future__ import annotations

import pytest

from tsd.base.errors import StateError
from tsd.engine.path.stamps import STRIDE_NS, TAI64N_KEY, StampStore
from tsplatform.state_file import MemoryStore

NOW_NS = 1_790_000_000 * 10**9


def open_store(store: MemoryStore, wall_ns: int) -> StampStore:
    return StampStore(store, wall_ns, lambda err: None)


def test_one_write_an_hour_and_an_exact_one_at_the_end() -> None:
    store = MemoryStore()
    written: list[bytes] = []
    put = store.put
    store.put = lambda name, value: (written.append(value or b""), put(name, value))[1]  # type: ignore[method-assign]
    stamps = open_store(store, NOW_NS)
    for minute in range(130):
        stamps.source.stamp(NOW_NS + minute * 60 * 10**9)
        stamps.note_used()
    assert [int(value) for value in written] == [NOW_NS, NOW_NS + STRIDE_NS, NOW_NS + 2 * STRIDE_NS]
    stamps.save()
    stamps.save()
    assert len(written) == 4 and store.get(TAI64N_KEY) == str(NOW_NS + 129 * 60 * 10**9).encode()


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("wrong_s", [-10, -86400 * 365, 3600])
def test_w18_stamps_grow_over_any_number_of_restarts(wrong_s: int, is_clean: bool) -> None:
    store, last = MemoryStore(), b""
    for start in range(6):
        wall_ns = NOW_NS + (wrong_s * 10**9 if start % 2 else 0) + start * 10**9
        stamps = open_store(store, wall_ns)
        for step in range(20):
            stamp = stamps.source.stamp(wall_ns + step * 10**8)
            stamps.note_used()
            assert stamp > last, (start, step)
            last = stamp
        if is_clean:
            stamps.save()


def test_damaged_values_count_as_none_and_trouble_is_told() -> None:
    store = MemoryStore()
    store.put(TAI64N_KEY, b"\x40\x00 nonsense")
    told: list[Exception] = []
    stamps = StampStore(store, NOW_NS, told.append)
    assert stamps.source.last_ns == 0

    def fail(name: str, value: bytes | None) -> None:
        raise StateError("disk full")

    store.put = fail  # type: ignore[method-assign]
    stamps.source.stamp(NOW_NS)
    stamps.note_used()
    assert [str(err) for err in told] == ["disk full"]
