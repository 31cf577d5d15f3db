"""What the lock trusts at one moment: keys, and values that prove a disablement secret (tailscale: tka/state.go)."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.kdf.argon2 import Argon2i

from tsd.tka import fields
from tsd.tka.errors import LockRefused
from tsd.tka.key import Key

DISABLEMENT_BYTES = 32
MAX_DISABLEMENT_VALUES = 32
MAX_KEYS = 512
_SALT = b"tailscale network-lock disablement salt"


@dataclass(frozen=True, slots=True)
class State:
    """`last` is the hash of the message that led here; it is absent inside a checkpoint."""

    keys: tuple[Key, ...] | None
    disablement_values: tuple[bytes, ...] | None
    state_id: tuple[int, int] = (0, 0)
    last: bytes | None = None

    def key(self, key_id: bytes) -> Key | None:
        return next((key for key in self.keys or () if key.id == key_id), None)

    def is_disabled_by(self, secret: bytes) -> bool:
        derived = disablement_value(secret)
        return any([hmac.compare_digest(derived, value) for value in self.disablement_values or ()])

    def check_checkpoint(self) -> None:
        """Whether this may stand in a checkpoint. Raises `LockRefused`."""
        keys, values = self.keys or (), self.disablement_values or ()
        if self.last is not None:
            raise LockRefused("a checkpoint whose state names a message")
        if not 0 < len(values) <= MAX_DISABLEMENT_VALUES:
            raise LockRefused(f"{len(values)} disablement values: 1 to {MAX_DISABLEMENT_VALUES} are allowed")
        if any(len(value) != DISABLEMENT_BYTES for value in values) or len(set(values)) != len(values):
            raise LockRefused("a disablement value of the wrong length, or twice the same")
        if not 0 < len(keys) <= MAX_KEYS:
            raise LockRefused(f"{len(keys)} trusted keys: 1 to {MAX_KEYS} are allowed")
        for key in keys:
            key.check()
        if len({key.id for key in keys}) != len(keys):
            raise LockRefused("the same trusted key twice")

    def to_cbor(self) -> fields.Fields:
        keys = None if self.keys is None else [key.to_cbor() for key in self.keys]
        values = None if self.disablement_values is None else list(self.disablement_values)
        ids = {at: part for at, part in zip((4, 5), self.state_id, strict=True) if part}
        return {1: self.last, 2: values, 3: keys, **ids}

    @classmethod
    def from_cbor(cls, value: Any) -> State:
        found = fields.mapping(value)
        values, keys = fields.items(found.get(2)), fields.items(found.get(3))
        return cls(
            keys=None if keys is None else tuple(map(Key.from_cbor, keys)),
            disablement_values=None if values is None else tuple(map(fields.octets, values)),
            state_id=(fields.number(found, 4), fields.number(found, 5)),
            last=fields.optional_octets(found, 1),
        )


def disablement_value(secret: bytes) -> bytes:
    """What may be public of a disablement secret."""
    kdf = Argon2i(salt=_SALT, length=DISABLEMENT_BYTES, iterations=4, lanes=4, memory_cost=16 * 1024)
    return kdf.derive(secret)
