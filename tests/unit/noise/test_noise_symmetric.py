"""The symmetric state against a whole IK handshake computed elsewhere (ts2021, protocol version 145)."""

from __future__ import annotations

import pytest

from tsd.base.errors import ProtocolError
from tsd.base.keys import clamp, x25519, x25519_public
from tsd.noise.symmetric import SymmetricState, hkdf1, hkdf2, hkdf3

MACHINE = clamp(bytes(range(0x01, 0x21)))
MACHINE_EPHEMERAL = clamp(bytes(range(0x21, 0x41)))
CONTROL = clamp(bytes(range(0x41, 0x61)))
CONTROL_EPHEMERAL = clamp(bytes(range(0x61, 0x81)))


def start() -> SymmetricState:
    state = SymmetricState.initialize(b"Noise_IK_25519_ChaChaPoly_BLAKE2s")
    state.mix_hash(b"Tailscale Control Protocol v145")
    state.mix_hash(x25519_public(CONTROL))
    return state


def test_names_are_hashed_or_padded() -> None:
    hashed = SymmetricState.initialize(b"Noise_IK_25519_ChaChaPoly_BLAKE2s")
    assert hashed.handshake_hash.hex() == "bbea022b948cf3bc5857d70804229179e1116bc40cb8cc074835349c464bca36"
    assert SymmetricState.initialize(b"short").chaining_key == b"short" + bytes(27)


def test_ik_transcript() -> None:
    state = start()
    assert state.handshake_hash.hex() == "e83a9f2c5a0bbce612e9af0c578bc975883090953430bc82f10327bbd07feec8"
    state.mix_hash(x25519_public(MACHINE_EPHEMERAL))
    state.mix_key(x25519(MACHINE_EPHEMERAL, x25519_public(CONTROL)))
    assert state.chaining_key.hex() == "38fc1e0f50fa0a434a77591d4fef6b8f41d7d90e731bbd396c612000e9bebf3b"
    sealed_static = state.encrypt_and_hash(x25519_public(MACHINE))
    assert sealed_static.hex().startswith("822e8514e6389169bdfd10afecae5bde")
    state.mix_key(x25519(MACHINE, x25519_public(CONTROL)))
    assert state.chaining_key.hex() == "ff187cef7c29ad08e485c92dbf31b6762221129873f08bf85100b3cc339b7d44"
    assert state.encrypt_and_hash(b"").hex() == "c50e831342d4c8605e6d5bccc41fba65"
    state.mix_hash(x25519_public(CONTROL_EPHEMERAL))
    state.mix_key(x25519(MACHINE_EPHEMERAL, x25519_public(CONTROL_EPHEMERAL)))
    state.mix_key(x25519(MACHINE, x25519_public(CONTROL_EPHEMERAL)))
    assert state.encrypt_and_hash(b"").hex() == "7cc147989eb24756280c2216d1f9d8e5"
    assert state.handshake_hash.hex() == "321714d20086399690b1ca68b173c01de3145831416fd3a049c6db8a2eb99214"
    first, second = state.split()
    assert first.hex() == "9d8a0c9bfad81a7ac34484c53c3b9e730edd3c0249faac7826a8cf9f4b9713b1"
    assert second.hex() == "5c591b6bc88039fb598c45334d246af59501be8061e51f3950afafc7d1fb28cb"


def test_both_sides_agree_and_a_bad_tag_changes_nothing() -> None:
    sender, receiver = start(), start()
    for state in (sender, receiver):
        state.mix_key_and_hash(bytes(32))
    sealed = sender.encrypt_and_hash(b"payload")
    fork = receiver.copy()
    for broken in (sealed[:-1] + bytes([sealed[-1] ^ 1]), b"", sealed[:10]):
        with pytest.raises(ProtocolError):
            receiver.decrypt_and_hash(broken)
    assert receiver.handshake_hash == fork.handshake_hash
    assert receiver.decrypt_and_hash(sealed) == b"payload"
    assert receiver.split() == sender.split()


def test_hkdf_outputs_are_prefixes_of_one_another() -> None:
    key, material = b"k" * 32, b"m"
    assert hkdf3(key, material)[:2] == hkdf2(key, material)
    assert hkdf2(key, material)[0] == hkdf1(key, material)
