"""Clocks, injected everywhere: protocol rooms never read one themselves."""

import time
from typing import Protocol


class Clock(Protocol):
    """`now` drives timers; `wall_ns` is only for TAI64N, expiry and what people read."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never goes back and counts time spent suspended."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch; may jump."""


class SystemClock:
    """The machine's clocks.

    CLOCK_BOOTTIME and not `time.monotonic()`: the latter stops in suspend, so sessions would outlive a sleep.
    """

    def __init__(self) -> None:
        self._clock_id: int | None = getattr(time, "CLOCK_BOOTTIME", None)

    def now(self) -> float:
        return time.monotonic() if self._clock_id is None else time.clock_gettime(self._clock_id)

    def wall_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """A clock that a test turns by hand."""

    def __init__(self, now: float = 1000.0, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now = now
        self._wall_ns = wall_ns

    def now(self) -> float:
        return self._now

    def wall_ns(self) -> int:
        return self._wall_ns

    def advance(self, seconds: float) -> float:
        self._now += seconds
        self._wall_ns += int(seconds * 1e9)
        return self._now
