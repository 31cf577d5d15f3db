"""A one-shot timer finer than the event loop's millisecond, where the kernel has timerfd."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC = 1
_FLAGS = 0o2004000
"""TFD_NONBLOCK | TFD_CLOEXEC on Linux."""


class PaceTimer(Protocol):
    """What pacing needs of a timer."""

    def start(self, delay_s: float) -> None: ...

    def close(self) -> None: ...


class FineTimer:
    """`start(delay_s)` calls `on_fire` once; a later start replaces an earlier one. Falls back to `call_later`."""

    def __init__(self, on_fire: Callable[[], None]) -> None:
        self._on_fire = on_fire
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        create = getattr(self._libc, "timerfd_create", None)
        self._fd: int = create(_CLOCK_MONOTONIC, _FLAGS) if create is not None else -1
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._fired)

    def start(self, delay_s: float) -> None:
        if self._fd < 0:
            self.stop()
            self._handle = self._loop.call_later(delay_s, self._on_fire)
            return
        seconds = int(delay_s)
        spec = struct.pack("@llll", 0, 0, seconds, max(1, int((delay_s - seconds) * 1e9)))
        self._libc.timerfd_settime(self._fd, 0, spec, None)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._fd >= 0:
            self._libc.timerfd_settime(self._fd, 0, bytes(struct.calcsize("@llll")), None)

    def close(self) -> None:
        """Idempotent."""
        self.stop()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._on_fire()
