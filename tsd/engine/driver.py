"""The one loop that runs sans-IO machines: drain their outputs, then arm one timer for the earliest deadline.

Nothing else in the engine calls `on_deadline`. A machine that asks for a deadline in the past gets `now`, and a
wake-up handles at most `_ROUNDS` rounds, so that a broken machine cannot starve the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from tsd.base.clock import Clock
from tsd.base.machine import Deadline, earliest

log = logging.getLogger(__name__)

_ROUNDS = 64
_AFTER_FAULT_S = 1.0


class Driven(Protocol):
    """A machine together with what is done with its outputs."""

    def next_deadline(self) -> Deadline | None: ...

    def on_deadline(self, now: float) -> None: ...

    def take_outputs(self) -> list[Any]: ...


class Driver:
    """Runs any number of machines on the running loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._machines: list[tuple[Driven, Callable[[Any], None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at = float("inf")
        self._is_draining = False
        self._is_kick_due = False
        self._is_closed = False

    def add(self, machine: Driven, handle: Callable[[Any], None]) -> None:
        self._machines.append((machine, handle))

    def kick(self) -> None:
        """To be called after every input: handle all outputs, then re-arm the timer."""
        if self._is_draining or self._is_closed:
            return
        self._is_draining = True
        try:
            self._drain()
        finally:
            self._is_draining = False
            self._arm()

    def kick_soon(self) -> None:
        """As `kick`, once for everything that happens in this loop iteration."""
        if not self._is_kick_due:
            self._is_kick_due = True
            asyncio.get_running_loop().call_soon(self._on_kick_due)

    def _on_kick_due(self) -> None:
        self._is_kick_due = False
        self.kick()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drain(self) -> None:
        for _ in range(_ROUNDS):
            busy = False
            for machine, handle in self._machines:
                for output in machine.take_outputs():
                    busy = True
                    self._hand_over(handle, output)
            if not busy:
                return
        log.error("machines keep producing outputs; left for the next wake-up")

    @staticmethod
    def _hand_over(handle: Callable[[Any], None], output: Any) -> None:
        """A fault in one output costs that output, not those behind it."""
        try:
            handle(output)
        except Exception:
            log.exception("an output could not be handled: %s", type(output).__name__)

    def _arm(self, not_before_s: float = 0.0) -> None:
        deadline = earliest(*[machine.next_deadline() for machine, _ in self._machines])
        if deadline is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._armed_at = float("inf")
            return
        if self._timer is not None:
            if self._armed_at == deadline.at:
                return
            self._timer.cancel()
        self._armed_at = deadline.at
        delay_s = max(deadline.at - self._clock.now(), not_before_s)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # A timer may fire a little early against our clock; the deadline that armed it must still count as reached.
        now = max(self._armed_at, self._clock.now())
        self._armed_at = float("inf")
        self.run_deadlines(now)

    def run_deadlines(self, now: float) -> None:
        """Run every machine whose deadline has come; also called after a wake from suspend."""
        has_failed = False
        for machine, _ in self._machines:
            deadline = machine.next_deadline()
            if deadline is not None and deadline.at <= now:
                try:
                    machine.on_deadline(now)
                except Exception:
                    log.exception("a machine failed at its deadline")
                    has_failed = True
        self.kick()
        if has_failed and not self._is_closed:
            # The others go on, and the one that failed is not asked again at once for ever.
            self._armed_at = float("inf")
            self._arm(_AFTER_FAULT_S)
