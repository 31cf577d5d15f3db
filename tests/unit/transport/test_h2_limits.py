"""HTTP/2 over a pipe in memory: what one connection can make the server hold, and odd heads."""

from __future__ import annotations

import asyncio

import pytest

from tsd.base.errors import ControlError
from tsd.transport import h2
from tsd.transport.h2 import Http2Client, Http2Request, Http2Server


class Pipe:
    """One direction each; `read` of one end gives what the other wrote."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes] = asyncio.Queue()
        self.other: Pipe

    async def read(self) -> bytes:
        return await self.received.get()

    def write(self, data: bytes) -> None:
        self.other.received.put_nowait(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self.received.put_nowait(b"")
        self.other.received.put_nowait(b"")


def pipes() -> tuple[Pipe, Pipe]:
    one, other = Pipe(), Pipe()
    one.other, other.other = other, one
    return one, other


async def test_large_bodies_share_a_budget() -> None:
    most = 0

    async def handle(request: Http2Request) -> None:
        nonlocal most
        try:
            body = await request.body()
        finally:
            most = max(most, server.held_body_bytes)
        await request.respond(200, b"%d" % len(body))

    near, far = pipes()
    server = Http2Server(far, handle)
    serving = asyncio.create_task(server.serve())
    client = Http2Client(near, "h")

    async def ask() -> int:
        answer = await client.request("POST", "/machine/register", (), bytes(700_000))
        await answer.read(1 << 20)
        return answer.status

    statuses = await asyncio.gather(*(ask() for _ in range(40)))
    assert set(statuses) <= {200, 413} and 200 in statuses
    assert most <= h2.MAX_HELD_BODY_BYTES and server.held_body_bytes == 0
    assert await ask() == 200, "afterwards all is well again"
    await client.close()
    server.close()
    await serving


async def test_paths_and_statuses_that_are_none() -> None:
    seen: list[tuple[str, str]] = []

    async def handle(request: Http2Request) -> None:
        seen.append((request.path, request.query))
        request.start(200)
        await request.end()

    near, far = pipes()
    server = Http2Server(far, handle)
    serving = asyncio.create_task(server.serve())
    client = Http2Client(near, "h")
    for path in ("/a%20b?c=d#e", "//[", "/%ff%00", "/x?//[::1", "*"):
        try:
            answer = await client.request("GET", path)
            await answer.read(100)
        except ControlError:
            pass
    assert seen[0] == ("/a b", "c=d") and ("//[", "") in seen
    await client.close()
    server.close()
    await serving


async def test_a_client_that_vanished_is_given_up_and_a_quiet_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h2, "PING_AFTER_S", 0.05)
    monkeypatch.setattr(h2, "PONG_WITHIN_S", 0.05)
    ended = asyncio.Event()

    async def handle(request: Http2Request) -> None:
        request.start(200)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    near, far = pipes()
    server = Http2Server(far, handle)
    serving = asyncio.create_task(server.serve())
    client = Http2Client(near, "h")
    answer = await client.request("POST", "/machine/map")
    await asyncio.sleep(0.3)
    assert not ended.is_set() and await client.is_alive(1.0)
    far.write = lambda data: None  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        await serving
    assert ended.is_set() and server.is_closed
    answer.close()
    await client.close()
