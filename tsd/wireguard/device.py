"""The WireGuard device: handshakes in both roles, cookies, staged packets and timers of all peers.

Whitepaper sections 5 and 6; behaviour as in wireguard-go (`device/*.go`) and the fork that tailscaled uses: peers may
be unknown until their initiation names them, the response goes out on the peer's path and not to the datagram's
source, a priority message opens each new session. Transport data is the business of the `Core`; paths, allowed IPs
and the storing of `Tai64nSource.last_ns` are the engine's.

Differences, all compatible: our own unanswered initiation survives when the peer initiates at the same moment (so
crossing handshakes end in a session at once), a retry is armed when a session is wanted within 5 s of a response, and
retries come early when the engine knows better (`retry`, `not_delivered`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

from tsd.base.entropy import Entropy, uniform
from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import NodePrivate, NodePublic, clamp
from tsd.base.log import DropCounter, fields
from tsd.base.machine import Deadline
from tsd.dataplane.pump import Core, Sealed
from tsd.hull import Frame
from tsd.wireguard import keylog
from tsd.wireguard.admission import Admission
from tsd.wireguard.constants import (
    ABSENT_RETRY_S,
    COOKIE_REPLY_BYTES,
    INITIATION_BYTES,
    INITIATION_MIN_GAP_S,
    KEEPALIVE_TIMEOUT_S,
    MAX_HANDSHAKE_RETRIES,
    MESSAGE_COOKIE_REPLY,
    MESSAGE_INITIATION,
    MESSAGE_RESPONSE,
    REJECT_AFTER_S,
    REKEY_JITTER_S,
    REKEY_TIMEOUT_S,
    RESPONSE_BYTES,
    ZERO_KEYS_S,
)
from tsd.wireguard.events import (
    HandshakeCompleted,
    HandshakeFailed,
    KeysZeroed,
    Output,
    Reply,
    SealedReady,
    SessionExpired,
    Transmit,
)
from tsd.wireguard.handshake import (
    Identity,
    ReadInitiation,
    create_initiation,
    create_response,
    read_initiation,
    read_response,
    read_timestamp,
)
from tsd.wireguard.messages import CookieReply, Initiation, Response
from tsd.wireguard.peer import NEVER, Peer
from tsd.wireguard.schedule import Schedule
from tsd.wireguard.table import PeerTable
from tsd.wireguard.tai64n import Tai64nSource, decode_s
from tsd.wireguard.timers import follow_activity, settle_keepalive

log = logging.getLogger("tsd.wireguard")

_LENGTHS = {
    MESSAGE_INITIATION: INITIATION_BYTES,
    MESSAGE_RESPONSE: RESPONSE_BYTES,
    MESSAGE_COOKIE_REPLY: COOKIE_REPLY_BYTES,
}
_CLOCK_WARNING_S = 60


class WireGuard:
    """All peers of one node key. Outputs are in `events.py`."""

    def __init__(
        self,
        private: NodePrivate,
        core: Core,
        *,
        entropy: Entropy,
        mtu_bytes: int = 1280,
        tai64n: Tai64nSource,
        write_keylog: Callable[[str], None] | None = None,
    ) -> None:
        self.unknown_peer_lookup: Callable[[NodePublic], int | None] = lambda public: None
        """Asked when a stranger initiates: add the peer and return its handle, or None for silence."""
        self.priority_message: Callable[[int], bytes | None] = lambda peer: None
        """An IP packet to be sealed first in each new session of that peer."""
        self.drops = DropCounter()
        self._identity = Identity(private.raw, private.public().raw)
        self._private = private
        self._core = core
        self._entropy = entropy
        self._mtu_bytes = mtu_bytes
        self._tai64n = tai64n
        self._write_keylog = write_keylog
        self._outputs: list[Output] = []
        self._admission = Admission(self._identity.public, entropy, self.drops, self._reply)
        self._table = PeerTable(entropy)
        self._peers = self._table.by_handle
        self._schedule = Schedule(self._peers)
        self._now = 0.0

    # Peers

    def add_peer(self, handle: int, public: NodePublic, psk: bytes = bytes(32)) -> None:
        """Also adds it to the core (when it is not there yet). Raises `ProtocolError` for a low-order key."""
        peer = Peer(handle, public, self._private.exchange(public.raw), psk)
        self.remove_peer(handle)
        self._core.add_peer(handle)
        self._table.add(peer)

    def remove_peer(self, handle: int) -> None:
        """Also removes it from the core. Unknown handles are ignored."""
        if self._table.remove(handle):
            self._core.remove_peer(handle)

    def restart_peer(self, handle: int) -> None:
        """The peer is known to have lost its sessions: drop ours, so that the next packet shakes hands at once."""
        peer = self._peers.get(handle)
        if peer is not None:
            self._drop_keys(peer)
            peer.handshake_sent_at = -NEVER
            peer.last_stamp = b""  # its clock may have gone back

    def has_peer(self, handle: int) -> bool:
        return handle in self._peers

    def session_count(self) -> int:
        return sum(peer.last_handshake_wall_ns > 0 for peer in self._peers.values())

    def last_handshake_wall_ns(self, handle: int) -> int:
        """Unix time of the last completed handshake; 0 when there was none."""
        peer = self._peers.get(handle)
        return peer.last_handshake_wall_ns if peer is not None else 0

    # Inputs

    def receive(self, datagram: bytes, source: Hashable | None, now: float, wall_ns: int) -> None:
        """A handshake message (types 1 to 3). `source` is where a cookie reply would go: an AddrPort, a DERP source."""
        self._now = now
        message_type = int.from_bytes(datagram[:4], "little")
        if len(datagram) != _LENGTHS.get(message_type, -1):
            self.drops.add("bad_message")
            return
        try:
            if message_type == MESSAGE_COOKIE_REPLY:
                self._receive_cookie(CookieReply.decode(datagram), now)
            elif self._admission.admits(datagram, source, now):
                if message_type == MESSAGE_INITIATION:
                    self._receive_initiation(Initiation.decode(datagram), now, wall_ns)
                else:
                    self._receive_response(Response.decode(datagram), now, wall_ns)
        except (ProtocolError, DecodeError):
            self.drops.add("not_authentic")

    def initiate(self, handle: int, now: float, wall_ns: int) -> None:
        """A session is wanted. At most one initiation in 5 s; then retried for 90 s."""
        self._now = now
        peer = self._peers.get(handle)
        if peer is not None:
            self._want_session(peer, now, wall_ns)
            self._schedule.arm(peer)

    def retry(self, handle: int, now: float, wall_ns: int) -> None:
        """The last initiation never left this machine: do not wait 5 s for another one."""
        self._now = now
        peer = self._peers.get(handle)
        if peer is not None and peer.pending is not None:
            self._send_initiation(peer, now, wall_ns)
            self._schedule.arm(peer)

    def direct_path_found(self, handle: int, now: float) -> None:
        """What left by a relay that may be gone leaves again: a response at once, which can do no harm."""
        self.retry_soon(handle, now)
        peer = self._peers.get(handle)
        if peer is not None and peer.response and now - peer.handshake_sent_at < REKEY_TIMEOUT_S:
            self._outputs.append(Transmit(handle, peer.response))

    def retry_soon(self, handle: int, now: float) -> None:
        """The last initiation may be lost. A relay says that the peer is not there: one that just starts will be."""
        self._now = now
        peer = self._peers.get(handle)
        if peer is not None and peer.pending is not None and peer.attempts == 0:
            peer.retransmit_at = min(peer.retransmit_at, now + ABSENT_RETRY_S)
            self._schedule.arm(peer)

    def stage(self, handle: int, frame: Frame, now: float, wall_ns: int) -> None:
        """Keep a frame until there is a session (the oldest goes when there are too many) and ask for one."""
        self._now = now
        peer = self._peers.get(handle)
        if peer is None:
            self.drops.add("no_peer")
            return
        if len(peer.staged) == peer.staged.maxlen:
            self.drops.add("staged_full")
        peer.staged.append(frame)
        self._want_session(peer, now, wall_ns)
        self._schedule.arm(peer)

    def note(
        self,
        attention: Sequence[int],
        confirmed: Sequence[int],
        authenticated: Sequence[int],
        now: float,
        wall_ns: int,
    ) -> None:
        """What `Core.seal` and `Core.open` reported. `authenticated` is for callers' convenience and not needed."""
        self._now = now
        for handle in confirmed:
            peer = self._peers.get(handle)
            if peer is not None:
                self._complete(peer, False, now, wall_ns)
        for handle in attention:
            peer = self._peers.get(handle)
            if peer is not None:
                self._follow(peer, now, wall_ns)

    def next_deadline(self) -> Deadline | None:
        at = self._schedule.next_at()
        return None if at == NEVER else Deadline(max(at, self._now), "wireguard")

    def on_deadline(self, now: float, wall_ns: int) -> None:
        self._now = now
        while (peer := self._schedule.take_due(now)) is not None:
            self._run_timers(peer, now, wall_ns)
            self._schedule.arm(peer)

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # Handshake messages

    def _receive_cookie(self, reply: CookieReply, now: float) -> None:
        peer = self._table.by_index.get(reply.receiver_index)
        if peer is None or not peer.macs.consume(reply, now):
            self.drops.add("cookie")

    def _receive_initiation(self, message: Initiation, now: float, wall_ns: int) -> None:
        half = read_initiation(self._identity, message)
        peer = self._find(half.static)
        if peer is None:
            self.drops.add("stranger")
            return
        stamp = read_timestamp(half, peer.static_shared)
        if not self._is_fresh(peer, stamp, now):
            return
        peer.last_stamp = stamp
        peer.initiation_received_at = now
        self._respond(peer, half, now)
        self._follow(peer, now, wall_ns)

    def _find(self, static: bytes) -> Peer | None:
        """The peer of a static key, added on the spot when the engine knows it; never ourselves."""
        if static == self._identity.public:
            return None
        peer = self._table.by_key.get(static)
        if peer is None:
            handle = self.unknown_peer_lookup(NodePublic(static))
            peer = self._peers.get(handle) if handle is not None else None
        return peer if peer is not None and peer.public.raw == static else None

    def _is_fresh(self, peer: Peer, stamp: bytes, now: float) -> bool:
        if stamp <= peer.last_stamp:
            self.drops.add("old_timestamp")
            behind_s = decode_s(peer.last_stamp) - decode_s(stamp)
            if behind_s > _CLOCK_WARNING_S and not peer.warned_about_clock:
                peer.warned_about_clock = True
                log.warning(fields("initiation refused: did the peer's clock go back?", peer=peer.public.short()))
            return False
        if now - peer.initiation_received_at < INITIATION_MIN_GAP_S:
            self.drops.add("initiation_flood")
            return False
        return True

    def _respond(self, peer: Peer, half: ReadInitiation, now: float) -> None:
        ephemeral = clamp(self._entropy(32))
        index = self._table.new_index()
        response, keys = create_response(half, ephemeral, peer.psk, index)
        self._log_keys(peer, ephemeral)
        self._install(
            peer, index, response.receiver_index, keys.responder_to_initiator, keys.initiator_to_responder, now
        )
        peer.handshake_sent_at = now
        peer.response = peer.macs.stamp(response.encode(), now)
        self._outputs.append(Transmit(peer.handle, peer.response))

    def _receive_response(self, message: Response, now: float, wall_ns: int) -> None:
        peer = self._table.by_index.get(message.receiver_index)
        pending = peer.pending if peer is not None else None
        if peer is None or pending is None or pending.local_index != message.receiver_index:
            self.drops.add("unexpected_response")
            return
        keys = read_response(self._identity, pending, message, peer.psk)
        peer.pending = None
        self._install(
            peer,
            pending.local_index,
            message.sender_index,
            keys.initiator_to_responder,
            keys.responder_to_initiator,
            now,
            is_initiator=True,
        )
        self._complete(peer, True, now, wall_ns)

    def _send_initiation(self, peer: Peer, now: float, wall_ns: int) -> None:
        if peer.pending is not None:
            self._table.forget_index(peer.pending.local_index)
        ephemeral = clamp(self._entropy(32))
        index = self._table.new_index()
        stamp = self._tai64n.stamp(wall_ns)
        message, peer.pending = create_initiation(
            self._identity, peer.public.raw, peer.static_shared, ephemeral, index, stamp
        )
        self._table.by_index[index] = peer
        self._log_keys(peer, ephemeral)
        peer.handshake_sent_at = now
        peer.retransmit_at = now + REKEY_TIMEOUT_S + uniform(self._entropy, 0.0, REKEY_JITTER_S)
        if peer.zero_keys_at == NEVER:
            peer.zero_keys_at = now + ZERO_KEYS_S
        settle_keepalive(peer)
        self._outputs.append(Transmit(peer.handle, peer.macs.stamp(message.encode(), now)))

    # Sessions

    def _want_session(self, peer: Peer, now: float, wall_ns: int) -> None:
        peer.attempts = 0
        if now - peer.handshake_sent_at >= REKEY_TIMEOUT_S:
            self._send_initiation(peer, now, wall_ns)
        elif peer.retransmit_at == NEVER:
            peer.retransmit_at = peer.handshake_sent_at + REKEY_TIMEOUT_S + uniform(self._entropy, 0.0, REKEY_JITTER_S)

    def _install(
        self,
        peer: Peer,
        local_index: int,
        remote_index: int,
        send_key: bytes,
        receive_key: bytes,
        now: float,
        *,
        is_initiator: bool = False,
    ) -> None:
        self._table.add_session(peer, local_index)
        self._core.install_session(peer.handle, local_index, remote_index, send_key, receive_key, is_initiator, now)
        peer.session_expires_at = now + REJECT_AFTER_S
        peer.zero_keys_at = now + ZERO_KEYS_S

    def _complete(self, peer: Peer, is_initiator: bool, now: float, wall_ns: int) -> None:
        """A session became current for sending: say so, then priority message, then what waited (or a keepalive)."""
        peer.retransmit_at = NEVER
        peer.attempts = 0
        peer.response = b""
        peer.last_handshake_wall_ns = wall_ns
        self._outputs.append(HandshakeCompleted(peer.handle, is_initiator))
        message = self.priority_message(peer.handle)
        if message is not None and len(message) <= self._mtu_bytes:
            self._emit(self._core.seal_to(peer.handle, [message], now))
        if peer.staged:
            self._flush(peer, now, wall_ns)
        elif is_initiator:
            self._emit(self._core.seal_to(peer.handle, [b""], now))
        self._follow(peer, now, wall_ns)

    def _flush(self, peer: Peer, now: float, wall_ns: int) -> None:
        frames = list(peer.staged)
        peer.staged.clear()
        result = self._core.seal(frames, now)
        self._emit(result.sealed)
        for handle, frame in result.no_session:
            # Its prefix moved to another peer meanwhile.
            if handle != peer.handle:
                self.stage(handle, frame, now, wall_ns)
        for handle in result.attention:
            if handle != peer.handle and handle in self._peers:
                self._follow(self._peers[handle], now, wall_ns)

    def _emit(self, sealed: list[Sealed]) -> None:
        if sealed:
            self._outputs.append(SealedReady(sealed))

    # Timers

    def _follow(self, peer: Peer, now: float, wall_ns: int) -> None:
        """Move timers after traffic, and rekey when the core asks for it."""
        activity = self._core.activity(peer.handle)
        follow_activity(peer, activity, now, self._entropy)
        if activity.rekey_wanted and peer.retransmit_at == NEVER:
            self._want_session(peer, now, wall_ns)
        self._schedule.arm(peer)

    def _run_timers(self, peer: Peer, now: float, wall_ns: int) -> None:
        if peer.retransmit_at <= now:
            self._retransmit(peer, now, wall_ns)
        if peer.keepalive_at <= now:
            self._keepalive(peer, now)
        if peer.new_handshake_at <= now:
            peer.new_handshake_at = NEVER
            activity = self._core.activity(peer.handle)
            if activity.last_send > peer.new_handshake_fired_at and activity.has_current:
                self._want_session(peer, now, wall_ns)
            peer.new_handshake_fired_at = now
        if peer.session_expires_at <= now:
            peer.session_expires_at = NEVER
            self._outputs.append(SessionExpired(peer.handle))
        if peer.zero_keys_at <= now:
            self._zero(peer)
        follow_activity(peer, self._core.activity(peer.handle), now, self._entropy)

    def _retransmit(self, peer: Peer, now: float, wall_ns: int) -> None:
        peer.retransmit_at = NEVER
        if peer.pending is None and not peer.staged and not self._core.activity(peer.handle).rekey_wanted:
            return
        if peer.attempts <= MAX_HANDSHAKE_RETRIES:
            peer.attempts += 1
            self._send_initiation(peer, now, wall_ns)
            return
        self.drops.add("staged_given_up", len(peer.staged))
        peer.staged.clear()
        peer.keepalive_at = NEVER
        if peer.zero_keys_at == NEVER:
            peer.zero_keys_at = now + ZERO_KEYS_S
        self._outputs.append(HandshakeFailed(peer.handle))

    def _keepalive(self, peer: Peer, now: float) -> None:
        activity = self._core.activity(peer.handle)
        was_extra = peer.keepalive_is_extra
        settle_keepalive(peer)
        peer.unreplied_settled_at = activity.first_unreplied_receive
        self._emit(self._core.seal_to(peer.handle, [b""], now))
        if not was_extra and activity.last_receive > activity.first_unreplied_receive:
            # More came while we waited: once more, so that the other side keeps hearing us.
            peer.keepalive_at = now + KEEPALIVE_TIMEOUT_S
            peer.keepalive_is_extra = True

    def _zero(self, peer: Peer) -> None:
        peer.staged.clear()
        self._drop_keys(peer)
        self._outputs.append(KeysZeroed(peer.handle))

    def _drop_keys(self, peer: Peer) -> None:
        peer.zero_keys_at = peer.retransmit_at = NEVER
        settle_keepalive(peer)
        peer.new_handshake_at = peer.session_expires_at = NEVER
        self._table.forget_indexes(peer)
        peer.pending = None
        self._core.drop_sessions(peer.handle)

    # Small things

    def _reply(self, source: Hashable, datagram: bytes) -> None:
        self._outputs.append(Reply(source, datagram))

    def _log_keys(self, peer: Peer, ephemeral: bytes) -> None:
        if self._write_keylog is not None:
            self._write_keylog(keylog.lines(self._identity.private, peer.public.raw, ephemeral, peer.psk))
