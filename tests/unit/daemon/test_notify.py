"""sd_notify datagrams."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from tsd.daemon import notify
from tsd.daemon.notify import Notifier


@pytest.mark.parametrize("is_abstract", [False, True])
async def test_messages(tmp_path: Path, is_abstract: bool) -> None:
    shown = f"@tsd-test-{os.getpid()}" if is_abstract else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + shown[1:] if is_abstract else shown)
        sock.settimeout(2)
        notifier = Notifier({"NOTIFY_SOCKET": shown, "WATCHDOG_USEC": "20000"})
        notifier.ready("Stopped")
        notifier.status("Stopped")
        notifier.status("Connected; me; 100.64.0.1")
        notifier.stopping()
        assert [sock.recv(200) for _ in range(3)] == [
            b"READY=1\nSTATUS=Stopped",
            b"STATUS=Connected; me; 100.64.0.1",
            b"STOPPING=1",
        ]
        task = asyncio.create_task(notifier.watchdog())
        assert await asyncio.to_thread(sock.recv, 200) == b"WATCHDOG=1"
        assert await asyncio.to_thread(sock.recv, 200) == b"WATCHDOG=1"
        task.cancel()


async def test_silence_without_systemd() -> None:
    notifier = Notifier({})
    notifier.ready()
    await asyncio.wait_for(notifier.watchdog(), 1)
    assert not notifier.is_active
    Notifier({"NOTIFY_SOCKET": "/nonexistent/x"}).ready()
    assert notify._watchdog_s({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}) == 0.0
