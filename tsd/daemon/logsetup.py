"""Where log lines go: stderr always, LocalAPI tails when somebody listens, an upload only when TS_LOG_TARGET asks.

stdlib logging throughout (tsd.base.log). Into the journal, lines go with their priority and without a time.
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
_PLAIN = "%(name)s: %(message)s"
_STAMPED = "%(asctime)s " + _PLAIN
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
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


def is_journal() -> bool:
    """Whether stderr is the journal: JOURNAL_STREAM names its device and inode, and is inherited by others, too."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class JournalFormatter(logging.Formatter):
    """sd-daemon(3): every line begins with its priority; the journal stamps it and takes the prefix away."""

    def __init__(self) -> None:
        super().__init__(_PLAIN)

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines() or [""])


def _priority(level: int) -> int:
    """syslog(3)'s number."""
    return next((number for least, number in _PRIORITIES if level >= least), 7)


def setup(verbose: int) -> LogTap:
    """Configure the root logger anew; returns the tap for the LocalAPI."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JournalFormatter() if is_journal() else logging.Formatter(_STAMPED, "%Y/%m/%d %H:%M:%S"))
    tap = LogTap()
    tap.setFormatter(logging.Formatter(_PLAIN))
    root.addHandler(stream)
    root.addHandler(tap)
    root.setLevel(logging.WARNING)
    for name in ("tsd", "tsplatform", "tsnative"):
        logging.getLogger(name).setLevel(_LEVELS.get(verbose, TRACE))
    logging.raiseExceptions = False
    return tap


def tell_where_when_aborted() -> None:
    """systemd's watchdog ends a daemon that hangs with SIGABRT: say what every thread was doing."""
    import faulthandler

    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        faulthandler.enable(sys.stderr)


def announce(line: str) -> None:
    """A line on stderr exactly as it is, for tools that wait for it."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def announce_socks5(address: str) -> None:
    """What tools wait for after `--socks5-server=…:0`."""
    announce(f"SOCKS5 listening on {address}")


def announce_http_proxy(address: str) -> None:
    announce(f"HTTP proxy listening on {address}")
