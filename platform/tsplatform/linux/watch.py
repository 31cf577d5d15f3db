"""Hears when somebody changes links, addresses, routes or rules, and asks for a comparison with what should be.

Debounced, and paced so that a fight with another tool costs little. An interface that was set down by hand stays down
until it is set up by hand (or the plan changes); then everything on it is put back.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from tsplatform import netlink

log = logging.getLogger(__name__)

DEBOUNCE_S = 0.25
PACE_S, FIGHT_PACE_S, SLOWEST_PACE_S = 0.5, 5.0, 30.0
REST_FACTOR = 20.0
"""A comparison is followed by this many times what it took: reading ten thousand routes costs seconds of CPU."""
# RTMGRP_*: link, addresses, routes, and the rules of both families (groups 8 and 19).
GROUPS = netlink.CHANGE_GROUPS | 1 << 7 | 1 << 18


class RoutingWatch:
    """`verify` is called at most once per `PACE_S` while changes are heard, less often when its last run cost much."""

    def __init__(
        self,
        verify: Callable[[], None],
        is_up: Callable[[], bool],
        device: str,
        cost_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._verify = verify
        self._cost_s = cost_s
        self._is_up = is_up
        self._device = device
        self._sock: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._verified_at = -PACE_S
        self._was_up = False
        self.is_slowed = False
        """Somebody undoes again and again what we put back."""

    def start(self) -> None:
        """On the running loop; without netlink events nothing is watched."""
        self._loop = asyncio.get_running_loop()
        try:
            self._sock = netlink.open_changes(GROUPS)
        except OSError as err:
            log.info("changes of routing are not watched: netlink: %s", err.strerror)
            return
        netlink.watch(self._loop, self._sock, self.poke)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sock is not None and self._loop is not None:
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None

    def poke(self) -> None:
        """Something was heard elsewhere that calls for a comparison."""
        if self._loop is not None and self._timer is None:
            pace_s = FIGHT_PACE_S if self.is_slowed else PACE_S
            pace_s = min(max(pace_s, REST_FACTOR * self._cost_s()), SLOWEST_PACE_S)
            delay_s = max(DEBOUNCE_S, self._verified_at + pace_s - self._loop.time())
            self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._loop is None:
            return
        self._verified_at = self._loop.time()
        is_up = self._is_up()
        if is_up:
            self._verify()
        elif self._was_up:
            log.warning("%s was set down: nothing goes through the tailnet until it is up again", self._device)
        self._was_up = is_up
