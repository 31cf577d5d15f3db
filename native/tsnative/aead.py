"""Batches of ChaCha20-Poly1305 by themselves, for tests and benchmarks: nonce = 0^4 || LE64 counter, no AAD.

`TSD_AEAD=avx2|portable|library` chooses what runs them; "library" is `cryptography`, the oracle.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

import tsnative


def kernels() -> list[str]:
    """What can be chosen here, fastest first."""
    return [*(tsnative.native.kernels() if tsnative.native is not None else []), "library"]


def _chosen(kernel: str) -> str:
    return kernel or os.environ.get("TSD_AEAD", "") or kernels()[0]


def seal(key: bytes, packets: list[tuple[int, bytes]], kernel: str = "") -> list[bytes]:
    """[(counter, plaintext)] -> [ciphertext and tag]. Raises ValueError for a kernel that is not there."""
    name = _chosen(kernel)
    if name != "library" and tsnative.native is not None:
        sealed: list[bytes] = tsnative.native.seal_batch(name, key, packets)
        return sealed
    if name != "library":
        raise ValueError(f"no AEAD kernel {name!r}: the native core is not built")
    cipher = ChaCha20Poly1305(key)
    return [cipher.encrypt(_nonce(counter), plaintext, None) for counter, plaintext in packets]


def open_(key: bytes, packets: list[tuple[int, bytes]], kernel: str = "") -> list[bytes | None]:
    """[(counter, ciphertext and tag)] -> [plaintext, or None when it is not authentic]."""
    name = _chosen(kernel)
    if name != "library" and tsnative.native is not None:
        opened: list[bytes | None] = tsnative.native.open_batch(name, key, packets)
        return opened
    if name != "library":
        raise ValueError(f"no AEAD kernel {name!r}: the native core is not built")
    cipher = ChaCha20Poly1305(key)
    return [_open_one(cipher, counter, sealed) for counter, sealed in packets]


def _nonce(counter: int) -> bytes:
    return bytes(4) + counter.to_bytes(8, "little")


def _open_one(cipher: ChaCha20Poly1305, counter: int, sealed: bytes) -> bytes | None:
    try:
        return cipher.decrypt(_nonce(counter), sealed, None)
    except InvalidTag:
        return None
