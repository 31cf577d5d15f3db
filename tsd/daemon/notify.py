"""sd_notify: telling systemd that we are ready, what we do, and that we still run.

Standard: sd_notify(3). Without NOTIFY_SOCKET every call does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """One datagram per message; errors are nobody's problem."""

    def __init__(self, env: Mapping[str, str]) -> None:
        address = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = _watchdog_s(env)
        self._last_status = ""

    @property
    def is_active(self) -> bool:
        return bool(self._address)

    def ready(self, status: str = "") -> None:
        self._send("READY=1" + (f"\nSTATUS={status}" if status else ""))
        self._last_status = status

    def status(self, text: str) -> None:
        if text != self._last_status:
            self._last_status = text
            self._send(f"STATUS={text}")

    def reloading(self, monotonic_us: int) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_us}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    async def watchdog(self) -> None:
        """Keep-alives at half the interval; returns at once when systemd does not want any."""
        while self._address and self._watchdog_s > 0:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(self._address)
            sock.sendall(text.encode())


def _watchdog_s(env: Mapping[str, str]) -> float:
    wanted, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    if not wanted.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(wanted) / 1_000_000
