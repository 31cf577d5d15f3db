"""The packet pump in Python: what runs without a compiler, and the oracle for the native one.

Contract: `tsd.dataplane.pump`. Where the contract leaves room, this file decides, and the native core must do the
same: how datagrams are grouped (`_Batches`), which drop reasons exist, when a peer gets attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from tsd.base.addr import IPPrefix
from tsd.base.log import DropCounter
from tsd.dataplane.allowedips import AllowedIps
from tsd.dataplane.classify import Kind, classify
from tsd.dataplane.pump import (
    REJECT_AFTER_S,
    REKEY_AFTER_S,
    REKEY_LAST_CHANCE_S,
    Activity,
    Opened,
    OpenResult,
    Other,
    Sealed,
    SealResult,
)
from tsd.dataplane.replay import REJECT_AFTER_MESSAGES, ReplayWindow
from tsd.dataplane.segments import Coalescer, split
from tsd.hull import Frame

REKEY_AFTER_MESSAGES = 1 << 60
MAX_BATCH_DATAGRAMS = 64
MAX_BATCH_BYTES = 65000
MAX_PACKET_BYTES = 64960
"""A larger packet would not fit a batch; it is dropped as "too_big". Of a super-segment the pieces count."""
_MAX_CUT_BYTES = MAX_PACKET_BYTES - 120

_HEADER = Struct("<IIQ")
_OVERHEAD_BYTES = 32
_PADDING = [bytes(count) for count in range(16)]
_DROP_REASONS = {Kind.SHORT: "short", Kind.UNKNOWN_TYPE: "unknown_type", Kind.BAD_LENGTH: "bad_length"}


class _Session:
    __slots__ = (
        "counter",
        "created",
        "is_initiator",
        "local_index",
        "peer",
        "receiver",
        "remote_index",
        "sender",
        "window",
    )

    def __init__(
        self,
        peer: _Peer,
        local_index: int,
        remote_index: int,
        send_key: bytes,
        receive_key: bytes,
        is_initiator: bool,
        created: float,
    ) -> None:
        self.peer = peer
        self.local_index = local_index
        self.remote_index = remote_index
        self.sender = ChaCha20Poly1305(send_key)
        self.receiver = ChaCha20Poly1305(receive_key)
        self.is_initiator = is_initiator
        self.created = created
        self.counter = 0
        self.window = ReplayWindow()


class _Peer:
    """Sessions in their three slots, and what timers ask about."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.current: _Session | None = None
        self.next: _Session | None = None
        self.previous: _Session | None = None
        self.rekey_wanted = False
        self.rx_bytes = self.tx_bytes = self.rx_packets = self.tx_packets = 0
        self.last_send = self.last_receive = 0.0
        self.first_unanswered_send = self.first_unreplied_receive = 0.0

    def sent(self, count: int, size_bytes: int, is_data: bool, now: float) -> bool:
        """Note datagrams that went out; True when timers must be looked at."""
        session = self.current
        assert session is not None
        self.tx_packets += count
        self.tx_bytes += size_bytes
        self.last_send = now
        needs_attention = self.first_unreplied_receive != 0.0
        self.first_unreplied_receive = 0.0
        if is_data and self.first_unanswered_send == 0.0:
            self.first_unanswered_send = now
            needs_attention = True
        is_old = session.is_initiator and now - session.created > REKEY_AFTER_S
        if not self.rekey_wanted and (is_old or session.counter > REKEY_AFTER_MESSAGES):
            self.rekey_wanted = needs_attention = True
        return needs_attention

    def received(self, size_bytes: int, is_data: bool, now: float) -> bool:
        """Note one authentic datagram; True when timers must be looked at."""
        self.rx_packets += 1
        self.rx_bytes += size_bytes
        self.last_receive = now
        needs_attention = self.first_unanswered_send != 0.0
        self.first_unanswered_send = 0.0
        if is_data and self.first_unreplied_receive == 0.0:
            self.first_unreplied_receive = now
            needs_attention = True
        current = self.current
        if current is not None and current.is_initiator and now - current.created > REKEY_LAST_CHANCE_S:
            needs_attention = needs_attention or not self.rekey_wanted
            self.rekey_wanted = True
        return needs_attention


class _Batches:
    """Groups datagrams for UDP_SEGMENT: each peer has one open batch; batches leave in the order they were opened.

    A batch closes when the next datagram is larger than its first, after a smaller one, or when it is full.
    """

    __slots__ = ("_batches", "_open")

    def __init__(self) -> None:
        # Each batch: peer, datagrams, [bytes of the first, bytes of all]; bare lists because this is the hot path.
        self._batches: list[tuple[_Peer, list[bytes], list[int]]] = []
        self._open: dict[_Peer, tuple[list[bytes], list[int]]] = {}

    def add(self, peer: _Peer, datagram: bytes) -> None:
        size = len(datagram)
        batch = self._open.get(peer)
        if batch is not None:
            parts, sizes = batch
            unit, total = sizes
            if size <= unit and total + size <= MAX_BATCH_BYTES and len(parts) < MAX_BATCH_DATAGRAMS:
                parts.append(datagram)
                sizes[1] += size
                if size < unit:
                    del self._open[peer]
                return
        parts, sizes = [datagram], [size, size]
        self._open[peer] = (parts, sizes)
        self._batches.append((peer, parts, sizes))

    def take(self) -> list[Sealed]:
        return [
            Sealed(peer.handle, parts[0] if len(parts) == 1 else b"".join(parts), sizes[0], len(parts))
            for peer, parts, sizes in self._batches
        ]

    def totals(self) -> dict[_Peer, tuple[int, int]]:
        """Datagrams and bytes by peer, in the order of their first."""
        totals: dict[_Peer, tuple[int, int]] = {}
        for peer, parts, sizes in self._batches:
            count, size = totals.get(peer, (0, 0))
            totals[peer] = (count + len(parts), size + sizes[1])
        return totals


class ReferenceCore:
    """See `tsd.dataplane.pump.Core`."""

    name = "python"

    def __init__(self, mtu_bytes: int = 1280) -> None:
        self.drops = DropCounter()
        self._mtu_bytes = mtu_bytes
        self._peers: dict[int, _Peer] = {}
        self._sessions: dict[int, _Session] = {}
        self._allowed = AllowedIps()

    def add_peer(self, peer: int) -> None:
        """Adding a peer again changes nothing."""
        if peer not in self._peers:
            self._peers[peer] = _Peer(peer)

    def remove_peer(self, peer: int) -> None:
        self.drop_sessions(peer)
        self._allowed.remove(peer)
        self._peers.pop(peer, None)

    def set_allowed_ips(self, peer: int, prefixes: Sequence[IPPrefix | bytes]) -> None:
        """Raises KeyError for a peer that was never added."""
        self._allowed.replace(self._peers[peer].handle, prefixes)

    def route(self, address: bytes) -> int | None:
        return self._allowed.lookup(address)

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
        """Raises KeyError for a peer that was never added."""
        owner = self._peers[peer]
        session = _Session(owner, local_index, remote_index, send_key, receive_key, is_initiator, now)
        if is_initiator:
            self._forget(owner.previous)
            if owner.next is not None:
                self._forget(owner.current)
                owner.previous, owner.next = owner.next, None
            else:
                owner.previous = owner.current
            owner.current = session
        else:
            self._forget(owner.next)
            self._forget(owner.previous)
            owner.next, owner.previous = session, None
        owner.rekey_wanted = False
        owner.first_unanswered_send = owner.first_unreplied_receive = 0.0
        self._sessions[local_index] = session

    def drop_sessions(self, peer: int) -> None:
        owner = self._peers.get(peer)
        if owner is None:
            return
        for session in (owner.current, owner.next, owner.previous):
            self._forget(session)
        owner.current = owner.next = owner.previous = None
        owner.rekey_wanted = False
        owner.first_unanswered_send = owner.first_unreplied_receive = 0.0

    def seal(self, frames: Sequence[Frame], now: float) -> SealResult:
        batches = _Batches()
        no_session: list[tuple[int, Frame]] = []
        for frame in frames:
            packet, segment_bytes = frame
            owner = self._owner_of(packet, segment_bytes)
            if owner is None:
                continue
            session = self._usable(owner, now)
            if session is None:
                no_session.append((owner.handle, frame))
                continue
            pieces = split(packet, segment_bytes) if segment_bytes else (packet,)
            if not pieces:
                self.drops.add("malformed")
            for piece in pieces:
                batches.add(owner, self._seal(session, piece))
        attention = [
            owner.handle for owner, (count, size) in batches.totals().items() if owner.sent(count, size, True, now)
        ]
        return SealResult(batches.take(), no_session, attention)

    def seal_to(self, peer: int, packets: Sequence[bytes], now: float) -> list[Sealed]:
        """Attention is not reported: whoever calls this re-arms timers by `activity`."""
        owner = self._peers.get(peer)
        session = self._usable(owner, now) if owner is not None else None
        if owner is None or session is None:
            return []
        batches = _Batches()
        for packet in packets:
            if len(packet) > MAX_PACKET_BYTES:
                self.drops.add("too_big")
                continue
            datagram = self._seal(session, packet)
            batches.add(owner, datagram)
            owner.sent(1, len(datagram), len(packet) > 0, now)
        return batches.take()

    def open(self, datagrams: bytes | bytearray | memoryview, datagram_bytes: int, now: float) -> OpenResult:
        view = memoryview(datagrams)
        total = len(view)
        step = datagram_bytes or total
        others: list[tuple[Other, bytes]] = []
        authenticated: dict[int, None] = {}
        confirmed: dict[int, None] = {}
        attention: dict[int, None] = {}
        coalescer = Coalescer()
        for start in range(0, total, step or 1):
            end = min(start + step, total)
            if (
                end - start < _OVERHEAD_BYTES
                or view[start] != 4
                or view[start + 1]
                or view[start + 2]
                or view[start + 3]
            ):
                self._other(view[start:end], others)
                continue
            session, plaintext = self._authentic(view, start, end, now)
            if session is None:
                continue
            owner = session.peer
            handle = owner.handle
            authenticated[handle] = None
            if session is owner.next:
                self._confirm(owner)
                confirmed[handle] = attention[handle] = None
            if owner.received(end - start, len(plaintext) > 0, now):
                attention[handle] = None
            packet = self._inner(owner, plaintext) if plaintext else b""
            if packet:
                coalescer.add(handle, packet)
        opened = [Opened(peer, Frame(packet, unit)) for peer, packet, unit in coalescer.take()]
        return OpenResult(opened, others, list(authenticated), list(confirmed), list(attention))

    def activity(self, peer: int) -> Activity:
        """All zero for a peer that is not known."""
        owner = self._peers.get(peer) or _Peer(peer)
        current = owner.current
        return Activity(
            first_unanswered_send=owner.first_unanswered_send,
            first_unreplied_receive=owner.first_unreplied_receive,
            last_send=owner.last_send,
            last_receive=owner.last_receive,
            session_created=current.created if current is not None else 0.0,
            is_initiator=current is not None and current.is_initiator,
            has_current=current is not None,
            has_next=owner.next is not None,
            rekey_wanted=owner.rekey_wanted,
            rx_bytes=owner.rx_bytes,
            tx_bytes=owner.tx_bytes,
            rx_packets=owner.rx_packets,
            tx_packets=owner.tx_packets,
        )

    def _forget(self, session: _Session | None) -> None:
        if session is not None and self._sessions.get(session.local_index) is session:
            del self._sessions[session.local_index]

    def _owner_of(self, packet: bytes | bytearray | memoryview, segment_bytes: int) -> _Peer | None:
        """The peer that an outgoing packet is for; None is counted."""
        size = len(packet)
        version = packet[0] >> 4 if size else 0
        if version == 4 and size >= 20:
            handle = self._allowed.lookup(bytes(packet[16:20]))
        elif version == 6 and size >= 40:
            handle = self._allowed.lookup(bytes(packet[24:40]))
        else:
            self.drops.add("malformed")
            return None
        if handle is None:
            self.drops.add("no_peer")
            return None
        if size > MAX_PACKET_BYTES and not 0 < segment_bytes <= _MAX_CUT_BYTES:
            self.drops.add("too_big")
            return None
        return self._peers[handle]

    @staticmethod
    def _usable(owner: _Peer, now: float) -> _Session | None:
        session = owner.current
        if (
            session is None
            or now - session.created >= REJECT_AFTER_S
            or session.counter >= REJECT_AFTER_MESSAGES - 65536
        ):
            return None
        return session

    def _seal(self, session: _Session, packet: bytes | bytearray | memoryview) -> bytes:
        header = _HEADER.pack(4, session.remote_index, session.counter)
        session.counter += 1
        size = len(packet)
        padding = -size & 15
        if padding:
            # Never beyond the MTU; a packet larger than it is padded as its last MTU-sized part would be.
            last_unit = size if size <= self._mtu_bytes else size % self._mtu_bytes
            padding = min(last_unit + 15 & ~15, self._mtu_bytes) - last_unit
            packet = bytes(packet) + _PADDING[padding]
        return header + session.sender.encrypt(b"\0\0\0\0" + header[8:], packet, None)

    def _other(self, datagram: memoryview, others: list[tuple[Other, bytes]]) -> None:
        kind = classify(datagram)
        if kind > 0:
            others.append((Other(kind), bytes(datagram)))
        else:
            self.drops.add(_DROP_REASONS[kind])

    def _authentic(self, view: memoryview, start: int, end: int, now: float) -> tuple[_Session | None, bytes]:
        """The session and plaintext of a transport datagram that is authentic and new."""
        _, receiver_index, counter = _HEADER.unpack_from(view, start)
        session = self._sessions.get(receiver_index)
        if session is None:
            self.drops.add("no_session")
        elif now - session.created >= REJECT_AFTER_S:
            self.drops.add("expired")
        else:
            nonce = b"\0\0\0\0" + view[start + 8 : start + 16]
            try:
                plaintext = session.receiver.decrypt(nonce, view[start + 16 : end], None)
            except InvalidTag:
                self.drops.add("auth")
                return None, b""
            if session.window.accept(counter):
                return session, plaintext
            self.drops.add("replay")
        return None, b""

    @staticmethod
    def _confirm(owner: _Peer) -> None:
        """The first authentic datagram under the next session makes it current."""
        owner.previous, owner.current, owner.next = owner.current, owner.next, None

    def _inner(self, owner: _Peer, plaintext: bytes) -> bytes:
        """The IP packet without padding; b"" when it is malformed or its source does not belong to the peer."""
        size = len(plaintext)
        version = plaintext[0] >> 4
        if version == 4 and size >= 20:
            length = plaintext[2] << 8 | plaintext[3]
            source = plaintext[12:16]
            is_whole = 20 <= length <= size
        elif version == 6 and size >= 40:
            length = (plaintext[4] << 8 | plaintext[5]) + 40
            source = plaintext[8:24]
            is_whole = length <= size
        else:
            is_whole = False
        if not is_whole:
            self.drops.add("malformed")
            return b""
        if self._allowed.lookup(source) != owner.handle:
            self.drops.add("source")
            return b""
        return plaintext[:length] if length != size else plaintext
