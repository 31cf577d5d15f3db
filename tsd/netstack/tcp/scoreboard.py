"""What was sent and not yet acknowledged, and the judgement which of it is lost.

Spec: RFC 2018 and RFC 6675 (SACK bookkeeping), RFC 8985 (RACK: loss by time order of transmissions). A record covers
up to a whole super-segment and is split where the peer's acknowledgements cut it. Retransmitting is the sender's work.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

_BY_SEQ = attrgetter("seq")
_NEVER = -1.0e18


class Sent:
    """One contiguous transmission; `ts_value` is the timestamp its last copy carried."""

    __slots__ = ("end", "is_lost", "is_retransmitted", "is_sacked", "sent_at", "seq", "ts_value")

    def __init__(self, seq: int, end: int, sent_at: float, ts_value: int) -> None:
        self.seq = seq
        self.end = end
        self.sent_at = sent_at
        self.ts_value = ts_value
        self.is_retransmitted = False
        self.is_sacked = False
        self.is_lost = False


class Scoreboard:
    """Records in sequence order. Neighbouring sacked records are merged, so that it stays small under loss."""

    __slots__ = (
        "_forward",
        "_rack_at",
        "_rack_end",
        "_rack_rtt_s",
        "is_reordering_seen",
        "lost_bytes",
        "min_rtt_s",
        "records",
        "reorder_multiplier",
        "rtt_sample_s",
        "sacked_bytes",
    )

    def __init__(self) -> None:
        self.records: list[Sent] = []
        self.sacked_bytes = 0
        self.lost_bytes = 0
        self.min_rtt_s = 1.0e9
        self.rtt_sample_s = -1.0
        self.is_reordering_seen = False
        self.reorder_multiplier = 1
        self._rack_at = _NEVER
        self._rack_end = 0
        self._rack_rtt_s = 0.0
        self._forward = 0

    def add(self, seq: int, end: int, now: float, ts_value: int) -> None:
        self.records.append(Sent(seq, end, now, ts_value))

    def acknowledge(self, upto: int, now: float, ts_echo: int) -> int:
        """Remove everything below `upto`; returns the bytes that were not known to be delivered before."""
        delivered = 0
        done = 0
        for record in self.records:
            if record.seq >= upto:
                break
            end = record.end if record.end <= upto else upto
            size = end - record.seq
            if record.is_sacked:
                self.sacked_bytes -= size
            else:
                delivered += size
                self._note_delivered(record, end, now, ts_echo)
            if record.is_lost:
                self.lost_bytes -= size
            if record.end > upto:
                record.seq = upto
                break
            done += 1
        if done:
            del self.records[:done]
        return delivered

    def sack(self, start: int, end: int, now: float, ts_echo: int) -> int:
        """Mark [start, end) as received out of order; returns the bytes newly known to be delivered."""
        records = self.records
        i = bisect_right(records, start, key=_BY_SEQ) - 1
        if i < 0 or records[i].end <= start:
            i += 1
        fresh = 0
        while i < len(records) and records[i].seq < end:
            record = records[i]
            if record.is_sacked:
                i += 1
                continue
            if record.seq < start:
                self.split(i, start)
                i += 1
                continue
            if record.end > end:
                self.split(i, end)
            fresh += record.end - record.seq
            self._mark_sacked(record, now, ts_echo)
            i = self._merge_left(i)
        if 0 < i < len(records) and records[i].is_sacked:
            self._merge_left(i)
        return fresh

    def split(self, i: int, at: int) -> None:
        """Cut record `i` in two at sequence number `at`."""
        record = self.records[i]
        right = Sent(at, record.end, record.sent_at, record.ts_value)
        right.is_retransmitted = record.is_retransmitted
        right.is_sacked = record.is_sacked
        right.is_lost = record.is_lost
        record.end = at
        self.records.insert(i + 1, right)

    def _mark_sacked(self, record: Sent, now: float, ts_echo: int) -> None:
        size = record.end - record.seq
        if record.is_lost:
            record.is_lost = False
            self.lost_bytes -= size
        record.is_sacked = True
        self.sacked_bytes += size
        self._note_delivered(record, record.end, now, ts_echo)

    def _merge_left(self, i: int) -> int:
        """Join record `i` to a sacked left neighbour; returns the index after it."""
        if i > 0 and self.records[i - 1].is_sacked and self.records[i].is_sacked:
            self.records[i - 1].end = self.records[i].end
            del self.records[i]
            return i
        return i + 1

    def _note_delivered(self, record: Sent, end: int, now: float, ts_echo: int) -> None:
        rtt_s = now - record.sent_at
        if record.is_retransmitted:
            is_of_original = (ts_echo - record.ts_value) & 0x80000000 if ts_echo else rtt_s < self.min_rtt_s
            if is_of_original:
                return
        else:
            self.rtt_sample_s = rtt_s
            if rtt_s < self.min_rtt_s:
                self.min_rtt_s = rtt_s
            if end < self._forward:
                self.is_reordering_seen = True
        if end > self._forward:
            self._forward = end
        if record.sent_at > self._rack_at or (record.sent_at == self._rack_at and end > self._rack_end):
            self._rack_at = record.sent_at
            self._rack_end = end
            self._rack_rtt_s = rtt_s

    def detect_losses(self, now: float, srtt_s: float, is_recovering: bool, mss: int) -> float:
        """Mark what RACK considers lost; returns seconds until it wants to look again (0: no need)."""
        window_s = min(self.min_rtt_s / 4 * self.reorder_multiplier, srtt_s)
        if not self.is_reordering_seen and (is_recovering or self.sacked_bytes >= 3 * mss):
            window_s = 0.0
        wait_s = 0.0
        rack_at = self._rack_at
        for record in self.records:
            if record.is_sacked or record.is_lost or record.sent_at > rack_at:
                continue
            if record.sent_at == rack_at and record.end > self._rack_end:
                continue
            left_s = record.sent_at + self._rack_rtt_s + window_s - now
            if left_s <= 1e-6:
                self.mark_lost(record)
            elif left_s > wait_s:
                wait_s = left_s
        return wait_s

    def mark_lost(self, record: Sent) -> None:
        if not record.is_lost and not record.is_sacked:
            record.is_lost = True
            self.lost_bytes += record.end - record.seq

    def mark_all_lost(self) -> None:
        """After a timeout. A sacked head means that the receiver threw data away (RFC 2018 section 8)."""
        if self.records and self.records[0].is_sacked:
            for record in self.records:
                record.is_sacked = False
            self.sacked_bytes = 0
        for record in self.records:
            self.mark_lost(record)

    def clear_lost(self) -> None:
        """The losses were none: what is marked counts as in flight again."""
        for record in self.records:
            record.is_lost = False
        self.lost_bytes = 0

    def first_lost(self) -> int:
        """Index of the first lost record, or -1."""
        if self.lost_bytes:
            for i, record in enumerate(self.records):
                if record.is_lost:
                    return i
        return -1

    def note_retransmitted(self, i: int, now: float, ts_value: int) -> None:
        """Record `i` is in flight again."""
        record = self.records[i]
        if record.is_lost:
            record.is_lost = False
            self.lost_bytes -= record.end - record.seq
        record.is_retransmitted = True
        record.sent_at = now
        record.ts_value = ts_value

    def clear(self) -> None:
        self.records.clear()
        self.sacked_bytes = 0
        self.lost_bytes = 0
