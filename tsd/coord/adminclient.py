"""The command line's side of the administrator's socket: blocking, standard library only, so that it starts fast."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

from tsd.base.errors import ConfigError, TsdError

SOCKET_NAME = "coord.sock"
_LONGEST_PATH = 100

Arguments = dict[str, Any]


class NotRunning(TsdError):
    """Nobody listens on the socket of that state folder."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("coord", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        folder_fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(self._path.stat().st_mode):
                raise ConnectionRefusedError
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(short_path(self._path, folder_fd))
        finally:
            os.close(folder_fd)


def call(state: Path, command: str, arguments: Arguments | None = None, timeout_s: float = 15.0) -> Any:
    """Run one command. Raises `ConfigError` with the server's text, `NotRunning`."""
    connection = _UnixConnection(state / SOCKET_NAME, timeout_s)
    try:
        connection.request("POST", f"/v1/{command}", json.dumps(arguments or {}))
        answer = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as err:
        reason = err.strerror or str(err) if isinstance(err, OSError) else str(err)
        raise NotRunning(
            f"cannot reach tsd coord through {state / SOCKET_NAME} ({reason}); is it running, and is --state right?"
        ) from None
    finally:
        connection.close()
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["result"]


def short_path(path: Path, folder_fd: int) -> str:
    """Socket paths end at 107 bytes; a longer one goes through the open folder."""
    return str(path) if len(os.fsencode(path)) <= _LONGEST_PATH else f"/proc/self/fd/{folder_fd}/{path.name}"
