"""Larger values that may be lost: each a file of its own beside the state file.

Written beside and renamed, so that a reader sees the old value or the new one. Not fsynced: after a power cut a value
may be missing or damaged, and whoever wrote it must be able to tell. What goes wrong here is logged, never raised.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class CacheFiles:
    """The value `name` is `<state file>.<kind>-<name>`, mode 0600."""

    def __init__(self, state: Path, kind: str) -> None:
        self._folder = state.parent
        self._prefix = f"{state.name}.{kind}-"

    def get(self, name: str) -> bytes | None:
        path = self._path(name)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as err:
            log.warning("%s cannot be read: %s", path, err.strerror)
            return None
        return raw if len(raw) <= MAX_BYTES else None

    def put(self, name: str, value: bytes | None) -> None:
        path = self._path(name)
        if path is None:
            return
        try:
            if value is None:
                path.unlink(missing_ok=True)
            else:
                self._write(path, value)
        except OSError as err:
            log.warning("%s cannot be %s: %s", path, "removed" if value is None else "written", err.strerror)

    def _write(self, path: Path, value: bytes) -> None:
        beside = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(value)
            os.rename(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise

    def keep_only(self, names: list[str]) -> None:
        """Remove what belongs to nobody any more."""
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{self._prefix}*"):
                if path.name.removeprefix(self._prefix) not in names:
                    path.unlink()

    def _path(self, name: str) -> Path | None:
        return self._folder / (self._prefix + name) if _NAME.fullmatch(name) else None
