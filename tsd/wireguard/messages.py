"""Handshake messages of WireGuard as records (whitepaper, sections 5.4.2 to 5.4.7). Integers are little-endian.

Types are read as u32, so reserved bytes must be zero; lengths are exact.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from tsd.base.errors import DecodeError
from tsd.wireguard.constants import (
    COOKIE_REPLY_BYTES,
    INITIATION_BYTES,
    MESSAGE_COOKIE_REPLY,
    MESSAGE_INITIATION,
    MESSAGE_RESPONSE,
    RESPONSE_BYTES,
)

_INITIATION = Struct("<II32s48s28s")
_RESPONSE = Struct("<III32s16s")
_COOKIE_REPLY = Struct("<II24s32s")


class Initiation(NamedTuple):
    sender_index: int
    ephemeral: bytes
    sealed_static: bytes
    sealed_timestamp: bytes

    def encode(self) -> bytes:
        """Without the two MACs."""
        return _INITIATION.pack(MESSAGE_INITIATION, *self)

    @classmethod
    def decode(cls, datagram: bytes) -> Initiation:
        _check(datagram, MESSAGE_INITIATION, INITIATION_BYTES)
        return cls(*_INITIATION.unpack_from(datagram)[1:])


class Response(NamedTuple):
    sender_index: int
    receiver_index: int
    ephemeral: bytes
    sealed_empty: bytes

    def encode(self) -> bytes:
        """Without the two MACs."""
        return _RESPONSE.pack(MESSAGE_RESPONSE, *self)

    @classmethod
    def decode(cls, datagram: bytes) -> Response:
        _check(datagram, MESSAGE_RESPONSE, RESPONSE_BYTES)
        return cls(*_RESPONSE.unpack_from(datagram)[1:])


class CookieReply(NamedTuple):
    receiver_index: int
    nonce: bytes
    sealed_cookie: bytes

    def encode(self) -> bytes:
        return _COOKIE_REPLY.pack(MESSAGE_COOKIE_REPLY, *self)

    @classmethod
    def decode(cls, datagram: bytes) -> CookieReply:
        _check(datagram, MESSAGE_COOKIE_REPLY, COOKIE_REPLY_BYTES)
        return cls(*_COOKIE_REPLY.unpack(datagram)[1:])


def _check(datagram: bytes, message_type: int, size: int) -> None:
    if len(datagram) != size:
        raise DecodeError("wireguard", f"message of {len(datagram)} bytes, want {size}")
    if int.from_bytes(datagram[:4], "little") != message_type:
        raise DecodeError("wireguard", "wrong message type")
