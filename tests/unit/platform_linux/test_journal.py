"""The undo journal: survives a crash, counts only where it was written, never raises."""

from __future__ import annotations

import json
from pathlib import Path

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
