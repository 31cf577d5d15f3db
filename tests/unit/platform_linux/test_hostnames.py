"""Claims of names on this host: one holder, told by its process; nobody else's files or sockets count."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tsplatform.linux import hostnames
from tsplatform.linux.hostnames import TakenError, claim_name, claim_slot, try_slot
from tsplatform.lock import FileLock


@pytest.fixture
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "claims"
    monkeypatch.setattr(hostnames, "CLAIMS", folder)
    return folder


def test_one_holder_who_is_told(claims: Path) -> None:
    first = claim_name("thing")
    assert isinstance(first, FileLock) and claims.stat().st_mode & 0o777 == 0o700
    with pytest.raises(TakenError, match=f"process {os.getpid()}"):
        claim_name("thing")
    claim_name("other").close()
    first.close()
    claim_name("thing").close()


def test_the_next_free_slot(claims: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    first, second = claim_slot("tsd1"), claim_slot("tsd1")
    assert (first.names.slot, second.names.slot) == (1, 2)
    assert "slot 1 of this network namespace is left alone: another tsd on this host has it" in caplog.text
    assert f"process {os.getpid()}" in caplog.text
    assert try_slot(2) is None
    for claim in (first, second):
        claim.close()


def test_a_killed_holder_leaves_no_claim(claims: Path) -> None:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = claim_name("thing")
        os.write(write_fd, b"x")
        signal.pause()
        held.close()
        os._exit(0)
    os.read(read_fd, 1)
    with pytest.raises(TakenError, match=f"process {pid}"):
        claim_name("thing")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    claim_name("thing").close()


def test_a_strangers_socket_blocks_nothing(claims: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.bind(f"\0tsd.mine-{os.getpid()}")
        claim_name(f"mine-{os.getpid()}").close()


@pytest.mark.parametrize("kind", ["missing", "file", "open to all", "link"])
def test_without_a_folder_of_ours_a_socket_does_it(claims: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    what = f"test-{os.getpid()}"
    if kind == "file":
        claims.touch()
    elif kind == "open to all":
        claims.mkdir()
        claims.chmod(0o777)
    elif kind == "link":
        claims.symlink_to("/")
    folder = claims / "nowhere" / "claims" if kind == "missing" else claims
    held = claim_name(what, folder)
    assert isinstance(held, socket.socket) and "cannot be used" in caplog.text
    with pytest.raises(TakenError, match=f"@tsd.{what}"):
        claim_name(what, folder)
    held.close()
