"""Background work of one owner: kept alive while it runs, cancelled together, and never failing in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any, TypeVar

from tsd.base.log import fields

T = TypeVar("T")


class Tasks:
    """`log` is the owner's; what fails there is a bug, and logged with its traceback."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._running: dict[asyncio.Task[Any], None] = {}

    def spawn(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Task[T]:
        """On the running loop, or on the one given."""
        task = (loop or asyncio.get_running_loop()).create_task(work)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        for task in list(self._running):
            task.cancel()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._running))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            name = getattr(task.get_coro(), "__qualname__", task.get_name())
            self._log.error(fields("background work failed", what=name, reason=repr(error)), exc_info=error)


async def until_one_ends(*works: Awaitable[object]) -> None:
    """Side by side until one ends, which ends the others; its exception is raised as it is, not as a group."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
