"""When to demand cookies, and how many handshakes one address may cause while we do.

Upstream looks at the length of its handshake queue; we compute at once, so a leaky bucket plays the queue.
"""

from __future__ import annotations

from collections.abc import Hashable

from tsd.wireguard.constants import (
    HANDSHAKE_DRAIN_PER_S,
    RATE_BURST,
    RATE_PER_S,
    UNDER_LOAD_MESSAGES,
    UNDER_LOAD_STICKY_S,
)

_MAX_ADDRESSES = 65536


class LoadMeter:
    """Counts handshake messages against what we are willing to compute."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at = 0.0
        self._loaded_until = -1.0

    def is_loaded(self, now: float) -> bool:
        """Note one message; whether cookies must be demanded."""
        self._level = max(0.0, self._level - (now - self._at) * HANDSHAKE_DRAIN_PER_S) + 1.0
        self._at = now
        if self._level >= UNDER_LOAD_MESSAGES:
            self._loaded_until = now + UNDER_LOAD_STICKY_S
            # A flood must not keep us loaded for longer than it lasts.
            self._level = UNDER_LOAD_MESSAGES
        return now < self._loaded_until


class RateLimiter:
    """A token bucket per source address."""

    def __init__(self) -> None:
        self._buckets: dict[Hashable, tuple[float, float]] = {}

    def allow(self, address: Hashable, now: float) -> bool:
        tokens, at = self._buckets.get(address, (RATE_BURST, now))
        tokens = min(RATE_BURST, tokens + (now - at) * RATE_PER_S)
        if tokens < 1.0:
            return False
        if len(self._buckets) >= _MAX_ADDRESSES and address not in self._buckets:
            self._forget_full(now)
            if len(self._buckets) >= _MAX_ADDRESSES:
                return False
        self._buckets[address] = (tokens - 1.0, now)
        return True

    def _forget_full(self, now: float) -> None:
        """Buckets that have filled up again carry no information."""
        self._buckets = {
            address: (tokens, at)
            for address, (tokens, at) in self._buckets.items()
            if tokens + (now - at) * RATE_PER_S < RATE_BURST
        }
