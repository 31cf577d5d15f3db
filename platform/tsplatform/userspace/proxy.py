"""The SOCKS5 and HTTP proxies into the overlay: listening, telling the two apart, and pumping once a target is reached.

Which targets are in the overlay and what names mean is the `Dialer`'s business. A port can serve one protocol or both
(a SOCKS5 client's first byte is 5). Parsing is in `proxies`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tsd.base.addr import AddrPort
from tsd.base.tasks import Tasks
from tsd.hull import DatagramPort, Stream
from tsplatform.userspace.bridge import Bridge
from tsplatform.userspace.hostsock import Acceptor, HostStream, address_of, listening_socket
from tsplatform.userspace.proxies.http import HttpSession
from tsplatform.userspace.proxies.socks5 import serve_socks5
from tsplatform.userspace.readiness import Readiness, readiness
from tsplatform.userspace.streams import OverlayStream
from tsplatform.userspace.tun import NetstackTun

log = logging.getLogger(__name__)

_RELAY_BYTES = 256 << 10
_HANDSHAKE_S = 30.0
_FIRST_READ_BYTES = 16 << 10


class Dialer(Protocol):
    """Resolves names (overlay names first) and chooses between overlay and host sockets."""

    async def dial(self, host: str, port: int) -> Stream:
        """`host` is a name or an IP literal. Raises OSError (refused, timed out, not found, ...), and in good time."""

    async def open_datagram(self, host: str, port: int) -> tuple[DatagramPort, AddrPort]:
        """A fresh port from which the resolved target can be reached."""


class ProxyServer:
    """One listening address. `protocols` is a subset of {"socks5", "http"}."""

    def __init__(self, dialer: Dialer, tun: NetstackTun | None, protocols: frozenset[str]) -> None:
        self.dialer = dialer
        self.protocols = protocols
        self._tun = tun
        self._acceptor: Acceptor | None = None
        self._readiness: Readiness | None = None
        self._tasks = Tasks(log)
        self._bridges: set[Bridge] = set()

    def start(self, listen: str) -> AddrPort:
        """Listen on "host:port"; returns the address in use. Raises OSError."""
        sock = listening_socket(listen)
        try:
            self._readiness = readiness(asyncio.get_running_loop())
        except OSError:
            sock.close()
            raise
        self._acceptor = Acceptor(sock, self._on_client)
        return self._acceptor.local

    def close(self) -> None:
        """Stop listening and reset what is open."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._tasks.cancel()
        for bridge in list(self._bridges):
            bridge.close()
        if self._readiness is not None:
            self._readiness.close()

    @property
    def connection_count(self) -> int:
        return len(self._tasks) + len(self._bridges)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the server."""
        return self._tasks.spawn(coroutine)

    def _on_client(self, sock: socket.socket, remote: AddrPort) -> None:
        assert self._acceptor is not None
        local = self._acceptor.local
        if local.ip.is_unspecified:
            local = address_of(sock.getsockname())
        self.spawn(self._serve(HostStream(sock, local, remote, self._readiness)))

    async def _serve(self, client: HostStream) -> None:
        try:
            await self._serve_protocol(client)
        except (OSError, asyncio.IncompleteReadError) as err:
            log.debug("proxy client ended: %s", err)
        except Exception:
            log.exception("proxy client failed")
        finally:
            client.close_now()

    async def _serve_protocol(self, client: HostStream) -> None:
        first = client.read_now(_FIRST_READ_BYTES)
        if first is None:
            async with asyncio.timeout(_HANDSHAKE_S):
                first = await client.read(_FIRST_READ_BYTES)
        if not first:
            return
        is_socks = first[0] == 5
        if is_socks and "socks5" in self.protocols:
            await serve_socks5(self, client, first)
        elif not is_socks and "http" in self.protocols:
            await HttpSession(self, client, first).serve()

    async def relay(self, client: HostStream, target: Stream) -> None:
        """Pump both ways until both ends are done. Overlay targets get a bridge, without a task."""
        if isinstance(target, OverlayStream) and self._tun is not None and self._readiness is not None:
            tun, ready = self._tun, self._readiness
            connection = target.connection
            loop = asyncio.get_running_loop()
            done: Callable[[Bridge], None] = self._bridges.discard
            bridge = Bridge(loop, ready, target, client.detach(), lambda: tun.touch(connection), tun.now, done)
            self._bridges.add(bridge)
            bridge.start()
            return
        await relay_streams(client, target)


async def relay_streams(a: Stream, b: Stream) -> None:
    """Two copying tasks; an error on one side resets the other."""
    tasks = [asyncio.ensure_future(_copy(a, b)), asyncio.ensure_future(_copy(b, a))]
    try:
        await asyncio.gather(*tasks)
    except OSError:
        a.abort()
        b.abort()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await a.close()
        await b.close()


async def _copy(source: Stream, sink: Stream) -> None:
    while data := await source.read(_RELAY_BYTES):
        await sink.write(data)
    await sink.write_eof()
