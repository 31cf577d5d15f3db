"""Our own endpoints, in the order that control and peers get them (tailscale: magicsock.go, determineEndpoints)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tsd.base.addr import AddrPort, IPAddress
from tsd.magicsock.peer import is_usable
from tsd.magicsock.types import EndpointKind, OwnEndpoint

CACHE_S = 310.0
CACHE_PER_IP = 6


@dataclass(frozen=True, slots=True)
class StunFindings:
    """What netcheck saw of us: every global address with the number of servers that reported it."""

    v4: tuple[tuple[AddrPort, int], ...] = ()
    v6: tuple[tuple[AddrPort, int], ...] = ()
    mapping_varies: bool | None = None


class EndpointList:
    """Builds the list and remembers global addresses that were valid a short time ago."""

    def __init__(self) -> None:
        self._cache: dict[AddrPort, tuple[EndpointKind, float]] = {}

    def collect(
        self,
        now: float,
        *,
        stun: StunFindings,
        local: Sequence[IPAddress],
        port_v4: int,
        port_v6: int = 0,
        portmapped: AddrPort | None = None,
        fixed_port: int = 0,
        static: Iterable[AddrPort] = (),
    ) -> tuple[OwnEndpoint, ...]:
        """`fixed_port` is the configured port (0: any); `static` are addresses the user vouches for."""
        found: dict[AddrPort, EndpointKind] = {}
        if portmapped is not None:
            found[portmapped] = EndpointKind.PORTMAPPED
        self._add_stun(found, stun, fixed_port)
        for address, kind in list(found.items()):
            self._cache[address] = (kind, now)
        for address in self._recent(now):
            found.setdefault(address, self._cache[address][0])
        for address in static:
            found.setdefault(address, EndpointKind.EXPLICIT)
        for ip in local:
            port = port_v4 if ip.version == 4 else port_v6
            if port:
                found.setdefault(AddrPort(ip, port), EndpointKind.LOCAL)
        return tuple(OwnEndpoint(a, k) for a, k in found.items() if is_usable(a))

    def forget(self) -> None:
        """The link changed: what was global may be someone else's now."""
        self._cache.clear()

    def _add_stun(self, found: dict[AddrPort, EndpointKind], stun: StunFindings, fixed_port: int) -> None:
        for seen in (stun.v4, stun.v6):
            for order, (address, count) in enumerate(seen):
                if order == 0 or count > 1:
                    found.setdefault(address, EndpointKind.STUN)
        if stun.mapping_varies and fixed_port and stun.v4:
            found.setdefault(AddrPort(stun.v4[0][0].ip, fixed_port), EndpointKind.STUN4_LOCAL_PORT)

    def _recent(self, now: float) -> list[AddrPort]:
        for address in [a for a, (_, at) in self._cache.items() if now - at > CACHE_S]:
            del self._cache[address]
        newest = sorted(self._cache, key=lambda a: -self._cache[a][1])
        per_ip: dict[IPAddress, int] = {}
        kept = []
        for address in newest:
            per_ip[address.ip] = per_ip.get(address.ip, 0) + 1
            if per_ip[address.ip] <= CACHE_PER_IP:
                kept.append(address)
        return kept
