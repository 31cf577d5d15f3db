"""What the WireGuard device asks of its driver, and what it reports."""

from __future__ import annotations

from collections.abc import Hashable

from msgspec import Struct

from tsd.dataplane.pump import Sealed


class Transmit(Struct, frozen=True):
    """Send a handshake message on the peer's path (never to the source of what it answers)."""

    peer: int
    datagram: bytes


class Reply(Struct, frozen=True):
    """Send a cookie reply to whoever sent from `source`; we do not know yet who that is."""

    source: Hashable
    datagram: bytes


class SealedReady(Struct, frozen=True):
    """Send these transport datagrams: keepalives, the priority message, what was staged."""

    sealed: list[Sealed]


class HandshakeCompleted(Struct, frozen=True):
    peer: int
    is_initiator: bool


class HandshakeFailed(Struct, frozen=True):
    """Gave up after 90 s; staged packets were dropped."""

    peer: int


class SessionExpired(Struct, frozen=True):
    """No session younger than 180 s is left."""

    peer: int


class KeysZeroed(Struct, frozen=True):
    """540 s without a new session: key material is gone. A lazily added peer may be removed now."""

    peer: int


Output = Transmit | Reply | SealedReady | HandshakeCompleted | HandshakeFailed | SessionExpired | KeysZeroed
