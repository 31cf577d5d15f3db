"""The receiving half: what arrives, when to acknowledge it, and how large the window should be.

Spec: RFC 9293, RFC 5681 section 4.2 (delayed ACKs), RFC 2018 and RFC 2883 (SACK, duplicate SACK). The window grows with
the rate at which the application reads, as Linux's receive buffer auto-tuning does.
"""

from __future__ import annotations

from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.segment import Buffer, Segment
from tsd.netstack.tcp.sender import Sender

_QUICK_ACKS = 8


class Receiver(Sender):
    __slots__ = ()

    def on_payload(self, segment: Segment, seq: int, now: float) -> None:
        """`seq` is absolute; the segment overlaps the window."""
        payload = segment.payload
        incoming = self.incoming
        end = seq + len(payload)
        if end > self.receive_edge:
            payload = payload[: self.receive_edge - seq]
            end = self.receive_edge
        if incoming.covers(seq, end):
            if self.has_sack:
                self.duplicate_block = (seq, end)
            self.ack_wanted = True
            return
        had_hole = bool(incoming.runs)
        if len(incoming.runs) >= c.MAX_OUT_OF_ORDER_RUNS and seq > incoming.next:
            self.ack_wanted = True
            return
        if incoming.insert(seq, payload):
            self.host.notify(self, c.READABLE)
        if incoming.runs or had_hole:
            self._acknowledge_early(segment, seq, end, now)
            return
        self.extra_acks = 0
        self._acknowledge_in_order(now)

    def _acknowledge_in_order(self, now: float) -> None:
        pending = self.incoming.next - self.last_ack_sent
        if pending >= 2 * self.mss or self.quick_acks > 0:
            self.quick_acks -= 1 if self.quick_acks > 0 else 0
            self.ack_wanted = True
        elif not self.ack_at:
            self.ack_at = now + c.DELAYED_ACK_S

    def _acknowledge_early(self, segment: Segment, seq: int, end: int, now: float) -> None:
        """RFC 5681: at once. A coalesced run stands for several segments: peers that count duplicate ACKs get three."""
        self.quick_acks = _QUICK_ACKS
        piece = segment.piece_bytes
        latest = self.incoming.latest
        if piece and latest is not None and self.has_sack and latest.start == seq and self.extra_acks < 2:
            upto = seq + piece
            while upto < end and self.extra_acks < 2:
                self.send_partial_sack(now, upto)
                self.extra_acks += 1
                upto += piece
        self.send_ack(now)

    # -- the application reads ---------------------------------------------------------------------------------

    def read(self, limit: int, now: float) -> bytes:
        """Up to `limit` bytes that arrived in order; b"" when there are none (see `is_at_eof`)."""
        data = self.incoming.read(limit)
        if data:
            self._note_read(len(data), now)
        return data

    def read_chunk(self, now: float) -> Buffer | None:
        """The oldest chunk as it arrived, without copying."""
        chunk = self.incoming.read_chunk()
        if chunk is not None:
            self._note_read(len(chunk), now)
        return chunk

    @property
    def readable_bytes(self) -> int:
        return self.incoming.ready_bytes

    @property
    def is_at_eof(self) -> bool:
        return self.is_fin_received and not self.incoming.ready_bytes

    def _note_read(self, size: int, now: float) -> None:
        self._tune(size, now)
        incoming = self.incoming
        grown = incoming.next + self.receive_limit - incoming.ready_bytes - self.receive_edge
        if grown >= max(self.receive_limit >> 2, min(self.own_mss, self.receive_limit)) and not self.is_fin_received:
            self.ack_wanted = True

    def _tune(self, size: int, now: float) -> None:
        """Let the window hold twice what the application took in the last round trip."""
        self.copied_bytes += size
        if now - self.tuned_at < max(self.srtt_s, 0.001):
            return
        wanted = min(2 * self.copied_bytes, c.RECEIVE_BUFFER_MAX_BYTES)
        if wanted > self.receive_limit and self.host.reserve_receive(wanted - self.receive_limit):
            self.receive_limit = wanted
        self.copied_bytes = 0
        self.tuned_at = now
