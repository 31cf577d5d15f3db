"""Peers by handle, by static key, and by the session indexes that we gave out for them."""

from __future__ import annotations

from tsd.base.entropy import Entropy
from tsd.wireguard.peer import Peer

SESSIONS_PER_PEER = 4
"""Three slots of the core, and the one that is being installed."""


class PeerTable:
    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self.by_handle: dict[int, Peer] = {}
        self.by_key: dict[bytes, Peer] = {}
        self.by_index: dict[int, Peer] = {}

    def add(self, peer: Peer) -> None:
        self.by_handle[peer.handle] = peer
        self.by_key[peer.public.raw] = peer

    def remove(self, handle: int) -> bool:
        """Whether there was one."""
        peer = self.by_handle.pop(handle, None)
        if peer is None:
            return False
        if self.by_key.get(peer.public.raw) is peer:
            del self.by_key[peer.public.raw]
        self.forget_indexes(peer)
        return True

    def new_index(self) -> int:
        while (index := int.from_bytes(self._entropy(4), "little")) in self.by_index:
            pass
        return index

    def add_session(self, peer: Peer, index: int) -> None:
        """The oldest goes when there are too many."""
        self.by_index[index] = peer
        peer.indexes.append(index)
        if len(peer.indexes) > SESSIONS_PER_PEER:
            self.forget_index(peer.indexes.pop(0))

    def forget_index(self, index: int) -> None:
        self.by_index.pop(index, None)

    def forget_indexes(self, peer: Peer) -> None:
        """Of its sessions and of a handshake that is under way."""
        pending = [peer.pending.local_index] if peer.pending is not None else []
        for index in [*peer.indexes, *pending]:
            self.forget_index(index)
        peer.indexes.clear()
