"""The control client and session against a real headscale: every login flow, the poll, updates, deltas, restarts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from harness.headscale import ALLOW_ALL, Headscale, peer_binary
from harness.netlab import NetLab, inside
from tsd.base.entropy import system_entropy
from tsd.base.errors import ControlError
from tsd.base.keys import DiscoPrivate, LockPrivate, MachinePrivate, NodePrivate
from tsd.engine.control.requests import SelfReport
from tsd.engine.control.session import ControlSession
from tsd.netmap.netmap import Netmap, apply
from tsd.tailcfg.hostinfo import Hostinfo, NetInfo
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.mapresponse import MapResponse
from tsd.tailcfg.register import RegisterResponse
from tsd.transport.control import ControlClient

pytestmark = [
    pytest.mark.root,
    pytest.mark.peers,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
]

POLICY: dict[str, Any] = {"tagOwners": {"tag:x": ["u@"], "tag:y": ["u@"]}, **ALLOW_ALL}


@pytest.fixture(scope="module")
def headscale(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Headscale]:
    peer_binary("headscale")
    with NetLab(f"tsdE{os.getpid()}") as lab:
        namespace = lab.add_host("hs")
        server = Headscale(lab, namespace, tmp_path_factory.mktemp("headscale")).start()
        server.set_policy(POLICY)
        server.user_id = server.create_user("u")  # type: ignore[attr-defined]
        with inside(namespace):
            yield server


class Member:
    """One node: a session, the netmap made of what it heard, and the last word on everything."""

    def __init__(self, url: str, name: str, *, known: NodePrivate | None = None, is_ephemeral: bool = False) -> None:
        self.name = name
        self.machine = MachinePrivate.generate(system_entropy)
        self.key = known or NodePrivate.generate(system_entropy)
        self.disco = DiscoPrivate.generate(system_entropy).public()
        self.is_ephemeral = is_ephemeral
        self.netmap: Netmap | None = None
        self.messages: list[MapResponse] = []
        self.urls: list[str] = []
        self.accepted: list[NodePrivate] = []
        self.errors: list[str] = []
        self.refusals: list[str] = []
        self.connected: list[bool] = []
        self.open(url)

    def open(self, url: str, known: NodePrivate | None = None) -> None:
        self.client = ControlClient(url, self.machine, environ={})
        self.session = ControlSession(
            self.client,
            self,
            report=self.report(),
            entropy=system_entropy,
            lock_key=lambda: LockPrivate.generate(system_entropy),
            known_node_key=known,
            is_ephemeral=self.is_ephemeral,
        )

    def report(self, *endpoints: str, **changes: Any) -> SelfReport:
        hostinfo = Hostinfo(
            hostname=self.name, backend_log_id="ab" * 32, os="linux", net_info=NetInfo(preferred_derp=900), **changes
        )
        return SelfReport(hostinfo, self.disco, tuple((endpoint, 1) for endpoint in endpoints))

    def on_auth_url(self, url: str) -> None:
        self.urls.append(url)

    def on_login_done(self, response: RegisterResponse, node_key: NodePrivate) -> None:
        self.accepted.append(node_key)

    def on_map(self, message: MapResponse, is_first: bool) -> None:
        self.messages.append(message)
        self.netmap, _ = apply(self.netmap, message, wall_ns=0, is_first=is_first)

    def on_error(self, text: str, is_refusal: bool) -> None:
        (self.refusals if is_refusal else self.errors).append(text)

    def on_connected(self, is_connected: bool) -> None:
        self.connected.append(is_connected)

    def on_pop_browser(self, url: str) -> None: ...

    def peer(self, name: str) -> Any:
        nodes = self.netmap.peers.values() if self.netmap is not None else ()
        return next((node for node in nodes if node.base_name == name), None)

    async def close(self) -> None:
        self.session.close()
        await self.session.wait_closed()


Join = Callable[..., Any]


@pytest.fixture
async def join(headscale: Headscale) -> AsyncIterator[Join]:
    members: list[Member] = []

    async def joiner(name: str, auth_key: str = "", *, waits: bool = True, **options: Any) -> Member:
        member = Member(headscale.url, name, **options)
        members.append(member)
        member.session.login(member.key, None, auth_key)
        if waits:
            await until(lambda: member.netmap is not None)
        return member

    yield joiner
    for member in members:
        await member.close()


async def until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def ask(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """headscale's CLI, without holding the loop that it needs answers from."""
    return await asyncio.to_thread(function, *arguments, **named)


async def new_key(headscale: Headscale, **options: Any) -> str:
    return str(await ask(headscale.create_key, headscale.user_id, **options))  # type: ignore[attr-defined]


async def test_key_and_early_payload(headscale: Headscale) -> None:
    client = ControlClient(headscale.url, MachinePrivate.generate(system_entropy), environ={})
    key = await client.fetch_key()
    assert not key.is_zero
    answer = await client.post("/machine/nothing", b"{}")
    assert answer.status in (404, 501)
    await client.close()


async def test_two_members_see_each_other(headscale: Headscale, join: Join) -> None:
    key = await new_key(headscale, reusable=True)
    first, second = await join("alpha", key), await join("beta", key)
    assert first.netmap.self_node.name == "alpha.tn.example."
    assert first.netmap.magic_suffix == "tn.example"
    assert first.netmap.derp_map.is_usable
    assert first.netmap.filter_rules()
    await until(lambda: first.peer("beta") and second.peer("alpha"))
    assert first.netmap.users[first.netmap.self_node.user].login_name
    second.session.update(second.report("192.0.2.7:4242"))
    await until(lambda: first.peer("beta").endpoints == ("192.0.2.7:4242",))
    assert first.peer("beta").disco == second.disco
    assert first.peer("beta").home_region == 900
    await second.close()
    await until(lambda: first.peer("beta").online is False, 30)
    await ask(headscale.cli, "nodes", "delete", "-i", str(second.netmap.self_node.id), "--force")
    await until(lambda: first.peer("beta") is None)
    assert any(message.peers_removed for message in first.messages)


async def test_single_use_key_serves_once_and_restarts_still_work(headscale: Headscale, join: Join) -> None:
    key = await new_key(headscale)
    member = await join("gamma", key)
    await member.close()
    for known in (member.key, None):
        member.netmap = None
        member.open(headscale.url, known)
        member.session.login(member.key, None, key)
        await until(lambda: member.netmap is not None)
        await member.close()
    stranger = await join("delta", key, waits=False)
    await until(lambda: stranger.refusals)
    assert "single use" in stranger.refusals[0]


@pytest.mark.parametrize(
    ("auth_key", "text"),
    [("hskey-auth-000000000000-" + "0" * 64, "does not know"), ("rubbish", "does not know")],
    ids=["unknown", "malformed"],
)
async def test_bad_keys_are_told_apart(join: Join, auth_key: str, text: str) -> None:
    member = await join("eps", auth_key, waits=False)
    await until(lambda: member.refusals)
    assert text in member.refusals[0]


async def test_expired_key(headscale: Headscale, join: Join) -> None:
    key = await new_key(headscale, expiration="1s")
    await asyncio.sleep(1.2)
    member = await join("zeta", key, waits=False)
    await until(lambda: member.refusals)
    assert "expired" in member.refusals[0]


async def test_tagged_and_ephemeral_keys(headscale: Headscale, join: Join) -> None:
    tagged = await join("eta", await new_key(headscale, tags=["tag:x"]))
    assert tagged.netmap.self_node.tags == ("tag:x",)
    ephemeral = await join("theta", await new_key(headscale, ephemeral=True), is_ephemeral=True)
    await until(lambda: tagged.peer("theta"))
    await ephemeral.session.logout()
    await until(lambda: tagged.peer("theta") is None)


async def test_interactive_login(headscale: Headscale, join: Join) -> None:
    member = await join("iota", waits=False)
    await until(lambda: member.urls)
    assert member.urls[0].startswith(f"{headscale.url}/register/")
    await asyncio.sleep(0.3)
    assert not member.accepted
    await ask(headscale.approve_login, member.urls[0], "u")
    await until(lambda: member.netmap is not None)
    assert len(member.urls) == 1


async def test_key_rotation_keeps_the_node(headscale: Headscale, join: Join) -> None:
    key = await new_key(headscale, reusable=True)
    member = await join("kappa", key)
    node_id, address = member.netmap.self_node.id, member.netmap.self_node.addresses
    fresh = NodePrivate.generate(system_entropy)
    member.session.login(fresh, member.key, key)
    await until(lambda: member.netmap.self_node.key == str(fresh.public()))
    assert (member.netmap.self_node.id, member.netmap.self_node.addresses) == (node_id, address)


async def test_expiry_and_logout(headscale: Headscale, join: Join) -> None:
    member = await join("lambda", await new_key(headscale))
    await ask(headscale.cli, "nodes", "expire", "-i", str(member.netmap.self_node.id))
    await until(lambda: member.netmap.self_node.key_expiry is not None)
    other = await join("mu", await new_key(headscale))
    await other.session.logout()
    listed = await ask(headscale.node, "mu")
    assert listed["expiry"]


async def test_deleted_node_says_so_and_asks_for_a_login(headscale: Headscale, join: Join) -> None:
    """Also when its auth key could be used again: who deletes a node does not want it back by itself."""
    member = await join("nu", await new_key(headscale))
    await ask(headscale.cli, "nodes", "delete", "-i", str(member.netmap.self_node.id), "--force")
    member.session.reconnect()
    await until(lambda: member.urls, 30)
    assert any("node not found" in text for text in member.errors)
    member.session.login(member.key, None, "used-up")
    await until(lambda: member.refusals, 30)


async def test_policy_change_reaches_the_filter(headscale: Headscale, join: Join) -> None:
    member = await join("xi", await new_key(headscale))
    before = member.netmap.filter_rules()
    narrow = POLICY | {"acls": [{"action": "accept", "src": ["u@"], "dst": ["*:80"]}]}
    await ask(headscale.set_policy, narrow)
    await until(lambda: member.netmap.filter_rules() != before)
    await ask(headscale.set_policy, POLICY)
    await until(lambda: member.netmap.filter_rules() == before)


async def test_restart_of_the_server_is_survived(headscale: Headscale, join: Join) -> None:
    member = await join("omicron", await new_key(headscale))
    await ask(headscale.stop)
    await until(lambda: member.connected[-1] is False)
    await until(lambda: any("(TCP)" in text for text in member.errors))
    await ask(headscale.start)
    member.session.retry_now()
    await until(lambda: member.connected[-1] is True, 40)
    assert member.errors[-1] == ""
    assert len(member.accepted) == 1


async def test_liveness_ping_of_the_server_is_answered(headscale: Headscale, join: Join) -> None:
    member = await join("rho", await new_key(headscale))
    url = f"{headscale.metrics_url}/debug/ping?node={member.netmap.self_node.id}"
    answer = await member.client.fetch("POST", url, timeout_s=20)
    assert answer.status == 200, answer.body
    assert any(message.ping_request for message in member.messages)
    assert b"Pong" in answer.body, answer.body


@pytest.mark.parametrize("compress", ["", "zstd"])
async def test_plain_and_compressed_polls(headscale: Headscale, join: Join, compress: str) -> None:
    member = await join("pi", await new_key(headscale, reusable=True))
    await member.close()
    client = ControlClient(headscale.url, member.machine, environ={})
    hostinfo = Hostinfo(hostname="pi", backend_log_id="ab" * 32, device_model="x" * 60_000)
    request = MapRequest(node_key=str(member.key.public()), stream=True, compress=compress, hostinfo=hostinfo)
    stream = await client.poll(request)
    assert (await anext(stream)).node is not None
    await stream.close()
    await client.close()


async def test_old_versions_are_refused_in_words(headscale: Headscale) -> None:
    machine = MachinePrivate.generate(system_entropy)
    client = ControlClient(headscale.url, machine, environ={}, capability_version=100)
    with pytest.raises(ControlError, match="refused the Noise handshake"):
        await client.post("/machine/register", b"{}")
    await client.close()
