"""The debug server: metrics over HTTP, and nothing for rubbish."""

import asyncio

import pytest

from tsd.daemon.compose import listen_failure
from tsd.daemon.debugserver import DebugServer

PAGES = {"/debug/metrics": lambda: "engine 1\n", "/metrics": lambda: "user 2\n"}


async def ask(where: str, request: bytes) -> bytes:
    host, _, port = where.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_pages_methods_and_rubbish() -> None:
    server = DebugServer(PAGES)
    where = await server.start("127.0.0.1:0")
    try:
        answer = await ask(where, b"GET /debug/metrics?x=1 HTTP/1.1\r\nHost: h\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\nengine 1\n")
        answer = await ask(where, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert b"Content-Length: 7\r\n" in answer and answer.endswith(b"\r\n\r\n")
        assert (await ask(where, b"GET /other HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await ask(where, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert (await ask(where, b"\xff\x00\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert await ask(where, b"GET /metrics HTTP/1.1\r\n") == b""
        assert await ask(where, b"x" * 100_000) == b""
    finally:
        server.close()


@pytest.mark.parametrize(
    ("listen", "reason"),
    [("127.0.0.1:{taken}", "Address already in use (another process may hold the port)"), ("no.such.invalid:1", "")],
)
async def test_an_address_that_cannot_be_had_is_named(listen: str, reason: str) -> None:
    first = DebugServer(PAGES)
    taken = (await first.start("127.0.0.1:0")).rpartition(":")[2]
    listen = listen.format(taken=taken)
    try:
        with pytest.raises(OSError) as caught:
            await DebugServer(PAGES).start(listen)
    finally:
        first.close()
    text = str(listen_failure(listen, caught.value))
    assert text.startswith(f"listen on {listen}: ") and text.endswith(reason)
    assert "Errno" not in text and "Unknown error" not in text
