"""ControlClient against a server made of our own server-side pieces."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from harness.control_double import ControlDouble, Json, node_json
from tsd.base.addr import parse_ip
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ControlError
from tsd.base.keys import MachinePrivate
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import RegisterRequest
from tsd.transport import map_stream
from tsd.transport.control import ControlClient

MACHINE = MachinePrivate.generate(SeededEntropy("machine"))
NODE_KEY = "nodekey:" + "ab" * 32


def client_of(url: str) -> ControlClient:
    return ControlClient(url, MACHINE, entropy=SeededEntropy("client"), environ={})


@pytest.mark.parametrize("early", [None, b"{}", b'{"nodeKeyChallenge":"' + b"x" * 9000 + b'"}'])
async def test_register_and_keys(early: bytes | None) -> None:
    async with ControlDouble(early_payload=early) as server:
        client = client_of(server.url + "/")
        assert await client.fetch_key() == server.static.public()
        answer = await client.register(RegisterRequest(node_key=NODE_KEY))
        assert answer.login.login_name == "u@example.com"
        assert server.registrations[0]["NodeKey"] == NODE_KEY
        assert server.handshakes == 1
        await client.close()


async def test_path_prefix_is_kept() -> None:
    async with ControlDouble() as server:
        client = client_of(server.url + "/vpn/")
        await client.register(RegisterRequest(node_key=NODE_KEY))
        assert client.server.path == "/vpn"
        await client.close()


@pytest.mark.parametrize("compress", ["zstd", ""])
async def test_map_stream(compress: str) -> None:
    async with ControlDouble() as server:

        async def messages(request: Json) -> AsyncIterator[bytes | Json]:
            yield {"Node": node_json(1), "Peers": [node_json(n) for n in range(2, 1002)]}
            yield b'{"KeepAlive":true}'
            yield b'{"KeepAlive":true}'
            yield {"PeersRemoved": [3]}

        server.on_map = messages
        client = client_of(server.url)
        stream = await client.poll(MapRequest(node_key=NODE_KEY, stream=True, compress=compress))
        got = [message async for message in stream]
        assert len(got[0].peers or ()) == 1000
        assert [message.keep_alive for message in got] == [False, True, True, False]
        assert got[3].peers_removed == (3,)
        await stream.close()
        await client.close()


async def test_lite_update_beside_a_poll_and_large_bodies() -> None:
    async with ControlDouble() as server:
        client = client_of(server.url)
        stream = await client.poll(MapRequest(node_key=NODE_KEY, stream=True))
        assert (await anext(stream)).node is not None
        await client.update(MapRequest(node_key=NODE_KEY, omit_peers=True, debug_flags=("x" * 200_000,)))
        assert len(server.updates[0]["DebugFlags"][0]) == 200_000
        assert server.handshakes == 1
        await stream.close()
        await client.close()


async def test_many_requests_at_once() -> None:
    async with ControlDouble() as server:
        client = client_of(server.url)
        answers = await asyncio.gather(*(client.post(f"/x/{n}", b"y" * 10_000) for n in range(300)))
        assert {answer.status for answer in answers} == {200}
        assert len(server.posts) == 300
        await client.close()


async def test_oversized_body_is_refused_not_fatal() -> None:
    async with ControlDouble() as server:
        client = client_of(server.url)
        assert (await client.post("/x", bytes((1 << 20) + 1))).status == 413
        assert (await client.post("/x", b"ok")).status == 200
        await client.close()


async def test_goaway_ends_the_poll_and_the_next_request_redials() -> None:
    async with ControlDouble() as server:
        client = client_of(server.url)
        stream = await client.poll(MapRequest(node_key=NODE_KEY, stream=True))
        await anext(stream)
        server.connections[0].close()
        with pytest.raises(ControlError, match=r"broke off.*GOAWAY"):
            await anext(stream)
        await client.update(MapRequest(node_key=NODE_KEY))
        assert server.handshakes == 2
        await client.close()


async def test_n06_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ControlDouble() as server:
        client = client_of(server.url)
        stream = await client.poll(MapRequest(node_key=NODE_KEY, stream=True))
        stream._watchdog_s = 0.05
        await anext(stream)
        with pytest.raises(ControlError, match="silent"):
            await anext(stream)
        assert map_stream.WATCHDOG_S == 120
        await client.close()


async def test_cancelled_followup_resets_the_stream() -> None:
    async with ControlDouble() as server:
        held = asyncio.Event()
        ended = asyncio.Event()

        async def hold(request: Json) -> Json:
            held.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return {}

        server.on_register = hold
        client = client_of(server.url)
        task = asyncio.create_task(client.register(RegisterRequest(node_key=NODE_KEY, followup="x"), timeout_s=None))
        await asyncio.wait_for(held.wait(), 2)
        task.cancel()
        await asyncio.wait_for(ended.wait(), 2)
        assert (await client.post("/x", b"")).status == 200
        await client.close()


async def test_refused_handshake_is_said_and_the_key_fetched_again() -> None:
    async with ControlDouble() as server:
        client = client_of(server.url)
        await client.fetch_key()
        server.static = MachinePrivate.generate(SeededEntropy("new key"))
        with pytest.raises(ControlError, match="refused the Noise handshake: 'noise: auth"):
            await client.register(RegisterRequest(node_key=NODE_KEY))
        await client.register(RegisterRequest(node_key=NODE_KEY))
        await client.close()


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("57", 57, 63), ("Wed, 21 Oct 2026 07:28:00 GMT", 5, 10), ("-1", 5, 10), ("999999999", 5, 10),
        ("", 5, 10), ("soon", 5, 10),
    ],
)  # fmt: skip
async def test_n25_rate_limits(header: str, low: float, high: float) -> None:
    async with ControlDouble() as server:

        async def limited(request: Json) -> tuple[int, str, dict[str, str]]:
            return 429, "slow down", {"retry-after": header} if header else {}

        server.on_register = limited
        client = client_of(server.url)
        with pytest.raises(ControlError, match="429: slow down") as caught:
            await client.register(RegisterRequest(node_key=NODE_KEY))
        assert low <= caught.value.retry_after_s <= high
        server.map_status = (429, "", {"retry-after": "999999999"})
        with pytest.raises(ControlError) as caught:
            await client.poll(MapRequest(node_key=NODE_KEY, stream=True))
        assert 300 <= caught.value.retry_after_s <= 305
        await client.close()


async def answering(*answers: bytes) -> tuple[asyncio.Server, str]:
    """A server that gives the same raw answer to everything but /key."""
    key = b'{"publicKey":"mkey:' + b"07" * 32 + b'"}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/key" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(key), key))
        else:
            writer.write(answers[0])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


ANSWERS = {
    "301": b"HTTP/1.1 301 Moved\r\nLocation: https://h/ts2021\r\nContent-Length: 0\r\n\r\n",
    "400": b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n",
    "405": b"HTTP/1.1 405 No\r\nContent-Length: 0\r\n\r\n",
    "426": b"HTTP/1.1 426 No\r\nContent-Length: 0\r\n\r\n",
    "500": b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    "502": b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
    "html": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    "other protocol": b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    "101 and end": b"HTTP/1.1 101 S\r\nUpgrade: tailscale-control-protocol\r\nConnection: upgrade\r\n\r\n",
    "nothing": b"",
    "garbage": b"SSH-2.0-x\r\n\r\n",
}


async def test_n17_every_wrong_answer_has_its_own_text() -> None:
    texts = {}
    for name, answer in ANSWERS.items():
        server, url = await answering(answer)
        client = client_of(url)
        with pytest.raises(ControlError) as caught:
            await client.register(RegisterRequest(node_key=NODE_KEY))
        texts[name] = str(caught.value)
        assert caught.value.retryable
        server.close()
    assert len(set(texts.values())) == len(ANSWERS), texts
    assert "https://h/ts2021" in texts["301"]
    assert "web site" in texts["html"]
    assert texts["nothing"] == "the server closed the connection without an answer (HTTP)"
    assert texts["garbage"].startswith("the server does not speak HTTP: ")


async def test_errors_name_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = asyncio.get_running_loop().getaddrinfo

    async def resolve(host: str, port: int, **kwargs: int) -> object:
        if host == "no-such-host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return await real(host, port, **kwargs)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    for url, layer in (("http://127.0.0.1:1", "(TCP)"), ("http://no-such-host.invalid", "(DNS)")):
        with pytest.raises(ControlError) as caught:
            await client_of(url).fetch_key()
        assert layer in str(caught.value) and "call failed" not in str(caught.value)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with pytest.raises(ControlError, match=r"\(TLS\)"):
        await client_of(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}").fetch_key()
    server.close()


async def test_after_a_network_change_only_a_dead_connection_is_dropped() -> None:
    async with ControlDouble() as server:
        client = client_of(server.url)
        await client.check([parse_ip("192.0.2.1")])
        stream = await client.poll(MapRequest(node_key=NODE_KEY, stream=True))
        await anext(stream)
        await client.check([parse_ip("127.0.0.1")])
        await client.check([])
        assert client.is_connected
        await client.check([parse_ip("192.0.2.1")])
        assert not client.is_connected
        with pytest.raises(ControlError, match="broke off"):
            await anext(stream)
        await client.update(MapRequest(node_key=NODE_KEY))
        assert server.handshakes == 2
        await client.close()
