"""Keys, one type per role, so that a disco key cannot be passed where a node key is meant.

Text forms follow upstream (tailscale: types/key/*.go): a prefix and lower-case hex. Private keys are stored
clamped, never appear in `repr`, and compare in constant time.
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from tsd.base.entropy import Entropy
from tsd.base.errors import DecodeError, ProtocolError


def x25519(private: bytes, public: bytes) -> bytes:
    """Shared secret of two raw 32-byte keys. Raises `ProtocolError` for low-order points (all-zero result)."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as err:
        raise ProtocolError(f"x25519: {err}") from None


def x25519_public(private: bytes) -> bytes:
    """The public half of a raw 32-byte private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def clamp(raw: bytes) -> bytes:
    """32 random bytes as an X25519 scalar (RFC 7748, section 5)."""
    return bytes([raw[0] & 248]) + raw[1:31] + bytes([(raw[31] & 127) | 64])


def _parse_hex(text: str, prefix: str, size: int) -> bytes:
    if not text.startswith(prefix):
        raise DecodeError("keys", f"want prefix {prefix!r}")
    digits = text[len(prefix) :]
    if len(digits) != 2 * size:
        raise DecodeError("keys", f"{prefix} wants {2 * size} hex digits, has {len(digits)}")
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise DecodeError("keys", f"{prefix} has characters that are not hex") from None


@dataclass(frozen=True, slots=True, order=True)
class PublicKey:
    """32 raw bytes; use a subclass."""

    raw: bytes
    PREFIX: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise DecodeError("keys", f"{len(self.raw)} bytes, want 32")

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(_parse_hex(text, cls.PREFIX, 32))

    @classmethod
    def zero(cls) -> Self:
        return cls(bytes(32))

    @property
    def is_zero(self) -> bool:
        return not any(self.raw)

    def short(self) -> str:
        """The form for logs: `[` + five base64 characters + `]`."""
        return f"[{base64.b64encode(self.raw).decode()[:5]}]"

    def __str__(self) -> str:
        return self.PREFIX + self.raw.hex()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.short()}"


class NodePublic(PublicKey):
    PREFIX = "nodekey:"
    __slots__ = ()


class MachinePublic(PublicKey):
    PREFIX = "mkey:"
    __slots__ = ()


class DiscoPublic(PublicKey):
    PREFIX = "discokey:"
    __slots__ = ()


class LockPublic(PublicKey):
    """Ed25519 key of the tailnet lock; `tlpub:` is accepted when parsing."""

    PREFIX = "nlpub:"
    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> LockPublic:
        return cls(_parse_hex(text, "tlpub:" if text.startswith("tlpub:") else cls.PREFIX, 32))


AnyPublic = TypeVar("AnyPublic", bound=PublicKey)


@dataclass(frozen=True, slots=True, eq=False)
class PrivateKey:
    """32 clamped bytes; use a subclass."""

    raw: bytes
    PREFIX: ClassVar[str] = "privkey:"

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise DecodeError("keys", f"{len(self.raw)} bytes, want 32")

    @classmethod
    def generate(cls, entropy: Entropy) -> Self:
        return cls(clamp(entropy(32)))

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(_parse_hex(text, cls.PREFIX, 32))

    @property
    def is_zero(self) -> bool:
        return not any(self.raw)

    def text(self) -> str:
        """The secret text form, for the state file only."""
        return self.PREFIX + self.raw.hex()

    def exchange(self, public: bytes) -> bytes:
        return x25519(self.raw, public)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and hmac.compare_digest(self.raw, other.raw)

    def __hash__(self) -> int:
        return hash((type(self), self.raw))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(secret)"


class NodePrivate(PrivateKey):
    __slots__ = ()

    def public(self) -> NodePublic:
        return NodePublic(x25519_public(self.raw))


class MachinePrivate(PrivateKey):
    __slots__ = ()

    def public(self) -> MachinePublic:
        return MachinePublic(x25519_public(self.raw))


class DiscoPrivate(PrivateKey):
    __slots__ = ()

    def public(self) -> DiscoPublic:
        return DiscoPublic(x25519_public(self.raw))


@dataclass(frozen=True, slots=True, eq=False)
class LockPrivate:
    """Ed25519 seed of the tailnet lock key; text form `nlpriv:` + seed + public, 128 hex digits."""

    seed: bytes

    @classmethod
    def generate(cls, entropy: Entropy) -> LockPrivate:
        return cls(entropy(32))

    @classmethod
    def parse(cls, text: str) -> LockPrivate:
        return cls(_parse_hex(text, "nlpriv:", 64)[:32])

    def public(self) -> LockPublic:
        return LockPublic(Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(message)

    def text(self) -> str:
        return "nlpriv:" + self.seed.hex() + self.public().raw.hex()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LockPrivate) and hmac.compare_digest(self.seed, other.seed)

    def __hash__(self) -> int:
        return hash((LockPrivate, self.seed))

    def __repr__(self) -> str:
        return "LockPrivate(secret)"
