"""An event loop in virtual time: when nothing is ready, the clock jumps to the next timer.

Hours of timers run in seconds and always in the same order. Real sockets and executor threads must not be used on it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is armed: the simulation would wait for ever."""


class Spinning(RuntimeError):
    """Something keeps the loop busy without letting time pass."""


TURNS_MAX = 100_000


class _JumpSelector(selectors.DefaultSelector):
    """`select(timeout)` does not wait: it moves the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.on_idle: Callable[[float | None], None] = lambda timeout: None
        self.on_spin: Callable[[], None] = lambda: None
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns += 1
        if timeout is None or timeout > 0:
            ready = super().select(0)
            if not ready:
                self._turns = 0
                self.on_idle(timeout)
            return ready
        if self._turns > TURNS_MAX:
            self.on_spin()
        return [] if self._turns % 64 else super().select(0)


class JumpLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 1000.0 and moves only when everybody waits."""

    def __init__(self) -> None:
        self._virtual_now = 1000.0
        selector = _JumpSelector()
        super().__init__(selector)
        selector.on_idle = self._jump
        selector.on_spin = self._complain

    def time(self) -> float:
        return self._virtual_now

    def _complain(self) -> None:
        handles = [*list(self._ready)[:3], *self._scheduled[:3]]  # type: ignore[attr-defined]
        raise Spinning(f"{TURNS_MAX} turns at {self._virtual_now}; next: {[repr(one)[:300] for one in handles]}")

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Deadlock("nothing ready and no timer armed")
        first = self._scheduled[0].when() if self._scheduled else 0.0  # type: ignore[attr-defined]
        self._virtual_now = max(self._virtual_now + timeout, first)


class LoopClock:
    """The `tsd.base.clock.Clock` of a jump loop."""

    WALL_START_NS = 1_790_000_000_000_000_000

    def __init__(self, loop: asyncio.AbstractEventLoop, offset_s: float = 0.0) -> None:
        self._loop = loop
        self._origin = loop.time()
        self.offset_s = offset_s

    def now(self) -> float:
        return self._loop.time()

    def wall_ns(self) -> int:
        return self.WALL_START_NS + int((self._loop.time() - self._origin + self.offset_s) * 1e9)


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function to its end in virtual time."""
    with asyncio.Runner(loop_factory=JumpLoop) as runner:
        return runner.run(main())
