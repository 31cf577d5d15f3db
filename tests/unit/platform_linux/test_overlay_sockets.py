"""The overlay's sockets beside a TUN: plain ones of the host, bound to our addresses (here: the loopback's)."""

from __future__ import annotations

import asyncio

import pytest

from tsd.base.addr import AddrPort, parse_ip
from tsd.hull import Stream
from tsplatform.linux.net import HostNet

LOOPBACK = parse_ip("127.0.0.1")


async def echo(stream: Stream) -> None:
    while data := await stream.read(1000):
        await stream.write(data)


async def test_streams_are_served_and_closed_when_the_handler_ends() -> None:
    net = HostNet(lambda: [LOOPBACK])
    port = await net.listen(AddrPort(LOOPBACK, 0), echo)
    stream = await net.connect(AddrPort(LOOPBACK, port))
    await stream.write(b"hello")
    assert await stream.read(100) == b"hello"
    await stream.write_eof()
    assert await asyncio.wait_for(stream.read(100), 10) == b""
    stream.close_now()
    net.unlisten(AddrPort(LOOPBACK, port))
    with pytest.raises(OSError):
        await net.connect(AddrPort(LOOPBACK, port))
    net.close()


async def test_a_failing_handler_is_told_and_its_stream_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(stream: Stream) -> None:
        raise ValueError("a bug")

    net = HostNet(lambda: [LOOPBACK])
    port = await net.listen(AddrPort(LOOPBACK, 0), fail)
    stream = await net.connect(AddrPort(LOOPBACK, port))
    assert await asyncio.wait_for(stream.read(100), 10) == b""
    assert "a bug" in caplog.text
    stream.close_now()
    net.close()


async def test_a_taken_port_and_a_missing_family_are_told() -> None:
    net = HostNet(lambda: [LOOPBACK])
    port = await net.listen(AddrPort(LOOPBACK, 0), echo)
    with pytest.raises(OSError):
        await net.listen(AddrPort(LOOPBACK, port), echo)
    with pytest.raises(OSError, match="no IPv6 overlay address"):
        await net.connect(AddrPort(parse_ip("::1"), port))
    datagrams = await net.open_datagram(None)
    datagrams.send(b"to myself", datagrams.local)
    assert (await asyncio.wait_for(datagrams.receive(), 10))[0] == b"to myself"
    datagrams.close()
    net.close()
