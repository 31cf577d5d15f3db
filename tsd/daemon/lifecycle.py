"""From opened state to exit code: signals, systemd, and one service in between.

The service itself (engine, hull, LocalAPI) is put together in tsd.daemon.compose; here nothing knows what it is made
of. SIGTERM and SIGINT stop it cleanly (exit 0), a second one at once (exit 1), SIGHUP reloads the configuration file
and makes the hull look again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from tsd.base.errors import TsdError
from tsd.base.tasks import until_one_ends
from tsd.daemon.flags import Settings
from tsd.daemon.logsetup import LogTap
from tsd.daemon.notify import Notifier
from tsd.daemon.statefiles import OpenedState

log = logging.getLogger(__name__)

STOP_LIMIT_S = 10.0


class Service(Protocol):
    """What `compose.build` returns."""

    on_status: Callable[[str], None] | None
    """Called with a line for `systemctl status` whenever the state changes."""

    async def start(self) -> None:
        """Returns when the LocalAPI answers. Raises TsdError."""

    async def wait(self) -> None:
        """Returns when the service was asked to end by itself (LocalAPI shutdown); raises when it broke down."""

    async def reload(self) -> None:
        """Read the configuration file again, and compare the host with what it should be. Raises TsdError."""

    async def stop(self) -> None:
        """Undo everything; idempotent."""


Build = Callable[[Settings, OpenedState, LogTap], Awaitable[Service]]


async def run(settings: Settings, state: OpenedState, tap: LogTap, build: Build | None = None) -> int:
    """Serve until told to stop; the exit code. The caller closes `state`."""
    if build is not None:
        return await _run(settings, state, tap, build)
    gc.disable()  # nothing that is loaded now ever becomes garbage
    try:
        return await _run(settings, state, tap, _compose(), _watch_new_garbage_only)
    finally:
        gc.enable()


def _watch_new_garbage_only() -> None:
    """From now on only what is made while serving is looked at: a full pass over all code would stop packets."""
    gc.freeze()
    gc.enable()


def _compose() -> Build:
    chosen: Build = importlib.import_module("tsd.daemon.compose").build
    return chosen


async def _run(
    settings: Settings, state: OpenedState, tap: LogTap, build: Build, on_ready: Callable[[], None] = lambda: None
) -> int:
    stop, reload = asyncio.Event(), asyncio.Event()
    _handle_signals(stop, reload)
    _watch_parent(settings.parent_death_fd)
    notifier = Notifier(settings.env)
    service = await build(settings, state, tap)
    service.on_status = notifier.status
    tasks = [
        asyncio.create_task(_reload_when_asked(reload, service, notifier)),
        asyncio.create_task(notifier.watchdog()),
    ]
    try:
        await service.start()
        on_ready()
        notifier.ready()
        log.info("ready: LocalAPI on %s", settings.socket)
        await until_one_ends(stop.wait(), service.wait())
    finally:
        notifier.stopping()
        for task in tasks:
            task.cancel()
        await _stop(service)
    log.info("stopped")
    return 0


async def _stop(service: Service) -> None:
    try:
        async with asyncio.timeout(STOP_LIMIT_S):
            await service.stop()
    except TimeoutError:
        log.error("the service did not stop within %.0f s; leaving anyway", STOP_LIMIT_S)


async def _reload_when_asked(asked: asyncio.Event, service: Service, notifier: Notifier) -> None:
    while True:
        await asked.wait()
        asked.clear()
        notifier.reloading(time.monotonic_ns() // 1000)
        try:
            await service.reload()
            log.info("configuration reloaded")
        except TsdError as err:
            log.error("configuration not reloaded: %s", err)
        notifier.ready()


def _handle_signals(stop: asyncio.Event, reload: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_stop() -> None:
        if stop.is_set():
            log.warning("told to stop twice: leaving at once")
            os._exit(1)
        stop.set()

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_stop)
        loop.add_signal_handler(signal.SIGHUP, reload.set)


def _watch_parent(fd: int) -> None:
    """TS_PARENT_DEATH_FD: leave at once when the other end of the pipe is closed."""
    if fd < 0:
        return
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        try:
            if os.read(fd, 64):
                return
        except OSError:
            pass
        os._exit(1)

    try:
        os.set_blocking(fd, False)
        loop.add_reader(fd, on_readable)
    except (OSError, ValueError):
        log.warning("TS_PARENT_DEATH_FD=%d is not a pipe that can be watched", fd)
