"""Work that must be done in order and may be long: generators that pause, so that packets are not kept waiting.

A job that does not pause is done when `submit` returns. One that pauses goes on by and by on the running loop, and what
is submitted meanwhile waits for its end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from tsd.base.clock import Clock

log = logging.getLogger(__name__)

Steps = Generator[None, None, None]

SLICE_S = 0.004


class Jobs:
    def __init__(self, clock: Clock, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._clock = clock
        self._spawn = spawn
        self._waiting: deque[Steps] = deque()
        self.is_busy = False

    def submit(self, job: Steps) -> None:
        """Raises what the job raises before its first pause; later failures are logged."""
        self._waiting.append(job)
        if self.is_busy:
            return
        self.is_busy = True
        try:
            self.is_busy = not self._advance()
        except BaseException:
            self.is_busy = False
            raise
        if self.is_busy:
            self._spawn(self._work_off())

    def clear(self) -> None:
        """Forget everything, also the rest of a job that has begun."""
        self._waiting.clear()

    def _advance(self) -> bool:
        """Work until the next pause (False), or until nothing is left."""
        while self._waiting:
            job = self._waiting[0]
            try:
                next(job)
                return False
            except BaseException as end:
                if self._waiting and self._waiting[0] is job:
                    self._waiting.popleft()
                if not isinstance(end, StopIteration):
                    raise
        return True

    async def _work_off(self) -> None:
        """Without garbage collection: it would walk all that the job makes and find nothing, and not only once."""
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            while self.is_busy:
                self._work_a_while()
                await asyncio.sleep(0)
        finally:
            if was_collecting:
                gc.freeze()
                gc.enable()

    def _work_a_while(self) -> None:
        started = self._clock.now()
        try:
            while self.is_busy and self._clock.now() - started < SLICE_S:
                self.is_busy = not self._advance()
        except Exception:
            log.exception("a change could not be worked in")
