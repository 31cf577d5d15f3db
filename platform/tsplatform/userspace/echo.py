"""ICMP echo requests to advertised subnets, forwarded through the host's unprivileged ICMP datagram sockets.

Linux and macOS allow them without rights (`net.ipv4.ping_group_range`); otherwise a raw socket is tried; when neither
works one health text says so. At most 20 at once and 3 s each, as tailscale; never runs a `ping` program.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from tsd.base.addr import behind_via
from tsd.netstack.events import EchoRequested
from tsd.netstack.stack import Stack
from tsd.packet.build import icmp_packet
from tsd.packet.parse import parse

log = logging.getLogger(__name__)

_MAX_PENDING = 20
_TIMEOUT_S = 3.0


class Driver(Protocol):
    stack: Stack

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def kick(self) -> None: ...


class EchoForwarder:
    def __init__(self, driver: Driver, protect: Callable[[socket.socket], None] | None) -> None:
        self._driver = driver
        self._protect = protect
        self._pending: dict[socket.socket, asyncio.TimerHandle] = {}
        self._sequence = 0
        self.health = ""

    def close(self) -> None:
        for sock in list(self._pending):
            self._end(sock)

    def forward(self, event: EchoRequested) -> None:
        """Ask the real host; its answer is handed back as if it had answered the overlay directly."""
        if len(self._pending) >= _MAX_PENDING:
            return
        target = behind_via(event.target)
        is_v4 = target.version == 4
        try:
            sock, is_raw = self._open(is_v4)
        except OSError as err:
            if not self.health:
                self.health = f"cannot forward ping to subnets: no right to open ICMP sockets ({err.strerror})"
                log.warning("%s; set net.ipv4.ping_group_range or grant CAP_NET_RAW", self.health)
            return
        loop = self._driver.loop
        self._pending[sock] = loop.call_later(_TIMEOUT_S, self._end, sock)
        loop.add_reader(sock.fileno(), self._on_reply, sock, event, is_raw)
        self._sequence = (self._sequence + 1) & 0xFFFF
        payload = bytes(parse(event.packet).payload)[4:]
        rest = sock.fileno().to_bytes(2, "big") + self._sequence.to_bytes(2, "big") + payload
        source = bytes(4) if is_v4 else bytes(16)
        request = icmp_packet(source, target.packed, 8 if is_v4 else 128, 0, rest)[20 if is_v4 else 40 :]
        try:
            sock.sendto(request, (str(target), 0))
        except OSError:
            self._end(sock)

    def _open(self, is_v4: bool) -> tuple[socket.socket, bool]:
        family = socket.AF_INET if is_v4 else socket.AF_INET6
        proto = socket.IPPROTO_ICMP if is_v4 else socket.IPPROTO_ICMPV6
        is_raw = False
        try:
            sock = socket.socket(family, socket.SOCK_DGRAM, proto)
        except OSError:
            sock = socket.socket(family, socket.SOCK_RAW, proto)
            is_raw = True
        sock.setblocking(False)
        if self._protect is not None:
            self._protect(sock)
        return sock, is_raw

    def _on_reply(self, sock: socket.socket, event: EchoRequested, is_raw: bool) -> None:
        try:
            data, source = sock.recvfrom(65535)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(sock)
            return
        target = behind_via(event.target)
        if is_raw and target.version == 4:
            data = data[(data[0] & 15) * 4 :] if data else b""
        wanted = 0 if target.version == 4 else 129
        if len(data) < 8 or data[0] != wanted or source[0] != str(target):
            return  # a raw socket sees everything
        if is_raw and int.from_bytes(data[4:6], "big") != sock.fileno():
            return
        self._end(sock)
        self._driver.stack.datagrams.answer_echo(event.packet)
        self._driver.kick()

    def _end(self, sock: socket.socket) -> None:
        timer = self._pending.pop(sock, None)
        if timer is not None:
            timer.cancel()
            self._driver.loop.remove_reader(sock.fileno())
            sock.close()
