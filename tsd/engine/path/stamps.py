"""TAI64N stamps that never go back, across restarts too, with few writes to the state.

The stamp is written at the first handshake, then once an hour, and exactly at a clean stop. When the clock stands
before the written stamp, an hour is jumped over: what may have been given out after the last write.
"""

from __future__ import annotations

from collections.abc import Callable

from tsd.base.addr import parse_number
from tsd.base.errors import TsdError
from tsd.hull import StateStore
from tsd.wireguard.tai64n import Tai64nSource

TAI64N_KEY = "_tsd-tai64n"
STRIDE_NS = 3600 * 10**9


class StampStore:
    """One per engine; `on_trouble` hears of writes that failed."""

    def __init__(self, store: StateStore, wall_ns: int, on_trouble: Callable[[TsdError], None]) -> None:
        self._store = store
        self._on_trouble = on_trouble
        raw = store.get(TAI64N_KEY) or b""
        self._stored_ns = parse_number(raw.decode("latin-1"), (1 << 63) - 1) or 0
        is_behind = wall_ns < self._stored_ns
        self.source = Tai64nSource(self._stored_ns + STRIDE_NS if is_behind else self._stored_ns)

    def note_used(self) -> None:
        """A stamp was given out; written at most once an hour, to spare flash memory."""
        if not self._stored_ns or self.source.last_ns >= self._stored_ns + STRIDE_NS:
            self.save()

    def save(self) -> None:
        if self.source.last_ns <= self._stored_ns:
            return
        self._stored_ns = self.source.last_ns
        try:
            self._store.put(TAI64N_KEY, str(self._stored_ns).encode())
        except TsdError as err:
            self._on_trouble(err)
