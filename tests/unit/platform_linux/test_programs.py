"""Programs of the system are found whatever PATH we were started with, and none in a folder relative to ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsplatform.linux import programs
from tsplatform.linux.netfilter.run import run_program


def _install(folder: Path, text: str) -> None:
    program = folder / "tsd-test-tool"
    program.write_text(f"#!/bin/sh\necho {text}\n")
    program.chmod(0o755)


def test_a_path_without_sbin_finds_the_firewalls_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, own = tmp_path / "sbin", tmp_path / "own"
    for folder in (system, own):
        folder.mkdir()
        _install(folder, folder.name)
    monkeypatch.setattr(programs, "SEARCH_PATH", f"{system}:/usr/bin:/bin")
    monkeypatch.setenv("PATH", str(own))
    assert programs.find_program("tsd-test-tool") == str(system / "tsd-test-tool")
    assert run_program(["tsd-test-tool"], "").strip() == "sbin"
    (system / "tsd-test-tool").unlink()
    assert run_program(["tsd-test-tool"], "").strip() == "own"


def test_folders_that_depend_on_where_we_are_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", ":.:bin")
    assert programs.find_program("tsd-test-tool") is None
    assert programs.search_path() == programs.SEARCH_PATH
