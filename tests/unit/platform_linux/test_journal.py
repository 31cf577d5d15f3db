"""The undo journal: survives a crash, counts only where it was written, never raises."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tsplatform.linux.journal as journal_module
from tsplatform.linux.journal import Entry, Scope, UndoJournal, has_leftovers

HERE = Scope("boot", "net")
SLOT = Entry("slot", 1, "tsd1")


def test_what_was_noted_is_read_by_the_next_daemon(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path, HERE)
    journal.note(SLOT)
    journal.note(SLOT)
    later = UndoJournal(tmp_path, HERE)
    assert later.entries == (SLOT,)
    later.forget(SLOT)
    assert not later.path.exists() and UndoJournal(tmp_path, HERE).entries == ()


def test_kernel_objects_of_another_boot_or_namespace_are_gone(tmp_path: Path) -> None:
    UndoJournal(tmp_path, HERE).note(SLOT)
    assert UndoJournal(tmp_path, Scope("later", "net")).entries == ()
    assert UndoJournal(tmp_path, Scope("boot", "other")).entries == ()


def test_what_another_namespace_noted_stays_for_it_until_the_next_boot(tmp_path: Path) -> None:
    other, theirs = Scope("boot", "other"), Entry("slot", 2, "tsd2")
    here, there = UndoJournal(tmp_path, HERE), UndoJournal(tmp_path, other)
    here.note(SLOT)
    there.note(theirs)
    here.note(Entry("source", 1))
    assert UndoJournal(tmp_path, HERE).entries == (SLOT, Entry("source", 1))
    assert UndoJournal(tmp_path, other).entries == (theirs,)
    for entry in here.entries:
        here.forget(entry)
    assert UndoJournal(tmp_path, HERE).entries == () and UndoJournal(tmp_path, other).entries == (theirs,)
    UndoJournal(tmp_path, Scope("later", "net")).note(SLOT)
    assert UndoJournal(tmp_path, other).entries == ()
    assert "other" not in here.path.read_text()


def test_daemons_that_share_a_folder_keep_what_the_other_noted(tmp_path: Path) -> None:
    """Two state files in one folder: both daemons know the journal as it was when they started."""
    one, two = UndoJournal(tmp_path, HERE), UndoJournal(tmp_path, HERE)
    theirs = Entry("slot", 2, "tsd2")
    one.note(SLOT)
    two.note(theirs)
    one.note(Entry("source", 1))
    assert set(UndoJournal(tmp_path, HERE).entries) == {SLOT, theirs, Entry("source", 1)}
    one.forget(SLOT)
    one.forget(Entry("source", 1))
    assert UndoJournal(tmp_path, HERE).entries == (theirs,)
    one.tidy()
    two.forget(theirs)
    assert not has_leftovers(tmp_path)


_NOTE_MANY = """
import sys
from pathlib import Path
import tsplatform.linux.journal
from tsplatform.linux.journal import Entry, Scope, UndoJournal
tsplatform.linux.journal.LOCK_PATIENCE_S = 100
slot = int(sys.argv[2])
journal = UndoJournal(Path(sys.argv[1]), Scope("boot", f"net{slot % 2}"))
for number in range(50):
    journal.note(Entry("source", slot, f"eth{number}"))
    if number % 2:
        journal.forget(Entry("source", slot, f"eth{number}"))
"""


def test_daemons_that_change_it_at_the_same_moment_lose_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-c", _NOTE_MANY, str(tmp_path)]
    running = [subprocess.Popen([*line, str(slot)], env=environ) for slot in range(4)]
    assert [process.wait(120) for process in running] == [0] * 4
    for network in range(2):
        found = UndoJournal(tmp_path, Scope("boot", f"net{network}")).entries
        wanted = {
            Entry("source", slot, f"eth{number}") for slot in (network, network + 2) for number in range(0, 50, 2)
        }
        assert set(found) == wanted and len(found) == len(wanted)


def test_a_daemon_that_was_stopped_in_the_middle_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "LOCK_PATIENCE_S", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    UndoJournal(tmp_path, HERE).note(SLOT)
    assert UndoJournal(tmp_path, HERE).entries == (SLOT,)
    os.close(held)


def test_the_file_of_an_earlier_version_counts(tmp_path: Path) -> None:
    entry = {"kind": "slot", "slot": 1, "device": "tsd1"}
    record = {"scope": {"boot": "boot", "network": "net"}, "entries": [entry]}
    (tmp_path / "undo.json").write_text(json.dumps(record))
    assert UndoJournal(tmp_path, HERE).entries == (SLOT,)


def test_a_damaged_file_undoes_nothing(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"scope": 1}', '{"scope": {"boot": "boot", "network": "net"}, "entries": [1]}'):
        (tmp_path / "undo.json").write_text(text)
        journal = UndoJournal(tmp_path, HERE)
        assert journal.entries == ()
        journal.note(SLOT)
        assert UndoJournal(tmp_path, HERE).entries == (SLOT,)


def test_a_note_that_a_crash_cut_short_is_no_leftover_for_ever(tmp_path: Path) -> None:
    half = tmp_path / "undo.new"
    half.write_text("{")
    journal = UndoJournal(tmp_path, HERE)
    journal.note(Entry("slot", 3, "tsd3"))
    half.write_text("{")
    journal.tidy()
    assert half.exists() and journal.path.exists()
    journal.forget(Entry("slot", 3, "tsd3"))
    journal.tidy()
    assert not has_leftovers(tmp_path)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "no" / "such", HERE)
    journal.note(SLOT)
    assert journal.entries == (SLOT,)
    journal.forget(SLOT)


def test_the_scope_is_read_from_the_kernel() -> None:
    assert Scope.current() == Scope.current() and Scope.current().network.startswith("net:")
