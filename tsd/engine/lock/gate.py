"""Which peers of a netmap tailnet lock lets in (tailscale: ipn/ipnlocal/tailnet-lock.go, tkaFilterNetmapLocked).

A peer needs a signature of its node key that a trusted key stands behind, and no later key of the same node. Peers that
only serve PeerAPI and say so need none. Verdicts are remembered, so that a message costs what it changes.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Generator
from dataclasses import dataclass

from tsd.base.errors import TsdError
from tsd.base.keys import NodePublic
from tsd.base.log import fields
from tsd.netmap.netmap import Netmap
from tsd.tailcfg.node import Node
from tsd.tka.authority import Authority
from tsd.tka.nodekey import Rotation, node_key_bytes
from tsd.tka.rotations import obsolete_keys

log = logging.getLogger(__name__)

SLICE_PEERS = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refusal` says why the peer stays out; "" when it may come in."""

    refusal: str = ""
    node_key: bytes = b""
    rotation: Rotation | None = None


class Gate:
    """Remembers the verdicts of one authority."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self._verdicts: dict[tuple[str, str | None], Verdict] = {}
        self._told: set[str] = set()
        self._last: tuple[dict[int, Node], dict[int, str]] = ({}, {})

    def refused(self, told: Netmap) -> Generator[None, None, dict[int, str]]:
        """The peers that stay out, each with the reason; pauses when there is much to verify."""
        if told.peers is self._last[0]:
            return self._last[1]
        found: dict[int, Verdict] = {}
        kept: dict[tuple[str, str | None], Verdict] = {}
        checked = 0
        for node in told.peers.values():
            if node.unsigned_peerapi_only:
                continue
            name = (node.key, node.key_signature)
            verdict = self._verdicts.get(name)
            if verdict is None:
                verdict = self.judge(node)
                checked += 1
                if checked % SLICE_PEERS == 0:
                    yield
            found[node.id] = kept[name] = verdict
        self._verdicts = kept
        self._last = (told.peers, self._summed_up(told, found))
        return self._last[1]

    def _summed_up(self, told: Netmap, found: dict[int, Verdict]) -> dict[int, str]:
        rotations = [(verdict.node_key, verdict.rotation) for verdict in found.values() if verdict.rotation]
        obsolete = obsolete_keys(rotations) if rotations else set()
        refused = {node_id: verdict.refusal for node_id, verdict in found.items() if verdict.refusal}
        for node_id, verdict in found.items():
            if not verdict.refusal and verdict.node_key in obsolete:
                refused[node_id] = "a later node key has replaced this one"
        self._tell(told, refused)
        return refused

    def _tell(self, told: Netmap, refused: dict[int, str]) -> None:
        keys = {told.peers[node_id].key: node_id for node_id in refused}
        for key in keys.keys() - self._told:
            peer = told.peers[keys[key]]
            log.warning(fields("tailnet lock keeps a peer out", peer=peer.name.rstrip("."), reason=refused[peer.id]))
        self._told = set(keys)

    def judge(self, node: Node) -> Verdict:
        """About the node alone."""
        if not node.key_signature:
            return Verdict("its node key is not signed")
        try:
            node_key = NodePublic.parse(node.key)
            rotation = self.authority.admit(node_key, signature_bytes(node))
        except TsdError as err:
            return Verdict(str(err))
        return Verdict("", node_key_bytes(node_key), rotation)


def signature_bytes(node: Node) -> bytes:
    """Empty when there is none, or none that could be read."""
    try:
        return base64.b64decode(node.key_signature or "", validate=True)
    except ValueError:
        return b""
