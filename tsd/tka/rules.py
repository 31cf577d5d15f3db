"""Whether an update may follow on a state, and which state that gives (tailscale: tka/tka.go, tka/state.go)."""

from __future__ import annotations

from dataclasses import replace

from tsd.tka.aum import ADD_KEY, AUM, CHECKPOINT, REMOVE_KEY, UPDATE_KEY
from tsd.tka.errors import LockRefused
from tsd.tka.key import Key
from tsd.tka.state import State


def verify(aum: AUM, state: State, *, is_genesis: bool = False) -> None:
    """Well-formed, in its place, and signed only by keys that are trusted there. Raises `LockRefused`."""
    aum.check()
    if not is_genesis and (aum.prev is None or aum.prev != state.last):
        raise LockRefused("an update that does not follow on the one before it")
    if not aum.signatures:
        raise LockRefused("an update without a signature")
    digest = aum.digest()
    for key_id, signature in aum.signatures:
        key = state.key(key_id)
        if key is None:
            raise LockRefused(f"an update signed by tlpub:{key_id.hex()}, which is not trusted")
        if not key.has_signed(digest, signature):
            raise LockRefused(f"an update with a wrong signature of tlpub:{key_id.hex()}")
    if aum.kind == REMOVE_KEY and [key.id for key in state.keys or ()] == [aum.key_id]:
        raise LockRefused("an update that removes the last trusted key")


def follow(state: State, aum: AUM) -> State:
    """The state after `aum`. Raises `LockRefused`."""
    keys = state.keys or ()
    if aum.kind == CHECKPOINT and aum.state is not None:
        if aum.state.state_id != state.state_id:
            raise LockRefused("a checkpoint of another lock")
        state, keys = aum.state, aum.state.keys or ()
    elif aum.kind == ADD_KEY and aum.key is not None:
        if state.key(aum.key.id) is not None:
            raise LockRefused(f"tlpub:{aum.key.id.hex()} is trusted already")
        keys = (*keys, aum.key)
    elif aum.kind in (UPDATE_KEY, REMOVE_KEY):
        known = state.key(aum.key_id)
        if known is None:
            raise LockRefused(f"tlpub:{aum.key_id.hex()} is not trusted")
        changed = (_updated(known, aum),) if aum.kind == UPDATE_KEY else ()
        at = keys.index(known)
        keys = (*keys[:at], *changed, *keys[at + 1 :])
    return replace(state, keys=keys, last=aum.hash())


def _updated(key: Key, aum: AUM) -> Key:
    votes = key.votes if aum.votes is None else aum.votes
    changed = replace(key, votes=votes, meta=aum.meta or key.meta)
    changed.check()
    return changed


def weight(aum: AUM, state: State) -> int:
    """Votes of the trusted keys that signed it."""
    signers = {key_id for key_id, _ in aum.signatures}
    return sum(key.votes for key in state.keys or () if key.id in signers)


def choose(state: State, rivals: list[AUM]) -> AUM:
    """Which of several updates on one state counts: most votes, then a removal, then the lowest hash."""
    return min(rivals, key=lambda aum: (-weight(aum, state), aum.kind != REMOVE_KEY, aum.hash()))
