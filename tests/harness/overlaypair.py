"""Two userspace TUNs joined in one process on the running loop, and small servers on the host's loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address

from harness.netwire import A4, A6, B4, B6
from tsd.base.addr import AddrPort
from tsd.hull import DatagramPort, Frame, Stream
from tsplatform.userspace.streams import OverlayStream
from tsplatform.userspace.tun import NetstackTun


class OverlayPair:
    """A is the client's node, B the node whose host runs the servers."""

    def __init__(self) -> None:
        self.a = NetstackTun([ip_address(A4), ip_address(A6)])
        self.b = NetstackTun([ip_address(B4), ip_address(B6)])
        self.is_cut = False
        loop = asyncio.get_running_loop()
        self.a.attach(lambda frames: self._carry(loop, self.b, frames))
        self.b.attach(lambda frames: self._carry(loop, self.a, frames))

    def _carry(self, loop: asyncio.AbstractEventLoop, to: NetstackTun, frames: list[Frame]) -> None:
        if not self.is_cut:
            loop.call_soon(to.deliver, frames)

    async def dial(self, host: str, port: int) -> Stream:
        """proxy.Dialer: `peer` and `peer6` are B, `self.local` the host itself."""
        if host == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")
        return await self.connect(port, {"peer": B4, "peer6": B6}.get(host, host))

    async def open_datagram(self, host: str, port: int) -> tuple[DatagramPort, AddrPort]:
        remote = AddrPort(ip_address({"peer": B4, "peer6": B6}.get(host, host)), port)
        return await self.a.open_datagram(None, remote.ip.version), remote

    async def connect(self, port: int, host: str = B4, timeout_s: float = 10.0) -> OverlayStream:
        return await self.a.connect(AddrPort(ip_address(host), port), timeout_s)

    def close(self) -> None:
        self.a.close()
        self.b.close()


@asynccontextmanager
async def overlay_pair() -> AsyncIterator[OverlayPair]:
    pair = OverlayPair()
    try:
        yield pair
    finally:
        pair.close()
        await asyncio.sleep(0)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@asynccontextmanager
async def host_server(handler: Handler) -> AsyncIterator[int]:
    """A TCP server on 127.0.0.1; gives its port.

    The backlog is large because a kernel whose accept queue overflows falls back to SYN cookies and may then lose
    early data, which looks like a fault of ours.
    """
    server = await asyncio.start_server(handler, "127.0.0.1", 0, backlog=2048)  # type: ignore[arg-type]
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echo_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything until EOF comes back, then EOF."""
    try:
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def read_all(stream: Stream) -> bytes:
    parts = []
    while data := await stream.read(1 << 18):
        parts.append(data)
    return b"".join(parts)


async def eventually(predicate: Callable[[], bool], timeout_s: float = 5.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if predicate():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen")


class UdpEcho(asyncio.DatagramProtocol):
    """Sends every datagram back."""

    def __init__(self) -> None:
        self.count = 0
        self.sources: list[tuple[str, int]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.count += 1
        self.sources.append(addr)
        self.transport.sendto(data, addr)  # type: ignore[attr-defined]


@asynccontextmanager
async def udp_echo() -> AsyncIterator[tuple[int, UdpEcho]]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(UdpEcho, local_addr=("127.0.0.1", 0))
    try:
        yield transport.get_extra_info("sockname")[1], protocol
    finally:
        transport.close()


async def datagram_from(sock: socket.socket, timeout_s: float = 5.0) -> bytes:
    """The next datagram of a non-blocking socket, on any event loop."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        await asyncio.wait_for(readable.wait(), timeout_s)
        return sock.recv(65535)
    finally:
        loop.remove_reader(sock.fileno())
