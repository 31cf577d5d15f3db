"""The lock that keeps two daemons off one state."""

import os
import signal
from pathlib import Path

import pytest

from tsd.base.errors import StateError
from tsplatform.lock import FileLock


def test_the_second_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with FileLock(tmp_path / "s", "state file") as first:
        assert first.is_held
        with pytest.raises(StateError, match=rf"state file .*pid {os.getpid()}\)"):
            FileLock(tmp_path / "s", "state file")
        FileLock(tmp_path / "other", "state file").close()
    FileLock(tmp_path / "s", "state file").close()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock = FileLock(tmp_path / "s", "state file")
        os.write(write_fd, b"x")
        signal.pause()
        os._exit(int(lock.is_held))
    os.read(read_fd, 1)
    with pytest.raises(StateError, match=f"pid {pid}"):
        FileLock(tmp_path / "s", "state file")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    FileLock(tmp_path / "s", "state file").close()
