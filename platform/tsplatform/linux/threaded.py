"""The router in a thread of its own: reading ten thousand routes or running nft must not stop packets.

The engine waits a moment for it, so that what it does next finds the addresses in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tsd.base.addr import IPAddress
from tsd.base.errors import HullError
from tsd.hull import RouterConfig
from tsplatform.linux.router import LinuxRouter

log = logging.getLogger(__name__)

PATIENCE_S = 0.25
REVERT_S = 8.0


class ThreadedRouter:
    """Implements `tsd.hull.Router` over another one that may block. The newest configuration wins."""

    def __init__(self, router: LinuxRouter, *, is_closed: bool = False) -> None:
        """`is_closed`: something is in force that the first `apply` must judge, even if it wants nothing."""
        self._router = router
        self._pool = ThreadPoolExecutor(1, "router")
        self._latest = RouterConfig()
        self._done: RouterConfig | None = None if is_closed else RouterConfig()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_busy = False
        self.stays_closed = False
        """Whether `revert` leaves what keeps traffic from leaking around an exit node."""
        self.cost_s = 0.0
        """CPU time of the last work that was done."""
        self.on_trouble: Callable[[str], None] = lambda text: None
        """What went wrong after `apply` returned; called on the loop. "" means that all is well again."""
        self.is_failing = False
        """The last work did not end well: it is worth another try."""
        self.on_config: Callable[[RouterConfig], None] = lambda config: None
        """Something else is asked for; called on the loop, before it is done."""
        self.on_done: Callable[[], None] = lambda: None
        """Something was compared or changed; called on the loop."""

    @property
    def is_busy(self) -> bool:
        """Whether changes that are heard now may be our own."""
        return self._is_busy

    @property
    def config(self) -> RouterConfig:
        """As asked for last."""
        return self._latest

    def own_addresses(self) -> list[IPAddress]:
        return [prefix.network_address for prefix in self._latest.local_addresses]

    def apply(self, config: RouterConfig) -> None:
        """Raises `HullError` when it fails within a moment; later failures are told to `on_trouble`."""
        self._loop = asyncio.get_running_loop()
        is_news = config != self._done
        self._ask(config)
        if not is_news and not config.local_addresses:
            return
        work = self._pool.submit(self._work, config)
        if is_news:
            with contextlib.suppress(TimeoutError):
                work.result(PATIENCE_S)
                self.on_done()
                return
        work.add_done_callback(self._report)

    def verify(self) -> None:
        """Compare with reality again and repair, in the background."""
        if self._latest.local_addresses:
            self._loop = asyncio.get_running_loop()
            self._pool.submit(self._work, self._latest).add_done_callback(self._report)

    def revert(self) -> None:
        self._ask(RouterConfig())
        try:
            self._pool.submit(self._work, self._latest).result(REVERT_S)
        except TimeoutError:
            raise HullError("take back routing", f"not done within {REVERT_S:.0f} s", "run tsd --cleanup") from None

    def _ask(self, config: RouterConfig) -> None:
        self._latest = config
        self.on_config(config)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, config: RouterConfig) -> None:
        if config is not self._latest:
            return
        if self.stays_closed:
            if config == RouterConfig():
                self._router.revert(stays_closed=True)
            return
        self._done = None
        self._is_busy = self.is_failing = True
        started_s = time.thread_time()
        try:
            self._router.apply(config)
            self.is_failing = False
        finally:
            self.cost_s = time.thread_time() - started_s
            self._is_busy = False
        self._done = config

    def _report(self, work: Future[None]) -> None:
        if work.cancelled() or self._loop is None:
            return
        err = work.exception()
        if err is not None and not isinstance(err, HullError):
            log.error("routing thread failed", exc_info=err)
        with contextlib.suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(self._tell, str(err) if err is not None else "")

    def _tell(self, trouble: str) -> None:
        self.on_trouble(trouble)
        self.on_done()
