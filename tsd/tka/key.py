"""A key that the lock trusts (tailscale: tka/key.go, tka/verify.go).

Signatures are checked by OpenSSL, which refuses a few malformed keys and signatures that upstream's lenient rules
(ZIP-215) let pass; a signer has to craft those on purpose, and we are then the stricter side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from nacl.bindings import crypto_core_ed25519_is_valid_point

from tsd.tka import fields
from tsd.tka.errors import LockRefused

ED25519 = 1
KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_VOTES = 4096
MAX_META_BYTES = 512


@dataclass(frozen=True, slots=True)
class Key:
    """`votes` is its weight where two changes compete."""

    public: bytes | None
    votes: int = 1
    kind: int = ED25519
    meta: dict[str, str] | None = None

    @property
    def id(self) -> bytes:
        """An Ed25519 key is its own ID."""
        return self.public or b""

    @property
    def kind_name(self) -> str:
        return {0: "invalid", ED25519: "25519"}.get(self.kind, f"Key?<{self.kind}>")

    def check(self) -> None:
        """Raises `LockRefused`."""
        if not 0 < self.votes <= MAX_VOTES:
            raise LockRefused(f"a key with {self.votes} votes: 1 to {MAX_VOTES} are allowed")
        if sum(len(part.encode()) for pair in (self.meta or {}).items() for part in pair) > MAX_META_BYTES:
            raise LockRefused(f"a key with more than {MAX_META_BYTES} bytes of metadata")
        if self.kind != ED25519:
            raise LockRefused(f"a key of unknown kind {self.kind}")

    def has_signed(self, digest: bytes, signature: bytes) -> bool:
        return self.kind == ED25519 and is_signed(self.id, digest, signature)

    def to_cbor(self) -> fields.Fields:
        return {1: self.kind, 2: self.votes, 3: self.public, **({12: self.meta} if self.meta else {})}

    @classmethod
    def from_cbor(cls, value: Any) -> Key:
        found = fields.mapping(value)
        return cls(
            kind=fields.number(found, 1, 255),
            votes=fields.number(found, 2),
            public=fields.optional_octets(found, 3),
            meta=fields.texts(found.get(12)),
        )


def is_signed(public: bytes, digest: bytes, signature: bytes) -> bool:
    """False also for public keys that nobody can own, such as 32 zeros: signatures by a point of small order can be
    made up by anybody (RFC 8032, 8.1 leaves that to the verifier).
    """
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        if not crypto_core_ed25519_is_valid_point(public):
            return False
        Ed25519PublicKey.from_public_bytes(public).verify(signature, digest)
    except (InvalidSignature, ValueError):
        return False
    return True
