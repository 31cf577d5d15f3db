"""One TCP connection: the state machine of RFC 9293 with the defences of RFC 5961 and RFC 7323 (PAWS).

The stack feeds `receive`, calls `output` once per batch and `on_deadline` when `next_at` is due. The owner uses
`write`, `read`, `shutdown_write`, `close`, `abort` and is told by event bits. TIME-WAIT lives in the stack.
"""

from __future__ import annotations

from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.buffers import ReceiveBuffer
from tsd.netstack.tcp.receiver import Receiver
from tsd.netstack.tcp.segment import Buffer, Segment, syn_options
from tsd.netstack.tcp.tcb import NO_TIMER, SYN_TIMER, unwrap


class Connection(Receiver):
    __slots__ = ()

    # -- opening -----------------------------------------------------------------------------------------------

    def open(self, now: float) -> None:
        """Active open: SYN."""
        self.state = c.SYN_SENT
        self.snd_nxt = self.iss + 1
        self._send_syn(now)

    def accept(self, syn: Segment, now: float) -> None:
        """Passive open from a SYN: SYN-ACK."""
        self.state = c.SYN_RECEIVED
        self._take_peer_options(syn, now)
        self._set_receive_start(syn.seq + 1)
        self.snd_nxt = self.iss + 1
        self.window_end = self.iss + 1 + syn.window
        self.snd_max_window = syn.window
        self.window_seq = syn.seq
        self.window_ack = self.iss
        self._send_syn(now)

    def _send_syn(self, now: float) -> None:
        is_answer = self.state == c.SYN_RECEIVED
        stamp = (self.ts_now(now), self.ts_recent) if self.has_timestamps else None
        options = syn_options(self.own_mss, self.receive_shift if self.receive_shift else -1, self.has_sack, stamp)
        flags = c.SYN | c.ACK if is_answer else c.SYN
        window = min(self.receive_limit, 0xFFFF)
        if is_answer:
            self.receive_edge = max(self.receive_edge, self.incoming.next + window)
            self.note_ack_sent(self.incoming.next)
        ack = self.incoming.next if is_answer else 0
        self.host.emit(self.header.build(self.iss, ack, flags, window, options, [], 0, 0), 0)
        self.last_send_at = now
        self.timer_kind = SYN_TIMER
        self.timer_at = now + min(c.INITIAL_RTO_S * (1 << self.retries), c.MAX_RTO_S)

    def _take_peer_options(self, syn: Segment, now: float) -> None:
        default = c.DEFAULT_MSS if self.header.ip_bytes == 20 else c.DEFAULT_MSS_V6
        self.has_timestamps = syn.has_timestamp
        self.has_sack = syn.sack_permitted
        if syn.window_shift >= 0:
            self.send_shift = syn.window_shift
        else:
            self.send_shift = self.receive_shift = 0
        if syn.has_timestamp:
            self.ts_recent = syn.ts_value
            self.ts_recent_at = now
        mss = min(max(syn.mss or default, c.MIN_MSS), self.own_mss)
        self.mss = mss - (12 if self.has_timestamps else 0)
        self.congestion.__init__(self.mss)  # type: ignore[misc]

    def _set_receive_start(self, seq: int) -> None:
        self.incoming = ReceiveBuffer(seq)
        self.receive_edge = seq
        self.last_ack_sent = seq

    # -- segments ----------------------------------------------------------------------------------------------

    def receive(self, segment: Segment, now: float) -> None:
        """One segment of this flow; its checksum is good."""
        self.last_receive_at = now
        self.keepalive_probes = 0
        if self.state == c.SYN_SENT:
            self._receive_in_syn_sent(segment, now)
        elif self.state != c.CLOSED:
            self._receive_synchronised(segment, now)

    def _receive_in_syn_sent(self, segment: Segment, now: float) -> None:
        flags = segment.flags
        is_ack_good = bool(flags & c.ACK) and segment.ack == (self.iss + 1) & 0xFFFFFFFF
        if flags & c.ACK and not is_ack_good:
            if not flags & c.RST:
                self.host.emit(self.header.build(segment.ack, 0, c.RST, 0, b"", [], 0, 0), 0)
            return
        if flags & c.RST:
            if is_ack_good:
                self._die("refused", now)
            return
        if not flags & c.SYN:
            return
        self._take_peer_options(segment, now)
        self._set_receive_start(segment.seq + 1)
        self.receive_edge = segment.seq + 1 + min(self.receive_limit, 0xFFFF)
        if not is_ack_good:
            self.state = c.SYN_RECEIVED  # simultaneous open
            self.retries = 0
            self._send_syn(now)
            return
        self.window_end = self.iss + 1 + segment.window
        self.snd_max_window = segment.window
        self.window_seq = segment.seq
        self.window_ack = self.iss + 1
        self._establish(now, self.retries == 0)
        self.ack_wanted = True

    def _establish(self, now: float, is_rtt_clear: bool) -> None:
        self.state = c.FIN_WAIT_1 if self.is_fin_wanted else c.ESTABLISHED
        self.snd_una = self.iss + 1
        self.timer_kind = NO_TIMER
        self.timer_at = 0.0
        self.retries = 0
        if is_rtt_clear:
            self._update_rtt(now - self.last_send_at)
        self.tuned_at = now
        self.keepalive_at = now + self.keepalive_idle_s
        self.host.notify(self, c.CONNECTED | c.WRITABLE)

    def _receive_synchronised(self, segment: Segment, now: float) -> None:
        flags = segment.flags
        incoming = self.incoming
        seq = unwrap(segment.seq, incoming.next)
        size = len(segment.payload)
        has_stamp = segment.has_timestamp and self.has_timestamps
        if has_stamp and not flags & c.RST and self._is_stale(segment, now):  # RFC 7323 5.3: a RST is never stale
            if size:
                self.duplicate_block = (seq, seq + size) if seq + size <= incoming.next else None
            self.ack_wanted = True
            return
        if not self._is_acceptable(seq, size + (1 if flags & c.FIN else 0)):
            if not flags & c.RST:
                self._answer_unacceptable(segment, seq, size, now)
            return
        if flags & c.RST:
            if seq == self.ack_number:
                self._die("refused" if self.state == c.SYN_RECEIVED else "reset", now)
            else:
                self.challenge(now)
            return
        if flags & c.SYN:
            self.challenge(now)
            return
        if not flags & c.ACK or not self._receive_ack(segment, seq, now):
            return
        if segment.has_timestamp and seq <= self.last_ack_sent:
            self.ts_recent = segment.ts_value
            self.ts_recent_at = now
        if size:
            self._receive_payload(segment, seq, now)
        if flags & c.FIN and self.fin_seq < 0:
            self.fin_seq = seq + size
        if self.fin_seq == incoming.next and not self.is_fin_received and self.state != c.CLOSED:
            self._receive_fin(now)

    def _answer_unacceptable(self, segment: Segment, seq: int, size: int, now: float) -> None:
        if self.state == c.SYN_RECEIVED and segment.flags & c.SYN:
            if segment.flags & c.ACK:  # simultaneous open: the other SYN-ACK
                self.ack_wanted = True
                self._receive_ack(segment, seq, now)
            else:
                self._send_syn(now)
        elif segment.flags & c.SYN:
            self.challenge(now)
        else:
            if size and self.has_sack and seq + size <= self.incoming.next:
                self.duplicate_block = (seq, seq + size)
            self.ack_wanted = True
            if segment.flags & c.ACK:  # a probe or a late duplicate may still carry a new ack
                ack = unwrap(segment.ack, self.snd_una)
                if self.snd_una < ack <= self.snd_nxt and self.state >= c.ESTABLISHED:
                    self._receive_ack(segment, seq, now)

    def _is_stale(self, segment: Segment, now: float) -> bool:
        """PAWS: the peer's clock went back."""
        if not (segment.ts_value - self.ts_recent) & 0x80000000:
            return False
        return now - self.ts_recent_at < c.PAWS_IDLE_S

    def _is_acceptable(self, seq: int, length: int) -> bool:
        start = self.ack_number
        edge = self.receive_edge
        if edge <= start:
            return seq == start and (length == 0 or self.is_fin_received)
        if length == 0:
            return start <= seq <= edge
        return seq < edge and seq + length > start

    def _receive_ack(self, segment: Segment, seq: int, now: float) -> bool:
        """False: nothing else in the segment may be used."""
        ack = unwrap(segment.ack, self.snd_una)
        if self.state == c.SYN_RECEIVED:
            if not self.iss < ack <= self.snd_nxt:
                self.host.emit(self.header.build(segment.ack, 0, c.RST, 0, b"", [], 0, 0), 0)
                return False
            self._establish(now, self.retries == 0)
            self.window_seq = seq - 1
        if ack > self.snd_nxt or ack < self.snd_una - max(self.snd_max_window, 65535):
            self.challenge(now)
            return False
        if ack >= self.snd_una:
            self.on_acknowledgement(segment, ack, now)
            self._update_window(segment, seq, ack, now)
            self._after_ack(now)
        return self.state != c.CLOSED

    def _update_window(self, segment: Segment, seq: int, ack: int, now: float) -> None:
        if seq < self.window_seq or (seq == self.window_seq and ack < self.window_ack):
            return
        window = segment.window << self.send_shift
        end = ack + window
        if window and end < self.window_end and (seq, ack) == (self.window_seq, self.window_ack):
            return  # overtaken by a later update of the same window
        self.window_seq = seq
        self.window_ack = ack
        self.window_end = end
        if window > self.snd_max_window:
            self.snd_max_window = window
        if not self.board.records:
            self.retries = 0
            if end > self.snd_nxt:
                self.backoff = 0
                self._arm(now)
        elif not window:
            self.retries = 0  # alive, only not reading

    def _after_ack(self, now: float) -> None:
        is_fin_acked = self.is_fin_wanted and self.snd_una == self.data_end
        if not is_fin_acked:
            return
        if self.state == c.FIN_WAIT_1:
            self.state = c.FIN_WAIT_2
            if self.is_released:
                self.linger_at = now + c.ORPHAN_S
        elif self.state == c.CLOSING:
            self._enter_time_wait(now)
        elif self.state == c.LAST_ACK:
            self._finish("", now)

    def _receive_payload(self, segment: Segment, seq: int, now: float) -> None:
        if self.is_released and seq + len(segment.payload) > self.incoming.next:
            self.send_reset(now)  # nobody will read it
            self._finish("reset", now)
        elif not self.is_fin_received:
            self.on_payload(segment, seq, now)

    def _receive_fin(self, now: float) -> None:
        self.is_fin_received = True
        self.ack_wanted = True
        self.host.notify(self, c.READABLE)
        if self.state == c.ESTABLISHED:
            self.state = c.CLOSE_WAIT
        elif self.state == c.FIN_WAIT_1:
            self.state = c.CLOSING
        elif self.state == c.FIN_WAIT_2:
            self._enter_time_wait(now)

    # -- the owner ---------------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Append to the stream; call `output` of the stack afterwards. Respect `send_room`."""
        if self.is_fin_wanted or self.state == c.CLOSED:
            raise BrokenPipeError("the sending side is closed")
        if len(data):
            self.out.append(data)

    def shutdown_write(self) -> None:
        """FIN after everything written."""
        if self.is_fin_wanted or self.state == c.CLOSED:
            return
        self.is_fin_wanted = True
        if self.state == c.ESTABLISHED:
            self.state = c.FIN_WAIT_1
        elif self.state == c.CLOSE_WAIT:
            self.state = c.LAST_ACK

    def close(self, now: float) -> None:
        """The owner is gone: FIN, or RST when it left data unread (RFC 2525 section 2.17)."""
        if self.state == c.CLOSED or self.is_released:
            return
        if self.incoming.ready_bytes or self.state in (c.SYN_SENT, c.SYN_RECEIVED):
            self.abort(now)
            return
        self.is_released = True
        self.shutdown_write()
        if self.state == c.FIN_WAIT_2:
            self.linger_at = now + c.ORPHAN_S

    def abort(self, now: float) -> None:
        """RST, at once."""
        if self.state == c.CLOSED:
            return
        if self.state != c.SYN_SENT:
            self.send_reset(now)
        self._finish("aborted", now)

    # -- the end -----------------------------------------------------------------------------------------------

    def _die(self, error: str, now: float) -> None:
        self._finish(error, now)

    def fail(self, error: str, now: float) -> None:
        """Something outside (an ICMP error) ends a connection that is still opening."""
        if self.state in (c.SYN_SENT, c.SYN_RECEIVED):
            self._finish(error, now)

    def _enter_time_wait(self, now: float) -> None:
        if self.ack_wanted:
            self.send_ack(now)
        self.state = c.TIME_WAIT
        self._stop(now)

    def _finish(self, error: str, now: float) -> None:
        self.error = error
        self.state = c.CLOSED
        if error:
            self.incoming.clear()
        self._stop(now)

    def _stop(self, now: float) -> None:
        self.out.clear()
        self.board.clear()
        self.ack_wanted = False
        self.timer_at = self.ack_at = self.reorder_at = self.keepalive_at = self.linger_at = 0.0
        self.timer_kind = NO_TIMER
        self.host.notify(self, c.DEAD)
        self.host.connection_closed(self, now)

    # -- time --------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When `on_deadline` is wanted; 0.0 for never."""
        at = 0.0
        for candidate in (self.timer_at, self.ack_at, self.reorder_at, self.keepalive_at, self.linger_at):
            if candidate and (not at or candidate < at):
                at = candidate
        return at

    def on_deadline(self, now: float) -> None:
        if self.ack_at and now >= self.ack_at:
            self.ack_at = 0.0
            self.ack_wanted = True
        if self.reorder_at and now >= self.reorder_at:
            self.on_reorder_timer(now)
        if self.timer_at and now >= self.timer_at:
            self.timer_at = 0.0
            self._on_main_timer(now)
        if self.linger_at and now >= self.linger_at:
            self._finish("", now)
        if self.keepalive_at and now >= self.keepalive_at:
            self._on_keepalive(now)

    def _on_main_timer(self, now: float) -> None:
        if self.timer_kind != SYN_TIMER:
            if not self.on_transmit_timer(now):
                self.send_reset(now)
                self._finish("timeout", now)
            return
        limit = c.SYN_RETRIES if self.state == c.SYN_SENT else c.SYN_ACK_RETRIES
        if self.retries >= limit:
            self._finish("timeout", now)
            return
        self.retries += 1
        self._send_syn(now)

    def _on_keepalive(self, now: float) -> None:
        idle_until = self.last_receive_at + self.keepalive_idle_s
        if not self.keepalive_probes and now < idle_until:
            self.keepalive_at = idle_until
            return
        if self.keepalive_probes >= c.KEEPALIVE_PROBES:
            self.send_reset(now)
            self._finish("timeout", now)
            return
        self.keepalive_probes += 1
        if not self.board.records:
            self.send_ack(now, self.snd_una - 1)
        self.keepalive_at = now + self.keepalive_interval_s
