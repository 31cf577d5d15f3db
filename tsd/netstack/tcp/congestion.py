"""How much may be in flight: CUBIC (RFC 9438) with HyStart++ (RFC 9406) and PRR (RFC 6937). All in bytes.

Knows nothing of sequence spaces beyond round boundaries; loss is detected elsewhere.
"""

from __future__ import annotations

from tsd.netstack.tcp.constants import INITIAL_SEGMENTS

_C = 0.4
_BETA = 0.7
_ALPHA = 3 * (1 - _BETA) / (1 + _BETA)
_INFINITE = 1 << 60
_CSS_ROUNDS = 5
_CSS_DIVISOR = 4
_MIN_SAMPLES = 8


class Cubic:
    __slots__ = (
        "_css_baseline_s",
        "_css_rounds",
        "_current_min_s",
        "_epoch_at",
        "_estimate",
        "_k_s",
        "_last_min_s",
        "_prr_delivered",
        "_prr_flight",
        "_prr_out",
        "_round_end",
        "_samples",
        "_undo",
        "_w_max",
        "cwnd",
        "mss",
        "ssthresh",
    )

    def __init__(self, mss: int) -> None:
        self.mss = mss
        self.cwnd = INITIAL_SEGMENTS * mss
        self.ssthresh = _INFINITE
        self._w_max = 0.0
        self._epoch_at = -1.0
        self._k_s = 0.0
        self._estimate = 0.0
        self._round_end = 0
        self._last_min_s = 0.0
        self._current_min_s = 0.0
        self._samples = 0
        self._css_baseline_s = 0.0
        self._css_rounds = 0
        self._prr_flight = 1
        self._prr_delivered = 0
        self._prr_out = 0
        self._undo: tuple[int, int, float] | None = None

    def on_ack(self, acked: int, una: int, nxt: int, rtt_s: float, srtt_s: float, now: float) -> None:
        """`acked` bytes were delivered while the window was the limit; `rtt_s` < 0 means no sample."""
        if self.cwnd < self.ssthresh:
            self._slow_start(acked, una, nxt, rtt_s)
        else:
            self._avoid(acked, srtt_s, now)

    def _slow_start(self, acked: int, una: int, nxt: int, rtt_s: float) -> None:
        if una >= self._round_end:
            self._start_round(nxt)
        if rtt_s >= 0:
            self._samples += 1
            if self._samples == 1 or rtt_s < self._current_min_s:
                self._current_min_s = rtt_s
            self._judge_delay()
        self.cwnd += acked // _CSS_DIVISOR if self._css_baseline_s else acked

    def _start_round(self, nxt: int) -> None:
        self._round_end = nxt
        if self._css_baseline_s:
            self._css_rounds += 1
            if self._css_rounds >= _CSS_ROUNDS:
                self.ssthresh = self.cwnd
        if self._samples:
            self._last_min_s = self._current_min_s
        self._samples = 0

    def _judge_delay(self) -> None:
        if self._samples < _MIN_SAMPLES or not self._last_min_s:
            return
        if self._css_baseline_s:
            if self._current_min_s < self._css_baseline_s:
                self._css_baseline_s = 0.0
            return
        threshold_s = min(max(self._last_min_s / 8, 0.004), 0.016)
        if self._current_min_s >= self._last_min_s + threshold_s:
            self._css_baseline_s = self._current_min_s
            self._css_rounds = 0

    def _avoid(self, acked: int, srtt_s: float, now: float) -> None:
        mss = self.mss
        if self._epoch_at < 0:
            self._epoch_at = now
            self._estimate = float(self.cwnd)
            if self._w_max < self.cwnd:
                self._w_max = float(self.cwnd)
            self._k_s = ((self._w_max - self.cwnd) / mss / _C) ** (1 / 3)
        t = now - self._epoch_at + srtt_s - self._k_s
        target = min(max(_C * t * t * t * mss + self._w_max, self.cwnd), 1.5 * self.cwnd)
        alpha = _ALPHA if self._estimate < self._w_max else 1.0
        self._estimate += alpha * mss * acked / self.cwnd
        grown = self.cwnd + (target - self.cwnd) * acked / self.cwnd
        self.cwnd = int(max(grown, self._estimate))

    def on_loss(self, in_flight: int) -> None:
        """A recovery starts: decrease once; PRR decides what each ACK may send until `on_recovered`."""
        self._reduce()
        self._prr_flight = max(in_flight, 1)
        self._prr_delivered = 0
        self._prr_out = 0

    def _reduce(self) -> None:
        self._undo = (self.cwnd, self.ssthresh, self._w_max)
        cwnd = float(self.cwnd)
        self._w_max = cwnd * (1 + _BETA) / 2 if cwnd < self._w_max else cwnd
        self.ssthresh = max(int(cwnd * _BETA), 2 * self.mss)
        self._epoch_at = -1.0
        self._css_baseline_s = 0.0

    def on_recovery_ack(self, delivered: int, in_flight: int, is_advancing: bool) -> None:
        """Proportional rate reduction; the slow-start reduction bound only while the left edge advances."""
        self._prr_delivered += delivered
        if in_flight > self.ssthresh:
            may_send = -(-self._prr_delivered * self.ssthresh // self._prr_flight) - self._prr_out
        else:
            may_send = max(self._prr_delivered - self._prr_out, delivered)
            if is_advancing:
                may_send += self.mss
            may_send = min(self.ssthresh - in_flight, may_send)
        if not self._prr_out and may_send < self.mss:
            may_send = self.mss
        self.cwnd = in_flight + max(may_send, 0)

    def note_sent(self, size: int) -> None:
        self._prr_out += size

    def on_recovered(self) -> None:
        self.cwnd = max(self.ssthresh, 2 * self.mss)

    def on_timeout(self, is_first: bool) -> None:
        """Start again from one segment; only the first of several timeouts in a row lowers the threshold."""
        if is_first:
            self._reduce()
        self.cwnd = self.mss

    def undo(self) -> None:
        """The last decrease was for nothing."""
        if self._undo is not None:
            cwnd, self.ssthresh, self._w_max = self._undo
            self.cwnd = max(self.cwnd, cwnd)
            self._epoch_at = -1.0
            self._undo = None

    def on_idle(self) -> None:
        """After a pause of more than one RTO the old window says nothing about the path (RFC 5681 section 4.1)."""
        self.cwnd = min(self.cwnd, INITIAL_SEGMENTS * self.mss)
        self._epoch_at = -1.0
