"""Keys, signatures and vectors of tailnet lock for tests. Key N has the seed of 32 bytes N, as in the vectors."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tsd.base.keys import LockPrivate, NodePublic
from tsd.tka.aum import AUM
from tsd.tka.authority import Authority
from tsd.tka.key import Key
from tsd.tka.nodekey import direct
from tsd.tka.updater import genesis

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "tka.json"
SECRET = b"\xa5" * 32


@cache
def vectors() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(VECTORS.read_text())
    return found


def lock_key(number: int) -> LockPrivate:
    return LockPrivate(bytes((number,)) * 32)


def key_id(number: int) -> bytes:
    return lock_key(number).public().raw


def trusted(number: int, votes: int = 1) -> Key:
    return Key(key_id(number), votes)


def signed(aum: AUM, *signers: int) -> AUM:
    for number in signers:
        aum = aum.signed_by(key_id(number), lock_key(number).sign)
    return aum


def new_genesis(*keys: Key, signer: int = 1, state_id: tuple[int, int] = (7, 8)) -> AUM:
    """Trusts key 1 unless told otherwise; `SECRET` switches it off."""
    value = bytes.fromhex(vectors()["disablement"]["value"])
    return signed(genesis(keys or (trusted(1),), (value,), state_id), signer)


def new_authority(*keys: Key) -> Authority:
    return Authority.bootstrap(new_genesis(*keys))


def sign_node(node_key: NodePublic, signer: int = 1, rotation: bytes = b"") -> bytes:
    return direct(node_key, key_id(signer), rotation, lock_key(signer).sign)
