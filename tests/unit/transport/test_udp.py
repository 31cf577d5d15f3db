"""The UDP socket over loopback, on asyncio and uvloop."""

import asyncio
import errno
from ipaddress import IPv4Address, IPv6Address

import pytest
import uvloop

from tsd.base.addr import AddrPort
from tsd.base.errors import HullError
from tsd.transport.udp import UdpSocket

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def local(port: int) -> AddrPort:
    return AddrPort(IPv4Address("127.0.0.1"), port)


def run(factory, main) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(main(), 10))


class Sink:
    def __init__(self) -> None:
        self.datagrams: list[bytes] = []
        self.batches = 0
        self.sources: set[AddrPort] = set()

    def __call__(self, view: memoryview, size: int, source: AddrPort) -> None:
        raw = bytes(view)
        self.batches += 1
        self.sources.add(source)
        step = size or len(raw) or 1
        self.datagrams += [raw[i : i + step] for i in range(0, max(len(raw), 1), step)]

    async def wait(self, count: int) -> None:
        while len(self.datagrams) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("factory", LOOPS)
@pytest.mark.parametrize("offload", [True, False])
def test_batches_arrive_whole(factory, offload):
    async def main() -> None:
        sink = Sink()
        a = UdpSocket(4, 0, lambda s: None, lambda *x: None, offload=offload)
        b = UdpSocket(4, 0, lambda s: None, sink, host="127.0.0.1", offload=offload)
        sent = [bytes([i]) * 1000 for i in range(40)] + [b"tail"]
        assert a.send(b"".join(sent), 1000, local(b.port))
        assert (
            a.send(b"one", 0, local(b.port)) and a.send(b"", 0, local(b.port)) and a.send(b"x" * 1000, 0, local(b.port))
        )
        await sink.wait(44)
        assert sink.datagrams == [*sent, b"one", b"", b"x" * 1000]
        assert sink.sources == {local(a.port)} and sink.batches <= 5
        a.close()
        b.close()
        b.close()
        assert not a.send(b"x", 0, local(b.port))

    run(factory, main)


class Refusing:
    """A socket whose sends fail as told, once each."""

    def __init__(self, sock, errors: list[int]) -> None:
        self._sock, self.errors, self.calls = sock, errors, []

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def _maybe_fail(self, kind: str) -> None:
        self.calls.append(kind)
        if self.errors and (number := self.errors.pop(0)):
            raise OSError(number, "told to")

    def sendmsg(self, *args):
        self._maybe_fail("sendmsg")
        return self._sock.sendmsg(*args)

    def sendto(self, *args):
        self._maybe_fail("sendto")
        return self._sock.sendto(*args)


@pytest.mark.parametrize("factory", LOOPS)
def test_w07_errors_are_reported_per_destination(factory):
    async def main() -> None:
        errors, sink = [], Sink()
        a = UdpSocket(4, 0, lambda s: None, lambda *x: None, on_error=lambda to, number: errors.append((to, number)))
        b = UdpSocket(4, 0, lambda s: None, sink)
        a._sock = Refusing(a._sock, [errno.ENETUNREACH, errno.EPERM])
        assert not a.send(b"1", 0, AddrPort(IPv4Address("192.0.2.9"), 9))
        assert not a.send(b"2", 0, AddrPort(IPv4Address("192.0.2.9"), 10))
        assert a.send(b"3", 0, local(b.port))
        await sink.wait(1)
        assert [n for _, n in errors] == [errno.ENETUNREACH, errno.EPERM]
        a.close()
        b.close()

    run(factory, main)


@pytest.mark.parametrize("factory", LOOPS)
def test_eio_turns_segmentation_off_for_good(factory):
    async def main() -> None:
        sink = Sink()
        a = UdpSocket(4, 0, lambda s: None, lambda *x: None)
        b = UdpSocket(4, 0, lambda s: None, sink)
        if not a.has_gso:
            pytest.skip("kernel has no UDP_SEGMENT")
        a._sock = Refusing(a._sock, [errno.EIO])
        assert a.send(b"aabbc", 2, local(b.port))
        assert a.send(b"ddee", 2, local(b.port))
        await sink.wait(5)
        assert sorted(sink.datagrams) == [b"aa", b"bb", b"c", b"dd", b"ee"]
        assert not a.has_gso and a._sock.calls == ["sendmsg"] + ["sendto"] * 5
        a.close()
        b.close()

    run(factory, main)


@pytest.mark.parametrize("factory", LOOPS)
def test_full_buffers_queue_in_order_and_are_bounded(factory):
    async def main() -> None:
        sink = Sink()
        a = UdpSocket(4, 0, lambda s: None, lambda *x: None)
        b = UdpSocket(4, 0, lambda s: None, sink)
        a._sock = Refusing(a._sock, [errno.EAGAIN, 0, errno.ENOBUFS])
        for i in range(5):
            assert a.send(bytes([i]), 0, local(b.port))
        await sink.wait(5)
        assert sink.datagrams == [bytes([i]) for i in range(5)]
        a._sock.errors = [errno.EAGAIN]
        results = [a.send(bytes(60000), 1000, local(b.port)) for _ in range(30)]
        assert results[0] and not results[-1] and a.drops["send queue full"] % 60 == 0 and a.drops["send queue full"]
        a.close()
        b.close()

    run(factory, main)


@pytest.mark.parametrize("factory", LOOPS)
def test_ipv6_and_bind_conflicts(factory):
    async def main() -> None:
        sink = Sink()
        a = UdpSocket(6, 0, lambda s: None, lambda *x: None)
        b = UdpSocket(6, 0, lambda s: None, sink)
        assert a.send(b"six", 0, AddrPort(IPv6Address("::1"), b.port))
        await sink.wait(1)
        assert sink.sources == {AddrPort(IPv6Address("::1"), a.port)}
        with pytest.raises(HullError, match="another process"):
            UdpSocket(6, a.port, lambda s: None, sink)
        a.close()
        b.close()

    run(factory, main)
