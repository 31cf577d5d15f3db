"""Background work does not fail in silence, and ends with its owner."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tsd.base.tasks import Tasks


async def test_a_failure_is_logged_with_its_name_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def look_for_relays() -> None:
        raise ValueError("no map")

    tasks = Tasks(logging.getLogger("tsd.test"))
    await asyncio.gather(tasks.spawn(look_for_relays()), return_exceptions=True)
    await asyncio.sleep(0)
    assert len(tasks) == 0
    [record] = caplog.records
    assert "look_for_relays" in record.getMessage() and "no map" in record.getMessage() and record.exc_info


async def test_the_end_of_the_owner_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks(logging.getLogger("tsd.test"))
    task = tasks.spawn(asyncio.sleep(60))
    done = tasks.spawn(asyncio.sleep(0, "result"), asyncio.get_running_loop())
    assert list(tasks) == [task, done] and await done == "result"
    tasks.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert task.cancelled() and not caplog.records and len(tasks) == 0
