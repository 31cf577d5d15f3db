"""Cases of section 7 (userspace mode, proxies) that stack, forwarder and proxies answer, plus F14 and W20."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from ipaddress import ip_address, ip_network

import pytest

from harness.netwire import A4, B4, B6, Pair, Wire
from harness.overlaypair import datagram_from, echo_once, eventually, host_server, overlay_pair, read_all, udp_echo
from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.hull import Frame, Stream
from tsd.netstack.stack import Stack
from tsd.netstack.tcp import constants as c
from tsd.packet.build import icmp_echo_request, ip_packet
from tsplatform.userspace import forward
from tsplatform.userspace.proxy import ProxyServer


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_f14_nothing_above_the_mtu_leaves() -> None:
    pair = Pair(Wire(1, loss=0.02), Wire(2))
    client, server = pair.establish()
    client.write(bytes(400_000))
    pair.a.touch(client)
    frames: list[Frame] = []
    pair.a.emit = lambda packet, size: frames.append(Frame(packet, size)) or pair.a._frames.append(frames[-1])  # type: ignore[method-assign,func-returns-value]
    pair.flush()
    pair.run(5.0, until=lambda: server.incoming.next - server.incoming.ready_bytes > 0 and client.in_flight == 0)
    assert frames and all(f.segment_bytes <= 1240 - 12 for f in frames)
    assert any(f.segment_bytes for f in frames)
    assert pair.there.largest_bytes <= 1280


def test_w20_short_inner_packet_with_protocol_tcp() -> None:
    stack = Stack([ip_address(B4)], 1280, SeededEntropy(1))
    for size in range(20):
        stack.receive([Frame(ip_packet(ip_address(A4).packed, ip_address(B4).packed, 6, bytes(size)))], 1.0)
    assert not stack.take_frames() and not stack.take_events()


async def test_u03_open_closed_and_filtered_ports_look_so() -> None:
    async with overlay_pair() as pair, host_server(echo_once) as port:
        stream = await pair.connect(port)
        await stream.close()
        with pytest.raises(ConnectionRefusedError):
            await pair.connect(free_port())
        pair.b.set_subnets([ip_network("127.8.0.0/16")])
        with pytest.raises(ConnectionRefusedError):
            await pair.connect(free_port(), "127.8.0.1")
        full = socket.create_server(("127.9.0.1", 0), backlog=0)
        pair.b.set_subnets([ip_network("127.9.0.0/16")])
        stuck = [socket.socket() for _ in range(4)]
        for sock in stuck:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        with pytest.raises(TimeoutError):  # the backend never accepts: no SYN-ACK
            await pair.connect(full.getsockname()[1], "127.9.0.1", 1.0)
        for sock in (*stuck, full):
            sock.close()


async def test_u03_a_server_on_the_ipv6_loopback_alone_is_reached() -> None:
    """As many development servers are, since that is what "localhost" means first to them."""
    if not has_ipv6_loopback():
        pytest.skip("this host has no ::1")
    async with overlay_pair() as pair:
        server = await asyncio.start_server(echo_once, "::1", 0)
        port = server.sockets[0].getsockname()[1]
        stream = await pair.connect(port)
        await stream.write(b"hello")
        assert await stream.read(5) == b"hello"
        stream.abort()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await pair.connect(port)


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def socks5_associate(proxy: AddrPort) -> tuple[socket.socket, AddrPort]:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    await loop.sock_connect(sock, (str(proxy.ip), proxy.port))
    await loop.sock_sendall(sock, b"\x05\x01\x00\x05\x03\x00\x01\0\0\0\0\0\0")
    data = b""
    while len(data) < 12:
        data += await loop.sock_recv(sock, 100)
    assert data[:4] == b"\x05\x00\x05\x00"
    return sock, AddrPort(ip_address(data[6:10]), int.from_bytes(data[10:12], "big"))


async def test_u04_udp_associate() -> None:
    async with overlay_pair() as pair, udp_echo() as (port, _):
        server = ProxyServer(pair, pair.a, frozenset({"socks5"}))
        proxy = server.start("127.0.0.1:0")
        control, relay = await socks5_associate(proxy)
        loop = asyncio.get_running_loop()
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.setblocking(False)
        udp.bind(("127.0.0.1", 0))
        where = (str(relay.ip), relay.port)
        tail = port.to_bytes(2, "big")
        targets = {
            b"\x01" + ip_address(B4).packed: ip_address(B4),
            b"\x04" + ip_address(B6).packed: ip_address(B6),
            b"\x03\x04peer": ip_address(B4),
        }
        for number, (target, answered_by) in enumerate(targets.items()):
            udp.sendto(b"\0\0\0" + target + tail + b"ping%d" % number, where)
            data = await datagram_from(udp)
            assert data.endswith(b"ping%d" % number) and data[:3] == b"\0\0\0"
            assert data[4 : 4 + len(answered_by.packed)] == answered_by.packed
        big = os.urandom(5000)
        udp.sendto(b"\0\0\0\x01" + ip_address(B4).packed + tail + big, where)
        data = await datagram_from(udp)
        assert data[10:] == big
        stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.sendto(b"\0\0\1\x01" + ip_address(B4).packed + tail + b"fragment", where)
        stranger.sendto(b"\0\0\0\x01" + ip_address(B4).packed + tail + b"stranger", where)
        with pytest.raises(TimeoutError):
            await datagram_from(udp, 0.3)
        control.close()
        await eventually(lambda: server.connection_count == 0)
        udp.sendto(b"late", where)
        for sock in (udp, stranger):
            sock.close()
        bind = socket.socket()
        bind.setblocking(False)
        await loop.sock_connect(bind, (str(proxy.ip), proxy.port))
        await loop.sock_sendall(bind, b"\x05\x01\x00\x05\x02\x00\x01\0\0\0\0\0\0")
        reply = b""
        while len(reply) < 12:
            reply += await loop.sock_recv(bind, 100)
        assert reply[3] == 7
        bind.close()
        server.close()


async def test_u06_both_directions_at_once_and_many_short_ones() -> None:
    async with overlay_pair() as pair, host_server(echo_once) as port:
        data = os.urandom(1 << 20) * 8

        async def feed(stream: Stream) -> None:
            await stream.write(data)
            await stream.write_eof()

        stream = await pair.connect(port)
        _, back = await asyncio.gather(feed(stream), read_all(stream))
        assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()

        async def short(number: int) -> bool:
            one = await pair.connect(port)
            await one.write(b"%d" % number)
            await one.write_eof()
            answer = await read_all(one)
            await one.close()
            return answer == b"%d" % number

        assert all(await asyncio.gather(*(short(n) for n in range(500))))
        await eventually(lambda: pair.b.forwarder.connection_count == 0 and pair.a.stack.connection_count == 0)
        assert not pair.b.forwarder.origins


async def test_u07_address_and_route_updates_leave_connections_alone() -> None:
    async with overlay_pair() as pair, host_server(echo_once) as port:
        data = os.urandom(300_000) * 10

        async def transfer() -> bool:
            stream = await pair.connect(port)

            async def feed() -> None:
                await stream.write(data)
                await stream.write_eof()

            _, back = await asyncio.gather(feed(), read_all(stream))
            return back == data

        async def updates() -> None:
            for number in range(1000):
                extra = [ip_address("100.64.7.7")] if number % 2 else []
                pair.b.set_addresses([ip_address(B4), ip_address(B6), *extra])
                pair.b.set_subnets([ip_network(f"10.{number % 200}.0.0/16")])
                await asyncio.sleep(0.001)

        updating = asyncio.ensure_future(updates())
        assert all(await asyncio.gather(*(transfer() for _ in range(10))))
        updating.cancel()


async def test_u08_half_close_is_carried_through() -> None:
    answer = os.urandom(1 << 20) * 10

    async def slow_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"GET"
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with overlay_pair() as pair, host_server(slow_answer) as port:
        stream = await pair.connect(port)
        await stream.write(b"GET")
        await stream.write_eof()
        assert hashlib.sha256(await read_all(stream)).digest() == hashlib.sha256(answer).digest()
        await stream.close()
        await eventually(lambda: pair.b.forwarder.connection_count == 0)


async def test_u08_reset_is_carried_as_reset_both_ways() -> None:
    seen: list[str] = []

    async def resetting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = await reader.read(1)
        if kind == b"r":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return
        try:
            while await reader.read(1000):
                pass
            seen.append("eof")
        except ConnectionResetError:
            seen.append("reset")
        writer.close()

    async with overlay_pair() as pair, host_server(resetting) as port:
        stream = await pair.connect(port)
        await stream.write(b"r")
        with pytest.raises(ConnectionResetError):
            await read_all(stream)
        stream = await pair.connect(port)
        await stream.write(b"k" * 10)
        await asyncio.sleep(0.05)
        stream.abort()
        await eventually(lambda: bool(seen))
        assert seen == ["reset"]
        await eventually(lambda: pair.b.forwarder.connection_count == 0 and pair.b.stack.connection_count == 0)


async def test_u09_fragmented_udp_and_subnet_echo() -> None:
    async with overlay_pair() as pair, udp_echo() as (port, _):
        datagrams = await pair.a.open_datagram(None)
        payload = os.urandom(4000)
        datagrams.send(payload, AddrPort(ip_address(B4), port))
        data, _ = await asyncio.wait_for(datagrams.receive(), 5)
        assert data == payload
        pair.b.set_subnets([ip_network("127.7.0.0/16")])
        replies: list[bytes] = []
        original = pair.a.stack.receive
        pair.a.stack.receive = lambda frames, now: (
            replies.extend(bytes(f.packet) for f in frames),
            original(frames, now),
        )[1]  # type: ignore[method-assign,func-returns-value]
        request = icmp_echo_request(ip_address(A4).packed, ip_address("127.7.0.1").packed, 5, 6, b"data")
        pair.a.stack.datagrams.emit_packet(request)
        pair.a.kick()
        try:
            await eventually(lambda: bool(replies) or bool(pair.b.forwarder.health))
        except AssertionError:
            pytest.fail("neither an echo reply nor a health text")
        if not pair.b.forwarder.health:
            assert replies[0][20] == 0 and replies[0].endswith(b"data")


async def test_u10_udp_flows_expire_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MAX_UDP_FLOWS", 50)
    async with overlay_pair() as pair, udp_echo() as (port, echo):
        now = [pair.b.now()]
        monkeypatch.setattr(pair.b, "now", lambda: now[0])
        stack = pair.a.stack
        for number in range(200):
            stack.datagrams.send(AddrPort(ip_address(A4), 10000 + number), AddrPort(ip_address(B4), port), b"x")
            pair.a.kick()
            await asyncio.sleep(0)
        await eventually(lambda: echo.count >= 150)
        assert len(pair.b.forwarder._flows) == 50
        assert len(pair.b.forwarder.origins) == 50
        now[0] += 121
        pair.b.forwarder._sweep()
        assert not pair.b.forwarder._flows and not pair.b.forwarder.origins
    assert forward.UDP_IDLE_S == 120 and forward.UDP_IDLE_DNS_S == 30


async def test_u11_listen_on_every_kind_of_address() -> None:
    async with overlay_pair() as pair:

        async def handler(stream: Stream) -> None:
            await stream.write(b"hello")

        for local, dialled in (
            (AddrPort(ip_address("0.0.0.0"), 80), B4),
            (AddrPort(ip_address("::"), 81), B6),
            (AddrPort(ip_address(B4), 82), B4),
            (AddrPort(ip_address("0.0.0.0"), 0), B6),
        ):
            port = await pair.b.listen(local, handler)
            stream = await pair.connect(port, dialled)
            assert await read_all(stream) == b"hello"
            await stream.close()
            with pytest.raises(OSError):
                await pair.b.listen(AddrPort(local.ip, port), handler)
        with pytest.raises(OSError):
            await pair.b.listen(AddrPort(ip_address("8.8.8.8"), 80), handler)
        pair.b.unlisten(AddrPort(ip_address(B4), 82))
        with pytest.raises(ConnectionRefusedError):
            await pair.connect(82)
        assert c.STATE_NAMES[c.ESTABLISHED] == "ESTABLISHED"
