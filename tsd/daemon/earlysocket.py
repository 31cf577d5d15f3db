"""The LocalAPI's socket, listening before the engine is even imported.

Tools wait two seconds for it and then give up; what they send meanwhile waits in the kernel's queue. The lock of
tsd.daemon.statefiles is held already, so a socket file that is there has no owner. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from pathlib import Path

from tsd.base.errors import ConfigError, StateError

BACKLOG = 128
MAX_PATH_BYTES = 103


class EarlySocket:
    """Bound and listening from construction; `close` also removes the file, if it is still ours.

    Raises `ConfigError` (the path cannot be used) or `StateError` (a daemon without our lock answers there).
    """

    def __init__(self, path: str) -> None:
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError(f"--socket={path}: too long for a Unix socket (at most {MAX_PATH_BYTES} bytes)")
        self.path = Path(path)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._remove_stale()
            self.sock.bind(path)
            os.chmod(path, 0o666 if _has_peer_credentials() else 0o600)
            self.sock.listen(BACKLOG)
            self.sock.setblocking(False)
            self._inode = self.path.stat().st_ino
        except OSError as err:
            self.sock.close()
            raise ConfigError(f"cannot listen on --socket={path}: {err.strerror or err}") from None
        except BaseException:
            self.sock.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"cannot listen on --socket={self.path}: something that is not a socket is in the way")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
                probe.connect(str(self.path))
                raise StateError(f"another daemon answers on {self.path}; stop it first, or pass another --socket")
        self.path.unlink(missing_ok=True)


def _has_peer_credentials() -> bool:
    """Where the kernel tells who is calling, the socket is open to all and each call is judged."""
    return hasattr(socket, "SO_PEERCRED") or sys.platform.startswith(("darwin", "freebsd"))
