"""The undo journal: what we are about to change on the host, written before it is changed.

A crash leaves it behind; the next start and `--cleanup` read it and put things back. Kernel objects die with the boot
and belong to one network namespace, so such entries count only there; those of other namespaces stay in the file for
the daemons there. One small JSON file, replaced as a whole. Several daemons may share the folder (two state files in
one): each change reads what the others noted meanwhile, under a lock on the folder that a killed process does not keep.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE_NAME = "undo.json"
LOCK_PATIENCE_S, _LOCK_PACE_S = 5.0, 0.005
"""A daemon that was stopped in the middle of a change must not stop the others."""


def has_leftovers(folder: Path) -> bool:
    """Whether anything is noted there, by this journal or for names: all such files have "undo" in their name."""
    return any(folder.glob("*undo*"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One change. `kind` "slot": rules, routes and firewall of `slot`; others: see where they are made."""

    kind: str
    slot: int = 0
    device: str = ""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where kernel objects live."""

    boot: str
    network: str

    @classmethod
    def current(cls) -> Scope:
        boot = network = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with contextlib.suppress(OSError):
            network = os.readlink("/proc/self/ns/net")
        return cls(boot, network)


class UndoJournal:
    """Never raises: a folder that cannot be written costs only the undoing after a crash."""

    def __init__(self, folder: Path, scope: Scope | None = None) -> None:
        self.path = folder / FILE_NAME
        self._fresh = self.path.with_suffix(".new")
        self._scope = scope or Scope.current()
        self._entries = self._read().get(self._scope, [])

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What may have to be undone here."""
        return tuple(self._entries)

    def note(self, entry: Entry) -> None:
        """Before the change. Costs nothing when it is there already."""
        if entry not in self._entries:
            self._entries.append(entry)
            self._change(entry, is_noted=True)

    def forget(self, entry: Entry) -> None:
        """After it was undone."""
        if entry in self._entries:
            self._entries.remove(entry)
            self._change(entry, is_noted=False)

    def tidy(self) -> None:
        """What a crash while noting has left goes, where nothing is noted here."""
        if not self._entries:
            with contextlib.suppress(OSError), self._locked():
                self._fresh.unlink(missing_ok=True)

    def _read(self) -> dict[Scope, list[Entry]]:
        """What is noted since the boot, by network namespace."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
            # A single record is what earlier versions wrote.
            records = [_decode(record) for record in (found if isinstance(found, list) else [found])]
            return {scope: entries for scope, entries in records if scope.boot == self._scope.boot}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as err:
            log.warning("%s cannot be read, nothing is undone by it: %s", self.path, err)
            return {}

    def _change(self, entry: Entry, *, is_noted: bool) -> None:
        try:
            with self._locked():
                noted = self._read()
                others = [one for one in noted.get(self._scope, []) if one != entry]
                noted[self._scope] = [*others, entry] if is_noted else others
                self._write(noted)
        except OSError as err:
            log.warning("%s cannot be written: after a crash things may be left on this host: %s", self.path, err)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises OSError. Where the folder takes no lock it goes without."""
        fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            patience_ends = time.monotonic() + LOCK_PATIENCE_S
            while not _try_lock(fd) and time.monotonic() < patience_ends:
                time.sleep(_LOCK_PACE_S)
            yield
        finally:
            os.close(fd)

    def _write(self, noted: dict[Scope, list[Entry]]) -> None:
        """Raises OSError."""
        records = [
            {"scope": asdict(scope), "entries": [asdict(e) for e in entries]}
            for scope, entries in noted.items()
            if entries
        ]
        if not records:
            self.path.unlink(missing_ok=True)
            return
        self._fresh.write_text(json.dumps(records, indent=1), "utf-8")
        os.replace(self._fresh, self.path)


def _try_lock(fd: int) -> bool:
    """False while another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _decode(record: Any) -> tuple[Scope, list[Entry]]:
    """Raises KeyError, TypeError or ValueError."""
    scope = Scope(str(record["scope"]["boot"]), str(record["scope"]["network"]))
    return scope, [Entry(str(e["kind"]), int(e["slot"]), str(e["device"])) for e in record["entries"]]
