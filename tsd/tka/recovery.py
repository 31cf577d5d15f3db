"""Revoking stolen keys so that what they did is undone: a checkpoint that forks off before (tailscale: tka/tka.go).

It needs more signatures than keys are revoked, so it travels from one trusted node to the next.
"""

from __future__ import annotations

from dataclasses import replace

from tsd.tka.aum import AUM, CHECKPOINT
from tsd.tka.authority import MAX_UPDATES, Authority
from tsd.tka.errors import LockRefused


def revocation(authority: Authority, revoked: set[bytes], own_key: bytes, fork_from: bytes | None) -> AUM:
    """Not signed yet. Without `fork_from`, the newest place where no revoked key was trusted, but ours was."""
    if fork_from is None and not any(map(authority.is_trusted, revoked)):
        raise LockRefused("none of these keys is trusted")
    keys = tuple(key for key in authority.keys if key.id not in revoked)
    if not keys:
        raise LockRefused("not all trusted keys can be revoked")
    made = AUM(
        CHECKPOINT,
        prev=fork_from or _parent(authority, revoked, own_key),
        state=replace(authority.state, keys=keys, last=None),
    )
    made.check()
    return made


def _parent(authority: Authority, revoked: set[bytes], own_key: bytes) -> bytes:
    chain = authority.newest(MAX_UPDATES)
    for aum in chain:
        state = authority.state_at(aum.hash())
        if state.key(own_key) is not None and not any(state.key(key_id) for key_id in revoked):
            return aum.hash()
    return chain[-1].hash()
