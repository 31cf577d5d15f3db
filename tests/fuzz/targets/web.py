"""Fuzz targets: HTTP in all its places: PeerAPI, proxies, LocalAPI and its client, control's front, relays.

Also what comes around it: login URLs, proxy variables, Retry-After, map frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

from harness.fakebackend import FakeBackend
from harness.fedstream import Bench, DeafWriter, FedReader, FedStream
from tsctl.client import LineStream, LocalClient, _Wire
from tsctl.goflags import Failure
from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ConfigError, ControlError, ProtocolError
from tsd.base.keys import NodePrivate
from tsd.base.login_url import parse_login_server
from tsd.engine import peerapi
from tsd.hull import Stream
from tsd.localapi.server import LocalApiServer
from tsd.tailcfg.derpmap import DERPNode, DERPRegion
from tsd.transport.control import _read_response, parse_url
from tsd.transport.control_text import key_refusal, retry_after_s, upgrade_refusal
from tsd.transport.derp import DerpConnection
from tsd.transport.derp_dial import DerpOptions
from tsd.transport.dial import open_tunnel
from tsd.transport.h2 import Http2Client, Http2Request, Http2Server, StreamLost
from tsd.transport.http import exchange, upgrade
from tsd.transport.map_stream import MapStream
from tsd.transport.proxy_env import Proxy, ProxySettings
from tsplatform.userspace.proxies.http import HttpSession
from tsplatform.userspace.proxies.socks5 import serve_socks5

_BENCH = Bench()
_PEER = parse_ip("100.64.0.2")
_MARK = b"\xff\xfe"


class _PeerApiHost:
    def self_name(self) -> str:
        return "self.tail.example"

    def own_addresses(self) -> list[IPAddress]:
        return [parse_ip("100.64.0.1")]

    def identify(self, source: IPAddress) -> peerapi.Caller | None:
        return peerapi.Caller("peer", "user", True, True)

    async def resolve_dns(self, query: bytes) -> bytes:
        return query


def fuzz_peerapi(data: bytes) -> None:
    """Requests of a peer: nothing but HTTP comes back, nothing escapes."""

    async def run() -> None:
        served: list[Any] = []

        class Net:
            async def listen(self, local: AddrPort, handler: Any) -> int:
                served.append(handler)
                return 1

        api = peerapi.PeerApi(Net(), _PeerApiHost(), SeededEntropy(1))  # type: ignore[arg-type]
        await api.serve([parse_ip("100.64.0.1")])
        for piece in (data, b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n" + data):
            stream = FedStream(piece, remote=AddrPort(_PEER, 5))
            await served[0](stream)
            assert stream.is_closed and (not stream.written or stream.written.startswith(b"HTTP/1.1 "))

    _BENCH.run(run())


def fuzz_peerapi_answer(data: bytes) -> None:
    """What a peer's PeerAPI says to our ping."""

    async def run() -> None:
        async def connect(remote: AddrPort) -> Stream:
            return FedStream(data)

        with contextlib.suppress(OSError, TimeoutError):
            assert 100 <= await peerapi.head(connect, AddrPort(_PEER, 5)) <= 999

    _BENCH.run(run())


class _Proxy:
    """Both ends of a proxy in one: `answers` is what a target says."""

    def __init__(self, answers: bytes) -> None:
        self.dialer = self
        self.targets: list[FedStream] = []
        self._answers = answers
        self._tasks: list[asyncio.Task[None]] = []

    async def dial(self, host: str, port: int) -> FedStream:
        assert 0 <= port <= 65535
        if host.startswith("refused"):
            raise ConnectionRefusedError(111, "refused")
        self.targets.append(FedStream(self._answers))
        return self.targets[-1]

    async def open_datagram(self, host: str, port: int) -> Any:
        raise OSError("no datagrams")

    def spawn(self, work: Any) -> asyncio.Task[None]:
        self._tasks.append(asyncio.get_running_loop().create_task(work))
        return self._tasks[-1]

    async def relay(self, client: Any, target: FedStream) -> None:
        while data := await client.read():
            await target.write(data)
        while data := await target.read():
            await client.write(data)

    async def settle(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=False)


def fuzz_http_proxy(data: bytes) -> None:
    """A client's requests, and behind FF FE what the targets answer."""
    asked, _, answers = data.partition(_MARK)

    async def run() -> None:
        server, client = _Proxy(answers), FedStream(asked)
        with contextlib.suppress(OSError, TimeoutError):
            await HttpSession(server, client, b"").serve()  # type: ignore[arg-type]
        with contextlib.suppress(asyncio.CancelledError):
            await server.settle()

    _BENCH.run(run())


def fuzz_socks5(data: bytes) -> None:
    asked, _, answers = data.partition(_MARK)

    async def run() -> None:
        server = _Proxy(answers)
        for first in (asked, b"\x05\x01\x00\x05\x01\x00" + asked):
            client = FedStream(first[40:])
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                await serve_socks5(server, client, first[:40])  # type: ignore[arg-type]
            assert not client.written or client.written[0] == 5

    _BENCH.run(run())


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_over = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_over

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def fuzz_localapi_server(data: bytes) -> None:
    """A whole LocalAPI connection, whoever may have opened it."""

    async def run() -> None:
        server, transport = LocalApiServer(), _Transport()
        server.set_backend(FakeBackend())
        connection = server._new_connection()
        connection.connection_made(transport)
        for at in range(0, len(data), 500):
            connection.data_received(data[at : at + 500])
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        connection.eof_received()
        connection.connection_lost(None)
        await server.close()
        assert not transport.written or transport.written.startswith(b"HTTP/1.1 ")

    logging.disable(logging.CRITICAL)
    try:
        _BENCH.run(run())
    finally:
        logging.disable(logging.NOTSET)


def fuzz_tsctl_reply(data: bytes) -> None:
    """What something on the daemon's socket answers to tsctl."""
    wire = _Wire.__new__(_Wire)
    near, far = socket.socketpair()
    wire.sock, wire.buffer = near, data
    far.close()
    try:
        reply = LocalClient._read_reply("GET", wire)
        with contextlib.suppress(Failure):
            reply.json()
    except (Failure, OSError):
        pass
    wire.buffer = data
    lines = LineStream(wire, is_chunked=data[:1] < b"\x80")
    with contextlib.suppress(Failure, EOFError):
        while lines.next_json(0.0) is not None:
            pass
    near.close()


def fuzz_control_http(data: bytes) -> None:
    """Answers to `/key` and to the ts2021 upgrade, from a server, a proxy, or anything."""

    async def run() -> None:
        for method in ("GET", "HEAD"):
            try:
                answer = await exchange((FedReader(data), DeafWriter()), method, "/key?v=1", [("Host", "h")])  # type: ignore[arg-type]
                assert str(key_refusal("http://h/key", answer))
            except ControlError:
                pass
        try:
            connection: Any = (FedReader(data), DeafWriter())
            upgraded = await upgrade(connection, "/ts2021", [("Host", "h")], "tailscale-control-protocol")
            assert str(upgrade_refusal("h", upgraded))
            await _read_response(connection, upgraded.leftover)
        except ControlError:
            pass

    _BENCH.run(run())


def fuzz_control_texts(data: bytes) -> None:
    """URLs, proxy settings and Retry-After, as people, servers and environments write them."""
    text = data.decode("latin-1")
    with contextlib.suppress(ConfigError):
        server = parse_login_server(text)
        again = parse_login_server(server.url)
        assert (again.host, again.port, again.path) == (server.host, server.port, server.path)
    with contextlib.suppress(ControlError):
        parse_url(text)
    with contextlib.suppress(ConfigError):
        settings = ProxySettings.from_environ({"HTTPS_PROXY": text, "NO_PROXY": text})
        settings.check()
        settings.proxy_for("host.example", 443, is_tls=True)
    for is_capped in (False, True):
        wait_s = retry_after_s(text, 10**18, SeededEntropy(1), cap_s=300.0, is_capped=is_capped)
        assert 0 < wait_s <= 330


def fuzz_proxy_connect(data: bytes) -> None:
    """What an HTTP proxy answers to CONNECT."""

    async def run() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        far.sendall(data[:8192])
        far.shutdown(socket.SHUT_WR)
        try:
            await open_tunnel(near, "host.example", 443, Proxy("proxy", 3128))
        except ControlError:
            pass
        finally:
            near.close()
            far.close()

    _BENCH.run(run())


class _Answer:
    """An HTTP/2 response whose body is `data`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def chunks(self) -> Any:
        for at in range(0, len(self._data), 50):
            yield self._data[at : at + 50]

    def close(self) -> None: ...


def fuzz_map_stream(data: bytes) -> None:
    """The body of a map poll, compressed and not; also with its length put in order."""

    async def run() -> None:
        framed = len(data).to_bytes(4, "little") + data
        for body, is_compressed in ((data, True), (data, False), (framed, True), (framed, False)):
            stream = MapStream(_Answer(body), is_compressed=is_compressed)  # type: ignore[arg-type]
            with contextlib.suppress(ControlError):
                async for _ in stream:
                    pass
            await stream.close()

    _BENCH.run(run())


class _Bytes:
    """A byte stream under HTTP/2."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.is_closed = False

    async def read(self) -> bytes:
        piece, self._data = self._data[:100], self._data[100:]
        return piece

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


_SETTINGS = bytes.fromhex("000000040000000000")


def fuzz_http2_connection(data: bytes) -> None:
    """Both ends of a whole HTTP/2 connection, with a handler and a request under way."""

    async def handle(request: Http2Request) -> None:
        body = await request.body(1 << 16)
        await request.respond(200, body[:100])

    async def run() -> None:
        for start in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS, b""):
            await Http2Server(_Bytes(start + data), handle).serve()
        client = Http2Client(_Bytes(_SETTINGS + data), "h")
        try:
            answer = await client.request("POST", "/", (), b"x")
            assert 0 <= answer.status <= 999
            await answer.read(1 << 16)
        except ControlError as err:
            assert isinstance(err, StreamLost | ControlError)
        await client.close()

    logging.disable(logging.CRITICAL)
    try:
        _BENCH.run(run())
    finally:
        logging.disable(logging.NOTSET)


class _Relays:
    def __getattr__(self, name: str) -> Any:
        return lambda *words: None


def fuzz_derp_connection(data: bytes) -> None:
    """A relay's answer to the upgrade, and what follows it."""

    async def run() -> None:
        transport = _Transport()

        async def connect(node: DERPNode, protocol: Any) -> asyncio.Transport:
            return transport

        entropy = SeededEntropy(1)
        options = DerpOptions(NodePrivate.generate(entropy), ManualClock(), entropy, lambda s: None, connect=connect)
        region = DERPRegion(1, "r", "r", nodes=(DERPNode(name="1a", region_id=1, host_name="h"),))
        connection = DerpConnection(region, options, _Relays())
        with contextlib.suppress(ProtocolError):
            await connection.open(prefers=True)
        for at in range(0, len(data), 61):
            connection.data_received(data[at : at + 61])
        connection.close()

    _BENCH.run(run())
