"""Signatures that admit a node key (tailscale: tka/sig.go).

Direct: made by a trusted key. Rotation: made by the node itself for a new node key, around the signature of the old
one, which names the key that may do so. Credential: made by a trusted key for a key that came with an auth key; it
admits nothing by itself, only inside a rotation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from tsd.base.errors import DecodeError
from tsd.base.keys import NodePublic
from tsd.tka import cbor, fields
from tsd.tka.errors import LockRefused
from tsd.tka.key import Key, is_signed

DIRECT, ROTATION, CREDENTIAL = 1, 2, 3
MAX_ROTATIONS = 15
"""Node keys that a chain of rotations may remember, so that one more still fits."""
_NAMES = {0: "invalid", DIRECT: "direct", ROTATION: "rotation", CREDENTIAL: "credential"}
_NODE_PREFIX = b"np"


@dataclass(frozen=True, slots=True)
class NodeKeySignature:
    kind: int
    pubkey: bytes = b""
    """The node key in binary form, with its prefix."""
    key_id: bytes = b""
    signature: bytes = b""
    nested: NodeKeySignature | None = None
    wrapping_pubkey: bytes = b""
    """Who may wrap this one into a rotation."""

    @property
    def kind_name(self) -> str:
        return _NAMES.get(self.kind, f"Sig?<{self.kind}>")

    def to_cbor(self) -> fields.Fields:
        nested = self.nested.to_cbor() if self.nested is not None else None
        rest = {2: self.pubkey, 3: self.key_id, 4: self.signature, 5: nested, 6: self.wrapping_pubkey}
        return {1: self.kind, **{at: value for at, value in rest.items() if value}}

    def encode(self) -> bytes:
        return cbor.encode(self.to_cbor())

    @classmethod
    def from_cbor(cls, value: object) -> NodeKeySignature:
        found = fields.mapping(value)
        pubkey, key_id, signature, wrapping = (fields.octets(found.get(at, b"")) for at in (2, 3, 4, 6))
        nested = cls.from_cbor(found[5]) if 5 in found else None
        return cls(fields.number(found, 1, 255), pubkey, key_id, signature, nested, wrapping)

    @classmethod
    def decode(cls, raw: bytes) -> NodeKeySignature:
        """Raises `DecodeError`, also for bytes that we would not write like this."""
        found = cls.from_cbor(cbor.decode(raw))
        if found.encode() != raw:
            raise DecodeError("tka", "a node key signature with unknown fields, or not in canonical form")
        return found

    def digest(self) -> bytes:
        """What is signed."""
        return hashlib.blake2s(replace(self, signature=b"").encode()).digest()

    def signed_by(self, sign: Callable[[bytes], bytes]) -> NodeKeySignature:
        return replace(self, signature=sign(self.digest()))

    def layers(self) -> list[NodeKeySignature]:
        """From the outside in."""
        found = [self]
        while found[-1].nested is not None:
            found.append(found[-1].nested)
        return found

    @property
    def wrapping_public(self) -> bytes:
        """Who may wrap this one; a rotation without a key of its own leaves it to the one inside."""
        for layer in self.layers():
            if layer.wrapping_pubkey or layer.kind != ROTATION:
                return layer.wrapping_pubkey
        return b""

    @property
    def authorizing_key_id(self) -> bytes:
        """The trusted key that all rests on, not yet verified. Raises `LockRefused`."""
        for layer in self.layers():
            if layer.kind in (DIRECT, CREDENTIAL) and layer.key_id:
                return layer.key_id
            if layer.kind != ROTATION:
                break
        raise LockRefused("a signature that names no trusted key")

    def verify(self, node_key: NodePublic, trusted: Key) -> None:
        """That it admits `node_key`, given that `trusted` is the key it names. Raises `LockRefused`."""
        if self.kind == CREDENTIAL:
            raise LockRefused("a credential does not admit a node by itself")
        if self.pubkey != node_key_bytes(node_key):
            raise LockRefused("the signature is for another node key")
        layer = self
        while layer.kind == ROTATION:
            inner = layer.nested
            if inner is None:
                raise LockRefused("a rotation without the signature before it")
            if not is_signed(inner.wrapping_public, layer.digest(), layer.signature):
                raise LockRefused("a rotation is not signed by the node that it is for")
            if inner.kind != CREDENTIAL:
                parse_node_key(inner.pubkey)
            layer = inner
        if layer.kind not in (DIRECT, CREDENTIAL) or layer.nested is not None:
            raise LockRefused(f"a signature of kind {layer.kind_name} where it does not belong")
        if not trusted.has_signed(layer.digest(), layer.signature):
            raise LockRefused("the trusted key did not make this signature")

    def rotation(self) -> Rotation | None:
        """Of a verified signature: what it replaces; None when it replaces nothing."""
        if self.kind != ROTATION:
            return None
        _, *inner = self.layers()
        previous = tuple(layer.pubkey for layer in inner if layer.pubkey)
        return Rotation(previous, inner[-1])


@dataclass(frozen=True, slots=True)
class Rotation:
    previous: tuple[bytes, ...]
    """Node keys in binary form that are no longer in use, newest first."""
    initial: NodeKeySignature


def node_key_bytes(node_key: NodePublic) -> bytes:
    return _NODE_PREFIX + node_key.raw


def parse_node_key(raw: bytes) -> NodePublic:
    """Raises `LockRefused`."""
    if len(raw) != 34 or not raw.startswith(_NODE_PREFIX):
        raise LockRefused("a signature for something that is not a node key")
    return NodePublic(raw[2:])


def direct(node_key: NodePublic, key_id: bytes, rotation_public: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """The signature of a trusted key; `rotation_public` may sign for later node keys of the same node."""
    made = NodeKeySignature(DIRECT, node_key_bytes(node_key), key_id, wrapping_pubkey=rotation_public)
    return made.signed_by(sign).encode()


def rotated(old: bytes, node_key: NodePublic, sign: Callable[[bytes], bytes]) -> bytes:
    """The signature of the new node key of a node whose old key had `old`. Raises `DecodeError`."""
    before = NodeKeySignature.decode(old)
    if before.pubkey == node_key_bytes(node_key):
        return old
    inner = _trimmed(before, sign)
    return NodeKeySignature(ROTATION, node_key_bytes(node_key), nested=inner).signed_by(sign).encode()


def _trimmed(chain: NodeKeySignature, sign: Callable[[bytes], bytes]) -> NodeKeySignature:
    """With its oldest rotations left out, when one more would not fit."""
    layers = chain.layers()
    keys = [layer.pubkey for layer in layers if layer.pubkey]
    if chain.kind != ROTATION or len(keys) <= MAX_ROTATIONS:
        return chain
    result = layers[-1]
    for pubkey in reversed(keys[: MAX_ROTATIONS - 1]):
        result = NodeKeySignature(ROTATION, pubkey, nested=result).signed_by(sign)
    return result


def by_credential(credential: NodeKeySignature, node_key: NodePublic, sign: Callable[[bytes], bytes]) -> bytes:
    """The signature of a node that logs in with a wrapped auth key. Raises `LockRefused`."""
    if credential.kind != CREDENTIAL:
        raise LockRefused(f"the auth key carries a signature of kind {credential.kind_name}, not a credential")
    return NodeKeySignature(ROTATION, node_key_bytes(node_key), nested=credential).signed_by(sign).encode()
