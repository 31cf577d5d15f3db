"""Sockets watched through one epoll descriptor, and by the loop itself where there is none."""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import socket
from collections.abc import Callable, Iterator

import pytest

from harness.netwire import A4, B4
from harness.overlaypair import eventually
from tsd.base.addr import AddrPort, parse_ip
from tsplatform.userspace.hostsock import HostStream
from tsplatform.userspace.readiness import READABLE, WRITABLE, EpollReadiness, LoopReadiness, Readiness

Make = Callable[[asyncio.AbstractEventLoop], Readiness]
KINDS = [
    pytest.param(LoopReadiness, id="loop"),
    pytest.param(
        EpollReadiness,
        id="epoll",
        marks=pytest.mark.skipif(not hasattr(select, "epoll"), reason="this system has no epoll"),
    ),
]
HERE, THERE = AddrPort(parse_ip(A4), 1), AddrPort(parse_ip(B4), 2)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    yield a, b
    a.close()
    b.close()


@pytest.mark.parametrize("make", KINDS)
async def test_tells_what_is_ready_and_what_becomes_so(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    ready = make(asyncio.get_running_loop())
    heard: list[int] = []
    ready.watch(near.fileno(), heard.append)
    await eventually(lambda: heard == [WRITABLE])
    ready.more(near.fileno(), READABLE)
    far.send(b"1")
    await eventually(lambda: any(bits & READABLE for bits in heard))
    assert near.recv(10) == b"1"
    heard.clear()
    ready.more(near.fileno(), READABLE)
    far.shutdown(socket.SHUT_WR)
    await eventually(lambda: any(bits & READABLE for bits in heard))
    assert near.recv(10) == b""
    ready.close()


@pytest.mark.parametrize("make", KINDS)
async def test_silence_costs_nothing(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    """What nobody reads is told once, not in every round of the loop."""
    near, far = pair
    ready = make(asyncio.get_running_loop())
    heard: list[int] = []
    far.send(b"unread")
    ready.watch(near.fileno(), heard.append)
    await asyncio.sleep(0.05)
    assert 1 <= len(heard) <= 2
    ready.close()


@pytest.mark.parametrize("make", KINDS)
async def test_a_new_owner_hears_what_is_ready(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    ready = make(asyncio.get_running_loop())
    first: list[int] = []
    second: list[int] = []
    far.send(b"unread")
    ready.watch(near.fileno(), first.append)
    await eventually(lambda: bool(first))
    first.clear()
    ready.watch(near.fileno(), second.append)
    await eventually(lambda: any(bits & READABLE for bits in second))
    ready.forget(near.fileno())
    ready.forget(near.fileno())
    second.clear()
    far.send(b"more")
    await asyncio.sleep(0.02)
    assert not first and not second
    ready.close()


@pytest.mark.parametrize("make", KINDS)
async def test_a_failing_owner_does_not_end_the_others(
    make: Make, pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    near, far = pair
    ready = make(asyncio.get_running_loop())
    heard: list[int] = []

    def fail(bits: int) -> None:
        raise ValueError("a bug")

    ready.watch(near.fileno(), fail)
    ready.watch(far.fileno(), heard.append)
    await eventually(lambda: bool(heard))
    assert "a bug" in caplog.text
    ready.close()


@pytest.mark.parametrize("make", KINDS)
async def test_host_streams_carry_bulk_both_ways(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    ready = make(asyncio.get_running_loop())
    near, far = (HostStream(sock, HERE, THERE, ready) for sock in pair)
    data = os.urandom(3 << 20)

    async def read(stream: HostStream) -> bytes:
        digest = hashlib.sha256()
        while piece := await stream.read(50_000):
            digest.update(piece)
        return digest.digest()

    async def write(stream: HostStream) -> None:
        await stream.write(data)
        await stream.write_eof()

    async with asyncio.timeout(30):
        got = await asyncio.gather(read(near), read(far), write(near), write(far))
    assert got[:2] == [hashlib.sha256(data).digest()] * 2
    near.close_now()
    assert await near.read(1) == b""
    with pytest.raises(BrokenPipeError):
        await near.write(b"late")
    far.close_now()
    ready.close()


@pytest.mark.parametrize("make", KINDS)
async def test_closing_wakes_who_waits(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    ready = make(asyncio.get_running_loop())
    near = HostStream(pair[0], HERE, THERE, ready)
    reading = asyncio.ensure_future(near.read(10))
    await asyncio.sleep(0.01)
    near.close_now()
    assert await asyncio.wait_for(reading, 5) == b""
    ready.close()
