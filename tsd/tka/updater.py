"""New updates on top of an authority, signed (tailscale: tka/builder.go)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from tsd.tka.aum import ADD_KEY, AUM, CHECKPOINT, REMOVE_KEY
from tsd.tka.authority import Authority
from tsd.tka.errors import LockRefused
from tsd.tka.key import Key
from tsd.tka.rules import follow, verify
from tsd.tka.state import MAX_KEYS, State

CHECKPOINT_EVERY = 50

Sign = Callable[[bytes], bytes]


def genesis(keys: tuple[Key, ...], disablement_values: tuple[bytes, ...], state_id: tuple[int, int]) -> AUM:
    """The first update of a new lock, not signed yet."""
    return AUM(CHECKPOINT, state=State(keys, disablement_values, state_id))


def changes(authority: Authority, add: Iterable[Key], remove: Iterable[bytes], key_id: bytes, sign: Sign) -> list[AUM]:
    """Updates that add keys and remove those with the given IDs. Raises `LockRefused`."""
    state, made = authority.state, []

    def append(aum: AUM) -> None:
        nonlocal state
        signed = replace(aum, prev=state.last).signed_by(key_id, sign)
        verify(signed, state)
        state = follow(state, signed)
        made.append(signed)

    for key in add:
        if len(state.keys or ()) >= MAX_KEYS:
            raise LockRefused(f"the lock trusts {MAX_KEYS} keys already, no more are allowed")
        append(AUM(ADD_KEY, key=key))
    for gone in remove:
        append(AUM(REMOVE_KEY, key_id=gone))
    if made and _is_checkpoint_due(authority, len(made)):
        append(AUM(CHECKPOINT, state=replace(state, last=None)))
    return made


def _is_checkpoint_due(authority: Authority, count: int) -> bool:
    before = authority.newest(max(CHECKPOINT_EVERY - count, 0))
    return count + len(before) >= CHECKPOINT_EVERY and all(
        aum.kind != CHECKPOINT and aum.prev is not None for aum in before
    )
