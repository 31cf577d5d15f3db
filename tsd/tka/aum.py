"""Messages that change the lock, each signed and naming the one before it (tailscale: tka/aum.go).

A message is known by the BLAKE2s hash of its bytes; signatures are over the hash of the bytes without them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from tsd.base.errors import DecodeError
from tsd.tka import cbor, fields
from tsd.tka.errors import LockRefused
from tsd.tka.key import KEY_BYTES, SIGNATURE_BYTES, Key
from tsd.tka.state import State

ADD_KEY, REMOVE_KEY, NO_OP, UPDATE_KEY, CHECKPOINT = range(1, 6)
HASH_BYTES = 32
_NAMES = {0: "invalid", 1: "add-key", 2: "remove-key", 3: "no-op", 4: "update-key", 5: "checkpoint"}
_OWN_FIELDS = {
    ADD_KEY: {"key"},
    REMOVE_KEY: {"key_id"},
    UPDATE_KEY: {"key_id", "votes", "meta"},
    CHECKPOINT: {"state"},
}


@dataclass(frozen=True, slots=True)
class AUM:
    """An authority update message. A kind from the future changes nothing for us, but keeps its place in the chain."""

    kind: int
    prev: bytes | None = None
    key: Key | None = None
    key_id: bytes = b""
    state: State | None = None
    votes: int | None = None
    meta: dict[str, str] | None = None
    signatures: tuple[tuple[bytes, bytes], ...] = ()
    """(ID of the key, signature)."""

    @property
    def kind_name(self) -> str:
        return _NAMES.get(self.kind, f"AUM?<{self.kind}>")

    def encode(self) -> bytes:
        found: fields.Fields = {1: self.kind, 2: self.prev}
        if self.key is not None:
            found[3] = self.key.to_cbor()
        if self.key_id:
            found[4] = self.key_id
        if self.state is not None:
            found[5] = self.state.to_cbor()
        if self.votes is not None:
            found[6] = self.votes
        if self.meta:
            found[7] = self.meta
        if self.signatures:
            found[23] = [{1: key_id, 2: signature} for key_id, signature in self.signatures]
        return cbor.encode(found)

    @classmethod
    def decode(cls, raw: bytes) -> AUM:
        """Raises `DecodeError`, also for bytes that we would not write like this."""
        found = fields.mapping(cbor.decode(raw))
        aum = cls(
            kind=fields.number(found, 1, 255),
            prev=fields.optional_octets(found, 2),
            key=Key.from_cbor(found[3]) if 3 in found else None,
            key_id=fields.octets(found.get(4, b"")),
            state=State.from_cbor(found[5]) if 5 in found else None,
            votes=fields.optional_number(found, 6),
            meta=fields.texts(found.get(7)),
            signatures=tuple(map(_signature, fields.items(found.get(23)) or ())),
        )
        if aum.encode() != raw:
            raise DecodeError("tka", "an update with unknown fields, or not in canonical form")
        return aum

    def hash(self) -> bytes:
        return hashlib.blake2s(self.encode()).digest()

    def digest(self) -> bytes:
        """What is signed."""
        return hashlib.blake2s(replace(self, signatures=()).encode()).digest()

    def signed_by(self, key_id: bytes, sign: Callable[[bytes], bytes]) -> AUM:
        return replace(self, signatures=(*self.signatures, (key_id, sign(self.digest()))))

    def check(self) -> None:
        """Whether it is well-formed; says nothing about its signatures. Raises `LockRefused`."""
        if self.prev is not None and len(self.prev) != HASH_BYTES:
            raise LockRefused("an update whose parent is not a hash")
        if any(len(key_id) != KEY_BYTES or len(made) != SIGNATURE_BYTES for key_id, made in self.signatures):
            raise LockRefused("an update with a malformed signature")
        if self.key is not None:
            self.key.check()
        if self.state is not None:
            self.state.check_checkpoint()
        self._check_fields()

    def _check_fields(self) -> None:
        own = _OWN_FIELDS.get(self.kind)
        if own is None:
            return
        given = {
            "key": self.key is not None,
            "key_id": bool(self.key_id),
            "state": self.state is not None,
            "votes": self.votes is not None,
            "meta": bool(self.meta),
        }
        has = {name for name, is_given in given.items() if is_given}
        wants = {"key_id"} if self.kind == UPDATE_KEY else own
        if has - own or not wants <= has or (self.kind == UPDATE_KEY and len(has) < 2):
            raise LockRefused(f"a {self.kind_name} update with the wrong fields: {', '.join(sorted(has)) or 'none'}")


def _signature(value: object) -> tuple[bytes, bytes]:
    found = fields.mapping(value)
    return fields.octets(found.get(1)), fields.octets(found.get(2))


def hash_text(digest: bytes) -> str:
    """Base32 without padding, as heads are told."""
    return base64.b32encode(digest).decode().rstrip("=")


def parse_hash(text: str) -> bytes:
    """Raises `DecodeError`."""
    try:
        found = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError:
        found = b""
    if len(found) != HASH_BYTES or hash_text(found) != text:
        raise DecodeError("tka", f"not the hash of an update: {text[:60]!r}")
    return found
