"""Tell apart what arrives on the one UDP socket: STUN, disco, Geneve, WireGuard.

Order as upstream (tailscale: `wgengine/magicsock/magicsock.go`, packetLooksLike).
The tests run in a fixed order; a WireGuard message can match none of those before it, because its bytes 1-3 are zero.
"""

from __future__ import annotations

from enum import IntEnum

DISCO_MAGIC = b"TS\xf0\x9f\x92\xac"
STUN_COOKIE = b"\x21\x12\xa4\x42"
GENEVE_BYTES = 8
MESSAGE_INITIATION_BYTES = 148
MESSAGE_RESPONSE_BYTES = 92
MESSAGE_COOKIE_REPLY_BYTES = 64
MESSAGE_TRANSPORT_MIN_BYTES = 32

_GENEVE_DISCO = b"\x7a\x11"
_GENEVE_WIREGUARD = b"\x7a\x12"
_HANDSHAKE_BYTES = (0, MESSAGE_INITIATION_BYTES, MESSAGE_RESPONSE_BYTES, MESSAGE_COOKIE_REPLY_BYTES)


class Kind(IntEnum):
    """Positive values equal those of `pump.Other`; negative ones are reasons to drop."""

    TRANSPORT = 0
    HANDSHAKE = 1
    DISCO = 2
    STUN = 3
    GENEVE_DISCO = 4
    GENEVE_WIREGUARD = 5
    SHORT = -1
    UNKNOWN_TYPE = -2
    BAD_LENGTH = -3


def classify(datagram: bytes | bytearray | memoryview) -> Kind:
    """The class of one datagram; contents are not looked at beyond magic numbers, message type and length."""
    size = len(datagram)
    head = bytes(datagram[:16])
    if size >= 20 and head[4:8] == STUN_COOKIE and head[0] & 0xC0 == 0 and head[1] == 1:
        return Kind.STUN
    if size >= GENEVE_BYTES and not (head[0] & 0xC0 or head[1] & 0x3F or head[7]):
        if head[2:4] == _GENEVE_WIREGUARD:
            return Kind.GENEVE_WIREGUARD
        if head[2:4] == _GENEVE_DISCO and head[8:14] == DISCO_MAGIC:
            return Kind.GENEVE_DISCO
    if size >= 38 and head[:6] == DISCO_MAGIC:
        return Kind.DISCO
    return _classify_wireguard(head, size)


def _classify_wireguard(head: bytes, size: int) -> Kind:
    """The type is a little-endian u32, so reserved bytes must be zero; lengths are exact."""
    if size < MESSAGE_TRANSPORT_MIN_BYTES:
        return Kind.SHORT
    message_type = int.from_bytes(head[:4], "little")
    if message_type == 4:
        return Kind.TRANSPORT
    if not 1 <= message_type <= 3:
        return Kind.UNKNOWN_TYPE
    return Kind.HANDSHAKE if size == _HANDSHAKE_BYTES[message_type] else Kind.BAD_LENGTH
