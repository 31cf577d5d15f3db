"""Registering in a locked tailnet: we sign our own new node key, and a wrapped auth key signs the first one."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from harness.control_double import ControlDouble, Json
from harness.lockkeys import key_id, lock_key, new_authority, sign_node
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import MachinePrivate, NodePrivate, NodePublic
from tsd.engine.control.requests import SelfReport
from tsd.engine.control.session import ControlSession
from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tka.nodekey import CREDENTIAL, NodeKeySignature
from tsd.tka.wrapped import wrap
from tsd.transport.control import ControlClient

ENTROPY = SeededEntropy("locked session")
KEY = NodePrivate.generate(ENTROPY)
OWN = lock_key(7)


class Events:
    def __init__(self) -> None:
        self.logins: list[NodePrivate] = []
        self.errors: list[str] = []

    def on_login_done(self, response: Any, node_key: NodePrivate) -> None:
        self.logins.append(node_key)

    def on_error(self, text: str, is_refusal: bool) -> None:
        self.errors.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class Bench:
    """A session and a server whose tailnet is locked; `answers` are taken first, then logins are accepted."""

    def __init__(self, *answers: Json) -> None:
        self.events = Events()
        self.server = ControlDouble()
        self.answers = list(answers)
        self.server.on_register = self._register

    async def _register(self, request: Json) -> Json:
        return self.answers.pop(0) if self.answers else {"User": {"ID": 1}, "Login": {"ID": 1}}

    async def __aenter__(self) -> Bench:
        await self.server.__aenter__()
        machine = MachinePrivate.generate(SeededEntropy("m"))
        client = ControlClient(self.server.url, machine, entropy=ENTROPY, environ={})
        report = SelfReport(Hostinfo(hostname="h", backend_log_id="00"))
        self.session = ControlSession(client, self.events, report=report, entropy=ENTROPY, lock_key=lambda: OWN)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.session.close()
        await self.session.wait_closed()
        await self.server.__aexit__()

    async def logged_in(self) -> Json:
        """The request that was accepted."""
        async with asyncio.timeout(20):
            while not self.events.logins:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self.server.registrations[-1]


def admitted(request: Json) -> NodeKeySignature:
    """Its signature, if a lock that trusts key 1 takes it for the node key of the request."""
    raw = base64.b64decode(request["NodeKeySignature"])
    new_authority().admit(NodePublic.parse(request["NodeKey"]), raw)
    return NodeKeySignature.decode(raw)


def signature_of(key: NodePrivate) -> Json:
    return {"NodeKeySignature": base64.b64encode(sign_node(key.public(), rotation=OWN.public().raw)).decode()}


async def test_control_gets_our_lock_key_and_no_signature_unless_it_is_wanted() -> None:
    async with Bench() as bench:
        bench.session.login(KEY, None, "tskey-auth-x")
        request = await bench.logged_in()
        assert request["NLKey"] == str(OWN.public()) and request["NodeKeySignature"] is None


async def test_a_new_node_key_is_signed_with_what_admitted_the_old_one() -> None:
    new = NodePrivate.generate(ENTROPY)
    async with Bench(signature_of(KEY)) as bench:
        bench.session.login(new, KEY, "")
        request = await bench.logged_in()
        assert request["NodeKey"] == str(new.public()) and request["OldNodeKey"] == str(KEY.public())
        assert admitted(request).nested is not None
        assert bench.events.logins == [new]


async def test_a_key_that_control_wants_replaced_is_replaced() -> None:
    async with Bench(signature_of(KEY)) as bench:
        bench.session.login(KEY, None, "")
        request = await bench.logged_in()
        assert request["OldNodeKey"] == str(KEY.public()) and request["NodeKey"] != str(KEY.public())
        admitted(request)


async def test_a_signature_is_not_kept_for_another_key() -> None:
    async with Bench(signature_of(KEY), {"NodeKeyExpired": True}) as bench:
        bench.session.login(KEY, None, "")
        request = await bench.logged_in()
        _, signed, _ = bench.server.registrations
        admitted(signed)
        assert request["NodeKey"] != signed["NodeKey"] and request["NodeKeySignature"] is None


async def test_a_signature_that_cannot_be_read_is_told_with_the_way_out() -> None:
    async with Bench({"NodeKeySignature": "AAAA"}) as bench:
        bench.session.login(KEY, None, "")
        await bench.logged_in()
        assert any("tsctl lock sign nodekey:" in text for text in bench.events.errors)


async def test_a_wrapped_auth_key_signs_the_node_and_stays_secret() -> None:
    private = Ed25519PrivateKey.from_private_bytes(b"w" * 32)
    public = private.public_key().public_bytes_raw()
    credential = NodeKeySignature(CREDENTIAL, key_id=key_id(1), wrapping_pubkey=public).signed_by(lock_key(1).sign)
    async with Bench() as bench:
        bench.session.login(KEY, None, wrap("tskey-auth-x-y", credential, private))
        request = await bench.logged_in()
        assert request["Auth"] == {"AuthKey": "tskey-auth-x-y"} and "--TL" not in json.dumps(request)
        assert admitted(request).nested == credential
