"""The host's own sockets in the shape of `tsd.hull`: streams, datagram ports and a plain accept loop.

Used by the proxies for clients and for targets outside of the overlay. No resolver: addresses only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.errors import reason_of
from tsd.hull import Stream, StreamHandler
from tsplatform.userspace.bridge import reset_socket
from tsplatform.userspace.readiness import READABLE, WRITABLE, LoopReadiness, Readiness

Protect = Callable[[socket.socket], None]

_ACCEPTS_PER_WAKE = 64
_RETRY_S = 0.1


def address_of(name: tuple[object, ...]) -> AddrPort:
    """A `getsockname`-style tuple as `AddrPort` (mapped IPv4 unmapped, zone dropped)."""
    return AddrPort(_parse(str(name[0])), int(str(name[1])))


@lru_cache(maxsize=512)
def _parse(text: str) -> IPAddress:
    return parse_ip(text.partition("%")[0])


class ClosableStream(Stream, Protocol):
    """A stream that needs no waiting to be closed."""

    def close_now(self) -> None: ...


class HostStream:
    """hull.Stream on a connected non-blocking socket. The system is asked first, and waited for when it has nothing."""

    def __init__(
        self, sock: socket.socket, local: AddrPort, remote: AddrPort, readiness: Readiness | None = None
    ) -> None:
        """`readiness`: its owner's, who has many sockets; without it the loop watches this one."""
        self.sock = sock
        self.local = local
        self.remote = remote
        self._loop = asyncio.get_running_loop()
        self._readiness = readiness or LoopReadiness(self._loop)
        self._fd = -1
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._is_closed = False

    def read_now(self, limit: int) -> bytes | None:
        """What is there already; None: nothing yet, b"": the end. Raises OSError."""
        if self._is_closed:
            return b""
        try:
            return self.sock.recv(limit)
        except (BlockingIOError, InterruptedError):
            return None

    async def read(self, limit: int) -> bytes:
        while (data := self.read_now(limit)) is None:
            await self._wait(READABLE)
        return data

    async def write(self, data: bytes | memoryview) -> None:
        while True:
            if self._is_closed:
                raise BrokenPipeError(32, "the connection is closed")
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
            await self._wait(WRITABLE)

    async def write_eof(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        if not self._is_closed:
            self.detach()
            reset_socket(self.sock)

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        if not self._is_closed:
            self.detach()
            self.sock.close()

    def detach(self) -> socket.socket:
        """The socket belongs to the caller now."""
        self._is_closed = True
        if self._fd >= 0:
            self._readiness.forget(self._fd)
            self._on_ready(READABLE | WRITABLE)
        return self.sock

    async def _wait(self, bit: int) -> None:
        """Until the socket may be read or written, or is closed."""
        waiter = self._waiters[bit] = self._loop.create_future()
        if self._fd < 0:
            self._fd = self.sock.fileno()
            self._readiness.watch(self._fd, self._on_ready)
        else:
            self._readiness.more(self._fd, bit)
        try:
            await waiter
        finally:
            self._waiters.pop(bit, None)

    def _on_ready(self, bits: int) -> None:
        for bit in (READABLE, WRITABLE):
            if bits & bit and bit in self._waiters:
                _wake(self._waiters[bit])


class HostDatagrams:
    """hull.DatagramPort on the host's UDP."""

    def __init__(self, family: int = 4, protect: Protect | None = None, *, bind_to: AddrPort | None = None) -> None:
        self._sock = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
        self._sock.setblocking(False)
        if protect is not None:
            protect(self._sock)
        anywhere = "0.0.0.0" if family == 4 else "::"
        try:
            self._sock.bind((str(bind_to.ip), bind_to.port) if bind_to is not None else (anywhere, 0))
        except OSError:
            self._sock.close()
            raise
        self.local = address_of(self._sock.getsockname())
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def send(self, data: bytes, remote: AddrPort) -> None:
        with contextlib.suppress(BlockingIOError):
            self._sock.sendto(data, (str(remote.ip), remote.port))

    async def receive(self) -> tuple[bytes, AddrPort]:
        while True:  # uvloop has no sock_recvfrom
            if self._is_closed:
                raise ConnectionAbortedError(103, "the port is closed")
            try:
                data, source = self._sock.recvfrom(65535)
                return data, address_of(source)
            except (BlockingIOError, InterruptedError):
                await self._wait_readable()

    async def _wait_readable(self) -> None:
        self._waiter = self._loop.create_future()
        self._loop.add_reader(self._sock.fileno(), _wake, self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if not self._is_closed:
                self._loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            if self._waiter is not None:
                _wake(self._waiter)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Acceptor:
    """Hands out what a listening socket accepts: non-blocking client sockets with the client's address."""

    def __init__(self, sock: socket.socket, on_client: Callable[[socket.socket, AddrPort], None]) -> None:
        """Owns `sock` (non-blocking, listening) from now on."""
        self._on_client = on_client
        self._sock = sock
        self.local = address_of(sock.getsockname())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._on_readable)
        self._is_closed = False

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
            self._on_client(client, address_of(remote))

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()


async def serve_stream(handler: StreamHandler, stream: ClosableStream, log: logging.Logger) -> None:
    """Let a handler serve one accepted connection, and close it whatever happens."""
    try:
        await handler(stream)
    except (ConnectionError, TimeoutError) as err:
        log.debug("overlay connection ended: %s", err)
    except Exception:
        log.exception("handler of an overlay connection failed")
    finally:
        stream.close_now()


def listening_socket(listen: str) -> socket.socket:
    """On "host:port", "[v6]:port" or ":port". Raises OSError."""
    host, _, port = listen.rpartition(":")
    return _listening_socket(host.strip("[]"), int(port))


def _listening_socket(host: str, port: int) -> socket.socket:
    if host == "localhost":
        host = "127.0.0.1"
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if is_dual else 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is accepted inherits it
        sock.bind((host or ("::" if is_dual else "0.0.0.0"), port))
        sock.listen(1024)
        sock.setblocking(False)
    except (OSError, ValueError) as err:
        sock.close()
        if isinstance(err, ValueError):
            raise OSError(errno.EINVAL, f"{host!r} is not a host name") from None
        raise
    return sock


def error_text(err: BaseException) -> str:
    """One line for a proxy client."""
    text = (reason_of(err) if isinstance(err, Exception) else "") or type(err).__name__
    return " ".join(str(text).split())[:200]
