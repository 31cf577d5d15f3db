"""The host's own TCP as a `hull.Stream`, and host name look-ups that never block the loop."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Awaitable, Callable

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError

Resolve = Callable[[str], Awaitable[list[IPAddress]]]
"""Addresses of a name. Raises OSError when there are none."""

_LIMIT_BYTES = 1 << 20
_LINGER_RST = struct.pack("ii", 1, 0)


class HostStream:
    """A connected TCP socket of the host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.local = _sock_addr(writer.get_extra_info("sockname"))
        self.remote = _sock_addr(writer.get_extra_info("peername"))

    async def read(self, limit: int) -> bytes:
        return await self._reader.read(limit)

    async def write(self, data: bytes | memoryview) -> None:
        if self._writer.is_closing():  # uvloop would raise RuntimeError
            raise ConnectionResetError(errno.ECONNRESET, "connection reset")
        self._writer.write(data)
        await self._writer.drain()

    async def write_eof(self) -> None:
        if not self._writer.is_closing() and self._writer.can_write_eof():
            self._writer.write_eof()

    def abort(self) -> None:
        sock = self._writer.get_extra_info("socket")
        if sock is not None:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RST)
            except OSError:
                pass
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except (ConnectionError, OSError):
            pass


def _sock_addr(name: object) -> AddrPort:
    if isinstance(name, tuple) and len(name) >= 2:
        return AddrPort(parse_ip(str(name[0]).partition("%")[0]), int(name[1]))
    return AddrPort(parse_ip("0.0.0.0"), 0)


async def connect_host(
    remote: AddrPort, timeout_s: float = 10.0, protect: Callable[[socket.socket], None] | None = None
) -> HostStream:
    """Dial from the host; `protect` gets the socket before it connects. Raises OSError or TimeoutError."""
    sock = socket.socket(socket.AF_INET if remote.ip.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if protect is not None:
            protect(sock)
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, (str(remote.ip), remote.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=_LIMIT_BYTES)
    except BaseException:
        sock.close()
        raise
    return HostStream(reader, writer)


async def resolve_host(name: str) -> list[IPAddress]:
    """Addresses of a name by the host's resolver. Raises OSError when there are none."""
    try:
        if "\0" in name:
            raise ValueError("the C library would read the part before it")
        infos = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except ValueError:
        # A label that is empty, too long, or no text at all: the resolver is not even asked.
        raise socket.gaierror(socket.EAI_NONAME, f"{name[:100]!r} is not a host name") from None
    ips: list[IPAddress] = []
    for info in infos:
        try:
            ip = parse_ip(str(info[4][0]).partition("%")[0])
        except DecodeError:
            continue
        if ip not in ips:
            ips.append(ip)
    if not ips:
        raise OSError(f"no address for {name}")
    return ips
