"""The front door: upgrades keep early bytes, everything else reaches aiohttp, on one port."""

import asyncio

from aiohttp import web

from tsd.transport.frontdoor import MAX_HEAD_BYTES, FrontDoor, Upgrade


async def echo(upgrade: Upgrade) -> None:
    if upgrade.headers.get("refuse"):
        upgrade.refuse(400, "no")
        return
    upgrade.accept("Echo", {"X-Target": upgrade.target})
    while chunk := await upgrade.reader.read(4096):
        upgrade.writer.write(chunk)
        await upgrade.writer.drain()


async def say_hello(request: web.Request) -> web.Response:
    return web.Response(text=f"hello {request.path} {(await request.read()).decode()}")


class Door:
    async def __aenter__(self) -> "Door":
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", say_hello)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        self.door = FrontDoor(self.runner.server, {"echo": echo})
        self.at = await self.door.listen("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.door.close()
        await self.runner.cleanup()

    async def talk(self, *parts: bytes, until: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection(str(self.at.ip), self.at.port)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.005)
        if until:
            answer = await reader.readuntil(until)
        else:
            answer = await reader.read()
        writer.close()
        return answer


UPGRADE = b"GET /derp?x=1 HTTP/1.1\r\nHost: h\r\nUpgrade: ECHO\r\nConnection: Upgrade\r\n\r\n"


async def test_bytes_behind_the_head_are_kept() -> None:
    async with Door() as door:
        answer = await door.talk(UPGRADE + b"early", until=b"early")
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert b"X-Target: /derp?x=1\r\n" in answer


async def test_head_in_single_bytes() -> None:
    async with Door() as door:
        answer = await door.talk(*(bytes([byte]) for byte in UPGRADE), b"late", until=b"late")
        assert answer.endswith(b"\r\n\r\nlate")


async def test_ordinary_requests_and_keep_alive() -> None:
    async with Door() as door:
        first = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
        second = b"GET /b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        answer = await door.talk(first, second)
        assert b"hello /a abc" in answer
        assert b"hello /b" in answer


async def test_unknown_upgrade_goes_to_the_web() -> None:
    async with Door() as door:
        answer = await door.talk(b"GET /w HTTP/1.0\r\nHost: h\r\nUpgrade: nothing\r\n\r\n")
        assert b"200 OK" in answer


async def test_refusal_and_garbage() -> None:
    async with Door() as door:
        assert b" 400 Bad Request" in await door.talk(UPGRADE[:-2] + b"Refuse: 1\r\n\r\n")
        assert b" 400 " in await door.talk(b"\x16\x03\x01 upgrade\r\n\r\n")
        assert b" 431 " in await door.talk(b"GET / HTTP/1.1\r\nA: " + b"a" * MAX_HEAD_BYTES)


async def test_a_client_that_speaks_tls_to_a_plain_port_is_told_at_once() -> None:
    async with Door() as door:
        answer = await door.talk(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert answer.startswith(b"HTTP/1.1 400 ") and b"without TLS" in answer
        assert b"hello /late" in await door.talk(b"\r\nGET /late HTTP/1.0\r\n\r\n")


async def test_close_ends_upgraded_connections() -> None:
    async with Door() as door:
        reader, writer = await asyncio.open_connection(str(door.at.ip), door.at.port)
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        await door.door.close()
        assert await reader.read() == b""
        writer.close()
