"""Opening state and socket at the start: locks first; what cannot be opened is reported, not replaced.

When the file is damaged or belongs to somebody else, the daemon still comes up, in state NoState, so that the CLI can
say why; nothing is written then. A second daemon on the same state or socket is refused outright.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from tsd.base.errors import StateError
from tsd.daemon.earlysocket import EarlySocket
from tsd.daemon.flags import Settings
from tsplatform.lock import FileLock
from tsplatform.state_file import FileStore, MemoryStore, open_store, prepare_folder

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenedState:
    """`error` is the text for health `state-store-health`; the store is a stand-in in memory then.

    `listener` is the LocalAPI's socket, listening already: `LocalApiServer.adopt(listener.sock)`.
    """

    store: FileStore | MemoryStore
    error: str = ""
    notice: str = ""
    locks: list[FileLock] = field(default_factory=list)
    listener: EarlySocket | None = None

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        for lock in self.locks:
            lock.close()


def open_state(settings: Settings) -> OpenedState:
    """Raises `StateError` when another daemon holds the state or the socket, `ConfigError` for an unknown kind."""
    opened = OpenedState(MemoryStore())
    try:
        if settings.socket:
            opened.locks.append(_lock_socket(Path(settings.socket)))
        _open_store(settings, opened)
        if settings.socket:
            opened.listener = EarlySocket(settings.socket)
    except BaseException:
        opened.close()
        raise
    if opened.error:
        log.error("%s", opened.error)
    return opened


def _lock_socket(path: Path) -> FileLock:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, "socket")


def _open_store(settings: Settings, opened: OpenedState) -> None:
    is_file = not settings.is_ephemeral and ":" not in settings.state.partition("/")[0]
    try:
        if is_file:
            path = Path(settings.state)
            prepare_folder(path.absolute().parent)
            opened.locks.append(_lock_state(path))
        opened.store = open_store(settings.state)
        opened.notice = opened.store.notice
    except StateInUse:
        raise
    except StateError as err:
        opened.error = str(err)
        opened.store = MemoryStore(f"{settings.state} (not readable)")


class StateInUse(StateError):
    """Another daemon holds it."""


def _lock_state(path: Path) -> FileLock:
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        raise StateError(f"{path} is a symbolic link that leads in a circle; remove it") from None
    try:
        return FileLock(target, "state file")
    except StateError as err:
        raise StateInUse(str(err)) from None
