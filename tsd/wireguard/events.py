"""What the WireGuard device asks of its driver, and what it reports."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from tsd.dataplane.pump import Sealed


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a handshake message on the peer's path (never to the source of what it answers)."""

    peer: int
    datagram: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a cookie reply to whoever sent from `source`; we do not know yet who that is."""

    source: Hashable
    datagram: bytes


@dataclass(frozen=True, slots=True)
class SealedReady:
    """Send these transport datagrams: keepalives, the priority message, what was staged."""

    sealed: list[Sealed]


@dataclass(frozen=True, slots=True)
class HandshakeCompleted:
    peer: int
    is_initiator: bool


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    """Gave up after 90 s; staged packets were dropped."""

    peer: int


@dataclass(frozen=True, slots=True)
class SessionExpired:
    """No session younger than 180 s is left."""

    peer: int


@dataclass(frozen=True, slots=True)
class KeysZeroed:
    """540 s without a new session: key material is gone. A lazily added peer may be removed now."""

    peer: int


Output = Transmit | Reply | SealedReady | HandshakeCompleted | HandshakeFailed | SessionExpired | KeysZeroed
