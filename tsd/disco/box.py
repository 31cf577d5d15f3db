"""The disco envelope: magic, sender key, nonce, NaCl box (tailscale: disco/disco.go, types/key/disco.go).

A shared secret is computed once per peer (`crypto_box_beforenm`) and kept by `DiscoKeyring`.
"""

from __future__ import annotations

from collections import OrderedDict

from nacl.bindings import crypto_box_beforenm, crypto_box_easy_afternm, crypto_box_open_easy_afternm
from nacl.exceptions import CryptoError

from tsd.base.errors import DecodeError
from tsd.base.keys import DiscoPrivate, DiscoPublic

MAGIC = b"TS\xf0\x9f\x92\xac"
KEY_BYTES = 32
NONCE_BYTES = 24
HEADER_BYTES = len(MAGIC) + KEY_BYTES
OVERHEAD_BYTES = HEADER_BYTES + NONCE_BYTES + 16
MIN_BYTES = HEADER_BYTES + NONCE_BYTES

_SECRETS_MAX = 4096


def is_disco(datagram: bytes | memoryview) -> bool:
    """Whether a datagram starts like disco and can hold an envelope."""
    return len(datagram) >= MIN_BYTES and datagram[:6] == MAGIC


def sender_of(datagram: bytes) -> bytes:
    """The sender's raw disco public key, unauthenticated. Raises `DecodeError` when it is no disco envelope."""
    if not is_disco(datagram):
        raise DecodeError("disco", "not disco")
    return datagram[len(MAGIC) : HEADER_BYTES]


class DiscoKeyring:
    """Seals and opens envelopes of one disco key towards many peers.

    Unknown senders must be refused by the caller before `open_from`, so that strangers cost no key exchange.
    """

    def __init__(self, private: DiscoPrivate) -> None:
        self.public: DiscoPublic = private.public()
        self._private = private
        self._secrets: OrderedDict[bytes, bytes] = OrderedDict()
        self._header = MAGIC + self.public.raw

    def seal_to(self, peer: bytes, nonce: bytes, plaintext: bytes) -> bytes:
        """Raises `DecodeError` when `peer` is a key with which no secret can be shared."""
        return self._header + nonce + bytes(crypto_box_easy_afternm(plaintext, nonce, self._secret(peer)))

    def open_from(self, peer: bytes, datagram: bytes) -> bytes:
        """The plaintext of an envelope whose sender is `peer`. Raises `DecodeError`."""
        nonce = datagram[HEADER_BYTES:MIN_BYTES]
        try:
            return bytes(crypto_box_open_easy_afternm(datagram[MIN_BYTES:], nonce, self._secret(peer)))
        except (CryptoError, ValueError, TypeError):
            raise DecodeError("disco", "box does not open") from None

    def forget(self, peer: bytes) -> None:
        """Wipe the shared secret of a key that no peer uses any more."""
        self._secrets.pop(peer, None)

    def _secret(self, peer: bytes) -> bytes:
        secret = self._secrets.get(peer)
        if secret is None:
            try:
                secret = bytes(crypto_box_beforenm(peer, self._private.raw))
            except (CryptoError, ValueError, RuntimeError):
                raise DecodeError("disco", "unusable key") from None
            self._secrets[peer] = secret
            if len(self._secrets) > _SECRETS_MAX:
                self._secrets.popitem(last=False)
        return secret
