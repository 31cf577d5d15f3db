"""Pauses between attempts."""

from __future__ import annotations

from tsd.base.entropy import Entropy, uniform

MAX_BACKOFF_S = 30.0


class Backoff:
    """Growing pauses with jitter: 0.1 s, 0.2 s ... 30 s, each times 0.5 to 1.5 and never above the maximum."""

    def __init__(self, entropy: Entropy, *, first_s: float = 0.1, max_s: float = MAX_BACKOFF_S) -> None:
        self._entropy = entropy
        self._first_s = first_s
        self._max_s = max_s
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        base_s = min(self._max_s, self._first_s * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return min(self._max_s, base_s * uniform(self._entropy, 0.5, 1.5))
