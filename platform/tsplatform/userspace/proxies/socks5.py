"""SOCKS5 (RFC 1928) without authentication: CONNECT and UDP ASSOCIATE. BIND is refused with code 7.

An association lives as long as its TCP connection and serves one client address; fragments are dropped. Targets are
bounded per association, the least recently used one gives way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import OrderedDict
from typing import TYPE_CHECKING

from tsd.base.addr import AddrPort
from tsd.base.errors import DecodeError
from tsd.hull import DatagramPort
from tsplatform.userspace.hostsock import HostStream, address_of

if TYPE_CHECKING:
    from tsplatform.userspace.proxy import ProxyServer

_GENERAL_FAILURE = 1
_NOT_ALLOWED = 2
_NET_UNREACHABLE = 3
_HOST_UNREACHABLE = 4
_REFUSED = 5
_TTL_EXPIRED = 6
_BAD_COMMAND = 7
_BAD_ADDRESS_TYPE = 8
_DIAL_TIMEOUT_S = 10.0
_MAX_TARGETS = 256
_MAX_RESOLVING = 64


class _Reader:
    """Exact reads over a stream with some bytes read already."""

    def __init__(self, client: HostStream, first: bytes) -> None:
        self._client = client
        self.rest = first

    async def take(self, count: int) -> bytes:
        while len(self.rest) < count:
            more = await self._client.read(4096)
            if not more:
                raise asyncio.IncompleteReadError(self.rest, count)
            self.rest += more
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken


async def serve_socks5(server: ProxyServer, client: HostStream, first: bytes) -> None:
    reader = _Reader(client, first)
    async with asyncio.timeout(30.0):
        _, count = await reader.take(2)
        methods = await reader.take(count)
        if 0 not in methods:
            await client.write(b"\x05\xff")
            return
        await client.write(b"\x05\x00")
        version, command, _, kind = await reader.take(4)
        if version != 5:
            return
        host = await _read_host(reader, kind)
        if host is None:
            await client.write(_reply(_BAD_ADDRESS_TYPE))
            return
        port = int.from_bytes(await reader.take(2), "big")
    if command == 1 and not port:
        await client.write(_reply(_GENERAL_FAILURE))
    elif command == 1:
        await _connect(server, client, reader.rest, host, port)
    elif command == 3:
        await _Association(server, client, host, port).serve()
    else:
        await client.write(_reply(_BAD_COMMAND))


async def _read_host(reader: _Reader, kind: int) -> str | None:
    if kind == 1:
        return socket.inet_ntop(socket.AF_INET, await reader.take(4))
    if kind == 4:
        return socket.inet_ntop(socket.AF_INET6, await reader.take(16))
    if kind == 3:
        return (await reader.take((await reader.take(1))[0])).decode("ascii", "replace")
    return None


def _reply(code: int, bound: AddrPort | None = None) -> bytes:
    if bound is None:
        return bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))
    return bytes((5, code, 0)) + _encode_address(bound)


def _encode_address(address: AddrPort) -> bytes:
    return bytes((1 if address.ip.version == 4 else 4,)) + address.ip.packed + address.port.to_bytes(2, "big")


def _code_of(err: BaseException) -> int:
    if isinstance(err, ConnectionRefusedError):
        return _REFUSED
    if isinstance(err, TimeoutError):
        return _TTL_EXPIRED
    if isinstance(err, PermissionError):
        return _NOT_ALLOWED
    number = getattr(err, "errno", None)
    if number == 101:
        return _NET_UNREACHABLE
    return _HOST_UNREACHABLE if number == 113 or isinstance(err, socket.gaierror) else _GENERAL_FAILURE


async def _connect(server: ProxyServer, client: HostStream, early: bytes, host: str, port: int) -> None:
    try:
        target = await server.dialer.dial(host, port)
    except (OSError, DecodeError, LookupError) as err:
        await client.write(_reply(_code_of(err)))
        return
    try:
        await client.write(_reply(0, target.local))
        if early:
            await target.write(early)
    except BaseException:
        target.abort()
        raise
    await server.relay(client, target)


class _Association:
    """One UDP ASSOCIATE: datagrams of one client, a port per target."""

    def __init__(self, server: ProxyServer, client: HostStream, host: str, port: int) -> None:
        self._server = server
        self._client = client
        self._wanted_port = port
        self._peer: tuple[object, ...] | None = None
        self._targets: OrderedDict[tuple[str, int], tuple[DatagramPort, AddrPort, asyncio.Task[None]]] = OrderedDict()
        self._resolving: dict[tuple[str, int], list[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        family = socket.AF_INET if client.local.ip.version == 4 else socket.AF_INET6
        self._sock = socket.socket(family, socket.SOCK_DGRAM)
        self._sock.setblocking(False)
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Until the TCP connection ends."""
        try:
            self._sock.bind((str(self._client.local.ip), 0))
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
            await self._client.write(_reply(0, address_of(self._sock.getsockname())))
            while await self._client.read(4096):
                pass
        finally:
            self._close()

    def _close(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in list(self._tasks):
            task.cancel()
        while self._targets:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (port, _, task) = self._targets.popitem(last=False)
        task.cancel()
        port.close()

    def _on_readable(self) -> None:
        for _ in range(64):
            try:
                datagram, source = self._sock.recvfrom(65535)
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            if self._is_from_client(source):
                self._handle(datagram)

    def _is_from_client(self, source: tuple[object, ...]) -> bool:
        if self._peer is None:
            address = address_of(source)
            if address.ip != self._client.remote.ip or self._wanted_port not in (0, address.port):
                return False
            self._peer = source
        return source == self._peer

    def _handle(self, datagram: bytes) -> None:
        parsed = parse_datagram(datagram)
        if parsed is None:
            return
        host, port, payload = parsed
        key = (host, port)
        target = self._targets.get(key)
        if target is not None:
            self._targets.move_to_end(key)
            with contextlib.suppress(OSError):
                target[0].send(payload, target[1])
        elif key in self._resolving:
            if len(self._resolving[key]) < 16:
                self._resolving[key].append(payload)
        elif len(self._resolving) < _MAX_RESOLVING:
            self._resolving[key] = [payload]
            self._spawn(self._open(key))

    def _spawn(self, coroutine: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self, key: tuple[str, int]) -> None:
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                port, remote = await self._server.dialer.open_datagram(*key)
        except (OSError, DecodeError, LookupError):
            return
        finally:
            waiting = self._resolving.pop(key, [])
        if len(self._targets) >= _MAX_TARGETS:
            self._forget_oldest()
        self._targets[key] = (port, remote, self._spawn(self._return(port)))
        for payload in waiting:
            with contextlib.suppress(OSError):
                port.send(payload, remote)

    async def _return(self, port: DatagramPort) -> None:
        """Datagrams from the target to the client."""
        with contextlib.suppress(OSError):
            while True:
                payload, source = await port.receive()
                if self._peer is not None:
                    with contextlib.suppress(BlockingIOError):
                        self._sock.sendto(b"\0\0\0" + _encode_address(source) + payload, self._peer)


def parse_datagram(datagram: bytes) -> tuple[str, int, bytes] | None:
    """(host, port, payload) of a client's datagram; None for fragments and nonsense."""
    if len(datagram) < 10 or datagram[2]:
        return None
    kind = datagram[3]
    if kind == 1:
        host, at = socket.inet_ntop(socket.AF_INET, datagram[4:8]), 8
    elif kind == 4 and len(datagram) >= 22:
        host, at = socket.inet_ntop(socket.AF_INET6, datagram[4:20]), 20
    elif kind == 3 and len(datagram) >= 7 + datagram[4]:
        at = 5 + datagram[4]
        host = datagram[5:at].decode("ascii", "replace")
    else:
        return None
    return host, int.from_bytes(datagram[at : at + 2], "big"), datagram[at + 2 :]
