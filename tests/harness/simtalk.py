"""Traffic between simulated nodes: pings that measure outages, datagrams that are counted, TCP that is hashed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness.simnode import SimNode
from tsd.base.addr import AddrPort
from tsd.hull import DatagramPort, Stream

PIECE_BYTES = 64 << 10


class Talk:
    """TSMP pings from `a` to `b`, one every `period_s`, whether or not the last one was answered."""

    def __init__(self, a: SimNode, b: SimNode, period_s: float = 0.5, patience_s: float = 1.0) -> None:
        self.a, self.b = a, b
        self._period_s, self._patience_s = period_s, patience_s
        self._loop = a.tailnet.loop
        self.asked: list[tuple[float, bool | None]] = []
        """(when, whether it was answered in time; None: not known yet), in order of asking."""

    @asynccontextmanager
    async def going(self) -> AsyncIterator[Talk]:
        """Talk while the block runs; afterwards all answers are in."""
        pending: dict[asyncio.Task[None], None] = {}
        asking = asyncio.create_task(self._keep_asking(pending))
        try:
            yield self
        finally:
            asking.cancel()
            await asyncio.gather(asking, *pending, return_exceptions=True)

    async def _keep_asking(self, pending: dict[asyncio.Task[None], None]) -> None:
        while True:
            task = asyncio.create_task(self._ask(len(self.asked)))
            self.asked.append((self._loop.time(), None))
            pending[task] = None
            task.add_done_callback(pending.pop)
            await asyncio.sleep(self._period_s)

    async def _ask(self, index: int) -> None:
        result = await self.a.ping(self.b, "TSMP", self._patience_s)
        self.asked[index] = (self.asked[index][0], not result["Err"])

    def outages(self) -> list[tuple[float, float]]:
        """(first unanswered, next answered) of each outage; one that did not end lasts until the last ping."""
        found: list[tuple[float, float]] = []
        since: float | None = None
        for at, is_answered in self.asked:
            if is_answered is None:
                continue
            if not is_answered and since is None:
                since = at
            elif is_answered and since is not None:
                found.append((since, at))
                since = None
        return found if since is None else [*found, (since, self.asked[-1][0] + 1e6)]

    @property
    def longest_s(self) -> float:
        """The longest outage, 0 when every ping was answered."""
        return max((end - begin for begin, end in self.outages()), default=0.0)

    @property
    def answered(self) -> int:
        return sum(bool(is_answered) for _, is_answered in self.asked)


class Datagrams:
    """A UDP port on a node's overlay that keeps what it received."""

    def __init__(self, node: SimNode, port: DatagramPort) -> None:
        self.node = node
        self.port = port
        self.received: list[bytes] = []
        self._task = node.call(asyncio.ensure_future, self._receive())

    @classmethod
    async def open(cls, node: SimNode) -> Datagrams:
        return cls(node, await node.run(node.engine.options.hull.net.open_datagram(None)))

    async def _receive(self) -> None:
        while True:
            data, _ = await self.port.receive()
            self.received.append(data)

    def send(self, data: bytes, to: Datagrams) -> None:
        self.node.call(self.port.send, data, AddrPort(to.node.ip4, to.port.local.port))

    def close(self) -> None:
        self._task.cancel()
        self.port.close()


def content(size: int) -> bytes:
    """Bytes that look random and are always the same."""
    return hashlib.shake_128(b"content").digest(size)


class Sink:
    """A TCP service that reads to the end, answers with the hash of what it got, and closes."""

    def __init__(self, node: SimNode, port: int = 8000) -> None:
        self.node = node
        self.port = port
        self.received = 0

    async def open(self) -> Sink:
        net = self.node.engine.options.hull.net
        await self.node.run(net.listen(AddrPort(self.node.ip4, self.port), self._serve))
        return self

    async def _serve(self, stream: Stream) -> None:
        digest = hashlib.sha256()
        while data := await stream.read(PIECE_BYTES):
            digest.update(data)
            self.received += len(data)
        await stream.write(digest.digest())
        await stream.write_eof()


async def transfer(source: SimNode, sink: Sink, data: bytes, pace_bytes_per_s: float = 0.0) -> float:
    """Send `data` over TCP and check the hash that comes back; the virtual seconds it took."""
    loop = source.tailnet.loop
    began = loop.time()

    async def run() -> bytes:
        stream = await source.engine.options.hull.net.connect(AddrPort(sink.node.ip4, sink.port))
        for at in range(0, len(data), PIECE_BYTES):
            await stream.write(data[at : at + PIECE_BYTES])
            if pace_bytes_per_s:
                await asyncio.sleep(PIECE_BYTES / pace_bytes_per_s)
        await stream.write_eof()
        answer = b""
        while piece := await stream.read(4096):
            answer += piece
        await stream.close()
        return answer

    assert await source.run(run()) == hashlib.sha256(data).digest(), "what arrived is not what was sent"
    return loop.time() - began


async def echo_service(node: SimNode, port: int = 7) -> None:
    """A TCP service that gives back what it gets."""

    async def serve(stream: Stream) -> None:
        while data := await stream.read(PIECE_BYTES):
            await stream.write(data)

    await node.run(node.engine.options.hull.net.listen(AddrPort(node.ip4, port), serve))


async def echo(node: SimNode, stream: Stream, data: bytes = b"hello", timeout_s: float = 5.0) -> bytes:
    """Send over an open connection and wait for the answer. Raises TimeoutError."""

    async def exchange() -> bytes:
        await stream.write(data)
        return await stream.read(4096)

    async with asyncio.timeout(timeout_s):
        return await node.run(exchange())
