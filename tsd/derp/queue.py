"""A send queue bounded by bytes that drops its oldest entries, for both ends of a relay connection.

Bounded in bytes and not in packets or by the machine's memory: a container sees only its own share (W26).
"""

from __future__ import annotations

from collections import deque


class FrameQueue:
    """Stretches of whole frames, oldest first; `dropped` counts the packets that had to go."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.packets = 0
        self.dropped = 0
        self._stretches: deque[tuple[bytes, int]] = deque()

    def __len__(self) -> int:
        return len(self._stretches)

    def push(self, frames: bytes, packets: int = 1) -> None:
        """Append, making room at the head; what is larger than the queue replaces everything."""
        self._stretches.append((frames, packets))
        self.size_bytes += len(frames)
        self.packets += packets
        while self.size_bytes > self.limit_bytes and len(self._stretches) > 1:
            gone, count = self._stretches.popleft()
            self.size_bytes -= len(gone)
            self.packets -= count
            self.dropped += count

    def take(self, budget_bytes: int, max_packets: int = 1 << 30) -> list[bytes]:
        """Stretches within both limits, but at least one when there is any."""
        taken: list[bytes] = []
        stretches, left = self._stretches, budget_bytes
        while stretches:
            frames, packets = stretches[0]
            if taken and (len(frames) > left or packets > max_packets):
                break
            stretches.popleft()
            taken.append(frames)
            left -= len(frames)
            self.packets -= packets
            max_packets -= packets
        self.size_bytes -= budget_bytes - left
        return taken

    def clear(self) -> None:
        self._stretches.clear()
        self.size_bytes = self.packets = 0
