"""Questions of one connection to our resolver: in any order, with limits, and what is not a question."""

from __future__ import annotations

import asyncio

import pytest

from harness.fedstream import FedStream
from tsd.base.addr import QUAD_100, AddrPort
from tsplatform import dnsstream
from tsplatform.dnsstream import MAX_PIPELINED, Pipeline, ServicePort, open_service


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(2, "big") + message for message in messages)


async def run(data: bytes, answer: object, step: int = 97) -> FedStream:
    stream = FedStream(data, step)
    await Pipeline(stream, answer).run()  # type: ignore[arg-type]
    return stream


async def test_a_slow_answer_keeps_nobody_waiting() -> None:
    async def answer(query: bytes) -> bytes:
        await asyncio.sleep(0.1 if query == b"slow" else 0)
        return query.upper()

    stream = await run(framed(b"slow", b"one", b"two"), answer, step=1)
    assert bytes(stream.written) == framed(b"ONE", b"TWO", b"SLOW")


async def test_no_more_than_some_at_once() -> None:
    running = most = 0

    async def answer(query: bytes) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return query

    stream = await run(framed(*[b"query"] * 100), answer)
    assert len(stream.written) == 700 and most == MAX_PIPELINED


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0", b"\0\5ab", b"\x10\x01" + bytes(5000)])
async def test_what_is_no_question_ends_the_connection(data: bytes) -> None:
    async def answer(query: bytes) -> bytes:
        raise AssertionError("asked")

    assert not (await run(data, answer)).written


async def test_silence_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FedStream):
        async def read(self, limit: int = 65536) -> bytes:
            await asyncio.sleep(3600)
            return b""

    monkeypatch.setattr(dnsstream, "IDLE_S", 0.05)

    async def answer(query: bytes) -> bytes:
        return query

    await asyncio.wait_for(Pipeline(Silent(b""), answer).run(), 10)


async def test_our_own_process_reaches_the_resolver_without_a_packet() -> None:
    async def answer(query: bytes, over_tcp: bool) -> bytes:
        assert over_tcp
        return query.upper()

    served: list[asyncio.Task[None]] = []
    stream = open_service(answer, lambda work: served.append(asyncio.ensure_future(work)), AddrPort(QUAD_100, 53))
    await stream.write(framed(b"one"))
    assert await asyncio.wait_for(stream.read(100), 10) == framed(b"ONE")
    await stream.close()
    await asyncio.wait_for(served[0], 10)
    with pytest.raises(ConnectionRefusedError, match="DNS only"):
        open_service(answer, served.append, AddrPort(QUAD_100, 80))


async def test_datagrams_of_our_own_process_reach_the_resolver_without_a_packet() -> None:
    """As those of SOCKS5's UDP ASSOCIATE, which programs that send all they have through a proxy ask names with."""

    async def resolve(query: bytes, over_tcp: bool) -> bytes:
        await asyncio.sleep(0)
        return b"" if over_tcp else query.upper()

    running: set[asyncio.Task[None]] = set()
    port = ServicePort(resolve, lambda work: running.add(asyncio.ensure_future(work)), QUAD_100)
    dns = AddrPort(QUAD_100, 53)
    port.send(b"lost", AddrPort(QUAD_100, 80))
    for count in range(2 * MAX_PIPELINED):
        port.send(b"q%d" % count, dns)
    assert len(running) == MAX_PIPELINED
    assert [await port.receive() for _ in range(MAX_PIPELINED)] == [(b"Q%d" % i, dns) for i in range(MAX_PIPELINED)]
    waiting = asyncio.ensure_future(port.receive())
    await asyncio.sleep(0)
    port.close()
    with pytest.raises(OSError, match="closed"):
        await waiting
    with pytest.raises(OSError, match="closed"):
        await port.receive()
