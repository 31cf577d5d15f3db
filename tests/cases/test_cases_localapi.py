"""Cases of the field that touch the LocalAPI and tsctl (section 6, and W19, S10, P07): one test per case id."""

import asyncio
import copy
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.fakebackend import FakeBackend, peer_status
from harness.fakedaemon import RecordingServer, serving
from harness.rawhttp import HOST, RawClient
from tsctl import risk
from tsctl.root import run
from tsctl.status import last_seen
from tsd.localapi import permissions, schema
from tsd.localapi.permissions import Caller
from tsd.localapi.server import LocalApiServer


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        return (self.out + self.err).strip()


class Cli:
    def __init__(self, server: RecordingServer, path: str, backend: FakeBackend, capsys: pytest.CaptureFixture) -> None:
        self.path, self.backend, self._capsys = path, backend, capsys
        self.loop = server.loop

    def __call__(self, *words: str) -> Outcome:
        self._capsys.readouterr()
        code = run([f"--socket={self.path}", *words])
        return Outcome(code, *self._capsys.readouterr())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    monkeypatch.delenv("SSH_CLIENT", raising=False)
    backend = FakeBackend()
    with tempfile.TemporaryDirectory(prefix="tsd") as folder, serving(f"{folder}/s", backend) as server:
        yield Cli(server, f"{folder}/s", backend, capsys)


@pytest.fixture
async def api() -> AsyncIterator[tuple[str, FakeBackend]]:
    with tempfile.TemporaryDirectory(prefix="tsd") as folder:
        server, backend = LocalApiServer(), FakeBackend()
        await server.listen(f"{folder}/s")
        server.set_backend(backend)
        yield f"{folder}/s", backend
        await server.close()


def test_c02_each_ping_failure_has_its_own_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    own = cli("ping", "100.64.0.1")
    assert own.code == 0 and own.line == "100.64.0.1 is local Tailscale IP"
    lines = [
        cli("ping", "-c", "1", "no-such-machine.invalid").line,
        cli("ping", "123456").line,
        cli("ping", "100.64.0.99").line,
        cli("ping", "--timeout=0", "b").line,
        cli("ping", "-c", "-1", "b").line,
    ]
    cli.backend.answers_pings = False
    offline = cli("ping", "-c", "1", "--timeout=100ms", "other")
    assert offline.code == 1 and offline.err.startswith('no reply ("other" is offline, last seen ')
    assert 'ping "100.64.0.3" timed out' in offline.out
    cli.backend.state = schema.STOPPED
    stopped = cli("ping", "no-such-machine")
    cli.backend.state, cli.backend.auth_url = schema.NEEDS_LOGIN, "http://control.example/r/1"
    logged_out = cli("ping", "b")
    assert "stopped" in stopped.line and "Log in at: http://control.example/r/1" in logged_out.line
    lines += [offline.err.strip(), stopped.line, logged_out.line]
    dead = run(["--socket=/nosuch/sock", "ping", "b"])
    assert dead == 1
    assert len(set(lines)) == len(lines) and all(lines), lines


@pytest.mark.parametrize("state", ["NoState", "NeedsLogin", "NeedsMachineAuth", "Stopped", "Starting", "Running"])
def test_c03_status_exit_code_and_json_in_every_state(cli: Cli, state: str) -> None:
    cli.backend.state = state
    assert cli("status").code == (0 if state in ("Starting", "Running") else 1)
    found = cli("status", "--json")
    assert found.code == 0 and json.loads(found.out)["BackendState"] == state


def test_c03_absent_dead_and_forbidden_sockets(capsys: pytest.CaptureFixture) -> None:

    with tempfile.TemporaryDirectory(prefix="tsd") as folder:
        dead = f"{folder}/dead"
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(dead)
        sock.close()
        texts = []
        for path in (f"{folder}/absent", dead):
            for words in (["status"], ["status", "--json"]):
                assert run([f"--socket={path}", *words]) == 1
                out, err = capsys.readouterr()
                assert out == "" and err.splitlines()[0] == "failed to connect to local tsd; is it running?"
                texts.append(err)
        assert texts[0] == texts[1] and texts[0] != texts[2]


@pytest.mark.parametrize("words", [("status",), ("status", "--json"), ("ip",), ("wait", "--timeout=1ms")])
def test_c03_a_daemon_that_is_frozen_does_not_freeze_its_callers(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after SIGSTOP: the kernel still takes connections for it."""
    monkeypatch.setattr("tsctl.client.ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(4)
        assert run([f"--socket={tmp_path / 's'}", *words]) == 1
    told = capsys.readouterr().err
    assert "timed out" in told if words[0] == "wait" else "takes connections, but the daemon has not answered" in told


def test_c04_suggested_command_is_complete_and_works(cli: Cli) -> None:
    import shlex

    cli.backend.current |= {"Hostname": "it's", "RouteAll": True}
    refused = cli("up", "--login-server=http://control.example/", "--shields-up")
    assert refused.code == 1 and "--exit-node" not in refused.err and "--login-server=http://control" in refused.err
    words = shlex.split(next(line for line in refused.err.splitlines() if line.startswith("\t")))
    assert words[:2] == ["tsctl", f"--socket={cli.path}"], "it is for the same daemon"
    assert cli(*words[2:]).code == 0
    after = cli.backend.prefs()
    assert (after["ShieldsUp"], after["Hostname"], after["RouteAll"]) == (True, "it's", True)


def test_c05_exit_node_mistakes_are_told_apart(cli: Cli) -> None:
    cli.backend.peers += [peer_status(4, "twin", "nodekey:" + "55" * 32, ExitNodeOption=True)]
    cli.backend.peers += [peer_status(5, "twin", "nodekey:" + "66" * 32, ExitNodeOption=True)]
    before = cli.backend.prefs()
    words = ("100.64.0.1", "fd7a:115c:a1e0::1", "a", "nosuch", "other", "100.64.0.3", "1.2.3.4", "twin")
    lines = [cli("set", f"--exit-node={word}") for word in words]
    assert all(one.code == 1 and "\n" not in one.line for one in lines)
    assert "--advertise-exit-node" in lines[0].line and "--advertise-exit-node" in lines[2].line
    assert len({one.line for one in lines}) == len(words)
    assert cli.backend.prefs() == before
    assert cli("set", "--exit-node=b").code == 0 and cli.backend.current["ExitNodeIP"] == "100.64.0.2"
    assert cli("set", "--exit-node=").code == 0 and cli.backend.current["ExitNodeIP"] == ""


def test_c06_denied_says_what_to_do_and_reads_work(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permissions, "caller_of", lambda sock: Caller(1, 65534, 65534))
    cli.backend.current["OperatorUser"] = "nobody-knows-this-user"
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert cli("status").code == 0 and cli("ip").code == 0
    for words in (("down",), ("set", "--hostname=x"), ("logout",), ("switch", "--list")):
        denied = cli(*words)
        assert denied.code == 1 and denied.err.startswith("Access denied: ")
        assert f"`sudo tsctl --socket={cli.path} {' '.join(words)}`" in denied.err
        assert f"`sudo tsctl --socket={cli.path} set --operator=$USER`" in denied.err
    assert "set '--hostname=it is'`" in cli("set", "--hostname=it is").err, "for a shell"


async def test_c07_names_arrive_byte_equal(api: tuple[str, FakeBackend]) -> None:
    from urllib.parse import quote

    path, backend = api
    seen: list[str] = []

    async def put_file(node_id: str, name: str, length: int, body: AsyncIterator[bytes]) -> tuple[int, bytes]:
        seen.append(name)
        return 200, b"{}\n"

    backend.put_file = put_file  # type: ignore[method-assign, assignment]
    client = await RawClient.open(path)
    names = ["a b.txt", "a#b.txt", "100%20.txt", "新\u3000文.pdf", "e\u0301", "\u00e9", "CON", "x" * 255]
    for name in names:
        assert (await client.call("PUT", f"file-put/2/{quote(name, safe='')}", b"data")).status == 200
    assert seen == names
    for bad in ("..%2fx", "%2e%2e%2fx", ""):
        assert (await client.call("PUT", f"file-put/2/{bad}", b"data")).status == 400
    client.close()


async def test_c08_operator_may_not_serve_files_or_sockets(
    api: tuple[str, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, backend = api
    monkeypatch.setattr(permissions, "caller_of", lambda sock: Caller(1, 65534, 65534))
    monkeypatch.setattr(permissions, "may_become_root", lambda caller: False)
    backend.current["OperatorUser"] = "65534"
    client = await RawClient.open(path)
    for handler in ('{"Path":"/root"}', '{"Proxy":"unix:/run/docker.sock"}', '{"proxy":"UNIX:/run/docker.sock"}'):
        config = '{"Foreground":{"x":{"Web":{"a:443":{"Handlers":{"/":HANDLER}}}}}}'.replace("HANDLER", handler)
        assert (await client.call("POST", "serve-config", config.encode())).status == 401
    forward = b'{"TCP":{"80":{"TCPForward":"unix:/run/docker.sock"}}}'
    assert (await client.call("POST", "serve-config", forward)).status == 401
    assert (await client.call("POST", "serve-config", b'{"TCP":{"80":{"TCPForward":"127.0.0.1:80"}}}')).status == 200
    client.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: local-tailscaled.sock\r\n", 200),
        ("Host:\r\n", 200),
        ("Host: local-tailscaled.sock:80\r\n", 403),
        ("Host: tailscale\r\n", 403),
        ("Host: localhost\r\n", 403),
        ("Host: evil.example\r\n", 403),
        ("Host: local-tailscaled.sock\r\nOrigin: http://evil.example\r\n", 403),
        ("Host: local-tailscaled.sock\r\nReferer: http://evil.example/\r\n", 403),
        ("", 400),
        ("Host: local-tailscaled.sock\r\nHost: local-tailscaled.sock\r\n", 400),
    ],
)
async def test_c09_host_matrix(api: tuple[str, FakeBackend], headers: str, status: int) -> None:
    client = await RawClient.open(api[0])
    await client.send(f"GET /localapi/v0/prefs HTTP/1.1\r\n{headers}\r\n")
    answer = await client.read_answer()
    assert answer.status == status
    if status == 403 and "Origin" not in headers and "Referer" not in headers:
        assert b"'local-tailscaled.sock'" in answer.body
    client.close()


async def test_c09_old_http_pipelining_and_huge_heads(api: tuple[str, FakeBackend]) -> None:
    client = await RawClient.open(api[0])
    await client.send("GET /localapi/v0/status HTTP/1.0\r\n\r\n")
    answer = await client.read_answer()
    assert answer.status == 200 and answer.headers["Connection"] == "close" and answer.json()["Version"]
    assert await client.is_closed()

    client = await RawClient.open(api[0])
    one = f"GET /localapi/v0/prefs HTTP/1.1\r\n{HOST}\r\n"
    await client.send(one * 20 + f"GET /localapi/v0/derpmap HTTP/1.1\r\n{HOST}\r\n")
    for _ in range(20):
        assert "ControlURL" in (await client.read_answer()).json()
    assert "Regions" in (await client.read_answer()).json()
    client.close()

    client = await RawClient.open(api[0])
    try:
        await client.send(f"GET /localapi/v0/prefs HTTP/1.1\r\n{HOST}X: ".encode() + b"x" * (2 << 20) + b"\r\n\r\n")
        answer = await client.read_answer()
        assert answer.status == 431
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    client.close()
    assert (await (await RawClient.open(api[0])).call("GET", "prefs")).status == 200


async def test_c09_half_close_slow_bytes_and_cut_bodies(api: tuple[str, FakeBackend]) -> None:
    client = await RawClient.open(api[0])
    for byte in f"GET /localapi/v0/prefs HTTP/1.1\r\n{HOST}\r\n".encode():
        await client.send(bytes([byte]))
    assert (await client.read_answer()).status == 200
    await client.send(f"GET /localapi/v0/derpmap HTTP/1.1\r\n{HOST}\r\n")
    client.writer.write_eof()
    assert (await client.read_answer()).status == 200 and await client.is_closed()

    client = await RawClient.open(api[0])
    await client.send(f"PATCH /localapi/v0/prefs HTTP/1.1\r\n{HOST}Content-Length: 100\r\n\r\n{{")
    client.writer.write_eof()
    assert (await client.read_answer()).status == 400

    for chunks in ("zz\r\n", "1\r\nabc\r\n", "ffffffffffffffff\r\n"):
        client = await RawClient.open(api[0])
        head = f"PATCH /localapi/v0/prefs HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n"
        await client.send(head + chunks)
        assert (await client.read_answer()).status == 400 and await client.is_closed()

    client = await RawClient.open(api[0])
    await client.send("GET /localapi/v0/prefs HTTP/1.1\nHost: local-tailscaled.sock\n\n")
    assert (await client.read_answer()).status == 400


def test_c10_older_and_newer_daemons(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    original = cli.backend.status

    def odd(with_peers: bool = True) -> dict:
        found = copy.deepcopy(original(with_peers))
        found |= {"FromTheFuture": {"x": [1]}, "Health": None}
        for peer in (found["Peer"] or {}).values():
            del peer["CurAddr"], peer["Relay"], peer["OS"]
            peer["RxBytes"] = None
        if found["Peer"]:
            found["Peer"]["nodekey:odd"] = "a text"
            found["Peer"]["nodekey:bare"] = {"TailscaleIPs": None}
        return found

    monkeypatch.setattr(cli.backend, "status", odd)
    assert cli("status").code == 0 and cli("ip", "b").code == 0 and cli("ping", "b").code == 0
    monkeypatch.setattr(cli.backend, "status", lambda with_peers=True: {"BackendState": "Running"})
    assert cli("status").code == 0
    monkeypatch.setattr(
        cli.backend, "status", lambda with_peers=True: {"BackendState": "Running", "Self": 7, "Peer": 3}
    )
    assert cli("status").code == 0
    monkeypatch.setattr(cli.backend, "status", lambda with_peers=True: {"BackendState": "Running", "User": [1]})
    cli.backend.peers.clear()
    shape = cli("exit-node", "list")
    assert shape.code == 1 and "\n" not in shape.line
    monkeypatch.setattr(cli.backend, "prefs", lambda: {"NetfilterMode": "x", "AdvertiseRoutes": 5})
    odd_prefs = cli("get")
    assert odd_prefs.code == 1 and odd_prefs.err.startswith("the daemon's answer is not what tsctl")
    monkeypatch.setattr(cli.backend, "status", lambda with_peers=True: [])
    assert cli("status").line == "the daemon's status is not a JSON object"


def test_c10_daemon_restart_under_a_running_watch(cli: Cli) -> None:
    import threading

    def end() -> None:
        for watch in list(cli.backend.watches):
            watch.queue.put_nowait(None)

    threading.Timer(0.3, lambda: cli.loop.call_soon_threadsafe(end)).start()
    watched = cli("debug", "watch-ipn", "--initial")
    assert watched.code == 1 and "ended the stream" in watched.err and '"State": 6' in watched.out


def test_w19_no_handshake_is_not_an_age(cli: Cli) -> None:
    cli.backend.peers[1] |= {"LastSeen": schema.ZERO_TIME}
    shown = cli("status").out
    assert "last seen" not in shown and "53" not in shown.replace("100.64", "")
    found = json.loads(cli("status", "--json").out)["Peer"]
    assert all(peer["LastHandshake"] == schema.ZERO_TIME for peer in found.values())
    assert last_seen({"LastSeen": ""}) == "" and last_seen({"LastSeen": None}) == ""


def test_s10_force_reauth_over_the_tailnet_asks(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(risk, "_process_comes_over_tailnet", lambda pid: True)
    words = ("up", "--login-server=http://control.example", "--force-reauth")
    refused = cli(*words)
    assert refused.code == 1 and "--accept-risk=lose-ssh" in refused.err and "aborted, no changes made" in refused.err
    assert not [name for name, _ in cli.backend.calls if name in ("start", "edit_prefs")]


def test_s10_the_socket_table_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert risk._is_tailnet_hex("01024064"[::-1]) is False
    assert risk._is_tailnet_hex(bytes([100, 64, 2, 1])[::-1].hex())
    assert not risk._is_tailnet_hex(bytes([100, 128, 2, 1])[::-1].hex())
    v6 = bytes.fromhex("fd7a115ca1e00000") + bytes(7) + b"\x01"
    assert risk._is_tailnet_hex(b"".join(v6[i : i + 4][::-1] for i in range(0, 16, 4)).hex())
    mapped = bytes(10) + b"\xff\xff" + bytes([100, 100, 1, 2])
    assert risk._is_tailnet_hex(b"".join(mapped[i : i + 4][::-1] for i in range(0, 16, 4)).hex())
    assert not risk._is_tailnet_hex("") and not risk._is_tailnet_hex("zz")
    for text, wanted in (("100.64.0.1", True), ("::ffff:100.127.9.9", True), ("fd7a:115c:a1e0::5%x", True)):
        assert risk.is_tailnet_address(text) is wanted
    assert not risk.is_tailnet_address("fe80::1") and not risk.is_tailnet_address("10.0.0.1")


async def test_p07_fifty_pollers_are_answered_fast(api: tuple[str, FakeBackend]) -> None:
    path, backend = api
    built = 0
    original = backend.status

    def counted(with_peers: bool = True) -> dict:
        nonlocal built
        built += 1
        return original(with_peers)

    backend.status = counted  # type: ignore[method-assign]
    slowest_s = 0.0

    async def poll() -> None:
        nonlocal slowest_s
        client = await RawClient.open(path)
        for _ in range(8):
            started = time.perf_counter()
            assert (await client.call("GET", "status")).status == 200
            slowest_s = max(slowest_s, time.perf_counter() - started)
            await asyncio.sleep(0.05)
        client.close()

    await asyncio.gather(*(poll() for _ in range(50)))
    assert built < 150, "answers are shared under load"
    assert slowest_s < 5.0  # a loaded machine; alone it is some 50 ms
    client = await RawClient.open(path)
    await client.call("PATCH", "prefs", b'{"WantRunning":false,"WantRunningSet":true}')
    assert (await client.call("GET", "status")).json()["BackendState"] == "Stopped"
    client.close()


async def test_p07_too_many_connections_are_told_to_come_back(
    api: tuple[str, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsd.localapi.server.MAX_CONNECTIONS", 3)
    clients = [await RawClient.open(api[0]) for _ in range(3)]
    for client in clients:
        assert (await client.call("GET", "prefs")).status == 200
    extra = await RawClient.open(api[0])
    answer = await extra.read_answer()
    assert answer.status == 429 and answer.headers["Retry-After"] == "1"
    clients[0].close()
    await asyncio.sleep(0.05)
    assert (await (await RawClient.open(api[0])).call("GET", "prefs")).status == 200


def test_n14_words_that_are_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["up", "--hostname=\udcff"], ["set", "--hostname", "a\udc80"], ["ping", "\udcfe"], ["\udcff"]):
        assert run(["--socket=/nowhere", *words]) == 2
        assert "not valid UTF-8" in capsys.readouterr().err
