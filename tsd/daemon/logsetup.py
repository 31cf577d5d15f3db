"""Where log lines go: stderr always, LocalAPI tails when somebody listens, an upload only when TS_LOG_TARGET asks.

stdlib logging throughout (tsd.base.log). Under systemd the journal stamps the lines, so we do not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tsd.base.log import TRACE

if TYPE_CHECKING:
    import asyncio

_RING_LINES = 500
_TAP_QUEUE = 1000
_LEVELS = {0: logging.INFO, 1: logging.DEBUG}


class LogTap(logging.Handler):
    """Keeps the newest lines, and hands every line to whoever follows (`debug daemon-logs`)."""

    def __init__(self) -> None:
        super().__init__()
        self._ring: deque[dict[str, Any]] = deque(maxlen=_RING_LINES)
        self._followers: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        entry = entry_of(record, self.format(record))
        self._ring.append(entry)
        for loop, queue in list(self._followers):
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_offer, queue, entry)

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Every line from now on; a follower that is too slow loses lines."""
        import asyncio

        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_TAP_QUEUE)
        follower = (asyncio.get_running_loop(), queue)
        self._followers.append(follower)
        try:
            while True:
                yield await queue.get()
        finally:
            self._followers.remove(follower)


def _offer(queue: asyncio.Queue[dict[str, Any]], entry: dict[str, Any]) -> None:
    if not queue.full():
        queue.put_nowait(entry)


def entry_of(record: logging.LogRecord, text: str) -> dict[str, Any]:
    """The JSON form of a line; `extra={"upload": {...}}` adds fields, for tools that look for them."""
    stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"logtail": {"client_time": stamp}, "text": text + "\n", **getattr(record, "upload", {})}


def setup(verbose: int) -> LogTap:
    """Configure the root logger anew; returns the tap for the LocalAPI."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    stream = logging.StreamHandler(sys.stderr)
    is_journal = "JOURNAL_STREAM" in os.environ or "INVOCATION_ID" in os.environ
    stamp = "" if is_journal else "%(asctime)s "
    stream.setFormatter(logging.Formatter(stamp + "%(name)s: %(message)s", "%Y/%m/%d %H:%M:%S"))
    tap = LogTap()
    tap.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    root.addHandler(stream)
    root.addHandler(tap)
    root.setLevel(logging.WARNING)
    for name in ("tsd", "tsplatform", "tsnative"):
        logging.getLogger(name).setLevel(_LEVELS.get(verbose, TRACE))
    logging.raiseExceptions = False
    return tap


def announce(line: str) -> None:
    """A line on stderr exactly as it is, for tools that wait for it."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def announce_socks5(address: str) -> None:
    """What tools wait for after `--socks5-server=…:0`."""
    announce(f"SOCKS5 listening on {address}")


def announce_http_proxy(address: str) -> None:
    announce(f"HTTP proxy listening on {address}")
