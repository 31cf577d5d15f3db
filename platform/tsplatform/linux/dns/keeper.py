"""What lives as long as names are looked after: a thread with its loop, the bus, watches, timers, fights counted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from tsd.base.errors import HullError
from tsd.base.tasks import Tasks
from tsplatform.linux.dns.bus import NETWORK_MANAGER, RESOLVED, SystemBus
from tsplatform.linux.dns.claim import NamesClaim
from tsplatform.linux.dns.watch import FileWatch

log = logging.getLogger(__name__)

REVERT_S = 8.0
LOOK_S, SLOW_LOOK_S = 3.0, 15.0
"""Between looks, for hosts that do not tell us of changes; resolved does."""
SETTLE_S = 0.3
RETRY_S = 5.0
FIGHT_LIMIT = 10
"""So many rewrites by others are undone at once, then one every `TRUCE_S`."""
TRUCE_S = 30.0


class NamesThread:
    """A loop in a thread of its own. Not uvloop: it must take subprocesses and odd descriptors anywhere."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="names", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(REVERT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


class Fight:
    """Rewrites of others, counted: many at once, then few."""

    def __init__(self) -> None:
        self._count = 0
        self._last_s = -TRUCE_S

    def may_go_on(self, now: float) -> bool:
        if now - self._last_s > 2 * TRUCE_S:
            self._count = 0
        if self._count >= FIGHT_LIMIT and now - self._last_s < TRUCE_S:
            return False
        self._count += 1
        self._last_s = now
        return True

    def is_over(self, now: float) -> bool:
        return self._count < FIGHT_LIMIT or now - self._last_s > 2 * TRUCE_S


class Keeper:
    """What lives as long as the thread: bus, watches, timers. Made on its loop."""

    def __init__(
        self, look: Callable[[], Coroutine[Any, Any, None]], again: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._look = look
        self._again = again
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.lock = asyncio.Lock()
        self.fight = Fight()
        self.rival = ""
        self.claim: NamesClaim | None = None
        self.bus = SystemBus()
        self.bus.on_owner = lambda name: self._later(self._again)
        self.bus.on_lost = lambda: self._later(self._again, RETRY_S)
        self.bus.on_properties = lambda: self._later(self._look)
        self._files = FileWatch(lambda: self._later(self._look, 0.0))
        self._timers: dict[Any, asyncio.TimerHandle] = {}
        self._tasks = Tasks(log)
        self._is_bus_watched = False
        self._pause_s = LOOK_S
        self._pulse = self._loop.call_later(LOOK_S, self._beat)

    async def watch_bus(self) -> None:
        if self.bus.is_there and not self._is_bus_watched:
            with contextlib.suppress(HullError):
                await self.bus.watch((RESOLVED, NETWORK_MANAGER))
                self._is_bus_watched = True

    def watch_files(self, paths: Sequence[Path]) -> None:
        self._files.set(paths)

    def set_pace(self, *, is_told: bool) -> None:
        """`is_told`: changes are heard of, so that looking is only for safety."""
        self._pause_s = SLOW_LOOK_S if is_told else LOOK_S

    def retry(self) -> None:
        self._later(self._again, RETRY_S)

    def close(self) -> None:
        self._pulse.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._tasks.cancel()
        self._files.close()
        self.bus.close()

    def _beat(self) -> None:
        self._pulse = self._loop.call_later(self._pause_s, self._beat)
        self._later(self._look, 0.0)

    def _later(self, work: Callable[[], Coroutine[Any, Any, None]], delay_s: float = SETTLE_S) -> None:
        """Once, however often it is asked for meanwhile; at the earliest of the times asked for."""
        waiting = self._timers.get(work)
        if waiting is None or waiting.when() > self._loop.time() + delay_s:
            if waiting is not None:
                waiting.cancel()
            self._timers[work] = self._loop.call_later(delay_s, self._start, work)

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._timers.pop(work, None)
        self._tasks.spawn(work())
