"""Hears at once when somebody changes certain files (inotify(7), by ctypes: Python has no binding for it).

Folders are watched for files that are replaced, files for those that are rewritten in place: a bind-mounted file has
its own inode, of which its folder hears nothing. Where the kernel has no watches left, nothing is heard.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)

_IN_MODIFY, _IN_ATTRIB, _IN_CLOSE_WRITE, _IN_MOVED, _IN_CREATE, _IN_DELETE = 2, 4, 8, 0xC0, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF = 0x400, 0x800
_EVENTS = _IN_MODIFY | _IN_ATTRIB | _IN_CLOSE_WRITE | _IN_MOVED | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF
_EVENTS |= _IN_MOVE_SELF
_HEADER = struct.Struct("=iIII")
_BUFFER_BYTES = 16 << 10


class FileWatch:
    """`on_change` is called on the running loop, at most once per `pause_s`, for paths given to `set`."""

    def __init__(self, on_change: Callable[[], None], pause_s: float = 0.2) -> None:
        self._on_change = on_change
        self._pause_s = pause_s
        self._fd = -1
        self._watched: dict[int, Path] = {}
        self._names: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def set(self, paths: Iterable[Path]) -> None:
        """Watch these, whatever was watched before; also to find files anew that were replaced."""
        self.close()
        wanted = [path for path in paths if path.exists()]
        if not wanted:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            log.info("changes of resolver files are looked for, not heard: %s", os.strerror(ctypes.get_errno()))
            return
        self._names = {path.name for path in wanted if not path.is_dir()}
        for path in wanted:
            number = libc.inotify_add_watch(self._fd, os.fsencode(path), _EVENTS)
            if number >= 0:
                self._watched[number] = path
        asyncio.get_running_loop().add_reader(self._fd, self._on_readable)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._watched.clear()

    def _on_readable(self) -> None:
        try:
            raw = os.read(self._fd, _BUFFER_BYTES)
        except OSError:
            return
        if self._timer is None and self._concerns_us(raw):
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._tell)

    def _concerns_us(self, raw: bytes) -> bool:
        """Folders have other files too."""
        position = 0
        while position + _HEADER.size <= len(raw):
            number, _, _, length = _HEADER.unpack_from(raw, position)
            name = os.fsdecode(raw[position + _HEADER.size : position + _HEADER.size + length].rstrip(b"\0"))
            position += _HEADER.size + length
            if not name or name in self._names or self._is_folder_of_ours(number):
                return True
        return False

    def _is_folder_of_ours(self, number: int) -> bool:
        """A folder without a watched file in it: everything there counts."""
        folder = self._watched.get(number)
        return folder is not None and not any(path.parent == folder for path in self._watched.values())

    def _tell(self) -> None:
        self._timer = None
        self._on_change()
