"""Status answers under a storm of pollers: above a rate, one encoded answer serves everybody for a moment.

At ordinary rates every caller gets a fresh status. Any call that is not a read throws the kept answers away.
"""

from __future__ import annotations

from collections import deque

from tsd.localapi.backend import LocalBackend
from tsd.localapi.call import Response, pretty

BUSY_PER_S = 20
LIFE_S = 0.1


class StatusSnapshots:
    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=BUSY_PER_S)
        self._kept: dict[bool, tuple[float, Response]] = {}

    def answer(self, backend: LocalBackend, with_peers: bool, now: float) -> Response:
        is_busy = len(self._recent) == BUSY_PER_S and now - self._recent[0] < 1.0
        self._recent.append(now)
        kept = self._kept.get(with_peers)
        if is_busy and kept is not None and now - kept[0] < LIFE_S:
            return kept[1]
        response = pretty(backend.status(with_peers))
        self._kept[with_peers] = (now, response)
        return response

    def forget(self) -> None:
        self._kept.clear()
