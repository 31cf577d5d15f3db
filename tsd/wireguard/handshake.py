"""The Noise IKpsk2 handshake of WireGuard (whitepaper, section 5.4). Pure functions over `SymmetricState`.

A failed read raises `ProtocolError` and leaves the state of the caller untouched. MACs are in `cookie.py`; who may
speak and when is in `device.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tsd.base.keys import x25519, x25519_public
from tsd.noise.symmetric import SymmetricState, hash256
from tsd.wireguard.messages import Initiation, Response

CHAINING_KEY = hash256(b"Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s")
INITIAL_HASH = hash256(CHAINING_KEY, b"WireGuard v1 zx2c4 Jason@zx2c4.com")


class Identity(NamedTuple):
    """Our static key pair, raw."""

    private: bytes
    public: bytes


class TransportKeys(NamedTuple):
    initiator_to_responder: bytes
    responder_to_initiator: bytes


@dataclass(slots=True)
class PendingInitiation:
    """What the initiator must remember until the response comes."""

    local_index: int
    ephemeral: bytes
    state: SymmetricState


class ReadInitiation(NamedTuple):
    """The responder's side after the first half of an initiation: the initiator is named, not yet proven."""

    message: Initiation
    static: bytes
    state: SymmetricState


def create_initiation(
    identity: Identity, remote: bytes, static_shared: bytes, ephemeral: bytes, local_index: int, timestamp: bytes
) -> tuple[Initiation, PendingInitiation]:
    """`static_shared` is DH(our static, their static), computed once per peer; `ephemeral` a fresh private key."""
    ephemeral_public = x25519_public(ephemeral)
    state = _start(remote, ephemeral_public)
    state.mix_key(x25519(ephemeral, remote))
    sealed_static = state.encrypt_and_hash(identity.public)
    state.mix_key(static_shared)
    sealed_timestamp = state.encrypt_and_hash(timestamp)
    message = Initiation(local_index, ephemeral_public, sealed_static, sealed_timestamp)
    return message, PendingInitiation(local_index, ephemeral, state)


def read_initiation(identity: Identity, message: Initiation) -> ReadInitiation:
    """Learn who claims to initiate."""
    state = _start(identity.public, message.ephemeral)
    state.mix_key(x25519(identity.private, message.ephemeral))
    return ReadInitiation(message, state.decrypt_and_hash(message.sealed_static), state)


def read_timestamp(half: ReadInitiation, static_shared: bytes) -> bytes:
    """The second half: proves the initiator's static key. Returns the TAI64N stamp."""
    half.state.mix_key(static_shared)
    return half.state.decrypt_and_hash(half.message.sealed_timestamp)


def create_response(
    half: ReadInitiation, ephemeral: bytes, psk: bytes, local_index: int
) -> tuple[Response, TransportKeys]:
    """Answer an initiation whose timestamp was accepted."""
    state = half.state
    ephemeral_public = x25519_public(ephemeral)
    state.mix_hash(ephemeral_public)
    state.mix_chain(ephemeral_public)
    state.mix_chain(x25519(ephemeral, half.message.ephemeral))
    state.mix_chain(x25519(ephemeral, half.static))
    state.mix_key_and_hash(psk)
    message = Response(local_index, half.message.sender_index, ephemeral_public, state.encrypt_and_hash(b""))
    return message, TransportKeys(*state.split())


def read_response(identity: Identity, pending: PendingInitiation, message: Response, psk: bytes) -> TransportKeys:
    """Finish as initiator; `pending` may be used again if this raises."""
    state = pending.state.copy()
    state.mix_hash(message.ephemeral)
    state.mix_chain(message.ephemeral)
    state.mix_chain(x25519(pending.ephemeral, message.ephemeral))
    state.mix_chain(x25519(identity.private, message.ephemeral))
    state.mix_key_and_hash(psk)
    state.decrypt_and_hash(message.sealed_empty)
    return TransportKeys(*state.split())


def _start(responder: bytes, ephemeral_public: bytes) -> SymmetricState:
    state = SymmetricState(CHAINING_KEY, INITIAL_HASH)
    state.mix_hash(responder)
    state.mix_hash(ephemeral_public)
    state.mix_chain(ephemeral_public)
    return state
