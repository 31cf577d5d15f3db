"""SIGKILL at random moments: the state is always whole, and never older than what `put` had confirmed."""

import os
import random
import signal
import time
from pathlib import Path

from tsplatform.state_file import FileStore

ROUNDS = 50


def _write_until_killed(path: Path, start: int, confirmed_fd: int) -> None:
    store = FileStore(path)
    number = start
    while True:
        number += 1
        store.put("number", b"%d" % number)
        store.put("ballast", os.urandom(3000))
        os.pwrite(confirmed_fd, b"%12d" % number, 0)


def wait_for_a_write(confirmed_fd: int, last: int) -> None:
    """On a busy machine a child may be killed before it had its turn; some have to get that far."""
    for _ in range(3000):
        if int(os.pread(confirmed_fd, 12, 0)) > last:
            return
        time.sleep(0.01)
    raise AssertionError("no write within 30 s")


def test_fifty_kills(tmp_path: Path) -> None:
    dice = random.Random(7)
    path = tmp_path / "state" / "s"
    confirmed_fd = os.open(tmp_path / "confirmed", os.O_RDWR | os.O_CREAT)
    os.pwrite(confirmed_fd, b"%12d" % 0, 0)
    last = 0
    for turn in range(ROUNDS):
        pid = os.fork()
        if pid == 0:
            try:
                _write_until_killed(path, last, confirmed_fd)
            finally:
                os._exit(1)
        if turn % 10 == 0:
            wait_for_a_write(confirmed_fd, last)
        time.sleep(dice.uniform(0.001, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        confirmed = int(os.pread(confirmed_fd, 12, 0))
        store = FileStore(path)
        assert store.notice == ""
        found = int(store.get("number") or 0)
        assert found >= confirmed
        last = found
    os.close(confirmed_fd)
    assert last > 0
