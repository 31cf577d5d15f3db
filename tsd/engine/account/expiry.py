"""Keys end by the clock, without a word from control: one timer for the next one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tsd.tailcfg.node import Node, next_expiry_ns

LONGEST_WAIT_S = 86400.0


class KeyExpiry:
    """`on_expiry` is called at the end of a key, perhaps more often; the timer is armed anew afterwards."""

    def __init__(
        self, now_ns: Callable[[], int], nodes: Callable[[], Iterable[Node]], on_expiry: Callable[[], None]
    ) -> None:
        self._now_ns = now_ns
        self._nodes = nodes
        self._on_expiry = on_expiry
        self._timer: asyncio.TimerHandle | None = None
        self._at_ns = 0

    def arm(self, changed: Iterable[Node] | None = None) -> None:
        """`changed`: all other nodes are as they were."""
        now_ns = self._now_ns()
        at_ns = next_expiry_ns(changed if changed is not None else self._nodes(), now_ns)
        if changed is not None and self._at_ns > now_ns:
            at_ns = min(at_ns or self._at_ns, self._at_ns)
        if changed is not None and at_ns == self._at_ns:
            return
        self.close()
        self._at_ns = at_ns
        if at_ns:
            delay_s = min((at_ns - now_ns) / 1e9 + 0.05, LONGEST_WAIT_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._on_expiry()
        self.arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
