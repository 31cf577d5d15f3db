"""The sending half: what to transmit next, what an acknowledgement means, and the retransmission timers.

Spec: RFC 9293, RFC 5681, RFC 6298 (RTO), RFC 6675 and RFC 8985 (SACK, RACK, tail loss probe), RFC 4015-style undo by
timestamps. No pacing: bursts are super-segments.
"""

from __future__ import annotations

from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.segment import Segment
from tsd.netstack.tcp.tcb import (
    AFTER_TIMEOUT,
    NO_TIMER,
    OPEN,
    PERSIST_TIMER,
    RECOVERY,
    RTO_TIMER,
    TAIL_PROBE_TIMER,
    Tcb,
    unwrap,
)


class Sender(Tcb):
    __slots__ = ()

    # -- transmission ------------------------------------------------------------------------------------------

    def output(self, now: float) -> None:
        """Send whatever congestion and flow control allow; at least the ACK that is due."""
        if self.ack_wanted and self.incoming.runs:
            self.send_ack(now)
        if self.state >= c.ESTABLISHED and (self.board.lost_bytes or self.data_end > self.snd_nxt):
            if not self.board.records and now - self.last_send_at > self.rto_s:
                self.congestion.on_idle()
            self._send_lost(now)
            self._send_new(now)
        if self.ack_wanted:
            self.send_ack(now)

    def _largest_burst(self) -> int:
        overhead = self.header.ip_bytes + 20 + (12 if self.has_timestamps else 0)
        return (c.MAX_PACKET_BYTES - overhead) // self.mss * self.mss

    def _send_lost(self, now: float) -> None:
        mss = self.mss
        while self.board.lost_bytes:
            room = self.congestion.cwnd - self.in_flight
            if room < mss and self.in_flight > 0:
                self.is_cwnd_limited = True
                return
            i = self.board.first_lost()
            self._retransmit(i, max(min(room, self._largest_burst()) // mss * mss, mss), now)

    def _retransmit(self, i: int, limit: int, now: float) -> None:
        record = self.board.records[i]
        if record.end - record.seq > limit:
            self.board.split(i, record.seq + limit)
        if self.undo_ts < 0:
            self.undo_ts = self.ts_now(now)
        self.board.note_retransmitted(i, now, self.ts_now(now))
        self.transmit(record.seq, record.end, now)
        self.congestion.note_sent(record.end - record.seq)
        self.last_send_at = now
        if self.timer_kind in (NO_TIMER, PERSIST_TIMER):
            self._arm(now)

    def _send_new(self, now: float) -> None:
        burst = self._largest_burst()
        is_sent = False
        while True:
            size = self._next_size(burst)
            if size <= 0:
                break
            self._send_range(size, now)
            is_sent = True
        if is_sent:
            if self.timer_kind != RTO_TIMER:
                self._arm(now)
        elif not self.board.records and self.timer_kind == NO_TIMER and self.data_end > self.snd_nxt:
            self._arm(now)

    def _next_size(self, burst: int) -> int:
        """Bytes of new stream to send now; 0: wait. Whole segments but for the last piece (RFC 9293 3.8.6.2.1)."""
        available = self.data_end - self.snd_nxt
        if available <= 0:
            self.is_cwnd_limited = False
            return 0
        mss = self.mss
        window = self.window_end - self.snd_nxt
        if available == 1 and self.is_fin_wanted and window <= 0:
            return 1  # a lone FIN needs no window
        room = self.congestion.cwnd - self.in_flight
        size = min(available, window, room, burst)
        self.is_cwnd_limited = room <= window
        if size < available:
            if size < mss:
                is_half_window = 0 < window <= room and window * 2 >= self.snd_max_window
                return size if is_half_window and not self.board.records else 0
            size -= size % mss
            if size < burst and self.board.records and size * 3 < self.congestion.cwnd and room <= window:
                return 0  # an ACK is on its way and will allow a bigger burst
        return size

    def _send_range(self, size: int, now: float) -> None:
        seq = self.snd_nxt
        end = seq + size
        self.board.add(seq, end, now, self.ts_now(now))
        self.snd_nxt = end
        self.transmit(seq, end, now)
        if self.phase != OPEN:
            self.congestion.note_sent(size)
        self.last_send_at = now

    # -- acknowledgements --------------------------------------------------------------------------------------

    def on_acknowledgement(self, segment: Segment, ack: int, now: float) -> None:
        """`ack` lies in [snd_una, snd_nxt]."""
        board = self.board
        flight = self.in_flight
        advanced = ack - self.snd_una
        echo = segment.ts_echo if segment.has_timestamp else 0
        delivered = 0
        board.rtt_sample_s = -1.0
        if advanced > 0:
            delivered = board.acknowledge(ack, now, echo)
            self.snd_una = ack
            self.out.acknowledge(min(ack, self.out.end))
            self.backoff = 0
            self.retries = 0
            self.duplicate_acks = 0
        if self.has_sack:
            if segment.sacks:
                delivered += self._apply_sacks(segment, ack, now, echo)
        elif advanced == 0 and board.records and not len(segment.payload) and not segment.flags & (c.SYN | c.FIN):
            self._count_duplicate(ack, segment)
        rtt_s = board.rtt_sample_s
        if rtt_s >= 0:
            self._update_rtt(rtt_s)
        elif advanced > 0 and echo:
            passed_ms = (self.ts_now(now) - echo) & 0xFFFFFFFF
            if passed_ms < 0x80000000:  # else a stamp that we have not sent yet
                self._update_rtt(passed_ms / 1000)
        self._judge(ack, advanced, delivered, flight, rtt_s, echo, now)
        if advanced > 0:
            self._arm(now)
            self._offer_room()

    def _apply_sacks(self, segment: Segment, ack: int, now: float, echo: int) -> int:
        delivered = 0
        blocks = [(unwrap(a, ack), unwrap(b, ack)) for a, b in segment.sacks]
        first = blocks[0]
        if first[1] <= ack or (len(blocks) > 1 and blocks[1][0] <= first[0] and first[1] <= blocks[1][1]):
            del blocks[0]
            if self.board.is_reordering_seen and self.board.reorder_multiplier < 16:
                self.board.reorder_multiplier += 1  # DSACK: we judged too early (RFC 8985 section 6.2)
            self.board.is_reordering_seen = True
        for start, end in sorted(blocks):
            if ack <= start < end <= self.snd_nxt:
                delivered += self.board.sack(start, end, now, echo)
        return delivered

    def _count_duplicate(self, ack: int, segment: Segment) -> None:
        """Peers without SACK: the third duplicate ACK condemns the first segment (RFC 5681)."""
        if ack + (segment.window << self.send_shift) != self.window_end:
            return
        self.duplicate_acks += 1
        if self.duplicate_acks == 3:
            self._condemn_first()

    def _condemn_first(self) -> None:
        record = self.board.records[0]
        if record.end - record.seq > self.mss:
            self.board.split(0, record.seq + self.mss)
        self.board.mark_lost(record)

    def _judge(self, ack: int, advanced: int, delivered: int, flight: int, rtt_s: float, echo: int, now: float) -> None:
        """Loss detection, then the window."""
        board = self.board
        if self.phase != OPEN and advanced > 0:
            if self.undo_ts >= 0 and echo and (echo - self.undo_ts) & 0x80000000:
                self._undo()
            elif ack >= self.recover:
                self._leave_recovery()
            elif not self.has_sack and self.phase == RECOVERY and board.records:
                self._condemn_first()
        self.reorder_at = 0.0
        if board.sacked_bytes or (self.phase != OPEN and delivered):
            wait_s = board.detect_losses(now, self.srtt_s, self.phase != OPEN, self.mss)
            if wait_s > 0:
                self.reorder_at = now + wait_s
        if board.lost_bytes and self.phase == OPEN:
            self._enter_recovery(flight)
        if self.phase == RECOVERY:
            self.congestion.on_recovery_ack(delivered, self.in_flight, advanced > 0)
        elif delivered and self.is_cwnd_limited:
            self.congestion.on_ack(delivered, self.snd_una, self.snd_nxt, rtt_s, self.srtt_s, now)

    def _enter_recovery(self, flight: int) -> None:
        self.phase = RECOVERY
        self.recover = self.snd_nxt
        self.undo_ts = -1
        self.congestion.on_loss(flight)

    def _leave_recovery(self) -> None:
        if self.phase == RECOVERY:
            self.congestion.on_recovered()
        self.phase = OPEN
        self.undo_ts = -1

    def _undo(self) -> None:
        """The peer echoes a timestamp older than our first retransmission: the original arrived."""
        self.board.clear_lost()
        self.board.is_reordering_seen = True
        self.congestion.undo()
        self.phase = OPEN
        self.undo_ts = -1

    def _update_rtt(self, sample_s: float) -> None:
        if not self.srtt_s:
            self.srtt_s = sample_s or 1e-6
            self.rttvar_s = sample_s / 2
        else:
            self.rttvar_s += (abs(self.srtt_s - sample_s) - self.rttvar_s) / 4
            self.srtt_s += (sample_s - self.srtt_s) / 8
        self.rto_s = min(max(self.srtt_s + 4 * self.rttvar_s, c.MIN_RTO_S), c.MAX_RTO_S)

    # -- room for the application ------------------------------------------------------------------------------

    @property
    def send_limit(self) -> int:
        return max(c.SEND_BUFFER_BYTES, min(2 * self.congestion.cwnd, c.SEND_BUFFER_MAX_BYTES))

    @property
    def send_room(self) -> int:
        """How much the application should write at most; more is taken, but is unfair to memory."""
        return self.send_limit - len(self.out)

    def _offer_room(self) -> None:
        if self.wants_writable and self.send_room >= self.send_limit // 3:
            self.wants_writable = False
            self.host.notify(self, c.WRITABLE)

    # -- timers ------------------------------------------------------------------------------------------------

    def _arm(self, now: float) -> None:
        rto_s = min(self.rto_s * (1 << self.backoff), c.MAX_RTO_S)
        if not self.board.records:
            if self.data_end > self.snd_nxt and self.state >= c.ESTABLISHED:
                self.timer_kind = PERSIST_TIMER
                self.timer_at = now + rto_s
            else:
                self.timer_kind = NO_TIMER
                self.timer_at = 0.0
            return
        if self.phase == OPEN and not self.board.sacked_bytes and self.srtt_s and not self.backoff:
            probe_s = max(2 * self.srtt_s, c.MIN_PROBE_S)
            if self.snd_nxt - self.snd_una <= self.mss:
                probe_s += c.MAX_ACK_DELAY_S
            if probe_s < rto_s:
                self.timer_kind = TAIL_PROBE_TIMER
                self.timer_at = now + probe_s
                return
        self.timer_kind = RTO_TIMER
        self.timer_at = now + rto_s

    def on_reorder_timer(self, now: float) -> None:
        self.reorder_at = 0.0
        flight = self.in_flight
        wait_s = self.board.detect_losses(now, self.srtt_s, self.phase != OPEN, self.mss)
        if wait_s > 0:
            self.reorder_at = now + wait_s
        if self.board.lost_bytes and self.phase == OPEN:
            self._enter_recovery(flight)
            self.congestion.on_recovery_ack(0, self.in_flight, False)

    def on_transmit_timer(self, now: float) -> bool:
        """The timer of `timer_kind` fired. False: the peer is gone."""
        kind = self.timer_kind
        if kind == TAIL_PROBE_TIMER and self.board.records:
            self._probe_tail(now)
            return True
        if self.retries >= c.MAX_RETRIES:
            return False
        self.retries += 1
        if kind == PERSIST_TIMER:
            self._probe_window(now)
        elif self.board.records:
            self._on_timeout(now)
        return True

    def _probe_tail(self, now: float) -> None:
        """Tail loss probe: new data if allowed, else the last segment again, so that SACK can show a loss."""
        available = min(self.data_end, self.window_end) - self.snd_nxt
        if available > 0:
            self._send_range(min(available, self.mss), now)
        else:
            last = self.board.records[-1]
            if last.end - last.seq > self.mss:
                self.board.split(len(self.board.records) - 1, last.end - self.mss)
            last = self.board.records[-1]
            self.board.note_retransmitted(len(self.board.records) - 1, now, self.ts_now(now))
            self.transmit(last.seq, last.end, now)
            self.last_send_at = now
        self.timer_kind = RTO_TIMER
        self.timer_at = now + self.rto_s

    def _probe_window(self, now: float) -> None:
        """The peer's window is closed (or silly): send what fits, or a bare segment that it must answer."""
        size = min(self.data_end, self.window_end, self.snd_nxt + self.mss) - self.snd_nxt
        self.backoff = min(self.backoff + 1, 16)
        if size > 0:
            self._send_range(size, now)
        else:
            self.send_ack(now, self.snd_una - 1)
        self._arm(now)

    def _on_timeout(self, now: float) -> None:
        is_first = self.phase != AFTER_TIMEOUT
        if is_first or self.backoff == 0:
            self.undo_ts = -1
        self.board.mark_all_lost()
        self.congestion.on_timeout(is_first)
        self.phase = AFTER_TIMEOUT
        self.recover = self.snd_nxt
        self.reorder_at = 0.0
        self.is_cwnd_limited = True
        self.backoff = min(self.backoff + 1, 16)
        self._retransmit(0, self.mss, now)
        self._arm(now)
