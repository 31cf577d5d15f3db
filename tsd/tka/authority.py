"""The chain of updates of one lock, and what it trusts now (tailscale: tka/tka.go, tka/sync.go).

An authority begins with a checkpoint that somebody vouched for, and never changes: `inform` gives a new one. Updates
that lost against a rival are kept, because what comes later may make them win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tsd.base.keys import NodePublic
from tsd.tka.aum import AUM, CHECKPOINT
from tsd.tka.errors import LockRefused
from tsd.tka.key import Key
from tsd.tka.nodekey import NodeKeySignature, Rotation
from tsd.tka.rules import choose, follow, verify
from tsd.tka.state import State

MAX_UPDATES = 10_000
"""Only holders of a trusted key can make a chain long."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one side of a sync has: its newest update, and older ones, newest first."""

    head: bytes
    ancestors: tuple[bytes, ...]


class Authority:
    """Made by `bootstrap`. Methods that judge raise `LockRefused`, with the reason."""

    def __init__(self, updates: dict[bytes, AUM], states: dict[bytes, State]) -> None:
        """By hash; every update but the first comes after its parent and has been verified."""
        self._updates = updates
        self._states = states
        self._chain = self._active_chain()
        self.head = self._chain[-1]
        self.state = states[self.head]

    @classmethod
    def bootstrap(cls, genesis: AUM) -> Authority:
        """A checkpoint that is signed by keys which it trusts itself."""
        if genesis.kind != CHECKPOINT or genesis.state is None:
            raise LockRefused(f"a lock begins with a checkpoint, not with {genesis.kind_name}")
        verify(genesis, genesis.state, is_genesis=True)
        return cls({genesis.hash(): genesis}, {genesis.hash(): follow(genesis.state, genesis)})

    @classmethod
    def replay(cls, encoded: Sequence[bytes]) -> Authority:
        """From `encode_all`; everything is verified again. Raises also `DecodeError`."""
        if not encoded:
            raise LockRefused("an empty chain")
        first, *rest = map(AUM.decode, encoded)
        return cls.bootstrap(first).inform(rest)

    def encode_all(self) -> list[bytes]:
        return [aum.encode() for aum in self._updates.values()]

    def inform(self, updates: Iterable[AUM]) -> Authority:
        """With these, oldest first; known ones are skipped. All are taken or none."""
        known, states = dict(self._updates), dict(self._states)
        for aum in updates:
            made = aum.hash()
            if made in known:
                continue
            if len(known) >= MAX_UPDATES:
                raise LockRefused(f"a chain of more than {MAX_UPDATES} updates")
            before = states.get(aum.prev or b"")
            if before is None:
                raise LockRefused("an update whose predecessor is unknown")
            verify(aum, before)
            known[made], states[made] = aum, follow(before, aum)
        return Authority(known, states) if len(known) > len(self._updates) else self

    def _active_chain(self) -> list[bytes]:
        children: dict[bytes, list[AUM]] = {}
        hashes = iter(self._updates.items())
        first, _ = next(hashes)
        for _, aum in hashes:
            children.setdefault(aum.prev or b"", []).append(aum)
        chain = [first]
        while rivals := children.get(chain[-1]):
            chosen = rivals[0] if len(rivals) == 1 else choose(self._states[chain[-1]], rivals)
            chain.append(chosen.hash())
        return chain

    # --- what it says

    def admit(self, node_key: NodePublic, signature: bytes) -> Rotation | None:
        """Raises `LockRefused` or `DecodeError` unless `signature` admits the key; gives what it replaces."""
        found = NodeKeySignature.decode(signature)
        key_id = found.authorizing_key_id
        trusted = self.state.key(key_id)
        if trusted is None:
            raise LockRefused(f"signed by tlpub:{key_id.hex()}, which is not trusted")
        found.verify(node_key, trusted)
        return found.rotation()

    def is_trusted(self, key_id: bytes) -> bool:
        return self.state.key(key_id) is not None

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.state.keys or ()

    @property
    def state_id(self) -> tuple[int, int]:
        return self.state.state_id

    def newest(self, limit: int) -> list[AUM]:
        """Updates in force, newest first."""
        return [self._updates[made] for made in reversed(self._chain[-limit:] if limit > 0 else [])]

    def state_at(self, made: bytes) -> State:
        """Raises `LockRefused` for an update that is not known."""
        if made not in self._states:
            raise LockRefused("an update that is not known here")
        return self._states[made]

    # --- sync

    def offer(self) -> Offer:
        checkpoints = [made for made in self._chain[1:] if self._updates[made].kind == CHECKPOINT]
        return Offer(self.head, (*reversed(checkpoints), self._chain[0]))

    def missing_from(self, other: Offer) -> list[AUM]:
        """What the other side lacks of the chain in force."""
        places = {made: at for at, made in enumerate(self._chain)}
        shared = next((places[made] for made in (other.head, *other.ancestors) if made in places), None)
        if shared is None:
            raise LockRefused("the two chains have nothing in common")
        return [self._updates[made] for made in self._chain[shared + 1 :]]
