"""`--cleanup`: undo what a daemon that was killed may have left on this machine, and exit 0.

Idempotent, quick, and without a running daemon's consent: while one runs nothing is touched. In userspace mode there
is only a stale socket to remove; a daemon with a network device leaves rules, routes and a firewall table. After a
crash under systemd (ExecStopPost, with $SERVICE_RESULT) what closes the host for its exit node stays: tsd starts again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from pathlib import Path

from tsd.base.errors import StateError
from tsd.daemon.flags import Settings
from tsplatform.linux.journal import has_leftovers
from tsplatform.lock import FileLock

log = logging.getLogger(__name__)


def cleanup(settings: Settings) -> int:
    """The exit code; always 0, because ExecStopPost must not turn a clean stop into a failure."""
    stays_closed = os.environ.get("SERVICE_RESULT", "success") != "success"
    if not Path(settings.socket).parent.is_dir():
        undo_leftovers(settings.undo_folder, stays_closed=stays_closed)
        return 0
    try:
        with FileLock(settings.socket, "socket"):
            _remove_stale_socket(settings.socket)
            undo_leftovers(settings.undo_folder, stays_closed=stays_closed)
    except StateError as err:
        log.info("nothing cleaned up: %s", err)
    return 0


def undo_leftovers(folder: Path, *, stays_closed: bool = False) -> None:
    """As `tsplatform.linux.hull.undo_leftovers`, which takes long to import and is seldom needed."""
    if sys.platform.startswith("linux") and has_leftovers(folder):
        from tsplatform.linux import hull

        hull.undo_leftovers(folder, stays_closed=stays_closed)


def _remove_stale_socket(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
            log.info("removed the socket of a daemon that is gone: %s", path)
