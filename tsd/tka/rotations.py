"""Which node keys are out of use because a later signature replaced them (tailscale: ipn/ipnlocal/tailnet-lock.go)."""

from __future__ import annotations

from collections.abc import Iterable

from tsd.tka.nodekey import DIRECT, Rotation


def obsolete_keys(rotations: Iterable[tuple[bytes, Rotation]]) -> set[bytes]:
    """From (node key, its verified rotation) of all peers; node keys in binary form.

    A node that was cloned shows as two rotations of one signature: the one that rotated more often is taken for the
    newer, and when they are equal none is trusted. Nodes that share a reusable auth key are not clones.
    """
    found: set[bytes] = set()
    families: dict[bytes, list[tuple[int, bytes]]] = {}
    for node_key, rotation in rotations:
        found.update(rotation.previous)
        if rotation.initial.kind == DIRECT:
            family = families.setdefault(rotation.initial.wrapping_pubkey, [])
            family.append((len(rotation.previous), node_key))
    for family in families.values():
        if len(family) == 1:  # of nearly all nodes
            continue
        alive = sorted(((count, key) for count, key in family if key not in found), reverse=True)
        is_tie = len(alive) > 1 and alive[0][0] == alive[1][0]
        found.update(key for _, key in alive[0 if is_tie else 1 :])
    return found
