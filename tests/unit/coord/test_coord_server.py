"""`tsd coord` over its sockets: our own control client, the relay's HTTP routes, the policy file, the command line."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import stat
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from harness.coordproc import coord_in_process
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ConfigError, ControlError
from tsd.base.keys import DiscoPrivate, MachinePrivate, NodePrivate
from tsd.coord import adminclient
from tsd.coord.cli import coord as command_line
from tsd.coord.server import CoordServer
from tsd.stun.messages import decode_reply, encode_request
from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import RegisterAuth, RegisterRequest
from tsd.transport.control import ControlClient


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[CoordServer]:
    async with coord_in_process(tmp_path / "state") as running:
        yield running


class Node:
    def __init__(self, url: str, name: str) -> None:
        entropy = SeededEntropy(name)
        self.client = ControlClient(url, MachinePrivate.generate(entropy), entropy=entropy, environ={})
        self.node_key = str(NodePrivate.generate(entropy).public())
        self.disco_key = str(DiscoPrivate.generate(entropy).public())
        self.name = name

    async def register(self, key: str = "", **more: Any) -> Any:
        auth = RegisterAuth(auth_key=key) if key else None
        hostinfo = Hostinfo(hostname=self.name)
        return await self.client.register(RegisterRequest(node_key=self.node_key, auth=auth, hostinfo=hostinfo, **more))

    async def poll(self, compress: str = "zstd") -> Any:
        request = MapRequest(node_key=self.node_key, disco_key=self.disco_key, stream=True, compress=compress)
        return await self.client.poll(request)


def new_key(server: CoordServer, **options: Any) -> str:
    made = server.administration.create_key(server.moment(), **options)
    server.drain()
    return str(made["key"])


async def next_of(stream: Any) -> Any:
    return await asyncio.wait_for(anext(aiter(stream)), 5)


async def test_two_nodes_join_and_see_each_other(server: CoordServer) -> None:
    key = new_key(server, reusable=True)
    one, two = Node(server.url, "one"), Node(server.url, "two")
    assert (await one.register(key)).machine_authorized
    stream = await one.poll()
    first = await next_of(stream)
    assert first.node is not None and first.derp_map is not None and first.derp_map.is_usable
    assert (await two.register(key)).machine_authorized
    delta = await next_of(stream)
    assert [peer.base_name for peer in delta.peers_changed or ()] == ["two"]
    plain = await next_of(await two.poll(""))
    assert [peer.base_name for peer in plain.peers or ()] == ["one"]
    await one.client.close()
    await two.client.close()


async def test_unknown_node_and_old_client_are_refused(server: CoordServer) -> None:
    stranger = Node(server.url, "stranger")
    with pytest.raises(ControlError) as caught:
        await stranger.poll()
    assert caught.value.status == 404
    with pytest.raises(ControlError) as old:
        await stranger.client.register(RegisterRequest(version=100, node_key=stranger.node_key))
    assert old.value.status == 400 and "capability version" in str(old.value)
    await stranger.client.close()


async def test_held_login_is_answered_on_approval(server: CoordServer) -> None:
    node = Node(server.url, "laptop")
    url = (await node.register()).auth_url
    held = asyncio.create_task(node.register(followup=url))
    await asyncio.sleep(0.1)
    assert not held.done()
    async with aiohttp.ClientSession() as session, session.get(url) as page:
        text = await page.text()
        assert page.status == 200 and "laptop" in text and "tsd coord nodes approve" in text
    state = server.settings.state
    await asyncio.to_thread(adminclient.call, state, "nodes.approve", {"id": url, "user": "alice"})
    assert (await asyncio.wait_for(held, 5)).login.login_name == "alice@tsd.internal"
    await node.client.close()


async def test_a_deleted_node_is_cut_off(server: CoordServer) -> None:
    node = Node(server.url, "one")
    await node.register(new_key(server))
    stream = await node.poll()
    await next_of(stream)
    await asyncio.to_thread(adminclient.call, server.settings.state, "nodes.delete", {"node": "one"})
    with pytest.raises((StopAsyncIteration, ControlError)):
        await next_of(stream)
    await node.client.close()


async def test_state_survives_a_restart(tmp_path: Path) -> None:
    node: Node
    async with coord_in_process(tmp_path / "state") as server:
        key, control_key = new_key(server), server.control_key_text
        node = Node(server.url, "one")
        await node.register(key)
        pin = server.coordinator.config.derp_map.region(900).derp_nodes[0].cert_name  # type: ignore[union-attr]
        await node.client.close()
    async with coord_in_process(tmp_path / "state") as server:
        again = Node(server.url, "one")
        assert (await again.register()).machine_authorized
        assert server.control_key_text == control_key
        assert server.coordinator.config.derp_map.region(900).derp_nodes[0].cert_name == pin  # type: ignore[union-attr]
        assert (await Node(server.url, "two").register(key)).error == "authkey already used"
        await again.client.close()


async def test_one_state_folder_has_one_server(server: CoordServer) -> None:
    with pytest.raises(ConfigError, match="another tsd coord"):
        async with coord_in_process(server.settings.state):
            pass


async def test_files_are_private_and_long_paths_work(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20) / ("path-" * 10)
    async with coord_in_process(folder):
        for path in [folder, *folder.iterdir()]:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert (await asyncio.to_thread(adminclient.call, folder, "status"))["nodes"] == 0


async def test_broken_policy_file_keeps_the_old_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = tmp_path / "policy.hujson"
    policy.write_text('{"acls": []}')
    async with coord_in_process(tmp_path / "state", policy_file=policy) as server:
        policy.write_text('{"acls": [\n  {"action": "drop"}]}')
        server.reload_policy(only_if_changed=True)
        assert f"{policy}:2:14: action must be 'accept'" in caplog.text
        assert server.coordinator.registry.visibility.compiled.rules == ()
        policy.write_text("{} // all")
        server.reload_policy(only_if_changed=True)
        assert len(server.coordinator.registry.visibility.compiled.rules) == 1
        with pytest.raises(ConfigError, match="comes from"):
            await server.set_policy("{}")
    policy.write_text("{]")
    with pytest.raises(ConfigError, match=r"policy\.hujson:1:2"):
        async with coord_in_process(tmp_path / "state", policy_file=policy):
            pass


async def test_stored_policy_survives_a_restart(tmp_path: Path) -> None:
    async with coord_in_process(tmp_path / "state") as server:
        await server.set_policy('{"acls": []} // none')
    async with coord_in_process(tmp_path / "state") as server:
        assert server.policy.text.endswith("// none")
        assert server.coordinator.registry.visibility.compiled.rules == ()


async def test_relay_http_routes(server: CoordServer) -> None:
    base = f"https://{server.derp_address}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session:
        for path in ("/derp/probe", "/derp/latency-check"):
            async with session.get(base + path) as answer:
                assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == "*"
            async with session.head(base + path) as answer:
                assert answer.status == 200
            async with session.post(base + path) as answer:
                assert answer.status == 405
        async with session.get(base + "/derp") as answer:
            assert answer.status == 426
        async with session.get(base + "/generate_204", headers={"X-Tailscale-Challenge": "ab:c"}) as answer:
            assert answer.status == 204 and answer.headers["X-Tailscale-Response"] == "response ab:c"


async def test_relay_greets_with_and_without_fast_start(server: CoordServer) -> None:
    assert server.derp is not None and server.derp_address is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    greeting = b"DERP\xf0\x9f\x94\x91" + server.derp.public.raw
    for extra, has_head in ((b"", True), (b"Derp-Fast-Start: 1\r\n", False)):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.derp_address.port, ssl=context)
        writer.write(b"GET /derp HTTP/1.1\r\nHost: x\r\nUpgrade: DERP\r\nConnection: Upgrade\r\n" + extra + b"\r\n")
        if has_head:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 101") and b"Derp-Version: 2" in head
        frame = await asyncio.wait_for(reader.readexactly(5 + len(greeting)), 5)
        assert frame == b"\x01" + struct.pack(">I", len(greeting)) + greeting
        writer.close()


async def test_stun_answers(server: CoordServer) -> None:
    assert server.stun_address is not None
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()

    class Probe(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: object) -> None:
            answer.set_result(data)

    transport, _ = await loop.create_datagram_endpoint(Probe, remote_addr=("127.0.0.1", server.stun_address.port))
    transport.sendto(encode_request(b"t" * 12))
    own = transport.get_extra_info("sockname")
    raw = await asyncio.wait_for(answer, 5)
    assert str(decode_reply(raw)[1]) == f"127.0.0.1:{own[1]}"
    transport.close()


async def test_plain_http_routes(server: CoordServer) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(server.url + "/key?v=130") as answer:
            assert (await answer.json())["publicKey"] == server.control_key_text
        for path, status in (("/key", 400), ("/key?v=x", 400), ("/health", 200), ("/ts2021", 400), ("/nowhere", 404)):
            async with session.get(server.url + path) as answer:
                assert answer.status == status, path
        for path in ("/register/" + "a" * 24, "/register/x"):
            async with session.get(server.url + path) as answer:
                assert answer.status == 404
        async with session.post(server.url + "/verify", data=b'{"NodePublic":"nodekey:00","Source":""}') as answer:
            assert await answer.json() == {"Allow": False}


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(command_line, words)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "words",
    [
        ("--listen=nowhere:1",),
        ("--base-domain=under_score",),
        ("--prefix-v4=10.0.0.1/8",),
        ("--derp-listen=none",),
        ("--listen=0.0.0.0:0",),
        ("--node-expiry=soon",),
        ("--url=ftp://x",),
        ("--tls-cert=/nonexistent",),
        ("policy", "check", "/nonexistent"),
        ("keys", "create", "--expiry=soon"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words: tuple[str, ...], tmp_path: Path) -> None:
    code, output = run(f"--state={tmp_path}", *words)
    assert code == 2 and len(output.strip().splitlines()) == 1 and output.startswith("tsd coord: "), output


def test_without_a_server_commands_say_so(tmp_path: Path) -> None:
    code, output = run("nodes", "list", f"--state={tmp_path}")
    assert code == 1 and "is it running" in output and len(output.strip().splitlines()) == 1


def test_help_states_the_size_limit() -> None:
    code, output = run("--help")
    assert code == 0 and "500 nodes" in output


def test_policy_check_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text('{\n  "acls": [{"action": "deny"}]}')
    code, output = run("policy", "check", str(path))
    assert code == 2 and f"{path}:2:23: " in output
    path.write_text("{}")
    assert run("policy", "check", str(path))[0] == 0


async def test_commands_against_a_running_server(server: CoordServer, tmp_path: Path) -> None:
    state = f"--state={server.settings.state}"

    async def ask(*words: str) -> tuple[int, str]:
        return await asyncio.to_thread(run, *words)

    output = tmp_path / "key"
    code, text = await ask("keys", "create", state, "--reusable", "--tags=tag:a,tag:b", f"--output={output}")
    assert code == 0 and "written" in text and stat.S_IMODE(output.stat().st_mode) == 0o600
    key = output.read_text()
    assert key.startswith("tskey-auth-") and key.endswith("\n") and key.strip() not in text
    node = Node(server.url, "Ann's Mac")
    assert (await node.register(key)).machine_authorized
    assert json.loads((await ask("nodes", "list", state, "--json"))[1])[0]["tags"] == ["tag:a", "tag:b"]
    assert "anns-mac" in (await ask(state, "nodes", "list"))[1]
    assert (await ask("nodes", "rename", state, "anns-mac", "ann"))[0] == 0
    assert (await ask("nodes", "approve-routes", state, "ann", "10.0.0.0/24,10.1.0.0/24"))[0] == 0
    assert (await ask("nodes", "approve-routes", state, "ann", "10.0.0.1/24"))[0] == 2
    assert (await ask("nodes", "expire", state, "ann"))[0] == 0
    assert (await ask("keys", "revoke", state, "1"))[0] == 0
    assert "revoked" in (await ask("keys", "list", state))[1]
    assert (await ask("nodes", "echo", state, "ann"))[0] == 2
    code, text = await ask("keys", "create", state, f"--output={tmp_path}/no/key")
    assert code == 2 and "No such file" in text
    keys = json.loads((await ask("keys", "list", state, "--json"))[1])
    assert [key["state"] for key in keys] == ["revoked", "revoked"], "a key that nobody has seen opens no door"
    policy = tmp_path / "policy"
    policy.write_text('{"acls": 1}')
    code, text = await ask("policy", "set", state, str(policy))
    assert code == 2 and f"{policy}:1:10" in text
    policy.write_text('{"acls": []}')
    assert (await ask("policy", "set", state, str(policy)))[0] == 0
    assert (await ask("policy", "get", state))[1].strip() == '{"acls": []}'
    assert (await ask("nodes", "delete", state, "ann"))[0] == 0
    assert (await ask("nodes", "delete", state, "ann"))[0] == 2
    await node.client.close()


def test_state_folder_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TSD_COORD_STATE", "/nonexistent/here")
    assert "/nonexistent/here" in run("status")[1]


def test_the_command_line_starts_without_the_server() -> None:
    program = (
        "import sys, tsd.coord.cli, tsd.coord.adminclient; print(*({'aiohttp', 'cryptography'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done
