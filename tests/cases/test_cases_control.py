"""Cases of the control connection: proxies, clocks, records, odd URLs, auth keys, sick servers."""

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from harness.control_double import ControlDouble
from tsd.base.authkey import check_auth_key
from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ConfigError, ControlError, DecodeError
from tsd.base.keys import MachinePrivate
from tsd.base.login_url import is_private_host, parse_login_server
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import RegisterRequest
from tsd.transport import dial, frontdoor
from tsd.transport.control import ControlClient
from tsd.transport.control_server import accept_control
from tsd.transport.map_stream import MAX_FRAME_BYTES, MapStream
from tsd.transport.proxy_env import ProxySettings
from tsd.transport.zstd import compress, decompress, zstd

MACHINE = MachinePrivate.generate(SeededEntropy("machine"))
REGISTER = RegisterRequest(node_key="nodekey:" + "ab" * 32)


def client_of(url: str, **options: Any) -> ControlClient:
    return ControlClient(url, MACHINE, entropy=SeededEntropy("client"), **options)


# --- proxies


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "https", "ftp"])
@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "http_proxy"])
def test_w11_other_proxies_are_refused_at_start(scheme: str, name: str) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        client_of("https://control.example", environ={name: f"{scheme}://127.0.0.1:1080"})


def test_w11_which_hosts_go_through_the_proxy() -> None:
    exceptions = ".corp.example, 10.0.0.0/8,only.example:8443,192.0.2.1"
    settings = ProxySettings.from_environ({"HTTPS_PROXY": "http://user:p%40ss@proxy:3128", "NO_PROXY": exceptions})
    proxy = settings.proxy_for("control.example", 443, is_tls=True)
    assert proxy is not None
    assert (proxy.host, proxy.port, proxy.authorization) == ("proxy", 3128, "Basic dXNlcjpwQHNz")
    assert settings.proxy_for("control.example", 80, is_tls=False) is None
    for host in ("localhost", "127.0.0.1", "::1", "a.corp.example", "corp.example", "10.2.3.4", "192.0.2.1"):
        assert settings.proxy_for(host, 443, is_tls=True) is None, host
    assert settings.proxy_for("only.example", 443, is_tls=True) is not None
    assert settings.proxy_for("only.example", 8443, is_tls=True) is None
    assert ProxySettings(https_proxy="p:1", no_proxy=("*",)).proxy_for("h", 443, is_tls=True) is None
    assert ProxySettings(https_proxy="p:1").proxy_for("h", 443, is_tls=True) == dial.Proxy("p", 1)


class ProxyDouble:
    """An HTTP proxy that knows CONNECT and absolute-form upgrades, and leads everything to one port."""

    def __init__(self, target_port: int, refuses: bool = False) -> None:
        self.target_port, self.refuses = target_port, refuses
        self.heads: list[bytes] = []
        self.port = 0

    async def __aenter__(self) -> "ProxyDouble":
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if self.refuses:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        if head.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            method, target, rest = head.split(b" ", 2)
            there_writer.write(method + b" /" + target.split(b"/", 3)[3] + b" " + rest)
        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer), return_exceptions=True)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()


async def test_w11_plain_control_through_a_proxy() -> None:
    async with ControlDouble() as server, ProxyDouble(int(server.url.rpartition(":")[2])) as proxy:
        environ = {"http_proxy": f"http://127.0.0.1:{proxy.port}", "https_proxy": f"http://u:p@127.0.0.1:{proxy.port}"}
        client = client_of("http://control.example:8080", environ=environ)
        assert (await client.register(REGISTER)).login.login_name
        assert proxy.heads[0].startswith(b"GET http://control.example:8080/key?v=")
        assert proxy.heads[1].startswith(b"POST http://control.example:8080/ts2021 ")
        await client.close()


@contextlib.asynccontextmanager
async def tls_double(monkeypatch: pytest.MonkeyPatch, folder: Path, **issue: Any) -> AsyncIterator[tuple[Any, int]]:
    """The double behind TLS; its authority is trusted by way of SSL_CERT_FILE."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "control.example", **issue).configure_cert(context)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    async with ControlDouble() as server:
        yield server, (await server.door.listen("127.0.0.1", 0, context)).port


async def test_w11_tls_control_through_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with tls_double(monkeypatch, tmp_path) as (_, port), ProxyDouble(port) as proxy:
        client = client_of("https://control.example", environ={"HTTPS_PROXY": f"u:p@127.0.0.1:{proxy.port}"})
        monkeypatch.setattr(client, "_dial", OnlyProxied(client._dial))
        assert (await client.register(REGISTER)).login.login_name
        assert all(head.startswith(b"CONNECT control.example:443 ") for head in proxy.heads)
        assert b"Proxy-Authorization: Basic dTpw" in proxy.heads[0]
        await client.close()


class OnlyProxied:
    """Fails what would leave the machine: the direct try on port 80."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, host: str, port: int, **options: Any) -> Any:
        if options.get("proxy") is None:
            raise ControlError("not here")
        return await self._inner(host, port, **options)


async def test_w11_proxy_that_refuses_is_named() -> None:
    async with ProxyDouble(1, refuses=True) as proxy:
        client = client_of("https://control.example", environ={"https_proxy": f"127.0.0.1:{proxy.port}"})
        with pytest.raises(ControlError, match=r"proxy 127.0.0.1:\d+ refused .* 407"):
            await client.fetch_key()


# --- TLS and clocks


async def test_tls_control_with_a_private_authority(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with tls_double(monkeypatch, tmp_path) as (server, port):
        client = client_of(f"https://127.0.0.1:{port}", environ={})
        assert await client.fetch_key() == server.static.public()
        await client.close()
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ControlError, match=r"not signed by an authority.*SSL_CERT_FILE"):
            await client_of(f"https://127.0.0.1:{port}", environ={}).fetch_key()


async def test_s12_wrong_clock_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    past = datetime.datetime(2001, 2, 3, tzinfo=datetime.UTC)
    options = {"not_after": past, "not_before": past - datetime.timedelta(days=9)}
    async with tls_double(monkeypatch, tmp_path, **options) as (_, port):
        clock = ManualClock(wall_ns=4_070_908_800 * 10**9)
        with pytest.raises(ControlError) as caught:
            await client_of(f"https://127.0.0.1:{port}", environ={}, clock=clock).fetch_key()
    assert "clock says 2099-01-01" in str(caught.value)
    assert "the certificate says 2001-01-25 to 2001-02-03" in str(caught.value)


# --- URLs and keys


def test_n17_login_server_urls() -> None:
    kept = parse_login_server(" https://Control.Example:8443/vpn/ ")
    assert (kept.url, kept.path, kept.plain_port, kept.tls_port) == (
        "https://control.example:8443/vpn",
        "/vpn",
        80,
        8443,
    )
    assert parse_login_server("control.example").url == "https://control.example"
    ports = {
        "https://h": (80, 443), "http://h:81": (81, 443), "http://h": (80, 443), "http://10.0.0.1:8080": (8080, None),
        "http://localhost": (80, None), "http://[fd00::1]:8": (8, None), "http://100.64.0.1": (80, 443),
    }  # fmt: skip
    for url, expected in ports.items():
        server = parse_login_server(url)
        assert (server.plain_port, server.tls_port) == expected, url
    for bad in ("ftp://h", "https://", "https://u@h", "https://h/?x=1", "https://h:99999", "https://h/#a", ""):
        with pytest.raises(ConfigError):
            parse_login_server(bad)
    assert not is_private_host("example.com")


@pytest.mark.parametrize("key", ["a" * 48, "hskey-auth-x", "tskey-client-abc?ephemeral=true", " tskey-auth-x\r\n"])
def test_s08_auth_keys_are_opaque(key: str) -> None:
    assert check_auth_key(key) == key.strip()


@pytest.mark.parametrize("key", ["", "  ", "a b", "a\tb", "a\x00b", "a\nb"])
def test_s08_white_space_and_control_bytes_are_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        check_auth_key(key)


# --- sick servers and hostile frames


async def test_n23_unreachable_control_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(dial, "_connect_one", never)
    async with asyncio.timeout(30):
        with pytest.raises(ControlError, match=r"no answer from 192.0.2.1:80 within 0 s \(TCP\)"):
            await dial.HostDial()("192.0.2.1", 80, timeout_s=0.05)


class Chunks:
    """Stands in for an HTTP/2 response."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    async def chunks(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk

    def close(self) -> None: ...


def stream_of(*chunks: bytes, is_compressed: bool = False) -> MapStream:
    return MapStream(Chunks(*chunks), is_compressed=is_compressed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "raw",
    [b"\0\0\0\0", (MAX_FRAME_BYTES + 1).to_bytes(4, "little"), b"\xff\xff\xff\xff", b"\x02\0\0\0{", b"\x02\0\0\0[]"],
)
async def test_bad_frames_end_the_stream(raw: bytes) -> None:
    with pytest.raises(ControlError):
        await anext(stream_of(raw))


async def test_frames_in_single_bytes() -> None:
    raw = b'\x12\x00\x00\x00{"KeepAlive":true}' * 2
    messages = [message async for message in stream_of(*(bytes([byte]) for byte in raw))]
    assert [message.keep_alive for message in messages] == [True, True]


KEEP_ALIVE_FRAMES = [
    "28b52ffda0120000009100007b224b656570416c697665223a747275657d",
    "28b52ffd24129100007b224b656570416c697665223a747275657d0e260c10",
]


@pytest.mark.parametrize("frame", KEEP_ALIVE_FRAMES)
def test_recorded_zstd_frames(frame: str) -> None:
    assert decompress(bytes.fromhex(frame)) == b'{"KeepAlive":true}'


def test_zstd_matches_what_headscale_sends() -> None:
    assert compress(b'{"KeepAlive":true}').hex() == KEEP_ALIVE_FRAMES[1]


def test_n22_decompression_is_bounded() -> None:
    bomb = compress(bytes(50 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(DecodeError, match="more than"):
        decompress(bomb, 1 << 20)
    stream = zstd.ZstdCompressor()
    unsized = stream.compress(b"x" * 1000) + stream.flush()
    assert decompress(unsized) == b"x" * 1000
    claims_4_gib = bytes.fromhex("28b52ffd" + "a0" + "ffffffff" + "010000")
    for bad in (b"", b"\0", unsized[:-3], claims_4_gib):
        with pytest.raises(DecodeError):
            decompress(bad)


async def test_n06_sick_gateway_is_named_each_time() -> None:
    async with ControlDouble() as server:
        server.map_status = (502, "bad gateway", {})
        client = client_of(server.url, environ={})
        for _ in range(3):
            with pytest.raises(ControlError, match="status 502"):
                await client.poll(MapRequest(node_key=REGISTER.node_key, stream=True))
        await client.close()


async def test_slow_heads_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontdoor, "HEAD_TIMEOUT_S", 0.05)
    async with ControlDouble() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"GET / HT")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 3) == b""
        writer.close()


# --- records


class BrokenRecords(ControlDouble):
    """Completes the handshake, then sends `tail` as it is and closes."""

    tail = b""

    async def _upgrade(self, upgrade: frontdoor.Upgrade) -> None:
        self.handshakes += 1
        if self.handshakes > 1:
            await super()._upgrade(upgrade)
            return
        accept_control(upgrade, self.static, entropy=SeededEntropy(1))
        upgrade.writer.write(self.tail)


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (b"\x04\x10\x00" + bytes(4096), "limit is 4093"),
        (b"\x04\x0f\xfd" + bytes(4093), "failed authentication"),
        (b"\x04\x01\x00" + bytes(17), "within a record"),
        (b"\x03\x00\x02no", "frame of type 3"),
        (b"", "closed by the server"),
    ],
    ids=["over the limit", "forged", "cut", "error frame", "closed"],
)
async def test_w15_broken_records_are_fatal_and_a_new_dial_helps(tail: bytes, text: str) -> None:
    async with BrokenRecords() as server:
        server.tail = tail
        client = client_of(server.url, environ={})
        with pytest.raises(ControlError, match=text):
            await client.register(REGISTER)
        assert (await client.register(REGISTER)).login.login_name
        assert server.handshakes >= 2
        await client.close()
