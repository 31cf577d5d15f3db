"""Values that may be lost: whole or absent, private, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsplatform import cache_files
from tsplatform.cache_files import CacheFiles


def test_values_are_files_of_their_own_beside_the_state(tmp_path: Path) -> None:
    files = CacheFiles(tmp_path / "tsd.state", "netmap")
    assert files.get("ab12") is None
    files.put("ab12", b"one")
    files.put("ab12", b"two")
    assert files.get("ab12") == b"two"
    [path] = tmp_path.iterdir()
    assert path.name == "tsd.state.netmap-ab12" and path.stat().st_mode & 0o777 == 0o600
    assert CacheFiles(tmp_path / "other.state", "netmap").get("ab12") is None
    files.put("ab12", None)
    files.put("ab12", None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a" * 65, "ä"])
def test_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    files = CacheFiles(tmp_path / "s", "netmap")
    files.put(name, b"x")
    assert files.get(name) is None and not list(tmp_path.iterdir())


def test_what_cannot_be_written_or_read_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CacheFiles(tmp_path / "absent" / "s", "netmap")
    files.put("a", b"x")
    assert "cannot be written" in caplog.text
    (tmp_path / "s.netmap-a").mkdir()
    assert CacheFiles(tmp_path / "s", "netmap").get("a") is None
    assert "cannot be read" in caplog.text
    (tmp_path / "s.netmap-b").write_bytes(b"x" * 11)
    monkeypatch.setattr(cache_files, "MAX_BYTES", 10)
    assert CacheFiles(tmp_path / "s", "netmap").get("b") is None


def test_what_belongs_to_nobody_goes(tmp_path: Path) -> None:
    files = CacheFiles(tmp_path / "s", "netmap")
    for name in ("a", "b"):
        files.put(name, b"x")
    (tmp_path / "s.bak").write_bytes(b"")
    files.keep_only(["b"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.bak", "s.netmap-b"]
