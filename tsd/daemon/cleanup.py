"""`--cleanup`: undo what a daemon that was killed may have left on this machine, and exit 0.

Idempotent, quick, and without a running daemon's consent: while one runs nothing is touched. In userspace mode there
is only a stale socket to remove.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat

from tsd.base.errors import StateError
from tsd.daemon.flags import Settings
from tsplatform.lock import FileLock

log = logging.getLogger(__name__)


def cleanup(settings: Settings) -> int:
    """The exit code; always 0, because ExecStopPost must not turn a clean stop into a failure."""
    try:
        with FileLock(settings.socket, "socket"):
            _remove_stale_socket(settings.socket)
    except StateError as err:
        log.info("nothing cleaned up: %s", err)
    return 0


def _remove_stale_socket(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
            log.info("removed the socket of a daemon that is gone: %s", path)
