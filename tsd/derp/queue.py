"""A send queue bounded by bytes that drops its oldest entries, for both ends of a relay connection.

Bounded in bytes and not in packets or by the machine's memory: a container sees only its own share (W26).
"""

from __future__ import annotations

from collections import deque


class FrameQueue:
    """Whole frames, oldest first; `dropped` counts what had to go."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.dropped = 0
        self._frames: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def push(self, frame: bytes) -> None:
        """Append, making room at the head; a frame larger than the queue replaces everything."""
        self._frames.append(frame)
        self.size_bytes += len(frame)
        while self.size_bytes > self.limit_bytes and len(self._frames) > 1:
            self.size_bytes -= len(self._frames.popleft())
            self.dropped += 1

    def take(self, budget_bytes: int) -> list[bytes]:
        """Frames worth at most `budget_bytes`, but at least one when there is any."""
        frames = self._frames
        if self.size_bytes <= budget_bytes:
            taken = list(frames)
            frames.clear()
            self.size_bytes = 0
            return taken
        taken = []
        left = budget_bytes
        while frames and (not taken or len(frames[0]) <= left):
            taken.append(frames.popleft())
            left -= len(taken[-1])
        self.size_bytes -= budget_bytes - left
        return taken

    def clear(self) -> None:
        self._frames.clear()
        self.size_bytes = 0
