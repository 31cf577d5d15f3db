"""One question to one plain resolver: over UDP, over TCP when the answer does not fit or does not come (RFC 7766).

Each question has a number and a source port of its own, and only what repeats the question counts as its answer. An
upstream inside the overlay is asked there; the host's sockets are protected, so that they never enter our tunnel.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tsd.base.addr import AddrPort, IPAddress
from tsd.dns import message
from tsd.hull import DatagramPort, Stream

UDP_FIRST_S = 2.0
"""After this long without an answer TCP is tried too."""
TCP_S = 5.0
MAX_STRANGERS = 32
"""Datagrams that are no answer to the question: more of them look like somebody who guesses."""
_MAX_BYTES = 65535

Protect = Callable[[socket.socket], None]


class Dialing(Protocol):
    """What is needed of the `Dialer`."""

    async def open_datagram(self, ip: IPAddress) -> DatagramPort | None: ...

    async def dial_ip(self, remote: AddrPort, timeout_s: float = 10.0) -> Stream: ...


class Reply(NamedTuple):
    wire: bytes
    transport: str


class Exchange:
    """Keeps nothing between questions."""

    def __init__(self, dialer: Dialing, protect: Protect) -> None:
        self._dialer = dialer
        self._protect = protect

    async def ask(self, target: AddrPort, query: bytes, over_tcp: bool) -> Reply:
        """`over_tcp`: the asker takes replies of any size. Raises OSError or TimeoutError."""
        by_udp = asyncio.create_task(self._ask_udp(target, query))
        try:
            async with asyncio.timeout(UDP_FIRST_S):
                cut = Reply(await asyncio.shield(by_udp), "udp")
        except TimeoutError:
            return await self._ask_both(target, query, by_udp, over_tcp)
        except OSError:
            return Reply(await self._ask_tcp(target, query), "tcp")
        except BaseException:
            by_udp.cancel()
            raise
        if message.is_cut(cut.wire) and over_tcp:
            return Reply(await self._ask_tcp(target, query), "tcp")
        return cut

    async def _ask_both(self, target: AddrPort, query: bytes, by_udp: asyncio.Task[bytes], over_tcp: bool) -> Reply:
        by_tcp = asyncio.create_task(self._ask_tcp(target, query))
        waiting = {by_udp: "udp", by_tcp: "tcp"}
        failure: BaseException = TimeoutError("no answer")
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    transport = waiting.pop(task)
                    problem = task.exception()
                    if problem is not None:
                        failure = problem
                    elif not message.is_cut(task.result()) or not over_tcp or not waiting:
                        return Reply(task.result(), transport)
        finally:
            for task in waiting:
                task.cancel()
        raise failure

    async def _ask_udp(self, target: AddrPort, query: bytes) -> bytes:
        port = await self._dialer.open_datagram(target.ip)
        if port is None:
            return await self._ask_host(target, query)
        try:
            port.send(query, target)
            for _ in range(MAX_STRANGERS):
                reply, source = await port.receive()
                if source == target and message.answers(reply, query):
                    return reply
            raise ConnectionError(f"{target} sends answers to other questions")
        finally:
            port.close()

    async def _ask_host(self, target: AddrPort, query: bytes) -> bytes:
        """A connected socket: the kernel picks a random port, drops what others send, and tells when nobody listens."""
        loop = asyncio.get_running_loop()
        family = socket.AF_INET if target.ip.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            self._protect(sock)
            sock.connect((str(target.ip), target.port))
            sock.send(query)
            for _ in range(MAX_STRANGERS):
                reply = await loop.sock_recv(sock, _MAX_BYTES)
                if message.answers(reply, query):
                    return reply
        raise ConnectionError(f"{target} sends answers to other questions")

    async def _ask_tcp(self, target: AddrPort, query: bytes) -> bytes:
        async with asyncio.timeout(TCP_S):
            stream = await self._dialer.dial_ip(target, TCP_S)
            try:
                await stream.write(len(query).to_bytes(2, "big") + query)
                size = int.from_bytes(await _read(stream, 2), "big")
                reply = await _read(stream, size)
            finally:
                await stream.close()
        if not message.answers(reply, query):
            raise ConnectionError(f"{target} answered something else")
        return reply


async def _read(stream: Stream, count: int) -> bytes:
    got = b""
    while len(got) < count:
        chunk = await stream.read(count - len(got))
        if not chunk:
            raise ConnectionError("upstream closed")
        got += chunk
    return got
