"""The memory hull records what it is told and joins hosts by streams."""

from ipaddress import ip_address

import pytest

from tsd.base.addr import AddrPort
from tsd.hull import Frame, LinkState, RouterConfig, Stream
from tsplatform.memory.hull import ManualLinks, MemorySwitch, MemoryTun, RecordingRouter, build_memory_hull

A, B = ip_address("100.64.0.1"), ip_address("100.64.0.2")


async def test_two_hosts_talk_over_the_switch() -> None:
    switch = MemorySwitch()
    one, two = build_memory_hull(A, switch), build_memory_hull(B, switch)

    async def echo(stream: Stream) -> None:
        while data := await stream.read(100):
            await stream.write(data.upper())
        await stream.close()

    port = await two.net.listen(AddrPort(B, 80), echo)
    stream = await one.net.connect(AddrPort(B, port))
    await stream.write(b"hello")
    assert await stream.read(3) == b"HEL"
    assert await stream.read(9) == b"LO"
    await stream.write_eof()
    assert await stream.read(9) == b""
    two.net.unlisten(AddrPort(B, 80))
    with pytest.raises(ConnectionRefusedError):
        await one.net.connect(AddrPort(B, 80))


async def test_abort_resets_the_other_side() -> None:
    switch = MemorySwitch()
    one, two = build_memory_hull(A, switch), build_memory_hull(B, switch)

    async def slam(stream: Stream) -> None:
        stream.abort()

    await two.net.listen(AddrPort(B, 80), slam)
    stream = await one.net.connect(AddrPort(B, 80))
    with pytest.raises(ConnectionResetError):
        await stream.read(1)


async def test_parts_record() -> None:
    hull = build_memory_hull(A)
    tun, router, links = hull.tun, hull.router, hull.links
    assert isinstance(tun, MemoryTun) and isinstance(router, RecordingRouter) and isinstance(links, ManualLinks)
    sent: list[list[Frame]] = []
    tun.attach(sent.append)
    tun.inject([b"packet"])
    tun.deliver([Frame(bytearray(b"in"))])
    assert sent == [[Frame(b"packet")]]
    assert tun.take_delivered() == [Frame(b"in")]
    config = RouterConfig(mtu_bytes=1300)
    router.apply(config)
    router.apply(config)
    assert router.applied == [config]
    links.change(LinkState(default_interface_v4="x"))
    links.wake()
    changes = links.changes()
    assert await anext(changes) == await anext(changes) == LinkState(default_interface_v4="x")
