"""The server over a real Unix socket with a fake backend: framing, statuses, streams, takeover, disconnects."""

import asyncio
import json
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.fakebackend import PEER_KEY, FakeBackend
from harness.rawhttp import HOST, RawClient
from tsd.base.errors import ConfigError
from tsd.localapi.server import LocalApiServer


class Rig:
    def __init__(self, path: str) -> None:
        self.path = path
        self.backend = FakeBackend()
        self.server = LocalApiServer()

    async def client(self) -> RawClient:
        return await RawClient.open(self.path)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="tsd") as folder:
        rig = Rig(f"{folder}/s")
        await rig.server.listen(rig.path)
        rig.server.set_backend(rig.backend)
        yield rig
        await rig.server.close()


async def test_socket_mode_and_removal(rig: Rig) -> None:
    assert stat.S_IMODE(os.stat(rig.path).st_mode) == 0o666
    await rig.server.close()
    assert not os.path.exists(rig.path)  # noqa: ASYNC240


async def test_stale_socket_is_replaced_a_living_one_is_not(rig: Rig) -> None:
    other = LocalApiServer()
    with pytest.raises(ConfigError, match="in use"):
        await other.listen(rig.path)
    await rig.server.close()
    import socket

    stale = socket.socket(socket.AF_UNIX)
    stale.bind(rig.path)
    stale.close()
    await other.listen(rig.path)
    await other.close()
    Path(rig.path).write_text("precious")  # noqa: ASYNC240
    with pytest.raises(ConfigError, match="not a socket"):
        await other.listen(rig.path)
    assert Path(rig.path).read_text() == "precious"  # noqa: ASYNC240
    os.unlink(rig.path)


async def test_headers_are_go_spelled_and_version_is_left_out(rig: Rig) -> None:
    client = await rig.client()
    answer = await client.call("GET", "serve-config")
    assert answer.body == b"null"
    assert answer.headers["Etag"] == "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"
    assert answer.headers["Tailscale-Cap"] == "145" and "Tailscale-Version" not in answer.headers
    assert answer.headers["X-Frame-Options"] == "DENY" and "Content-Security-Policy" in answer.headers
    client.close()


async def test_small_bodies_have_a_length_large_ones_are_chunked(rig: Rig) -> None:
    client = await rig.client()
    small, large = await client.call("GET", "prefs"), await client.call("GET", "status")
    assert int(small.headers["Content-Length"]) == len(small.body)
    assert large.headers["Transfer-Encoding"] == "chunked" and PEER_KEY in large.json()["Peer"]
    assert (await client.call("GET", "status?peers=false")).json()["Peer"] is None
    assert (await client.call("HEAD", "prefs")).status == 200
    assert (await client.call("GET", "nosuch")).status == 404
    client.close()


async def test_chunked_request_without_content_type(rig: Rig) -> None:
    client = await rig.client()
    body = json.dumps({"Hostname": "new", "HostnameSet": True, "CorpDNS": False}).encode()
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:])) + b"0\r\n\r\n"
    await client.send(
        f"PATCH /localapi/v0/prefs HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n".encode() + framed
    )
    answer = await client.read_answer()
    assert answer.status == 200 and answer.json()["Hostname"] == "new" and answer.json()["CorpDNS"] is True
    client.close()


async def test_exact_success_codes(rig: Rig) -> None:
    client = await rig.client()
    for method, name, body, status in (
        ("POST", "check-prefs", b"{}", 200),
        ("POST", "start", b'{"AuthKey":"k"}', 204),
        ("POST", "login-interactive", b"", 204),
        ("PUT", "profiles/", b"", 201),
        ("POST", "logout", b"", 204),
        ("POST", "upload-client-metrics", b"[]", 200),
        ("POST", "serve-config", b"{}", 200),
        ("POST", "query-feature?feature=serve", b"", 200),
        ("DELETE", "profiles/zzz", b"", 204),
        ("GET", "profiles/zzz", b"", 404),
        ("POST", "profiles/zzz", b"", 500),
        ("GET", "files/?waitsec=0", b"", 200),
        ("GET", "services", b"", 200),
        ("POST", "routecheck", b"", 503),
        ("POST", "update/install", b"", 501),
    ):
        assert (await client.call(method, name, body)).status == status, name
    client.close()


@pytest.mark.parametrize(
    ("method", "name", "status", "start"),
    [
        ("PATCH", "prefs", 400, b""),
        ("POST", "prefs", 405, b"unsupported"),
        ("GET", "start", 400, b"want POST"),
        ("GET", "whois", 400, b"missing 'addr'"),
        ("GET", "whois?addr=nodekey:00", 400, b"invalid nodekey"),
        ("GET", "whois?addr=garbage", 400, b"invalid 'addr'"),
        ("GET", "whois?addr=1.2.3.4:5", 404, b"no match for IP:port"),
        ("GET", "ping?ip=100.64.0.2&type=disco", 400, b"want POST"),
        ("POST", "ping", 400, b"missing 'ip'"),
        ("POST", "ping?ip=x", 400, b"invalid IP"),
        ("POST", "ping?ip=100.64.0.2", 400, b"missing 'type'"),
        ("POST", "ping?ip=100.64.0.2&type=TSMP&size=100", 400, b"'size'"),
        ("POST", "ping?ip=100.64.0.2&type=disco&size=99999", 400, b"maximum value for 'size' is 65467"),
        ("POST", "ping?ip=8.8.8.8&type=disco", 200, b'{"IP":"8.8.8.8"'),
        ("GET", "dial", 405, b"POST required"),
        ("POST", "dial", 400, b"bad ts-dial upgrade"),
        ("POST", "derpmap", 400, b"want GET"),
        ("GET", "peer-by-id", 400, b"invalid 'id'"),
        ("GET", "peer-by-id?id=99", 404, b"no peer"),
        ("GET", "user-profile?id=9", 404, b"no user"),
        ("GET", "watch-ipn-bus?mask=x", 400, b"bad mask"),
        ("GET", "watch-ipn-bus?mask=65536", 400, b"NotifyInProcess"),
        ("GET", "watch-ipn-bus?mask=4352", 400, b"NotifyRateLimit"),
        ("GET", "cert/", 500, b"invalid domain"),
        ("GET", "cert/..%2fx", 500, b"invalid domain"),
        ("GET", "dns-query?name=b&type=ZZ", 400, b"unknown DNS message type: ZZ"),
        ("POST", "debug", 400, b"missing parameter 'action'"),
        ("POST", "debug?action=nosuch", 400, b'unknown action "nosuch"'),
        ("GET", "debug", 405, b"POST required"),
        ("POST", "debug?action=rebind", 200, b"done"),
        ("GET", "file-put/2/x", 400, b"want PUT to put file"),
        ("PUT", "file-put/99/x", 501, b"this daemon does not send files yet"),
        ("POST", "tka/disable", 400, b"tailnet-lock disable failed"),
        ("GET", "tka/log", 500, b"reading log failed"),
    ],
)
async def test_refusals_have_the_recorded_status(rig: Rig, method: str, name: str, status: int, start: bytes) -> None:
    client = await rig.client()
    answer = await client.call(method, name)
    assert answer.status == status and answer.body.startswith(start), answer
    client.close()


async def test_prefs_errors_are_json_and_types_are_checked(rig: Rig) -> None:
    client = await rig.client()
    refused = await client.call("PATCH", "prefs", b'{"RunSSH":true,"RunSSHSet":true}')
    assert refused.status == 400 and "SSH" in refused.json()["Error"]
    checked = await client.call("POST", "check-prefs", b'{"RunSSH":true}')
    assert checked.status == 200 and checked.json()["Error"]
    for body in (b"{", b"[]", b'{"Hostname":7,"HostnameSet":true}', b'{"AutoUpdateSet":true}', b"[" * 100000):
        assert (await client.call("PATCH", "prefs", body)).status == 400
    lower = await client.call("PATCH", "prefs", b'{"hostname":"low","hostnameset":true,"unknown":1}')
    assert lower.json()["Hostname"] == "low"
    client.close()


async def test_etag_conflict_and_file_targets_of_serve(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await rig.client()
    stale = await client.call("POST", "serve-config", b"{}", headers=HOST + "If-Match: stale\r\n")
    assert stale.status == 412
    assert (await client.call("POST", "serve-config", b"{")).json()["error"].startswith("decoding config")
    client.close()


async def test_bus_answers_its_head_at_once_and_flushes_each_line(rig: Rig) -> None:
    client = await rig.client()
    await client.send(f"GET /localapi/v0/watch-ipn-bus?mask=0 HTTP/1.1\r\n{HOST}\r\n")
    status, headers = await client.read_head()
    assert status == 200 and headers["Transfer-Encoding"] == "chunked" and len(rig.backend.watches) == 1
    rig.backend.notify(State=6)
    line = await client.read_chunk()
    assert line.endswith(b"\n") and json.loads(line)["State"] == 6
    client.close()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not rig.backend.watches:
            break
    assert not rig.backend.watches


async def test_bus_ends_when_the_backend_ends_it(rig: Rig) -> None:
    client = await rig.client()
    await client.send(f"GET /localapi/v0/watch-ipn-bus?mask=2 HTTP/1.1\r\n{HOST}\r\n")
    await client.read_head()
    assert json.loads(await client.read_chunk())["SessionID"] == f"{1:016x}"
    rig.backend.watches[0].queue.put_nowait(None)
    assert await client.read_chunk() == b"" and await client.is_closed()


async def test_ping_is_cancelled_when_the_client_hangs_up(rig: Rig) -> None:
    rig.backend.answers_pings = False
    client = await rig.client()
    await client.send(f"POST /localapi/v0/ping?ip=100.64.0.2&type=disco HTTP/1.1\r\n{HOST}Content-Length: 0\r\n\r\n")
    await asyncio.sleep(0.05)
    client.close()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if rig.backend.cancelled_pings:
            break
    assert rig.backend.cancelled_pings == 1


class EchoStream:
    """Upper-cases what is written to it; ends after our half-close."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.was_closed = self.was_aborted = False

    async def read(self, limit: int) -> bytes:
        return await self.queue.get()

    async def write(self, data: bytes) -> None:
        self.queue.put_nowait(data.upper())

    async def write_eof(self) -> None:
        self.queue.put_nowait(b"")

    def abort(self) -> None:
        self.was_aborted = True
        self.queue.put_nowait(b"")

    async def close(self) -> None:
        self.was_closed = True


DIAL = "Connection: upgrade\r\nUpgrade: ts-dial\r\nDial-Host: b\r\nDial-Port: 80\r\n"


async def test_dial_takes_the_connection_over(rig: Rig) -> None:
    stream = EchoStream()
    rig.backend.dial_targets[("b", 80)] = stream
    client = await rig.client()
    await client.send(f"POST /localapi/v0/dial HTTP/1.1\r\n{HOST}{DIAL}Content-Length: 0\r\n\r\nearly ".encode())
    status, headers = await client.read_head()
    assert status == 101 and headers["Upgrade"] == "ts-dial"
    await client.send(b"late")
    found = b""
    while len(found) < 10:
        found += await asyncio.wait_for(client.reader.read(100), 5.0)
    assert found == b"EARLY LATE"
    client.writer.write_eof()
    assert await client.is_closed() and stream.was_closed and not stream.was_aborted


async def test_dial_self_and_failure(rig: Rig) -> None:
    rig.backend.dial_targets[("b", 80)] = "192.0.2.9:80"
    client = await rig.client()
    answer = await client.call("POST", "dial", headers=HOST + DIAL)
    assert answer.status == 200 and answer.headers["Dial-Self"] == "true"
    assert answer.headers["Dial-Addr"] == "192.0.2.9:80"
    rig.backend.dial_targets.clear()
    assert (await client.call("POST", "dial", headers=HOST + DIAL)).status == 502

    def refuse() -> object:
        raise ConnectionRefusedError(111, "Connection refused")

    rig.backend.dial_targets[("b", 80)] = refuse
    answer = await client.call("POST", "dial", headers=HOST + DIAL)
    assert (answer.status, answer.body) == (502, b"dial failure: Connection refused\n")
    client.close()


async def test_requests_before_the_engine_wait_for_it() -> None:
    with tempfile.TemporaryDirectory(prefix="tsd") as folder:
        server = LocalApiServer()
        await server.listen(f"{folder}/s")
        client, other = await RawClient.open(f"{folder}/s"), await RawClient.open(f"{folder}/s")
        await client.send(f"GET /server-status HTTP/1.1\r\n{HOST}\r\n")
        answer = await client.read_answer()
        assert answer.status == 503 and answer.json() == {"error": "backend not ready"}
        waiting = asyncio.ensure_future(other.call("GET", "prefs"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        server.set_backend(FakeBackend())
        assert (await waiting).status == 200
        await client.send(f"GET /server-status HTTP/1.1\r\n{HOST}\r\n")
        assert (await client.read_answer()).body == b"{}\n"
        await server.close()


async def test_logtap_and_bugreport_record(rig: Rig) -> None:
    client = await rig.client()
    await client.send(f"GET /localapi/v0/logtap HTTP/1.1\r\n{HOST}\r\n")
    await client.read_head()
    assert json.loads(await client.read_chunk())["text"] == "[logtap connected]\n"
    assert json.loads(await client.read_chunk())["text"] == "one line\n"
    client.close()
    client = await rig.client()
    await client.send(f"POST /localapi/v0/bugreport?record=true HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n")
    await client.read_head()
    assert (await client.read_chunk()).startswith(b"BUG-")
    await client.send(b"0\r\n\r\n")
    assert (await client.read_chunk()).startswith(b"BUG-") and await client.read_chunk() == b""


async def test_shutdown_and_reason(rig: Rig) -> None:
    client = await rig.client()
    bad = await client.call("POST", "logout", headers=HOST + "X-Tailscale-Reason: ***\r\n")
    assert bad.status == 400
    good = await client.call("POST", "logout", headers=HOST + "X-Tailscale-Reason: bW92aW5n\r\n")
    assert good.status == 204 and ("logout", "moving") in rig.backend.calls
    assert (await client.call("POST", "shutdown")).status == 200 and rig.backend.has_shut_down
    client.close()


async def test_a_handler_that_breaks_is_a_500_and_the_server_lives(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(with_peers: bool = True) -> dict[str, object]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(rig.backend, "status", broken)
    client = await rig.client()
    answer = await client.call("GET", "status")
    assert answer.status == 500 and b"secret" not in answer.body
    assert (await client.call("GET", "prefs")).status == 200
    client.close()
