"""The SOCKS5 and HTTP proxies with curl and with hand-made clients, and the inbound forwarder's WhoIs table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness.netwire import A4
from harness.overlaypair import OverlayPair, echo_once, eventually, host_server, overlay_pair, udp_echo
from harness.trafficserver import reset
from tsd.base.addr import AddrPort, parse_ip
from tsplatform.userspace.proxy import ProxyServer

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
BODY = bytes(range(256)) * 4000


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A small HTTP/1.1 server: / answers with a length, /chunked, /close without; POST echoes."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            method, path, _ = head.split(b" ", 2)
            assert b"proxy-" not in head.lower()
            if method == b"POST":
                lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if b"expect: 100-continue" in head.lower():
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(lines[0].split(b":")[1]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            elif path == b"/chunked":
                writer.write(
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=1\r\n world\r\n0\r\n\r\n"
                )
            elif path == b"/close":
                writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + BODY)
                break
            elif path == b"/upgrade":
                writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\n")
                writer.write(await reader.readexactly(4))
                break
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsmall\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[OverlayPair, ProxyServer, AddrPort, int]]:
    async with overlay_pair() as pair, host_server(web) as port:
        server = ProxyServer(pair, pair.a, frozenset({"socks5", "http"}))
        address = server.start("127.0.0.1:0")
        try:
            yield pair, server, address, port
        finally:
            server.close()


async def curl(*args: str) -> tuple[bytes, str, int]:
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    out, err = await process.communicate()
    return out, err.decode(), process.returncode or 0


@needs_curl
@pytest.mark.parametrize("scheme", ["socks5h", "http", "tunnel"])
async def test_curl(scheme: str, tmp_path: Path) -> None:
    async with proxied() as (_, server, proxy, port):
        via = ["-x", f"http://{proxy}", "-p"] if scheme == "tunnel" else ["-x", f"{scheme}://{proxy}"]
        base = f"http://peer:{port}"
        assert await curl(*via, f"{base}/", f"{base}/") == (b"small\n" * 2, "", 0)
        assert (await curl(*via, f"{base}/chunked"))[0] == b"hello world"
        assert (await curl(*via, f"{base}/close"))[0] == BODY
        (tmp_path / "body").write_bytes(BODY)
        out, _, _ = await curl(*via, "--data-binary", f"@{tmp_path / 'body'}", "-H", "Expect: 100-continue", f"{base}/")
        assert out == BODY
        out, _, _ = await curl(*via, "-I", f"http://peer6:{port}/")
        assert out.startswith(b"HTTP/1.1 200")
        await eventually(lambda: server.connection_count == 0)


@needs_curl
async def test_curl_sees_failures() -> None:
    async with proxied() as (_, _, proxy, _):
        out, _, _ = await curl("-i", "-x", f"http://{proxy}", "http://peer:1/")
        assert out.startswith(b"HTTP/1.1 502") and b"Tailscale-Connect-Error: " in out and b"refused" in out
        out, _, code = await curl("-i", "-p", "-x", f"http://{proxy}", "http://peer:1/")
        assert code and out.startswith(b"HTTP/1.1 500") and b"Tailscale-Connect-Error: " in out
        _, err, code = await curl("-x", f"socks5h://{proxy}", "http://peer:1/")
        assert code and "(5)" in err
        out, _, _ = await curl("-i", "-x", f"http://{proxy}", "http://nowhere/")
        assert b"Name or service not known" in out


async def talk(proxy: AddrPort, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(str(proxy.ip), proxy.port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_two_hundred_requests_at_once() -> None:
    async with proxied() as (pair, server, proxy, port):
        request = b"GET http://peer:%d/ HTTP/1.1\r\nHost: peer\r\nProxy-Connection: close\r\n\r\n" % port
        answers = await asyncio.gather(*(talk(proxy, request) for _ in range(200)))
        assert all(answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"small\n") for answer in answers)
        await eventually(lambda: server.connection_count == 0 and pair.a.stack.connection_count == 0)
        assert pair.b.forwarder.connection_count == 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"CONNECT peer:99999 HTTP/1.1\r\n\r\n",
        b"POST http://peer/ HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST http://peer/ HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"GET http://peer/ HTTP/1.1\r\nBad Header : x\r\n\r\n",
        b"GET http://peer/ HTTP/1.1\r\nX: " + b"y" * 70000,
        b"GET http://peer/ HTTP/1.1\nX: a\rb\n\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a client that speaks TLS to the proxy
        b"\x04\x01\x00\x50\x64\x40\x00\x02\x00",  # SOCKS4
    ],
)
async def test_bad_requests(request_bytes: bytes) -> None:
    async with proxied() as (_, _, proxy, _):
        assert (await talk(proxy, request_bytes)).startswith(b"HTTP/1.1 400")


async def test_heads_of_careless_clients() -> None:
    async with proxied() as (_, _, proxy, port):
        for sent in (
            b"\r\nGET http://peer:%d/ HTTP/1.1\r\nHost: peer\r\n\r\n\r\nGET http://peer:%d/ HTTP/1.0\r\n\r\n",
            b"GET http://peer:%d/ HTTP/1.1\nHost: peer\n\nGET http://peer:%d/ HTTP/1.0\n\n",
        ):
            answer = await talk(proxy, sent % (port, port))
            assert answer.count(b"HTTP/1.1 200") == answer.count(b"small\n") == 2


async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a POST without having read its body; /echo answers the head at once and returns the body as it comes."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.split(b" ")[1] == b"/echo":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n")
        for _ in range(2):
            writer.write(await reader.readexactly(3))
    else:
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 3\r\n\r\nno\n")
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        await reader.read()
    writer.close()


async def test_an_answer_before_the_body_is_passed_on_at_once() -> None:
    async with overlay_pair() as pair, host_server(refusing) as port:
        server = ProxyServer(pair, pair.a, frozenset({"http"}))
        proxy = server.start("127.0.0.1:0")
        try:
            for extra in (b"", b"Expect: 100-continue\r\n"):
                post = b"POST http://peer:%d/ HTTP/1.1\r\n%sContent-Length: 900\r\n\r\n" % (port, extra)
                async with asyncio.timeout(20):
                    answer = await talk(proxy, post)
                assert answer.startswith(b"HTTP/1.1 401 ") and answer.endswith(b"\r\n\r\nno\n")
                assert b"connection: close" in answer.lower()
            reader, writer = await asyncio.open_connection(str(proxy.ip), proxy.port)
            writer.write(b"POST http://peer:%d/echo HTTP/1.1\r\nContent-Length: 6\r\n\r\none" % port)
            async with asyncio.timeout(20):
                assert (await reader.readuntil(b"one")).startswith(b"HTTP/1.1 200 ")
                writer.write(b"two")
                assert await reader.readexactly(3) == b"two"
            writer.close()
        finally:
            server.close()


async def test_upgrade_through_plain_proxy() -> None:
    async with proxied() as (_, _, proxy, port):
        reader, writer = await asyncio.open_connection(str(proxy.ip), proxy.port)
        writer.write(b"GET http://peer:%d/upgrade HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n" % port)
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"abcd")
        assert await asyncio.wait_for(reader.readexactly(4), 5) == b"abcd"
        writer.close()


async def test_socks_with_early_data_and_bad_greetings() -> None:
    async with overlay_pair() as pair, host_server(echo_once) as port:
        server = ProxyServer(pair, pair.a, frozenset({"socks5"}))
        proxy = server.start("127.0.0.1:0")
        connect = b"\x05\x01\x00\x03\x04peer" + port.to_bytes(2, "big")
        reader, writer = await asyncio.open_connection(str(proxy.ip), proxy.port)
        writer.write(b"\x05\x01\x00" + connect + b"early")
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer[:4] == b"\x05\x00\x05\x00" and answer.endswith(b"early")
        writer.close()
        assert await talk(proxy, b"\x05\x01\x02") == b"\x05\xff"
        assert (await talk(proxy, b"\x05\x01\x00\x05\x01\x00\x09"))[3:4] == b"\x08"
        assert await talk(proxy, b"GET http://peer/ HTTP/1.1\r\n\r\n") == b""
        server.close()


async def test_socks_to_port_zero_fails_at_once() -> None:
    async with proxied() as (_, _, proxy, _):
        answer = await talk(proxy, b"\x05\x01\x00\x05\x01\x00\x03\x04peer\x00\x00")
        assert answer[:4] == b"\x05\x00\x05\x01"


async def test_whois_of_forwarded_flows() -> None:
    seen: list[tuple[str, int]] = []

    async def remember(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peername")[:2])
        await reader.read()
        writer.close()

    async with overlay_pair() as pair, host_server(remember) as port, udp_echo() as (udp_port, echo):
        stream = await pair.connect(port)
        await eventually(lambda: bool(seen))
        host = AddrPort(parse_ip(seen[0][0]), seen[0][1])
        assert pair.b.proxy_origin("tcp", host) == stream.local
        assert stream.local.ip == parse_ip(A4)
        await stream.close()
        await eventually(lambda: pair.b.proxy_origin("tcp", host) is None)
        datagrams = await pair.a.open_datagram(None)
        datagrams.send(b"hello", AddrPort(stream.remote.ip, udp_port))
        assert (await asyncio.wait_for(datagrams.receive(), 5))[0] == b"hello"
        source = AddrPort(parse_ip(echo.sources[0][0]), echo.sources[0][1])
        assert pair.b.proxy_origin("udp", source) == datagrams.local
        datagrams.close()


async def test_killed_client_leaves_nothing() -> None:
    async with overlay_pair() as pair, host_server(echo_once) as port:
        server = ProxyServer(pair, pair.a, frozenset({"http"}))
        proxy = server.start("127.0.0.1:0")
        reader, writer = await asyncio.open_connection(str(proxy.ip), proxy.port)
        writer.write(b"CONNECT peer:%d HTTP/1.1\r\n\r\n" % port)
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes(3_000_000))
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await eventually(lambda: server.connection_count == 0)
        await eventually(lambda: pair.b.forwarder.connection_count == 0 and pair.b.stack.connection_count == 0)
        server.close()


async def test_connect_timeout_and_cancel_leave_nothing() -> None:
    async with overlay_pair() as pair:
        pair.is_cut = True
        with pytest.raises(TimeoutError):
            await pair.connect(80, timeout_s=0.05)
        task = asyncio.ensure_future(pair.connect(81))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.a.stack.connection_count == 0


async def test_slow_reader_bounds_memory_and_resumes() -> None:
    async with overlay_pair() as pair, host_server(echo_once) as port:
        stream = await pair.connect(port)
        written = 0

        async def feed() -> None:
            nonlocal written
            for _ in range(400):
                await stream.write(bytes(100_000))
                written += 100_000
            await stream.write_eof()

        feeding = asyncio.ensure_future(feed())
        await asyncio.sleep(0.7)
        assert written < 39_000_000 and not feeding.done()
        got = 0
        while data := await asyncio.wait_for(stream.read(1 << 20), 10):
            got += len(data)
        await feeding
        assert got == 40_000_000


async def test_own_address_is_reached_without_leaving() -> None:
    async with overlay_pair() as pair, host_server(echo_once) as port, udp_echo() as (udp_port, _):
        pair.is_cut = True
        stream = await pair.connect(port, A4)
        await stream.write(b"to myself")
        await stream.write_eof()
        assert await stream.read(100) == b"to myself"
        await stream.close()
        datagrams = await pair.a.open_datagram(None)
        datagrams.send(b"hello", AddrPort(parse_ip(A4), udp_port))
        assert (await asyncio.wait_for(datagrams.receive(), 5))[0] == b"hello"


@pytest.mark.parametrize("size", [0, 1, 16_384, 50_000, 600_000])
async def test_a_reset_behind_data_is_noticed(size: int) -> None:
    """The data and the RST of a host's server may be there at once when the event loop looks."""

    async def send_and_reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(size))
        await writer.drain()
        reset(writer)

    async with overlay_pair() as pair, host_server(send_and_reset) as port:
        for _ in range(20):
            stream = await pair.connect(port)
            with pytest.raises(ConnectionResetError):
                async with asyncio.timeout(10):
                    while await stream.read(1 << 18):
                        pass
        await eventually(lambda: pair.b.forwarder.connection_count == 0)
