"""Networks without IPv4 whose own resolver makes IPv6 addresses for the IPv4 world (DNS64, RFC 6147).

There names must be asked of that resolver, whatever the tailnet prefers: another one gives addresses that cannot be
reached. Found as RFC 7050 says: ipv4only.arpa has IPv6 addresses only where somebody makes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tsd.hull import LinkState

PROBE_NAME = "ipv4only.arpa"
VERDICT_S = 600.0
_NO_ANSWER_S = 5.0


class Nat64:
    """`now` in seconds. A verdict counts for one state of the links."""

    def __init__(self, links: Callable[[], LinkState], now: Callable[[], float]) -> None:
        self._links = links
        self._now = now
        self._judged: LinkState | None = None
        self._verdict, self._until_s = False, 0.0

    async def is_here(self, ask: Callable[[bytes], Awaitable[bytes]]) -> bool:
        """`ask` puts a question to the host's own resolvers."""
        state = self._links()
        if state.default_interface_v4 or not state.default_interface_v6:
            return False
        if state != self._judged or self._now() >= self._until_s:
            from tsd.dns import wire

            reply = await ask(wire.question(PROBE_NAME, "AAAA"))
            self._verdict = any(ip.version == 6 for ip in wire.addresses_in(reply))
            is_final = self._verdict or not reply[3] & 15
            self._judged, self._until_s = state, self._now() + (VERDICT_S if is_final else _NO_ANSWER_S)
        return self._verdict
