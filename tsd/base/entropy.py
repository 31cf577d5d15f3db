"""Sources of random bytes, injected so that every handshake can be replayed to the byte."""

import hashlib
import os
from collections.abc import Callable

Entropy = Callable[[int], bytes]


def system_entropy(count: int) -> bytes:
    """`count` bytes from the operating system."""
    return os.urandom(count)


class SeededEntropy:
    """Reproducible bytes from a seed: BLAKE2s in counter mode. For tests and simulations only."""

    def __init__(self, seed: int | str | bytes) -> None:
        material = seed if isinstance(seed, bytes) else str(seed).encode()
        self._key = hashlib.blake2s(material).digest()
        self._counter = 0
        self._pool = b""

    def __call__(self, count: int) -> bytes:
        while len(self._pool) < count:
            self._pool += hashlib.blake2s(self._counter.to_bytes(8, "big"), key=self._key).digest()
            self._counter += 1
        taken, self._pool = self._pool[:count], self._pool[count:]
        return taken


def uniform(entropy: Entropy, low: float, high: float) -> float:
    """A number in [low, high) drawn from `entropy`."""
    return low + (high - low) * (int.from_bytes(entropy(7), "big") / (1 << 56))
