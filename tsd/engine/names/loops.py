"""Resolvers that would ask ourselves: found by a name that nobody else can know, sent through them.

A resolver on this host (127.0.0.53, dnsmasq) may have our service address as its own upstream; each question would go
round for ever. Before such a one is used, a name with a random label goes through it: when we are asked for that name,
the way leads back to us (dnsmasq's --dns-loop-detect does the same).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.entropy import Entropy

PROBE_S = 1.0
FINE_S, LOOP_S = 60.0, 5.0
"""How long a verdict counts; a loop may be mended any moment."""
_NAME_AT = 12
ZONE = "tsd-loop-check.internal"


class LoopGuard:
    """`host_addresses` are those whose resolvers are on this host; `now` in seconds."""

    def __init__(
        self, host_addresses: Callable[[], frozenset[IPAddress]], entropy: Entropy, now: Callable[[], float]
    ) -> None:
        self._host_addresses = host_addresses
        self._entropy = entropy
        self._now = now
        self._pending: dict[str, asyncio.Event] = {}
        self._verdicts: dict[AddrPort, tuple[bool, float]] = {}
        self._probing: dict[AddrPort, asyncio.Future[bool]] = {}
        self.is_possible = True
        """False where no program of this host can ask us."""

    def forget(self) -> None:
        """After a change of the host's or the tailnet's resolvers."""
        self._verdicts.clear()

    def came_back(self, query: bytes) -> bool:
        """Whether a question that reached us is one of our probes."""
        if not self._pending or len(query) <= _NAME_AT:
            return False
        label = query[_NAME_AT + 1 : _NAME_AT + 1 + query[_NAME_AT]]
        found = self._pending.get(label.decode("latin-1").lower())
        if found is None:
            return False
        found.set()
        return True

    async def is_loop(self, target: AddrPort, suffix: str, ask: Callable[[str], Awaitable[object]]) -> bool:
        """`ask` sends a question for a name through `target`; `suffix`: the zone that is routed there, or ""."""
        if not self.is_possible or not (target.ip.is_loopback or target.ip in self._host_addresses()):
            return False
        verdict, until = self._verdicts.get(target, (False, -1.0))
        if self._now() < until:
            return verdict
        if target not in self._probing:
            self._probing[target] = asyncio.ensure_future(self._judge(target, suffix, ask))
        return await asyncio.shield(self._probing[target])

    async def _judge(self, target: AddrPort, suffix: str, ask: Callable[[str], Awaitable[object]]) -> bool:
        try:
            verdict = await self._probe(suffix, ask)
        finally:
            del self._probing[target]
        self._verdicts[target] = (verdict, self._now() + (LOOP_S if verdict else FINE_S))
        return verdict

    async def _probe(self, suffix: str, ask: Callable[[str], Awaitable[object]]) -> bool:
        label = f"tsd-{self._entropy(10).hex()}"
        came_back = self._pending[label] = asyncio.Event()
        asking = asyncio.ensure_future(ask(f"{label}.{suffix or ZONE}"))
        returning = asyncio.ensure_future(came_back.wait())
        try:
            await asyncio.wait((asking, returning), timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED)
            return came_back.is_set()
        finally:
            del self._pending[label]
            for task in (asking, returning):
                task.cancel()
            await asyncio.gather(asking, returning, return_exceptions=True)
