"""Deadlines of many peers in one heap; moving a deadline costs nothing until the old one comes up."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from tsd.wireguard.peer import NEVER, Peer


class Schedule:
    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self._peers = peers
        self._heap: list[tuple[float, int]] = []

    def arm(self, peer: Peer) -> None:
        """Call whenever a timer of `peer` may have moved."""
        wanted = peer.wants_at()
        if wanted < peer.scheduled_at:
            peer.scheduled_at = wanted
            heapq.heappush(self._heap, (wanted, peer.handle))

    def next_at(self) -> float:
        """The earliest deadline of all, NEVER when there is none."""
        while self._heap:
            at, handle = self._heap[0]
            peer = self._peers.get(handle)
            if peer is not None and peer.scheduled_at == at and peer.wants_at() <= at:
                return at
            self._drop_head(peer, at)
        return NEVER

    def take_due(self, now: float) -> Peer | None:
        """A peer with a timer at or before `now`; the caller must run its timers and `arm` it again."""
        if self.next_at() > now:
            return None
        peer = self._peers[heapq.heappop(self._heap)[1]]
        peer.scheduled_at = NEVER
        return peer

    def _drop_head(self, peer: Peer | None, at: float) -> None:
        """The head belongs to a peer that is gone, was superseded, or fires later than it did."""
        heapq.heappop(self._heap)
        if peer is not None and peer.scheduled_at == at:
            peer.scheduled_at = NEVER
            self.arm(peer)
