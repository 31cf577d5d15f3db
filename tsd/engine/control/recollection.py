"""The netmap of the last run: kept beside the state, and brought back at a start until control speaks.

So a restart has its tailnet at once, and a node that starts while its coordination server is away reaches its peers
(tailscale: ipn/ipnlocal/netmapcache; there it is on only where control asks for it). What is brought back is marked by
the warning `using-cached-netmap`. It belongs to one profile, login server and node key; it goes with a logout, with a
profile, and when control refuses the login. Nothing here decides what a netmap means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from typing import Any, TypeVar

from tsd.base.clock import Clock
from tsd.base.errors import DecodeError
from tsd.base.log import fields
from tsd.engine.account.seams import Identity
from tsd.engine.jobs import Steps
from tsd.engine.report.health import Health
from tsd.hull import BlobCache
from tsd.netmap import snapshot
from tsd.netmap.netmap import Diff, Netmap
from tsd.netmap.snapshot import About, Snapshot
from tsd.tailcfg.wire import time_text
from tsd.transport import zstd

log = logging.getLogger(__name__)

T = TypeVar("T")

WARNING = "using-cached-netmap"
MAX_BYTES, MAX_PLAIN_BYTES = 16 << 20, 128 << 20
FIRST_SAVE_S, SAVE_S, MOVED_SAVE_S = 2.0, 10.0, 600.0
"""After a change: of the first map of a run; of peers, routes or rules; only of endpoints and the like."""
MIN_PAUSE_S, WRITE_BYTES_PER_S = 60.0, 1000.0
REFUSED_BY_CONTROL = "disable-cache-network-maps"


class Recollection:
    """Without a cache (`None`) everything here does nothing."""

    def __init__(
        self,
        cache: BlobCache | None,
        clock: Clock,
        health: Health,
        *,
        identity: Callable[[], Identity | None],
        current: Callable[[], tuple[Netmap | None, int]],
        bring_back: Callable[[Snapshot], None],
        on_void: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`current`: netmap and home region; `bring_back` makes a snapshot the netmap, `on_void` forgets it."""
        self._cache = cache
        self._clock = clock
        self._health = health
        self._identity = identity
        self._current = current
        self._bring_back = bring_back
        self._on_void = on_void
        self._spawn = spawn
        self._brought: Snapshot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._next_save = -1e9
        self._has_saved = False

    # --- bringing back

    async def recall(self) -> None:
        """Look for the netmap of the login in force, unless there is a netmap already."""
        identity = self._identity()
        if self._cache is None or identity is None or self._current()[0] is not None:
            return
        raw = self._cache.get(identity.profile_id)
        if raw is None:
            return
        try:
            found = await in_slices(snapshot.decode(zstd.decompress(raw, MAX_PLAIN_BYTES)))
        except DecodeError as err:
            log.warning(fields("the saved netmap is not used", reason=err))
            self._cache.put(identity.profile_id, None)
            return
        if (found.node_key, found.about.control_url) != (identity.node_key, identity.control_url):
            log.info("the saved netmap is of another login; not used")
            return
        if identity == self._identity() and self._current()[0] is None:
            self._brought = found
            self._warn("")
            log.info(fields("netmap of the last run in use", peers=len(found.message.peers or ()), age=self._age()))
            self._bring_back(found)

    def control_failed(self, reason: str) -> None:
        if self._brought is not None:
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        self._health.set(WARNING, age=self._age(), error=reason or "no answer yet")

    def _age(self) -> str:
        assert self._brought is not None
        return age_text((self._clock.wall_ns() - self._brought.saved_ns) / 1e9)

    # --- keeping

    def note(self, diff: Diff) -> None:
        """Control spoke: what was brought back is history, and what it changed is kept soon."""
        self._replaced()
        if self._cache is None or (diff.is_empty and self._has_saved):
            return
        is_moved_only = replace(diff, moved=(), health=False).is_empty
        delay_s = FIRST_SAVE_S if not self._has_saved else MOVED_SAVE_S if is_moved_only else SAVE_S
        due = max(self._clock.now() + delay_s, self._next_save)
        if self._timer is None or due < self._due:
            self._stop_timer()
            self._due = due
            self._timer = asyncio.get_running_loop().call_later(due - self._clock.now(), self._on_due)

    def _on_due(self) -> None:
        self._timer = None
        self._spawn(in_slices(self._save()))

    def flush(self, is_in_sync: bool = False) -> None:
        """Write what waits to be written, at once; when control is heard, also that all is as it was."""
        if self._timer is not None or (is_in_sync and self._has_saved):
            self._stop_timer()
            for _ in self._save():
                pass

    def _save(self) -> Steps:
        identity, (netmap, home) = self._identity(), self._current()
        if self._cache is None or identity is None or netmap is None or netmap.self_node.key != identity.node_key:
            return
        if netmap.self_node.has_cap(REFUSED_BY_CONTROL):
            self._cache.put(identity.profile_id, None)
            return
        about = About(snapshot.VERSION, time_text(self._clock.wall_ns()), identity.control_url, home)
        packed = zstd.compress((yield from snapshot.encode(netmap, about)))
        self._has_saved = True
        self._next_save = self._clock.now() + max(MIN_PAUSE_S, len(packed) / WRITE_BYTES_PER_S)
        is_too_large = len(packed) > MAX_BYTES
        if is_too_large:
            log.warning(fields("the netmap is too large to be kept for the next start", bytes=len(packed)))
        if identity == self._identity():
            self._cache.put(identity.profile_id, None if is_too_large else packed)

    # --- forgetting

    def distrust(self) -> None:
        """Control does not accept the login: a tailnet that we know only from the last run is void."""
        if self._brought is not None:
            identity = self._identity()
            self.leave()
            if identity is not None:
                self.forget(identity.profile_id)
            self._on_void()

    def forget(self, profile_id: str) -> None:
        if self._cache is not None and profile_id:
            self._cache.put(profile_id, None)

    def leave(self) -> None:
        """Another login follows."""
        self._replaced()
        self._stop_timer()
        self._has_saved = False

    def _replaced(self) -> None:
        self._brought = None
        self._health.clear(WARNING)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def in_slices(steps: Generator[None, None, T]) -> T:
    """Run to the end, letting others work at each pause."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


def age_text(seconds: float) -> str:
    """ "12 minutes"; coarse, so that it changes seldom."""
    for name, unit_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // unit_s)
        if count >= 2 or (count == 1 and name == "minute"):
            return f"{count} {name}s" if count > 1 else f"{count} {name}"
    return "less than a minute"
