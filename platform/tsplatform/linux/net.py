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
from tsplatform.userspace.hostsock import Acceptor, HostDatagrams, HostStream, address_of, serve_stream

log = logging.getLogger(__name__)

_IP_FREEBIND, _IPV6_FREEBIND, _IP_BIND_ADDRESS_NO_PORT = 15, 78, 24
_BACKLOG = 128


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
        sock = _socket(local.ip.version, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((str(local.ip), local.port))
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        self._acceptor = Acceptor(sock, self._on_client)
        self.port = self._acceptor.local.port

    def close(self) -> None:
        self._acceptor.close()
        self._tasks.cancel()

    def _on_client(self, client: socket.socket, remote: AddrPort) -> None:
        stream = HostStream(client, address_of(client.getsockname()), remote)
        self._tasks.spawn(serve_stream(self._handler, stream, log))


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
