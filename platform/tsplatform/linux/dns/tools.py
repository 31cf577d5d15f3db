"""Running resolvconf, and what a crash of ours leaves in its records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path

from tsd.base.errors import HullError
from tsd.dns.osconfig import OsDns
from tsplatform.linux.dns import file
from tsplatform.linux.dns.manager import Mode
from tsplatform.linux.programs import environment, find_program

TOOL_S = 10.0
UNDO_NAME = "names.undo"
OUTSIDE = "TSD_OUTSIDE"
"""Set by our systemd unit. resolvconf runs hooks of other packages, which may need what the sandbox of the unit
forbids: then it is run as a service of its own."""
_RUN = (
    "--quiet",
    "--pipe",
    "--wait",
    "--collect",
    "--property=DefaultDependencies=no",
    f"--property=RuntimeMaxSec={TOOL_S}",
)
_PUBLIC_MASK = 0o022
"""What resolvconf and its hooks make is for all users to read, whatever our own files are."""


class Record(ABC):
    """What the managers by either program called resolvconf share: a record of ours, noted before it is made."""

    mode: Mode
    can_split = False

    def __init__(self, folder: Path, record: str, path: Path) -> None:
        self._folder = folder
        self._record = record
        self._path = path
        self._wanted: OsDns | None = None

    async def set(self, wanted: OsDns) -> None:
        note(self._folder, self.mode, self._record)
        self._wanted = wanted
        await self._make(wanted)

    async def revert(self) -> None:
        self._wanted = None
        await asyncio.to_thread(self._undo)
        forget(self._folder)

    def rival(self) -> str:
        return ""

    @abstractmethod
    async def _make(self, wanted: OsDns) -> None:
        """The record. Raises `HullError`."""

    @abstractmethod
    def _undo(self) -> None:
        """Take it away again. Raises `HullError`."""

    def _servers(self) -> list[str]:
        """Of the file that is made of the records."""
        return file.servers_in(file.content_of(self._path) or b"")


async def resolvconf(*words: str, given: bytes = b"") -> bytes:
    """Its output. Raises `HullError`."""
    return await asyncio.to_thread(resolvconf_now, *words, given=given)


def resolvconf_now(*words: str, given: bytes = b"") -> bytes:
    program = find_program("resolvconf")
    if program is None:
        raise HullError("set up names by resolvconf", "it is not installed any more")
    line = f"run resolvconf {' '.join(words)}"
    try:
        done = subprocess.run(
            [*_outside(), program, *words],
            input=given,
            capture_output=True,
            timeout=TOOL_S,
            check=False,
            env=environment(),
            umask=_PUBLIC_MASK,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise HullError(line, str(err)) from None
    if done.returncode:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        raise HullError(line, said[-1] if said else f"exit code {done.returncode}")
    return done.stdout


def _outside() -> list[str]:
    """What leads out of the sandbox; a stop of the whole host must not keep it from running."""
    runner = find_program("systemd-run") if os.environ.get(OUTSIDE) == "1" else None
    return [runner, *_RUN, "--"] if runner is not None else []


def note(folder: Path, mode: Mode, record: str) -> None:
    """Before the record is made. Raises `HullError`."""
    path = folder / UNDO_NAME
    try:
        file.write_new(path, json.dumps({"mode": mode.value, "record": record}).encode(), 0o600)
    except OSError as err:
        raise HullError(f"keep {path}", os.strerror(err.errno or 0), errno=err.errno or 0) from None


def forget(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / UNDO_NAME).unlink()


def noted(folder: Path) -> tuple[str, str] | None:
    """(mode, record) of a daemon that did not come to its end."""
    try:
        found = json.loads((folder / UNDO_NAME).read_bytes())
        return str(found["mode"]), str(found["record"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
