"""MACs and cookies: how a loaded responder makes initiators prove their address (whitepaper, section 5.4.7).

`MacStamp` is one peer seen as a receiver of our messages; `CookieGuard` is us as a receiver.
"""

from __future__ import annotations

from collections.abc import Hashable
from hmac import compare_digest

from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt,
    crypto_aead_xchacha20poly1305_ietf_encrypt,
)
from nacl.exceptions import CryptoError

from tsd.base.entropy import Entropy
from tsd.noise.symmetric import hash256, keyed_mac
from tsd.wireguard.constants import COOKIE_REFRESH_S, MAC_BYTES
from tsd.wireguard.messages import CookieReply

_NO_MAC = bytes(MAC_BYTES)


def mac1_key(receiver: bytes) -> bytes:
    return hash256(b"mac1----", receiver)


def cookie_key(receiver: bytes) -> bytes:
    return hash256(b"cookie--", receiver)


class MacStamp:
    """Appends MAC1 and, while we hold a fresh cookie of that receiver, MAC2."""

    __slots__ = ("_cookie", "_cookie_at", "_cookie_key", "_last_mac1", "_mac1_key")

    def __init__(self, receiver: bytes) -> None:
        self._mac1_key = mac1_key(receiver)
        self._cookie_key = cookie_key(receiver)
        self._last_mac1 = b""
        self._cookie = b""
        self._cookie_at = 0.0

    def stamp(self, message: bytes, now: float) -> bytes:
        self._last_mac1 = keyed_mac(self._mac1_key, message)
        stamped = message + self._last_mac1
        if self._cookie and now - self._cookie_at < COOKIE_REFRESH_S:
            return stamped + keyed_mac(self._cookie, stamped)
        return stamped + _NO_MAC

    def consume(self, reply: CookieReply, now: float) -> bool:
        """Take the cookie of a reply to our last message; False when it is not one."""
        if not self._last_mac1:
            return False
        try:
            self._cookie = crypto_aead_xchacha20poly1305_ietf_decrypt(
                reply.sealed_cookie, self._last_mac1, reply.nonce, self._cookie_key
            )
        except CryptoError:
            return False
        self._cookie_at = now
        # One reply per message, so that a captured one cannot be replayed.
        self._last_mac1 = b""
        return True


class CookieGuard:
    """Checks the MACs of what we receive and mints cookies; the secret changes every two minutes."""

    __slots__ = ("_cookie_key", "_entropy", "_mac1_key", "_secret", "_secret_at")

    def __init__(self, own_public: bytes, entropy: Entropy) -> None:
        self._mac1_key = mac1_key(own_public)
        self._cookie_key = cookie_key(own_public)
        self._entropy = entropy
        self._secret = b""
        self._secret_at = 0.0

    def is_mac1_valid(self, datagram: bytes) -> bool:
        expected = keyed_mac(self._mac1_key, datagram[: -2 * MAC_BYTES])
        return compare_digest(expected, datagram[-2 * MAC_BYTES : -MAC_BYTES])

    def is_mac2_valid(self, datagram: bytes, source: bytes, now: float) -> bool:
        if not self._secret or now - self._secret_at > COOKIE_REFRESH_S:
            return False
        expected = keyed_mac(keyed_mac(self._secret, source), datagram[:-MAC_BYTES])
        return compare_digest(expected, datagram[-MAC_BYTES:])

    def reply(self, datagram: bytes, source: bytes, now: float) -> bytes:
        """A cookie for whoever receives at `source`, sealed for the sender of `datagram` (initiation or response)."""
        if not self._secret or now - self._secret_at > COOKIE_REFRESH_S:
            self._secret, self._secret_at = self._entropy(32), now
        nonce = self._entropy(24)
        mac1 = datagram[-2 * MAC_BYTES : -MAC_BYTES]
        cookie = keyed_mac(self._secret, source)
        sealed = crypto_aead_xchacha20poly1305_ietf_encrypt(cookie, mac1, nonce, self._cookie_key)
        return CookieReply(int.from_bytes(datagram[4:8], "little"), nonce, sealed).encode()


def source_bytes(source: Hashable | None) -> bytes:
    """What a cookie is bound to. Only we read it, so any stable form will do."""
    return b"" if source is None else repr(source).encode()
