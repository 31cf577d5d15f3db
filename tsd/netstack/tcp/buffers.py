"""Bytes waiting: `SendBuffer` until acknowledged, `ReceiveBuffer` until read, with reassembly of what came early.

Positions are absolute (never wrapping) sequence numbers. Chunks are kept as they came; nothing is copied except
small pieces, which are gathered so that overhead stays bounded. Does not know windows or timers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from tsd.netstack.tcp.segment import Buffer

_GATHER_BELOW_BYTES = 4096
_GATHERED_MAX_BYTES = 65536


class SendBuffer:
    """What the application wrote and the peer has not acknowledged; readable at any position for retransmission."""

    __slots__ = ("_chunks", "_head", "_starts", "end", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self._chunks: list[bytes | bytearray] = []
        self._starts: list[int] = []
        self._head = 0

    def __len__(self) -> int:
        return self.end - self.start

    def append(self, data: Buffer) -> None:
        """Take over `data`; anything but `bytes` is copied, because its owner may reuse it."""
        size = len(data)
        if size < _GATHER_BELOW_BYTES and self._head < len(self._chunks):
            last = self._chunks[-1]
            if isinstance(last, bytearray) and len(last) + size <= _GATHERED_MAX_BYTES:
                last += data
                self.end += size
                return
        chunk = bytearray(data) if size < _GATHER_BELOW_BYTES else data if isinstance(data, bytes) else bytes(data)
        self._chunks.append(chunk)
        self._starts.append(self.end)
        self.end += size

    def slices(self, seq: int, end: int) -> list[memoryview]:
        """Views of [seq, end); drop them before the next `append`."""
        views: list[memoryview] = []
        i = bisect_right(self._starts, seq, self._head) - 1
        while seq < end:
            chunk = self._chunks[i]
            offset = seq - self._starts[i]
            view = memoryview(chunk)[offset : offset + end - seq]
            views.append(view)
            seq += len(view)
            i += 1
        return views

    def acknowledge(self, upto: int) -> None:
        self.start = upto
        head = self._head
        while head < len(self._chunks) and self._starts[head] + len(self._chunks[head]) <= upto:
            self._chunks[head] = b""
            head += 1
        if head > 64 or head == len(self._chunks):
            del self._chunks[:head]
            del self._starts[:head]
            head = 0
        self._head = head

    def clear(self) -> None:
        self._chunks.clear()
        self._starts.clear()
        self._head = 0
        self.start = self.end


class _Run:
    """Contiguous bytes that arrived ahead of a hole."""

    __slots__ = ("chunks", "end", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self.chunks: deque[Buffer] = deque()


class ReceiveBuffer:
    """In-order bytes for the application, and runs that wait for a hole to be filled."""

    __slots__ = ("_chunks", "_run_starts", "early_bytes", "latest", "next", "ready_bytes", "runs")

    def __init__(self, start: int) -> None:
        self.next = start
        self._chunks: deque[Buffer] = deque()
        self.ready_bytes = 0
        self.early_bytes = 0
        self.runs: list[_Run] = []
        self._run_starts: list[int] = []
        self.latest: _Run | None = None

    def insert(self, seq: int, payload: Buffer) -> int:
        """Take the new part of `payload`; returns how many bytes became readable. `seq` may lie before `next`."""
        if seq < self.next:
            payload = payload[self.next - seq :]
            seq = self.next
        size = len(payload)
        if not size:
            return 0
        if seq > self.next:
            self._insert_early(seq, payload)
            return 0
        before = self.next
        if not self.runs:
            self._append(payload)
            self.next += size
            return size
        self._insert_early(seq, payload)
        run = self.runs[0]
        del self.runs[0], self._run_starts[0]
        for chunk in run.chunks:
            self._append(chunk)
        self.next = run.end
        self.early_bytes -= run.end - before
        if self.latest is run:
            self.latest = None
        return self.next - before

    def _append(self, payload: Buffer) -> None:
        size = len(payload)
        self.ready_bytes += size
        if size >= _GATHER_BELOW_BYTES:
            self._chunks.append(payload)
            return
        last = self._chunks[-1] if self._chunks else None
        if isinstance(last, bytearray) and len(last) + size <= _GATHERED_MAX_BYTES:
            last += payload
        else:
            self._chunks.append(bytearray(payload))

    def _insert_early(self, start: int, payload: Buffer) -> None:
        end = start + len(payload)
        i = bisect_right(self._run_starts, start) - 1
        if i >= 0 and self.runs[i].end >= start:
            run = self.runs[i]
            self.latest = run
            if run.end >= end:
                return
            payload = payload[run.end - start :]
            start = run.end
        else:
            i += 1
            run = _Run(start)
            self.runs.insert(i, run)
            self._run_starts.insert(i, start)
            self.latest = run
        self._extend(i, start, end, payload)

    def _extend(self, i: int, start: int, end: int, payload: Buffer) -> None:
        """Append [start, end) to run `i`, swallowing the runs it reaches."""
        run = self.runs[i]
        while True:
            following = self.runs[i + 1] if i + 1 < len(self.runs) else None
            if following is None or following.start > end:
                run.chunks.append(payload)
                self.early_bytes += end - start
                run.end = end
                return
            gap = following.start - start
            if gap:
                run.chunks.append(payload[:gap])
                self.early_bytes += gap
            run.chunks.extend(following.chunks)
            run.end = following.end
            del self.runs[i + 1], self._run_starts[i + 1]
            if following.end >= end:
                return
            payload = payload[following.end - start :]
            start = following.end

    def covers(self, seq: int, end: int) -> bool:
        """Whether all of [seq, end) has been received."""
        if end <= self.next:
            return True
        i = bisect_right(self._run_starts, max(seq, self.next)) - 1
        return i >= 0 and seq >= self.next and self.runs[i].end >= end

    def sack_blocks(self, limit: int) -> list[tuple[int, int]]:
        """Runs for the SACK option, the most recently changed one first (RFC 2018 section 4)."""
        latest = self.latest
        blocks = [] if latest is None else [(latest.start, latest.end)]
        for run in self.runs:
            if len(blocks) >= limit:
                break
            if run is not latest:
                blocks.append((run.start, run.end))
        return blocks[:limit]

    def read_chunk(self) -> Buffer | None:
        """The oldest readable chunk, whole; it belongs to the caller now."""
        if not self._chunks:
            return None
        chunk = self._chunks.popleft()
        self.ready_bytes -= len(chunk)
        return chunk

    def read(self, limit: int) -> bytes:
        """Up to `limit` readable bytes, gathered from several chunks."""
        parts: list[Buffer] = []
        left = limit
        while left > 0 and self._chunks:
            chunk = self._chunks[0]
            size = len(chunk)
            if size <= left:
                parts.append(self._chunks.popleft())
                left -= size
            else:
                view = memoryview(chunk)
                parts.append(view[:left])
                self._chunks[0] = view[left:]
                left = 0
        self.ready_bytes -= limit - left
        return b"".join(parts)

    def clear(self) -> None:
        self._chunks.clear()
        self.runs.clear()
        self._run_starts.clear()
        self.latest = None
        self.ready_bytes = 0
        self.early_bytes = 0
