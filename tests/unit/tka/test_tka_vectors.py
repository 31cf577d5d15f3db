"""Tailnet lock against what upstream's own code computed: bytes, hashes, forks, sync, signatures."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from harness.lockkeys import SECRET, key_id, lock_key, new_authority, vectors
from tsd.base.errors import DecodeError, TsdError
from tsd.base.keys import NodePublic
from tsd.tka import nodekey
from tsd.tka.aum import AUM, hash_text, parse_hash
from tsd.tka.authority import Authority, Offer
from tsd.tka.state import disablement_value
from tsd.tka.updater import changes


def chain() -> list[AUM]:
    return [AUM.decode(bytes.fromhex(entry["raw"])) for entry in vectors()["chain"]]


def whole() -> Authority:
    return Authority.replay([aum.encode() for aum in chain()])


def node(number: int) -> NodePublic:
    return NodePublic(bytes((number,)) * 32)


def test_updates_have_upstreams_bytes_and_hashes() -> None:
    for aum, entry in zip(chain(), vectors()["chain"], strict=True):
        assert aum.encode().hex() == entry["raw"]
        assert hash_text(aum.hash()) == entry["hash"] and parse_hash(entry["hash"]) == aum.hash()
        assert aum.digest().hex() == entry["sig_hash"]


def test_a_chain_leads_to_upstreams_head_and_state() -> None:
    authority = whole()
    assert hash_text(authority.head) == vectors()["offer"]["head"]
    assert [(key.id, key.votes, key.meta) for key in authority.keys] == [
        (key_id(1), 2, None),
        (key_id(3), 300, {"bb": "1", "a": "2"}),
    ]
    assert authority.state_id == (0x1122334455667788, 300)
    assert Authority.replay(authority.encode_all()).head == authority.head


def test_our_updates_are_upstreams() -> None:
    first, second, *_ = chain()
    authority = Authority.bootstrap(first)
    assert second.key is not None
    assert changes(authority, [second.key], [], key_id(1), lock_key(1).sign) == [second]


def test_checkpoints_come_where_upstream_puts_them() -> None:
    updates = chain()
    authority = Authority.bootstrap(updates[0])
    made = 1
    while made < len(updates):
        wanted = updates[made]
        add, remove = ([wanted.key], []) if wanted.key is not None else ([], [wanted.key_id])
        if wanted.kind_name == "update-key":
            ours = [wanted]
        else:
            ours = changes(authority, [key for key in add if key], remove, key_id(1), lock_key(1).sign)
        assert ours == updates[made : made + len(ours)]
        authority = authority.inform(ours)
        made += len(ours)


def test_sync_offers_are_upstreams() -> None:
    authority, offer = whole(), vectors()["offer"]
    assert [hash_text(made) for made in authority.offer().ancestors] == offer["ancestors"]
    genesis = Authority.bootstrap(chain()[0])
    missing = authority.missing_from(genesis.offer())
    assert len(missing) == vectors()["missing_from_genesis"] and genesis.inform(missing).head == authority.head
    assert authority.missing_from(authority.offer()) == []
    assert genesis.missing_from(authority.offer()) == []
    shared = Offer(b"?" * 32, (authority.offer().ancestors[0],))
    assert 0 < len(authority.missing_from(shared)) < len(missing)


def test_chains_without_a_common_update_do_not_sync() -> None:
    with pytest.raises(TsdError, match="nothing in common"):
        whole().missing_from(new_authority().offer())


@pytest.mark.parametrize("fork", vectors()["forks"], ids=lambda fork: fork["name"])
def test_forks_are_resolved_as_upstream_does(fork: dict[str, Any]) -> None:
    rivals = [AUM.decode(bytes.fromhex(raw)) for raw in fork["rivals"]]
    genesis = Authority.bootstrap(chain()[0])
    for order in (rivals, rivals[::-1]):
        assert hash_text(genesis.inform(order).head) == fork["head"]


@pytest.mark.parametrize("entry", vectors()["signatures"], ids=lambda entry: entry["name"])
def test_node_keys_are_admitted_as_upstream_does(entry: dict[str, Any]) -> None:
    raw = bytes.fromhex(entry["raw"])
    authority = Authority.bootstrap(chain()[0])
    found = nodekey.NodeKeySignature.decode(raw)
    assert found.encode() == raw and found.digest().hex() == entry["sig_hash"]
    node_key = NodePublic.parse(entry["node_key"])
    if entry["is_admitted"]:
        rotation = authority.admit(node_key, raw)
        assert (rotation is not None) == (found.kind == nodekey.ROTATION)
    else:
        with pytest.raises(TsdError):
            authority.admit(node_key, raw)


def test_rotations_are_upstreams_and_stay_short_enough_to_be_read() -> None:
    current = bytes.fromhex(vectors()["signatures"][0]["raw"])
    for number, wanted in enumerate(vectors()["rotations"], 40):
        current = nodekey.rotated(current, node(number), lock_key(7).sign)
        assert hashlib.blake2s(current).hexdigest() == wanted
    assert current.hex() == vectors()["rotations_last"]
    assert nodekey.rotated(current, node(59), lock_key(7).sign) == current


def test_as_many_layers_as_upstream_reads() -> None:
    layer = nodekey.NodeKeySignature.decode(bytes.fromhex(vectors()["signatures"][0]["raw"]))
    for _ in range(vectors()["max_layers"] - 1):
        layer = nodekey.NodeKeySignature(nodekey.ROTATION, layer.pubkey, nested=layer)
    assert nodekey.NodeKeySignature.decode(layer.encode()) == layer
    with pytest.raises(DecodeError, match="nested too deeply"):
        nodekey.NodeKeySignature.decode(replace(layer, nested=layer).encode())


def test_a_disablement_secret_is_known_by_its_value() -> None:
    assert disablement_value(SECRET).hex() == vectors()["disablement"]["value"]
    state = Authority.bootstrap(chain()[0]).state
    assert state.is_disabled_by(SECRET) and not state.is_disabled_by(b"\xa4" * 32)
