"""Lines for the journal: priorities on every line, only when stderr is the journal."""

import logging
import os
import sys

import pytest

from tsd.daemon.logsetup import JournalFormatter, is_journal


@pytest.mark.parametrize(
    ("level", "prefix"),
    [(logging.CRITICAL, "<2>"), (logging.ERROR, "<3>"), (logging.WARNING, "<4>"), (logging.INFO, "<6>"),
     (logging.DEBUG, "<7>"), (5, "<7>")],
)  # fmt: skip
def test_every_line_has_its_priority(level: int, prefix: str) -> None:
    record = logging.LogRecord("tsd.x", level, "f", 1, "one\ntwo", (), None)
    assert JournalFormatter().format(record) == f"{prefix}tsd.x: one\n{prefix}two"


def test_a_traceback_keeps_the_priority() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("tsd.x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    lines = JournalFormatter().format(record).splitlines()
    assert len(lines) > 2 and all(line.startswith("<3>") for line in lines)


def test_an_inherited_journal_stream_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        assert is_journal()
        monkeypatch.setenv("JOURNAL_STREAM", "1:2")
        assert not is_journal()
        monkeypatch.delenv("JOURNAL_STREAM")
        assert not is_journal()
