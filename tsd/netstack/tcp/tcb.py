"""State of one TCP connection and the few primitives all its halves share: timestamps, windows, sending one segment.

`Host` is what a connection needs from its stack. Decisions are made in `sender`, `receiver` and `connection`.
"""

from __future__ import annotations

from typing import Any, Protocol

from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.buffers import ReceiveBuffer, SendBuffer
from tsd.netstack.tcp.congestion import Cubic
from tsd.netstack.tcp.scoreboard import Scoreboard
from tsd.netstack.tcp.segment import Header, sack_option, timestamp_option

NO_TIMER = 0
SYN_TIMER = 1
RTO_TIMER = 2
TAIL_PROBE_TIMER = 3
PERSIST_TIMER = 4

OPEN = 0
RECOVERY = 1
AFTER_TIMEOUT = 2


class Host(Protocol):
    """The stack, as a connection sees it."""

    def emit(self, packet: bytes, segment_bytes: int) -> None: ...

    def notify(self, connection: Any, bits: int) -> None: ...

    def reserve_receive(self, size: int) -> bool: ...

    def connection_closed(self, connection: Any, now: float) -> None: ...


def unwrap(wire: int, near: int) -> int:
    """The absolute sequence number with these low 32 bits that is closest to `near`."""
    return near + ((wire - near + 0x80000000) & 0xFFFFFFFF) - 0x80000000


class Tcb:
    """Transmission control block. Sequence numbers are absolute: they never wrap."""

    __slots__ = (
        "_ts_offset",
        "ack_at",
        "ack_wanted",
        "backoff",
        "board",
        "challenge_at",
        "congestion",
        "copied_bytes",
        "duplicate_acks",
        "duplicate_block",
        "error",
        "events",
        "extra_acks",
        "fin_seq",
        "has_sack",
        "has_timestamps",
        "header",
        "heap_at",
        "host",
        "incoming",
        "is_cwnd_limited",
        "is_dirty",
        "is_fin_received",
        "is_fin_wanted",
        "is_released",
        "iss",
        "keepalive_at",
        "keepalive_idle_s",
        "keepalive_interval_s",
        "keepalive_probes",
        "key",
        "last_ack_sent",
        "last_receive_at",
        "last_send_at",
        "linger_at",
        "mss",
        "out",
        "own_mss",
        "owner",
        "phase",
        "quick_acks",
        "receive_edge",
        "receive_limit",
        "receive_shift",
        "recover",
        "reorder_at",
        "retries",
        "rto_s",
        "rttvar_s",
        "send_shift",
        "snd_max_window",
        "snd_nxt",
        "snd_una",
        "srtt_s",
        "state",
        "timer_at",
        "timer_kind",
        "ts_recent",
        "ts_recent_at",
        "tuned_at",
        "undo_ts",
        "wants_writable",
        "window_ack",
        "window_end",
        "window_seq",
    )

    def __init__(self, host: Host, header: Header, iss: int, mtu_bytes: int, ts_offset: int) -> None:
        self.host = host
        self.header = header
        self.key = b""
        self.owner: Any = None
        self.state = c.CLOSED
        self.error = ""
        self.own_mss = mtu_bytes - header.ip_bytes - 20
        self.mss = c.DEFAULT_MSS if header.ip_bytes == 20 else c.DEFAULT_MSS_V6
        self.has_timestamps = True
        self.has_sack = True
        self.send_shift = 0
        self.receive_shift = c.WINDOW_SHIFT
        self._ts_offset = ts_offset
        self.ts_recent = 0
        self.ts_recent_at = 0.0
        self._init_sending(iss)
        self._init_receiving()
        self._init_timers()
        # the stack's book-keeping
        self.events = 0
        self.is_dirty = False
        self.heap_at = 0.0

    def _init_sending(self, iss: int) -> None:
        self.iss = iss
        self.snd_una = iss
        self.snd_nxt = iss
        self.snd_max_window = 0
        self.window_end = iss
        self.window_seq = 0
        self.window_ack = 0
        self.out = SendBuffer(iss + 1)
        self.board = Scoreboard()
        self.congestion = Cubic(self.mss)
        self.is_fin_wanted = False
        self.is_cwnd_limited = False
        self.phase = OPEN
        self.recover = iss
        self.undo_ts = -1
        self.duplicate_acks = 0
        self.last_send_at = 0.0
        self.wants_writable = False
        self.srtt_s = 0.0
        self.rttvar_s = 0.0
        self.rto_s = c.INITIAL_RTO_S
        self.backoff = 0
        self.retries = 0

    def _init_receiving(self) -> None:
        self.incoming = ReceiveBuffer(0)
        self.receive_limit = c.RECEIVE_BUFFER_BYTES
        self.receive_edge = 0
        self.last_ack_sent = 0
        self.fin_seq = -1
        self.is_fin_received = False
        self.is_released = False
        self.duplicate_block: tuple[int, int] | None = None
        self.ack_wanted = False
        self.quick_acks = 0
        self.extra_acks = 0
        self.copied_bytes = 0
        self.tuned_at = 0.0
        self.challenge_at = -1.0

    def _init_timers(self) -> None:
        """0.0 is "not armed"."""
        self.timer_kind = NO_TIMER
        self.timer_at = 0.0
        self.reorder_at = 0.0
        self.ack_at = 0.0
        self.keepalive_at = 0.0
        self.linger_at = 0.0
        self.keepalive_idle_s = c.KEEPALIVE_IDLE_S
        self.keepalive_interval_s = c.KEEPALIVE_INTERVAL_S
        self.keepalive_probes = 0
        self.last_receive_at = 0.0

    def ts_now(self, now: float) -> int:
        return (int(now * 1000) + self._ts_offset) & 0xFFFFFFFF

    @property
    def in_flight(self) -> int:
        return self.snd_nxt - self.snd_una - self.board.sacked_bytes - self.board.lost_bytes

    @property
    def data_end(self) -> int:
        """Where our stream ends so far, FIN included once it is wanted."""
        return self.out.end + 1 if self.is_fin_wanted else self.out.end

    def advance_window(self) -> int:
        """Move the right edge when worth it, never back; returns the field for a segment with the window scaled."""
        incoming = self.incoming
        edge = incoming.next + self.receive_limit - incoming.ready_bytes
        if edge - self.receive_edge >= min(self.own_mss, self.receive_limit >> 1):
            self.receive_edge = edge
        window = self.receive_edge - incoming.next
        return min(window >> self.receive_shift, 0xFFFF) if window > 0 else 0

    @property
    def ack_number(self) -> int:
        return self.incoming.next + (1 if self.is_fin_received else 0)

    def transmit(self, seq: int, end: int, now: float, flags: int = c.ACK) -> None:
        """One (super-)segment carrying [seq, end) of our stream and a plain acknowledgement."""
        data_end = min(end, self.out.end)
        if end > self.out.end:
            flags |= c.FIN
        size = data_end - seq
        payload = self.out.slices(seq, data_end) if size > 0 else []
        if size > 0 and data_end == self.out.end:
            flags |= c.PSH
        options = timestamp_option(self.ts_now(now), self.ts_recent) if self.has_timestamps else b""
        segment_bytes = self.mss if size > self.mss else 0
        window = self.advance_window()
        ack = self.ack_number
        packet = self.header.build(seq, ack, flags, window, options, payload, max(size, 0), segment_bytes)
        self.note_ack_sent(ack)
        self.host.emit(packet, segment_bytes)

    def note_ack_sent(self, ack: int) -> None:
        self.last_ack_sent = ack
        self.ack_wanted = False
        self.ack_at = 0.0

    def send_ack(self, now: float, seq: int = -1) -> None:
        """A segment without data, with the holes we have; `seq` other than the next one makes it a probe."""
        options = timestamp_option(self.ts_now(now), self.ts_recent) if self.has_timestamps else b""
        duplicate = self.duplicate_block
        if self.has_sack and (duplicate is not None or self.incoming.runs):
            blocks = self.incoming.sack_blocks(3 if duplicate is None else 2)
            if duplicate is not None:
                blocks.insert(0, duplicate)
                self.duplicate_block = None
            options += sack_option(blocks)
        self._send_bare(seq if seq >= 0 else self.snd_nxt, c.ACK, options)

    def send_partial_sack(self, now: float, upto: int) -> None:
        """A duplicate ACK that reports only the first part of the latest run (see `receiver`)."""
        latest = self.incoming.latest
        if latest is None:
            return
        options = timestamp_option(self.ts_now(now), self.ts_recent) if self.has_timestamps else b""
        self._send_bare(self.snd_nxt, c.ACK, options + sack_option([(latest.start, upto)]))

    def _send_bare(self, seq: int, flags: int, options: bytes) -> None:
        window = self.advance_window()
        ack = self.ack_number
        packet = self.header.build(seq, ack, flags, window, options, [], 0, 0)
        self.note_ack_sent(ack)
        self.host.emit(packet, 0)

    def send_reset(self, now: float) -> None:
        options = timestamp_option(self.ts_now(now), self.ts_recent) if self.has_timestamps else b""
        self._send_bare(self.snd_nxt, c.RST | c.ACK, options)

    def challenge(self, now: float) -> None:
        """RFC 5961: answer what is suspicious with an ACK, but not at any rate."""
        if now - self.challenge_at >= c.CHALLENGE_INTERVAL_S or self.challenge_at < 0:
            self.challenge_at = now
            self.send_ack(now)
