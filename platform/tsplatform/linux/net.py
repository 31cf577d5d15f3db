"""Overlay sockets where a TUN routes the overlay: plain sockets of the host, bound to our overlay addresses.

IP_FREEBIND lets us listen on an address before the router has set it, and while somebody flushed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Sequence

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.tasks import Tasks
from tsd.hull import StreamHandler
from tsplatform.userspace.hostsock import HostDatagrams, HostStream, address_of

log = logging.getLogger(__name__)

_IP_FREEBIND, _IPV6_FREEBIND, _IP_BIND_ADDRESS_NO_PORT = 15, 78, 24
_BACKLOG = 128
_ACCEPTS_PER_WAKE = 64
_RETRY_S = 0.1


class HostNet:
    """Implements `tsd.hull.OverlayNet`. `own_addresses` is what the router was told last."""

    def __init__(self, own_addresses: Callable[[], Sequence[IPAddress]]) -> None:
        self._own_addresses = own_addresses
        self._listeners: dict[AddrPort, _Listener] = {}

    async def connect(self, remote: AddrPort, timeout_s: float = 10.0) -> HostStream:
        own = self._own(remote.ip.version)
        sock = _socket(remote.ip.version, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((str(own), 0))
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, (str(remote.ip), remote.port))
            return HostStream(sock, address_of(sock.getsockname()), remote)
        except BaseException:
            sock.close()
            raise

    async def listen(self, local: AddrPort, handler: StreamHandler) -> int:
        listener = _Listener(local, handler)
        self._listeners[AddrPort(local.ip, listener.port)] = listener
        return listener.port

    def unlisten(self, local: AddrPort) -> None:
        listener = self._listeners.pop(local, None)
        if listener is not None:
            listener.close()

    async def open_datagram(self, local: AddrPort | None, remote_family: int = 4) -> HostDatagrams:
        if local is None:
            local = AddrPort(self._own(remote_family), 0)
        return HostDatagrams(local.ip.version, _allow_any_address, bind_to=local)

    def close(self) -> None:
        for local in list(self._listeners):
            self.unlisten(local)

    def _own(self, version: int) -> IPAddress:
        for ip in self._own_addresses():
            if ip.version == version:
                return ip
        raise OSError(errno.EADDRNOTAVAIL, f"no IPv{version} overlay address")


class _Listener:
    """A listening socket and the tasks that serve what it accepted."""

    def __init__(self, local: AddrPort, handler: StreamHandler) -> None:
        self._handler = handler
        self._tasks = Tasks(log)
        self._loop = asyncio.get_running_loop()
        self._sock = _socket(local.ip.version, socket.SOCK_STREAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((str(local.ip), local.port))
            self._sock.listen(_BACKLOG)
        except OSError:
            self._sock.close()
            raise
        self.port: int = self._sock.getsockname()[1]
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        self._tasks.cancel()

    def _on_readable(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKE):
            try:
                client, remote = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors: look again later instead of spinning
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(_RETRY_S, self._resume)
                return
            client.setblocking(False)
            stream = HostStream(client, address_of(client.getsockname()), address_of(remote))
            self._tasks.spawn(self._serve(stream), self._loop)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    async def _serve(self, stream: HostStream) -> None:
        try:
            await self._handler(stream)
        except (ConnectionError, TimeoutError) as err:
            log.debug("overlay connection ended: %s", err)
        except Exception:
            log.exception("handler of an overlay connection failed")
        finally:
            stream.close_now()


def _socket(version: int, kind: socket.SocketKind) -> socket.socket:
    sock = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, kind)
    sock.setblocking(False)
    _allow_any_address(sock)
    return sock


def _allow_any_address(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
