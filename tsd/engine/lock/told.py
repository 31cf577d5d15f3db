"""Tailnet lock as LocalAPI tells it (tailscale: ipn/ipnstate/ipnstate.go, TailnetLockStatus)."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tsd.base.errors import TsdError
from tsd.base.keys import LockPublic
from tsd.engine.lock.gate import signature_bytes
from tsd.engine.peers import node_addresses
from tsd.tailcfg.node import Node
from tsd.tka.aum import AUM
from tsd.tka.authority import Authority
from tsd.tka.key import Key
from tsd.tka.nodekey import NodeKeySignature

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

Json = dict[str, Any]


def status(engine: Engine) -> Json:
    authority, lock_key, key = engine.lock.authority, engine.account.lock_key, engine.account.node_key
    told: Json = {
        "Enabled": authority is not None and lock_key is not None,
        "Head": None,
        "PublicKey": str(lock_key.public() if lock_key is not None else LockPublic(bytes(32))),
        "NodeKey": str(key.public()) if key is not None else None,
        "NodeKeySigned": False,
        "NodeKeySignature": None,
        "TrustedKeys": None,
        "VisiblePeers": None,
        "FilteredPeers": None,
        "StateID": 0,
    }
    if authority is not None and lock_key is not None:
        told |= _details(engine, authority)
    elif engine.lock.refused:
        told["FilteredPeers"] = _peers(node for node, _ in engine.lock.refused.values())
    return told


def _details(engine: Engine, authority: Authority) -> Json:
    netmap, refused = engine.tailnet.netmap, engine.lock.refused
    own = netmap.self_node if netmap is not None else None
    return {
        "Head": list(authority.head),
        "NodeKeySigned": netmap is not None and not engine.lock.own_refusal(netmap),
        "NodeKeySignature": _signature(own),
        "TrustedKeys": list(map(_key, authority.keys)),
        "VisiblePeers": _peers(netmap.sorted_peers()) if netmap is not None else None,
        "FilteredPeers": _peers(node for node, _ in refused.values()) or None,
        "StateID": authority.state_id[0],
    }


def log(authority: Authority, limit: int) -> list[Json]:
    return [_update(aum) for aum in authority.newest(limit)]


def _update(aum: AUM) -> Json:
    return {"Hash": list(aum.hash()), "Change": aum.kind_name, "Raw": _text(aum.encode())}


def _key(key: Key) -> Json:
    return {"Kind": key.kind_name, "Key": str(LockPublic(key.id)), "Metadata": key.meta, "Votes": key.votes}


def _peers(nodes: Iterable[Node]) -> list[Json]:
    return [
        {
            "Name": node.name,
            "ID": node.id,
            "StableID": node.stable_id,
            "TailscaleIPs": [str(ip) for ip in node_addresses(node)],
            "NodeKey": node.key,
            "NodeKeySignature": _signature(node),
        }
        for node in nodes
    ]


def _signature(node: Node | None) -> Json:
    try:
        return _signature_json(NodeKeySignature.decode(signature_bytes(node) if node is not None else b""))
    except TsdError:
        return _signature_json(NodeKeySignature(0))


def _signature_json(found: NodeKeySignature) -> Json:
    return {
        "SigKind": found.kind,
        "Pubkey": _text(found.pubkey),
        "KeyID": _text(found.key_id),
        "Signature": _text(found.signature),
        "Nested": _signature_json(found.nested) if found.nested is not None else None,
        "WrappingPubkey": _text(found.wrapping_pubkey),
    }


def _text(raw: bytes) -> str | None:
    return base64.b64encode(raw).decode() if raw else None
