"""Noise symmetric state over BLAKE2s and ChaCha20-Poly1305, shared by WireGuard and ts2021.

Standard: Noise protocol framework, revision 34, section 5 (https://noiseprotocol.org/noise.html).
Both users give every AEAD in a handshake a fresh key, so the nonce is always zero and no counter is kept here.
Transport records are not here: WireGuard and ts2021 count their nonces differently.
"""

from __future__ import annotations

from hashlib import blake2s

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from tsd.base.errors import ProtocolError

HASH_BYTES = 32
TAG_BYTES = 16
ZERO_NONCE = bytes(12)

_INNER_PAD = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD = bytes(byte ^ 0x5C for byte in range(256))


def hash256(*parts: bytes) -> bytes:
    """BLAKE2s-256 of the concatenation of `parts`."""
    return blake2s(b"".join(parts)).digest()


def keyed_mac(key: bytes, message: bytes) -> bytes:
    """BLAKE2s-128 in its own keyed mode (WireGuard's MAC), which is not HMAC."""
    return blake2s(message, key=key, digest_size=16).digest()


def hmac256(key: bytes, message: bytes) -> bytes:
    """HMAC over BLAKE2s-256 (RFC 2104); keys here never exceed the 64-byte block. Three times as fast as `hmac`."""
    block = key.ljust(64, b"\0")
    inner = blake2s(block.translate(_INNER_PAD) + message).digest()
    return blake2s(block.translate(_OUTER_PAD) + inner).digest()


def hkdf1(chaining_key: bytes, material: bytes) -> bytes:
    return hmac256(hmac256(chaining_key, material), b"\x01")


def hkdf2(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    pseudo_random_key = hmac256(chaining_key, material)
    first = hmac256(pseudo_random_key, b"\x01")
    return first, hmac256(pseudo_random_key, first + b"\x02")


def hkdf3(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes, bytes]:
    pseudo_random_key = hmac256(chaining_key, material)
    first = hmac256(pseudo_random_key, b"\x01")
    second = hmac256(pseudo_random_key, first + b"\x02")
    return first, second, hmac256(pseudo_random_key, second + b"\x03")


class SymmetricState:
    """Chaining key, handshake hash and the key of the next AEAD."""

    __slots__ = ("_key", "chaining_key", "handshake_hash")

    def __init__(self, chaining_key: bytes, handshake_hash: bytes) -> None:
        self.chaining_key = chaining_key
        self.handshake_hash = handshake_hash
        self._key = b""

    @classmethod
    def initialize(cls, protocol_name: bytes) -> SymmetricState:
        """Names of up to 32 bytes are padded, longer ones are hashed."""
        if len(protocol_name) > HASH_BYTES:
            start = hash256(protocol_name)
        else:
            start = protocol_name.ljust(HASH_BYTES, b"\0")
        return cls(start, start)

    def copy(self) -> SymmetricState:
        """A fork, so that a failed read leaves the original untouched."""
        fork = SymmetricState(self.chaining_key, self.handshake_hash)
        fork._key = self._key
        return fork

    def mix_hash(self, data: bytes) -> None:
        self.handshake_hash = hash256(self.handshake_hash, data)

    def mix_chain(self, material: bytes) -> None:
        """Advance the chaining key only; the AEAD key is not renewed (a Noise MixKey whose key is never used)."""
        self.chaining_key = hkdf1(self.chaining_key, material)

    def mix_key(self, material: bytes) -> None:
        self.chaining_key, self._key = hkdf2(self.chaining_key, material)

    def mix_key_and_hash(self, material: bytes) -> None:
        """Mix a pre-shared key."""
        self.chaining_key, digest, self._key = hkdf3(self.chaining_key, material)
        self.mix_hash(digest)

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        ciphertext = ChaCha20Poly1305(self._key).encrypt(ZERO_NONCE, plaintext, self.handshake_hash)
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        """Raises `ProtocolError` when the tag is wrong; the state is then unchanged."""
        if len(ciphertext) < TAG_BYTES:
            raise ProtocolError("noise: ciphertext shorter than its tag")
        try:
            plaintext = ChaCha20Poly1305(self._key).decrypt(ZERO_NONCE, ciphertext, self.handshake_hash)
        except InvalidTag:
            raise ProtocolError("noise: authentication failed") from None
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[bytes, bytes]:
        """Transport keys: initiator to responder, responder to initiator."""
        return hkdf2(self.chaining_key, b"")
