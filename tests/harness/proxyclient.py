"""Clients of the proxies for tests: SOCKS5 (CONNECT, UDP ASSOCIATE) and HTTP CONNECT on asyncio, and no more."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

SOCKS, HTTP = ("127.0.0.1", 1055), ("127.0.0.1", 1056)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refused(OSError):
    """`code` is SOCKS5's or HTTP's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the proxy refused with {code}")
        self.code = code


def socks_address(host: str, port: int) -> bytes:
    try:
        ip = ipaddress.ip_address(host)
        return bytes((1 if ip.version == 4 else 4,)) + ip.packed + port.to_bytes(2, "big")
    except ValueError:
        return bytes((3, len(host))) + host.encode() + port.to_bytes(2, "big")


async def _socks(command: int, host: str, port: int, proxy: tuple[str, int]) -> tuple[Streams, tuple[str, int]]:
    reader, writer = await asyncio.open_connection(*proxy)
    try:
        writer.write(b"\x05\x01\x00")
        assert await reader.readexactly(2) == b"\x05\x00"
        writer.write(bytes((5, command, 0)) + socks_address(host, port))
        _, code, _, kind = await reader.readexactly(4)
        raw = await reader.readexactly(4 if kind == 1 else 16)
        bound = str(ipaddress.ip_address(raw)), int.from_bytes(await reader.readexactly(2), "big")
        if code:
            raise Refused(code)
    except BaseException:
        writer.close()
        raise
    return (reader, writer), bound


async def via_socks(host: str, port: int, proxy: tuple[str, int] = SOCKS) -> Streams:
    streams, _ = await _socks(1, host, port, proxy)
    return streams


async def via_http(host: str, port: int, proxy: tuple[str, int] = HTTP) -> Streams:
    """CONNECT."""
    reader, writer = await asyncio.open_connection(*proxy)
    name = f"[{host}]" if ":" in host else host
    try:
        writer.write(f"CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n".encode())
        code = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        if code != 200:
            raise Refused(code)
    except BaseException:
        writer.close()
        raise
    return reader, writer


class SocksDatagrams:
    """One UDP ASSOCIATE, used as `async with`."""

    def __init__(self, proxy: tuple[str, int] = SOCKS) -> None:
        self._proxy = proxy

    async def __aenter__(self) -> SocksDatagrams:
        (_, self._control), relay = await _socks(3, "0.0.0.0", 0, self._proxy)
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.setblocking(False)
        self._sock.connect(relay)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sock.close()
        self._control.close()

    def send(self, host: str, port: int, payload: bytes) -> None:
        self._sock.send(b"\0\0\0" + socks_address(host, port) + payload)

    async def receive(self, timeout_s: float) -> tuple[str, int, bytes]:
        """(host, port, payload). Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            data = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
        end = 8 if data[3] == 1 else 20
        host = str(ipaddress.ip_address(data[4:end]))
        return host, int.from_bytes(data[end : end + 2], "big"), data[end + 2 :]

    async def ask(self, host: str, port: int, payload: bytes, tries: int = 5) -> tuple[str, int, bytes]:
        """Send until something comes back, as a resolver does."""
        for left in reversed(range(tries)):
            self.send(host, port, payload)
            try:
                return await self.receive(5.0)
            except TimeoutError:
                if not left:
                    raise
        raise AssertionError
