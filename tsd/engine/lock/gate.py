"""Which peers of a netmap tailnet lock lets in (tailscale: ipn/ipnlocal/tailnet-lock.go, tkaFilterNetmapLocked).

A peer needs a signature of its node key that a trusted key stands behind, and no later key of the same node. Peers that
only serve PeerAPI and say so need none. Verdicts are remembered, so that a message costs what it changes.
"""

from __future__ import annotations

import base64
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from tsd.base.errors import TsdError
from tsd.base.keys import NodePublic
from tsd.netmap.netmap import Netmap
from tsd.tailcfg.node import Node
from tsd.tka.authority import Authority
from tsd.tka.nodekey import Rotation, node_key_bytes
from tsd.tka.rotations import obsolete_keys

SLICE_EFFORT = 1000
"""Pause after so many peers looked at; verifying one signature counts like `JUDGED` of them."""
JUDGED = 50

Name = tuple[str, str | None]
"""Node key and its signature: what a verdict depends on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refusal` says why the peer stays out; "" when it may come in."""

    name: Name
    refusal: str = ""
    node_key: bytes = b""
    rotation: Rotation | None = None


class Gate:
    """Remembers the verdicts of one authority."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self._seen: Netmap | None = None
        self._verdicts: dict[int, Verdict] = {}
        self._obsolete: set[bytes] = set()
        self._refused: dict[int, str] = {}
        self._own: Verdict | None = None

    def refused(self, told: Netmap, before: Netmap, touched: Iterable[int]) -> Generator[None, None, dict[int, str]]:
        """The peers that stay out, each with the reason; pauses when there is much to do.

        `touched`: the peers that differ from `before`. The same object comes back when nothing changed.
        """
        is_known = before is self._seen
        if not is_known:
            touched = dict.fromkeys((*self._verdicts, *told.peers))
        self._seen, effort = None, 0
        changed, has_rotation = [], not is_known
        for node_id in touched:
            old, new = self._verdicts.get(node_id), self._renew(node_id, told.peers.get(node_id))
            if old is not new:
                changed.append(node_id)
                has_rotation |= any(verdict is not None and verdict.rotation is not None for verdict in (old, new))
            effort += JUDGED if new is not old else 1
            if effort >= SLICE_EFFORT:
                effort = 0
                yield
        if has_rotation:
            rotated = [(known.node_key, known.rotation) for known in self._verdicts.values() if known.rotation]
            self._obsolete = obsolete_keys(rotated)
            self._refused = {i: why for i, known in self._verdicts.items() if (why := self._refusal(known))}
        elif changed:
            self._refused = self._amended(changed)
        self._seen = told
        return self._refused

    def _renew(self, node_id: int, node: Node | None) -> Verdict | None:
        if node is None or node.unsigned_peerapi_only:
            self._verdicts.pop(node_id, None)
            return None
        verdict = self._verdicts.get(node_id)
        if verdict is None or verdict.name != _name(node):
            verdict = self._verdicts[node_id] = self.judge(node)
        return verdict

    def _amended(self, changed: Iterable[int]) -> dict[int, str]:
        refused = dict(self._refused)
        for node_id in changed:
            refused.pop(node_id, None)
            verdict = self._verdicts.get(node_id)
            if verdict is not None and (why := self._refusal(verdict)):
                refused[node_id] = why
        return refused

    def _refusal(self, verdict: Verdict) -> str:
        if not verdict.refusal and verdict.node_key in self._obsolete:
            return "a later node key has replaced this one"
        return verdict.refusal

    def own_refusal(self, node: Node) -> str:
        if self._own is None or self._own.name != _name(node):
            self._own = self.judge(node)
        return self._own.refusal

    def judge(self, node: Node) -> Verdict:
        """About the node alone."""
        if not node.key_signature:
            return Verdict(_name(node), "its node key is not signed")
        try:
            node_key = NodePublic.parse(node.key)
            rotation = self.authority.admit(node_key, signature_bytes(node))
        except TsdError as err:
            return Verdict(_name(node), str(err))
        return Verdict(_name(node), "", node_key_bytes(node_key), rotation)


def _name(node: Node) -> Name:
    return node.key, node.key_signature


def signature_bytes(node: Node) -> bytes:
    """Empty when there is none, or none that could be read."""
    try:
        return base64.b64decode(node.key_signature or "", validate=True)
    except ValueError:
        return b""
