"""Programs of the system are found whatever PATH we were started with, and none in a folder relative to ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tsplatform.linux import programs
from tsplatform.linux.dns import tools
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


def test_resolvconf_is_run_with_an_open_mask_and_in_the_unit_as_a_service_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit's mask is 0077, and other users read what resolvconf and its hooks make."""
    for name, text in (("resolvconf", 'umask; cat; echo "$@"'), ("systemd-run", 'echo runs "$@"; cat')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(programs, "SEARCH_PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(tools.OUTSIDE, raising=False)
    before = os.umask(0o077)
    try:
        assert tools.resolvconf_now("-a", "x", given=b"y\n").decode().split() == ["0022", "y", "-a", "x"]
    finally:
        os.umask(before)
    monkeypatch.setenv(tools.OUTSIDE, "1")
    said = tools.resolvconf_now("-a", "x", given=b"y\n").decode()
    assert said.startswith("runs --quiet --pipe --wait ") and said.endswith(f" -- {tmp_path}/resolvconf -a x\ny\n")
    (tmp_path / "systemd-run").unlink()
    monkeypatch.setattr(programs, "SEARCH_PATH", f"{tmp_path}:/bin/nothing")
    monkeypatch.setenv("PATH", "")
    (tmp_path / "resolvconf").write_text("#!/bin/sh\necho direct\n")
    assert tools.resolvconf_now("-a", "x") == b"direct\n", "where there is no systemd-run"
