"""Sockets watched through one epoll descriptor, and by the loop itself where there is none."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import select
import socket
from collections.abc import Callable, Iterator

import pytest

from harness.netwire import A4, B4
from harness.overlaypair import eventually, overlay_pair
from tsd.base.addr import AddrPort, parse_ip
from tsd.hull import Stream
from tsplatform.userspace.bridge import Bridge, reset_socket
from tsplatform.userspace.hostsock import HostStream
from tsplatform.userspace.proxy import ProxyServer
from tsplatform.userspace.readiness import READABLE, WRITABLE, EpollReadiness, LoopReadiness, Readiness, Wake

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


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="this system has no epoll")
async def test_an_event_of_a_closed_socket_is_not_told_to_the_next_of_its_number() -> None:
    ready = EpollReadiness(asyncio.get_running_loop())
    pairs = [socket.socketpair() for _ in range(2)]
    taken: list[socket.socket] = []
    heard: list[int] = []

    def swap(this: int) -> None:
        """The other one is closed in the same round, and its number is taken anew."""
        other = pairs[1 - this][0]
        if not taken:
            fd = other.fileno()
            ready.forget(fd)
            other.close()
            taken.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            assert taken[0].fileno() == fd
            ready.watch(fd, heard.append)

    for index in range(2):
        ready.watch(pairs[index][0].fileno(), lambda bits, index=index: swap(index))
    await eventually(lambda: bool(taken))
    await eventually(lambda: bool(heard))  # its own first event, in the next round
    assert len(heard) == 1
    ready.close()
    for sock in (*pairs[0], *pairs[1], *taken):
        sock.close()


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="this system has no epoll")
async def test_a_reset_by_the_host_ends_a_bridge_that_waits_for_the_overlay() -> None:
    """The overlay's peer reads nothing, so the bridge does not read the host, and must hear of the RST all the same."""
    held: list[Stream] = []
    hold = asyncio.Event()

    async def keep(stream: Stream) -> None:
        held.append(stream)
        await hold.wait()

    async with overlay_pair() as pair:
        port = await pair.b.listen(AddrPort(parse_ip(B4), 0), keep)
        server = ProxyServer(pair, pair.a, frozenset({"socks5"}))
        proxy = server.start("127.0.0.1:0")
        client = socket.create_connection((str(proxy.ip), proxy.port))
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        target = parse_ip(B4).packed + port.to_bytes(2, "big")
        await loop.sock_sendall(client, b"\x05\x01\x00\x05\x01\x00\x01" + target)
        answer = b""
        while len(answer) < 12:
            answer += await loop.sock_recv(client, 12)
        with pytest.raises(TimeoutError):  # until nothing moves any more
            async with asyncio.timeout(1.0):
                await loop.sock_sendall(client, bytes(64 << 20))
        assert server.connection_count == 1
        reset_socket(client)
        await eventually(lambda: server.connection_count == 0)
        hold.set()
        server.close()


async def test_a_socket_that_cannot_be_watched_is_reset(pair: tuple[socket.socket, socket.socket]) -> None:
    class Full(LoopReadiness):
        def watch(self, fd: int, wake: Wake) -> None:
            raise OSError(errno.ENOSPC, "too many watches")

    async def hold(stream: Stream) -> None:
        await stream.read(1)

    loop = asyncio.get_running_loop()
    async with overlay_pair() as overlay:
        port = await overlay.b.listen(AddrPort(parse_ip(B4), 0), hold)
        stream, done = await overlay.connect(port), list[Bridge]()
        Bridge(loop, Full(loop), stream, pair[0], overlay.a.kick, overlay.a.now, done.append).start()
        assert len(done) == 1 and pair[0].fileno() == -1


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
