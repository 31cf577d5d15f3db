"""Replacing a file so that a crash at any moment leaves the old content or the new one, whole and on disk."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def replace(path: Path, raw: bytes, mode: int = 0o600) -> None:
    """Write beside, fsync, rename over `path`, fsync the folder. Raises OSError; then `path` is as it was.

    A file that is a mount point of its own (as containers mount single files) cannot be renamed over: it is written
    in place, and a crash in that moment needs the backup.
    """
    beside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            _write_all(fd, raw)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(beside, path)
    except OSError as err:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if err.errno != errno.EBUSY:
            raise
        _overwrite(path, raw)
    fsync_folder(path.parent)


def _overwrite(path: Path, raw: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        _write_all(fd, raw)
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Make renames in it durable; file systems that cannot are tolerated."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[os.write(fd, view) :]
