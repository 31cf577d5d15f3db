"""The packet pump's contract: sealing and opening batches, with nothing per packet in the engine.

`Core` is implemented twice, by `tsd.dataplane.reference` (Python, the oracle) and by `tsnative` (C without the
GIL); for identical input both give identical bytes and verdicts. The core alone owns nonce counters, replay
windows and the allowed-IPs table. Handshakes, cookies, timers, path choice and DERP stay in Python.

A peer is an `int` handle chosen by the caller, never reused while the core lives. Times are seconds of the
injected clock. No method raises on foreign bytes: `drops` counts them by reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from tsd.base.addr import IPPrefix
from tsd.hull import Frame

REKEY_AFTER_S = 120.0
REKEY_LAST_CHANCE_S = 165.0
REJECT_AFTER_S = 180.0


class Sealed(NamedTuple):
    """Transport datagrams for one peer, back to back: each `datagram_bytes` long, the last one may be shorter.

    Made for one UDP_SEGMENT send: at most 64 datagrams and 65000 bytes.
    """

    peer: int
    datagrams: bytes
    datagram_bytes: int
    count: int  # type: ignore[assignment]


class SealResult(NamedTuple):
    sealed: list[Sealed]
    """In the order of the frames."""
    no_session: list[tuple[int, Frame]]
    """(peer, frame) that must be staged until a handshake is done."""
    attention: list[int]
    """Peers whose timers changed state: ask `activity` and re-arm (see `Activity`)."""


class Opened(NamedTuple):
    peer: int
    frame: Frame
    """TCP data in sequence is coalesced (segment_bytes > 0, IP lengths and IPv4 header checksum valid, checksums of the
    parts verified, TCP checksum field = folded pseudo-header sum); everything else is one packet, its transport
    checksum unverified. The source address was checked against the peer's allowed IPs."""


class Other(IntEnum):
    """Datagrams that are not WireGuard transport data (see `tsd.dataplane.classify`)."""

    HANDSHAKE = 1
    DISCO = 2
    STUN = 3
    GENEVE_DISCO = 4
    GENEVE_WIREGUARD = 5


class OpenResult(NamedTuple):
    opened: list[Opened]
    others: list[tuple[Other, bytes]]
    authenticated: list[int]
    """Peers of which at least one datagram was authentic in this call (keepalives too), each once."""
    confirmed: list[int]
    """Peers whose `next` session became current: the handshake is complete, flush what was staged."""
    attention: list[int]


class Activity(NamedTuple):
    """What timers need to know about one peer; 0.0 means "none"."""

    first_unanswered_send: float
    """When data was first sent after the last authentic packet came in."""
    first_unreplied_receive: float
    """When data was first received after the last packet went out."""
    last_send: float
    last_receive: float
    session_created: float
    """Of the current session."""
    is_initiator: bool
    """Of the current session."""
    has_current: bool
    has_next: bool
    rekey_wanted: bool
    """A send happened with a current session that we initiated and that is older than REKEY_AFTER_S, a receive with
    one older than REKEY_LAST_CHANCE_S, or the message limit is near. Cleared by `install_session`."""
    rx_bytes: int
    tx_bytes: int
    rx_packets: int
    tx_packets: int


class Core(Protocol):
    """The batch engine. Not thread-safe: one caller at a time."""

    name: str
    """"native (avx2)", "native (portable)", "python": shown by status and version."""

    @property
    def drops(self) -> Mapping[str, int]:
        """Reasons with their counts since the start."""

    def add_peer(self, peer: int) -> None: ...

    def remove_peer(self, peer: int) -> None:
        """Sessions, allowed IPs and counters go."""

    def set_allowed_ips(self, peer: int, prefixes: Sequence[IPPrefix | bytes]) -> None:
        """Replace. A prefix that another peer holds moves to this one. Bytes (4 or 16) are one address: nearly all
        peers of a large tailnet have nothing else, and prefix objects are slow to make."""

    def route(self, address: bytes) -> int | None:
        """Longest prefix match; `address` has 4 or 16 bytes."""

    def install_session(
        self,
        peer: int,
        local_index: int,
        remote_index: int,
        send_key: bytes,
        receive_key: bytes,
        is_initiator: bool,
        now: float,
    ) -> None:
        """Initiator: becomes current, the old current (or next) becomes previous. Responder: becomes next until the
        first authentic datagram arrives under it. Older ones are wiped. Clears `rekey_wanted`, `first_unanswered_send`
        and `first_unreplied_receive`: the handshake message that led here was authentic and answered."""

    def drop_sessions(self, peer: int) -> None:
        """Wipe all key material of a peer."""

    def seal(self, frames: Sequence[Frame], now: float) -> SealResult:
        """Route by destination, cut super-segments, finish checksums, pad, seal. A frame without a peer is counted
        as drop "no_peer". Sessions past REJECT_AFTER_S count as absent."""

    def seal_to(self, peer: int, packets: Sequence[bytes], now: float) -> list[Sealed]:
        """Seal without routing: b"" is a keepalive, otherwise one IP packet. Empty list: no usable session."""

    def open(self, datagrams: bytes | bytearray | memoryview, datagram_bytes: int, now: float) -> OpenResult:
        """Classify, open, check replay and source, unpad, coalesce. `datagrams` as in `Sealed`; 0 means one."""

    def activity(self, peer: int) -> Activity: ...
