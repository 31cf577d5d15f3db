"""Sliding window against replayed datagrams (RFC 6479): a ring of 128 words, 8128 counters wide.

Ask only after the datagram proved authentic, otherwise a forger could close the window on the peer.
"""

from __future__ import annotations

REJECT_AFTER_MESSAGES = (1 << 64) - (1 << 13) - 1
_WORDS = 128
WINDOW = (_WORDS - 1) * 64


class ReplayWindow:
    __slots__ = ("_last", "_ring")

    def __init__(self) -> None:
        self._last = 0
        self._ring = [0] * _WORDS

    def accept(self, counter: int) -> bool:
        """Whether `counter` is new and not too old; it is then marked as seen."""
        last = self._last
        word = counter >> 6
        if counter > last:
            if counter >= REJECT_AFTER_MESSAGES:
                return False
            if word != last >> 6:
                self._clear(last >> 6, word)
            self._last = counter
        elif last - counter > WINDOW:
            return False
        bit = 1 << (counter & 63)
        seen = self._ring[word & 127]
        if seen & bit:
            return False
        self._ring[word & 127] = seen | bit
        return True

    def _clear(self, old_word: int, new_word: int) -> None:
        for word in range(old_word + 1, old_word + 1 + min(new_word - old_word, _WORDS)):
            self._ring[word & 127] = 0
