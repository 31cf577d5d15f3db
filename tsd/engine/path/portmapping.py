"""Runs the port mapper of `tsd.portmap` on the host: one UDP socket, short HTTP requests, one timer.

It looks when reach looks. A gateway is asked over plain HTTP at its own address; answers are bounded in time and size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Any
from urllib.parse import urlsplit

from tsd.base.addr import AddrPort
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.errors import ControlError, HullError
from tsd.base.log import fields
from tsd.engine.driver import Driver
from tsd.engine.path.sockets import OpenUdp, Udp
from tsd.hull import LinkState
from tsd.portmap.dialog import Answer, Ask
from tsd.portmap.igd import DOCUMENT_BYTES
from tsd.portmap.mapper import HttpWanted, MappingChanged, PortMapper, Seen, SendDatagram
from tsd.transport.dial import Dial
from tsd.transport.http import exchange

log = logging.getLogger(__name__)

HTTP_S = 1.0
RELEASE_S = 0.5
"""How long a daemon that stops waits for the router."""


class PortMapping:
    """One per engine. Without a `dial` UPnP is not tried."""

    def __init__(
        self,
        *,
        open_udp: OpenUdp,
        dial: Dial | None,
        clock: Clock,
        entropy: Entropy,
        upnp: bool = True,
    ) -> None:
        self._open_udp = open_udp
        self._dial = dial
        self._clock = clock
        self._mapper = PortMapper(entropy=entropy, upnp=upnp and dial is not None)
        self._driver = Driver(clock)
        self._driver.add(self._mapper, self._on_output)
        self._socket: Udp | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_changed: Callable[[], None] = lambda: None
        """There is a mapping, another one, or none any more."""

    @property
    def external(self) -> AddrPort | None:
        """Where the router lets peers in; None without a mapping."""
        mapping = self._mapper.mapping
        return mapping.external if mapping is not None else None

    @property
    def seen(self) -> Seen:
        return self._mapper.seen

    def look(self, links: LinkState, port: int) -> None:
        """Make or renew the mapping for our UDP `port` (0: none is bound), soon and in the background."""
        now = self._clock.now()
        self._mapper.set_network(links.gateway_v4, _own_address(links), port, now)
        self._mapper.want(now)
        self._driver.kick()

    async def close(self) -> None:
        """Give the mapping back, as far as the router answers quickly."""
        self._mapper.release()
        self._driver.kick()
        self._driver.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RELEASE_S)
        for task in list(self._tasks):
            task.cancel()
        if self._socket is not None:
            self._socket.close()

    def _on_output(self, output: Any) -> None:
        match output:
            case SendDatagram(to, datagram):
                self._send(to, datagram)
            case HttpWanted(number, ask):
                task = asyncio.get_running_loop().create_task(self._ask(number, ask))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case MappingChanged(external, protocol):
                log.info(fields("port mapping", external=external or "gone", protocol=protocol))
                self.on_changed()

    def _send(self, to: AddrPort, datagram: bytes) -> None:
        if self._socket is None:
            try:
                self._socket = self._open_udp(4, 0, self._on_datagrams, lambda remote, error: None)
            except HullError as err:
                log.debug(fields("no socket for port mapping", reason=err))
                return
        self._socket.send(datagram, len(datagram), to)

    def _on_datagrams(self, datagrams: memoryview, datagram_bytes: int, source: AddrPort) -> None:
        now = self._clock.now()
        for start in range(0, len(datagrams), max(datagram_bytes, 1)):
            self._mapper.receive(bytes(datagrams[start : start + datagram_bytes]), source, now)
        self._driver.kick()

    async def _ask(self, number: int, ask: Ask) -> None:
        answer = Answer(0, b"")
        with contextlib.suppress(ControlError, OSError, TimeoutError):
            async with asyncio.timeout(HTTP_S):
                answer = await self._exchange(ask)
        self._mapper.answered(number, answer, self._clock.now())
        self._driver.kick()

    async def _exchange(self, ask: Ask) -> Answer:
        assert self._dial is not None
        parts = urlsplit(ask.url)
        connection = await self._dial(parts.hostname or "", parts.port or 80, tls=None, proxy=None, timeout_s=HTTP_S)
        headers = [("Host", parts.netloc), *ask.headers.items()]
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        method = "GET" if ask.body is None else "POST"
        found = await exchange(connection, method, target, headers, ask.body or b"", limit_bytes=DOCUMENT_BYTES)
        return Answer(found.status, found.body)


def _own_address(links: LinkState) -> IPv4Address | None:
    prefixes = links.interface_addresses.get(links.default_interface_v4, ())
    hosts = [prefix.network_address for prefix in prefixes]
    return next((ip for ip in hosts if isinstance(ip, IPv4Address)), None)
