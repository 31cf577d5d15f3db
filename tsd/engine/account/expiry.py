"""Keys end by the clock, without a word from control: which time it is for them, and one timer for the next end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tsd.base.clock import Clock
from tsd.tailcfg.node import Node, next_expiry_ns
from tsd.tailcfg.wire import time_ns, time_text

LONGEST_WAIT_S = 86400.0
SKEW_WORTH_MINDING_NS = 60 * 10**9
CONTROL_TIME_FLOOR_NS = 1_673_373_066 * 10**9
"""A server that says an earlier time is the one that is wrong (tailscale: ipn/ipnlocal/expiry.go)."""

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


class KeyTime:
    """Wall time by which keys expire: ours, or the server's when the two differ by more than a minute.

    Kept as a point on the clock that only goes forward: ours may be set right while we run.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: tuple[int, float] | None = None
        self._soon_ns, self._soon = 0, ""

    def note(self, control_time: str | None) -> None:
        """What the server says."""
        control_ns = time_ns(control_time)
        if control_ns is not None and control_ns > CONTROL_TIME_FLOOR_NS:
            self._told = (control_ns, self._clock.now())

    def forget(self) -> None:
        self._told = None

    def now_ns(self) -> int:
        return self._clock.wall_ns() - self.skew_ns()

    def skew_ns(self) -> int:
        """How far our wall clock is ahead of the server's; 0 for less than a minute, or when it is not known."""
        if self._told is None:
            return 0
        told_ns, told_at = self._told
        skew_ns = self._clock.wall_ns() - told_ns - int((self._clock.now() - told_at) * 1e9)
        return skew_ns if abs(skew_ns) > SKEW_WORTH_MINDING_NS else 0

    def is_expired(self, node: Node) -> bool:
        """Asked for thousands of nodes at a time: texts of times are compared, and read only when they are close."""
        if node.key_expiry is None or (node.key_expiry > self._soon_text() and node.key_expiry.endswith("Z")):
            return node.expired
        return node.is_expired(self.now_ns())

    def _soon_text(self) -> str:
        """A time that is surely not in the past yet, in the form of the map."""
        now_ns = self.now_ns()
        if not 0 < self._soon_ns - now_ns < 120 * 10**9:
            self._soon_ns = now_ns + 60 * 10**9
            self._soon = time_text(self._soon_ns)
        return self._soon


def skew_text(skew_ns: int) -> str:
    """ "3 hours ahead of", "2 minutes behind": in whole units, so that it does not change with every look."""
    seconds = abs(skew_ns) / 1e9
    unit, size = next((one for one in _UNITS if seconds >= 2 * one[1]), _UNITS[-1])
    count = round(seconds / size)
    return f"{count} {unit}{'s' * (count != 1)} {'ahead of' if skew_ns > 0 else 'behind'}"


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
