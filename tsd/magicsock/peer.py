"""What magicsock knows about one peer: candidates, the best address and how far it is trusted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tsd.base.addr import AddrPort
from tsd.magicsock import constants as c
from tsd.magicsock.choice import NO_PATH, Quality
from tsd.magicsock.types import NO_ROUTE, PathInfo, PeerPaths, Route

NEVER = -1e9


@dataclass(slots=True)
class Candidate:
    """One UDP address that may reach the peer, and why we think so."""

    in_netmap: bool = False
    in_call: bool = False
    last_ping_from: float = NEVER
    """When the peer last pinged us from here."""
    last_ping: float = NEVER
    """When we last pinged it."""
    last_pong: float = NEVER
    latency_s: float = 0.0
    is_unreachable: bool = False
    """The kernel has no route to it: left alone until the link changes (W07)."""
    suspect_until: float = NEVER
    suspect_for_s: float = 0.0
    """Disco passed and data did not (W09); until data did, `suspect_for_s` stays."""
    next_probe: float = NEVER
    is_proven: bool = False
    """Data was seen to pass: what the peer prefers says nothing about it."""

    def is_kept(self, now: float) -> bool:
        return self.in_netmap or self.in_call or now - self.last_ping_from < c.OBSERVED_KEEP_S


def is_usable(address: AddrPort) -> bool:
    """Link-local IPv6 is refused because its zone is lost on the wire (W08)."""
    ip = address.ip
    if address.port == 0 or ip.is_unspecified or ip.is_multicast:
        return False
    return not (ip.version == 6 and ip.is_link_local)


@dataclass(slots=True, eq=False)
class PeerState:
    """Mutable state of one peer; the rules live in `tsd.magicsock.magicsock` and `tsd.magicsock.discovery`."""

    handle: int
    paths: PeerPaths
    candidates: dict[AddrPort, Candidate] = field(default_factory=dict)
    best: Quality = NO_PATH
    best_route: Route = NO_ROUTE
    trust_until: float = NEVER
    heard_region: int = 0
    last_send: float = NEVER
    last_receive: float = NEVER
    relayed_since: float = NEVER
    """When data began to come by relay and nothing by UDP any more; `last_relayed` is its newest."""
    last_relayed: float = NEVER
    best_since: float = NEVER
    """Since when the best address has carried the data alone."""
    last_full: float = NEVER
    next_full: float = NEVER
    next_call: float = NEVER
    is_heartbeating: bool = False
    wants_call: bool = False
    told: AddrPort | None = None
    """The address that the last `PathChanged` named."""

    @property
    def disco(self) -> bytes | None:
        key = self.paths.disco_key
        return None if key is None or key.is_zero else key.raw

    @property
    def relay_region(self) -> int:
        return self.paths.home_derp or self.heard_region

    def learn(self, address: AddrPort, now: float) -> Candidate | None:
        """The candidate of an address, made when new; None when it is unusable or there are too many."""
        found = self.candidates.get(address)
        if found is None and is_usable(address):
            if len(self.candidates) >= c.CANDIDATES_MAX:
                self.prune(now)
            if len(self.candidates) >= c.CANDIDATES_MAX:
                return None
            found = self.candidates[address] = Candidate()
            self.next_full = NEVER
        return found

    def prune(self, now: float) -> None:
        """Forget addresses that nobody vouches for any more; the trusted best stays."""
        best = self.best.address if now <= self.trust_until else None
        gone = [a for a, cand in self.candidates.items() if not cand.is_kept(now) and a != best]
        for address in gone:
            del self.candidates[address]
            if address == self.best.address:
                self.clear_best()

    def set_netmap_endpoints(self, endpoints: Iterable[AddrPort], now: float) -> None:
        best = self.candidates.get(self.best.address) if self.best.address is not None else None
        was_named = best is not None and best.in_netmap
        for cand in self.candidates.values():
            cand.in_netmap = False
        for address in endpoints:
            learnt = self.learn(address, now)
            if learnt is not None:
                learnt.in_netmap = True
        if was_named and best is not None and not best.in_netmap:
            self.doubt()
        self.prune(now)

    def set_called_endpoints(self, endpoints: Iterable[AddrPort], now: float) -> None:
        best = self.candidates.get(self.best.address) if self.best.address is not None else None
        was_named = best is not None and (best.in_call or best.in_netmap)
        for cand in self.candidates.values():
            cand.in_call = False
            cand.last_ping = NEVER
        for address in list(endpoints)[: c.CALL_ME_MAYBE_MAX]:
            learnt = self.learn(address, now)
            if learnt is not None:
                learnt.in_call = True
        if was_named and best is not None and not best.in_call:
            self.doubt()
        self.prune(now)
        self.next_full = NEVER

    def set_best(self, quality: Quality, now: float) -> None:
        if quality.address != self.best.address or now > self.trust_until:
            self.best_since = now
        self.best = quality
        self.best_route = Route(quality.address, 0)
        self.trust_until = now + c.TRUST_S

    def doubt(self) -> None:
        """The peer itself no longer names the best address: at most used beside the relay until it answers again."""
        self.trust_until = NEVER

    def clear_best(self) -> None:
        self.best = NO_PATH
        self.best_route = NO_ROUTE
        self.trust_until = NEVER

    def restart(self) -> None:
        """Everything measured is void: the link changed or the peer's disco key did."""
        self.clear_best()
        self.next_full = self.last_full = self.next_call = NEVER
        for cand in self.candidates.values():
            cand.last_ping = NEVER
            cand.is_unreachable = False
            cand.suspect_until, cand.suspect_for_s, cand.is_proven = NEVER, 0.0, False
        self.relayed_since = NEVER

    def note_relayed(self, now: float) -> None:
        """Authentic data came by relay."""
        if self.relayed_since == NEVER:
            self.relayed_since = now
        self.last_relayed = now

    def is_shunned(self) -> bool:
        """Whether the peer has long sent by relay alone although we use a direct path."""
        if self.relayed_since == NEVER or self.last_relayed - max(self.relayed_since, self.best_since) <= c.SHUNNED_S:
            return False
        cand = self.candidates.get(self.best.address) if self.best.address is not None else None
        return cand is not None and not cand.is_proven

    def data_passed(self, address: AddrPort) -> None:
        cand = self.candidates.get(address)
        if cand is not None:
            cand.suspect_until, cand.is_proven = NEVER, True
            cand.suspect_for_s = 0.0

    def suspect_best(self, now: float) -> None:
        """Data does not come through the best address although disco does: keep off it for a while (W09)."""
        cand = self.candidates.get(self.best.address) if self.best.address is not None else None
        if cand is not None:
            cand.suspect_for_s = min(c.SUSPECT_MAX_S, max(c.SUSPECT_S, cand.suspect_for_s * 2))
            cand.suspect_until = now + cand.suspect_for_s
            cand.is_proven = False
        self.relayed_since = NEVER
        self.clear_best()

    def keep_off(self, address: AddrPort, until: float) -> None:
        """Use something else meanwhile."""
        cand = self.candidates.get(address)
        if cand is not None:
            cand.suspect_until = max(cand.suspect_until, until)
            if self.best.address == address:
                self.clear_best()

    def wants_full_round(self, now: float) -> bool:
        if self.best.address is None or self.last_full == NEVER or now > self.trust_until:
            return True
        return self.best.latency_ns > c.GOOD_ENOUGH_S * 1e9 and now - self.last_full >= c.UPGRADE_S

    def info(self, now: float) -> PathInfo:
        is_trusted = self.best.address is not None and now <= self.trust_until
        cand = self.candidates.get(self.best.address) if self.best.address is not None else None
        return PathInfo(
            self.best.address if is_trusted else None,
            self.relay_region,
            self.best.latency_ns / 1e9,
            max((x.last_pong for x in self.candidates.values()), default=NEVER) if cand is None else cand.last_pong,
            self.last_send,
            self.last_receive,
            now - self.last_send <= c.SESSION_ACTIVE_S,
            tuple(self.candidates),
        )
