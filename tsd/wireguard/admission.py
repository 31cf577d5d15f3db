"""Which handshake messages are worth a computation: MAC1 always, MAC2 and the rate of the source under load.

Whitepaper section 5.4.7; wireguard-go `device/receive.go`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from tsd.base.entropy import Entropy
from tsd.base.log import DropCounter
from tsd.wireguard.cookie import CookieGuard, source_bytes
from tsd.wireguard.load import LoadMeter, RateLimiter


class Admission:
    """`reply` sends a cookie back to where a message came from."""

    def __init__(
        self, public: bytes, entropy: Entropy, drops: DropCounter, reply: Callable[[Hashable, bytes], None]
    ) -> None:
        self._guard = CookieGuard(public, entropy)
        self._load = LoadMeter()
        self._limiter = RateLimiter()
        self._drops = drops
        self._reply = reply

    def admits(self, datagram: bytes, source: Hashable | None, now: float) -> bool:
        if not self._guard.is_mac1_valid(datagram):
            self._drops.add("mac1")
            return False
        if not self._load.is_loaded(now):
            return True
        where = source_bytes(source)
        if not self._guard.is_mac2_valid(datagram, where, now):
            self._drops.add("cookie_demanded")
            if source is not None:
                self._reply(source, self._guard.reply(datagram, where, now))
            return False
        if not self._limiter.allow(getattr(source, "ip", source), now):
            self._drops.add("rate_limited")
            return False
        return True
