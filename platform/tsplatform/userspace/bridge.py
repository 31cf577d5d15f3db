"""Joins a host socket and an overlay connection: bytes, half-close and RST both ways, back-pressure, no task.

Host reads are up to 256 KiB and go into the stack without another copy; overlay chunks go to the socket as they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.segment import Buffer
from tsplatform.userspace.readiness import FAILED, READABLE, WRITABLE, Readiness
from tsplatform.userspace.streams import OverlayStream

_READ_BYTES = 256 << 10
_FIRST_READ_BYTES = 16 << 10
_READS_PER_WAKE = 4
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def reset_socket(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()


class Bridge:
    """Owns `sock` (non-blocking, connected) and the stream from now on; `on_done` is called once, at the end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        readiness: Readiness,
        stream: OverlayStream,
        sock: socket.socket,
        touch: Callable[[], None],
        now: Callable[[], float],
        on_done: Callable[[Bridge], None],
    ) -> None:
        self._loop = loop
        self._readiness = readiness
        self._stream = stream
        self._connection = stream.connection
        self._sock = sock
        self._fd = sock.fileno()
        self._touch = touch
        self._now = now
        self._on_done = on_done
        self._unsent: memoryview | None = None
        self._read_bytes = _FIRST_READ_BYTES
        self._is_host_eof = False
        self._is_overlay_eof = False
        self._is_paused = False
        self._is_read_due = False
        self._is_done = False
        stream.sink = self._on_overlay

    def start(self) -> None:
        """Begin to pump; call when both sides exist."""
        self._overlay_to_host()
        if self._is_done:
            return
        try:
            self._readiness.watch(self._fd, self._on_host)
        except OSError:  # the system watches no more sockets
            self._fail_host()

    def close(self) -> None:
        """Reset both sides."""
        self._fail_host()

    # -- host → overlay ----------------------------------------------------------------------------------------

    def _on_host(self, bits: int) -> None:
        if bits & FAILED and self._is_paused:
            self._fail_overlay()
            return
        if bits & WRITABLE and self._unsent is not None:
            self._on_host_writable()
        if bits & READABLE:
            self._on_host_readable()

    def _resume_host(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._read_on_soon()

    def _read_on_soon(self) -> None:
        if not self._is_read_due:
            self._is_read_due = True
            self._loop.call_soon(self._on_read_due)

    def _on_read_due(self) -> None:
        self._is_read_due = False
        self._on_host_readable()

    def _on_host_readable(self) -> None:
        """Reads until there is no more, or for a while: others wait too."""
        connection = self._connection
        if self._is_paused or self._is_host_eof or self._is_done or self._is_read_due:
            return
        for _ in range(_READS_PER_WAKE):
            try:
                data = self._sock.recv(self._read_bytes)
            except (BlockingIOError, InterruptedError):
                self._readiness.more(self._fd, READABLE)
                break
            except OSError:
                self._fail_overlay()
                return
            if connection.state == c.CLOSED or connection.is_fin_wanted:
                self._fail_host()
                return
            if not data:
                self._is_host_eof = True
                connection.shutdown_write()
                break
            connection.write(data)
            if connection.send_room <= 0:
                connection.wants_writable = True
                self._is_paused = True
                break
            if len(data) == self._read_bytes:
                self._read_bytes = _READ_BYTES
        else:
            self._read_on_soon()
        self._touch()
        self._finish_if_both_ended()

    # -- overlay → host ----------------------------------------------------------------------------------------

    def _on_overlay(self, bits: int) -> None:
        if self._is_done:
            return
        if bits & c.DEAD and self._connection.error:
            self._fail_host()
            return
        if bits & (c.READABLE | c.DEAD):
            self._overlay_to_host()
        if bits & c.WRITABLE:
            self._resume_host()

    def _overlay_to_host(self) -> None:
        connection = self._connection
        while self._unsent is None:
            chunk = connection.read_chunk(self._now())
            if chunk is None:
                break
            if not self._send(chunk):
                return
        if connection.ack_wanted:
            self._touch()
        if self._unsent is None and connection.is_at_eof and not self._is_overlay_eof and not self._is_done:
            self._is_overlay_eof = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            self._finish_if_both_ended()

    def _send(self, chunk: Buffer) -> bool:
        """False when the host side broke."""
        try:
            sent = self._sock.send(chunk)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._fail_overlay()
            return False
        if sent < len(chunk):
            self._unsent = memoryview(chunk)[sent:]
            self._readiness.more(self._fd, WRITABLE)
        else:
            self._unsent = None
        return True

    def _on_host_writable(self) -> None:
        rest = self._unsent
        if rest is None or not self._send(rest):
            return
        if self._unsent is None:
            self._overlay_to_host()

    # -- the end -----------------------------------------------------------------------------------------------

    def _finish_if_both_ended(self) -> None:
        if self._is_host_eof and self._is_overlay_eof and not self._is_done:
            self._detach()
            self._sock.close()
            self._stream.close_now()
            self._on_done(self)

    def _fail_overlay(self) -> None:
        """The host side broke: RST into the overlay."""
        if not self._is_done:
            self._detach()
            self._sock.close()
            self._stream.abort()
            self._on_done(self)

    def _fail_host(self) -> None:
        """The overlay side broke: RST to the host."""
        if not self._is_done:
            self._detach()
            reset_socket(self._sock)
            self._stream.abort()
            self._on_done(self)

    def _detach(self) -> None:
        self._is_done = True
        self._unsent = None
        self._readiness.forget(self._fd)
        self._stream.sink = _ignore


def _ignore(bits: int) -> None:
    """The bridge is gone; the connection finishes on its own."""
