"""Auth keys that admit a node to a locked tailnet: `KEY--TLsignature-privatekey` (tailscale: tka/sig.go)."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tsd.base.errors import DecodeError
from tsd.base.keys import NodePublic
from tsd.tka.key import KEY_BYTES
from tsd.tka.nodekey import NodeKeySignature, by_credential

MARK = "--TL"
PRIVATE_BYTES = 64


@dataclass(frozen=True, slots=True)
class WrappedKey:
    auth_key: str
    credential: NodeKeySignature
    seed: bytes

    def sign(self, node_key: NodePublic) -> bytes:
        """The signature of a node that logs in with it. Raises `LockRefused`."""
        return by_credential(self.credential, node_key, Ed25519PrivateKey.from_private_bytes(self.seed).sign)


def unwrap(text: str) -> WrappedKey | None:
    """None for a key that is not wrapped, or not in a way that we can read."""
    auth_key, mark, suffix = text.partition(MARK)
    signature, dash, private = suffix.partition("-")
    if not (mark and dash):
        return None
    try:
        raw = _unpadded(private)
        credential = NodeKeySignature.decode(_unpadded(signature))
    except (ValueError, DecodeError):
        return None
    return WrappedKey(auth_key, credential, raw[:KEY_BYTES]) if len(raw) == PRIVATE_BYTES else None


def wrap(auth_key: str, credential: NodeKeySignature, private: Ed25519PrivateKey) -> str:
    raw = private.private_bytes_raw() + private.public_key().public_bytes_raw()
    return f"{auth_key}{MARK}{_text(credential.encode())}-{_text(raw)}"


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode().rstrip("=")


def _unpadded(text: str) -> bytes:
    if "=" in text:
        raise ValueError("padded")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
