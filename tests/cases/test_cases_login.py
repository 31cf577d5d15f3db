"""Cases of logging in and out: a whole engine and a coordination server that plays along, or does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.control_double import ControlDouble
from harness.loneengine import LoneEngine, lone_engine, peer_json
from tsd.base.clock import SystemClock
from tsd.base.errors import ControlError
from tsd.engine.account.prefs import Prefs
from tsd.engine.account.states import State
from tsd.engine.control import session as control
from tsd.transport.dial import HostDial


async def _joined(server: ControlDouble, **options: Any) -> LoneEngine:
    """An engine that logged in at a coordination server by auth key."""
    lone = LoneEngine(control_dial=HostDial(), **options)
    await lone.engine.start()
    prefs = Prefs(control_url=server.url, want_running=True).to_go()
    await lone.backend.start({"UpdatePrefs": prefs, "AuthKey": "A"})
    await lone.backend.login_interactive()
    await _until(lambda: lone.engine.account.state in (State.STARTING, State.RUNNING))
    return lone


async def _until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _auth_keys(server: ControlDouble) -> list[str]:
    return [(request.get("Auth") or {}).get("AuthKey", "") for request in server.registrations]


async def test_s09_a_key_for_a_node_that_is_logged_in() -> None:
    """While running it is kept back and that is said; with an expired key or logged out it is used."""
    async with ControlDouble() as server:
        lone = await _joined(server)
        assert _auth_keys(server) == ["A"]
        await lone.backend.start({"AuthKey": "B"})
        await _until(lambda: "auth key given was not used" in " ".join(lone.backend.status()["Health"]))
        assert _auth_keys(server) == ["A", ""]
        await _until(lambda: len(server.polls) == 2)

        async def expired(request: dict[str, Any]) -> dict[str, Any]:
            if "Auth" not in request:
                return {"NodeKeyExpired": True}
            return await server._accept(request)

        server.on_register = expired
        await lone.backend.start({"AuthKey": "C"})
        await _until(lambda: _auth_keys(server)[-1] == "C")
        await _until(lambda: "auth key" not in " ".join(lone.backend.status()["Health"]))
        await lone.backend.logout()
        server.on_register = server._accept
        await lone.backend.start(
            {
                "UpdatePrefs": lone.backend.prefs()
                | {"ControlURL": server.url, "WantRunning": True, "LoggedOut": False},
                "AuthKey": "D",
            }
        )
        await lone.backend.login_interactive()
        await _until(lambda: _auth_keys(server)[-1] == "D")
        await _until(lambda: lone.engine.account.state in (State.STARTING, State.RUNNING))
        await lone.backend.start({"AuthKey": "E"})
        await _until(lambda: "auth key given was not used" in " ".join(lone.backend.status()["Health"]))
        await lone.backend.logout()
        assert "auth key" not in " ".join(lone.backend.status()["Health"]), "who is logged out is not logged in already"
        await lone.engine.close()


async def test_s09_an_expired_node_without_a_key_gets_a_url() -> None:
    async with ControlDouble() as server:
        lone = await _joined(server)

        async def expired(request: dict[str, Any]) -> dict[str, Any]:
            if request.get("Followup"):
                await asyncio.Event().wait()
            if request["NodeKey"] == str(lone.engine.account.prefs.node_key.public()):  # type: ignore[union-attr]
                return {"NodeKeyExpired": True}
            return {"AuthURL": server.url + "/a/1"}

        server.on_register = expired
        await lone.backend.start({})
        await _until(lambda: lone.backend.status()["AuthURL"] == server.url + "/a/1")
        await lone.engine.close()


async def test_k05_an_ephemeral_node_stops_in_time_though_control_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ControlDouble() as server:
        lone = await _joined(server, is_ephemeral=True)
        assert server.registrations[-1]["Ephemeral"] is True
        leaving = asyncio.Event()

        async def hang(request: dict[str, Any]) -> dict[str, Any]:
            if request["Expiry"].startswith("1970"):
                leaving.set()
            await asyncio.Event().wait()
            return {}

        server.on_register = hang
        monkeypatch.setattr(control, "LOGOUT_TIMEOUT_S", 0.3)
        async with asyncio.timeout(3.0):
            await lone.engine.close()
        assert leaving.is_set(), "the server was told"
        server.on_register = server._accept
        again = await _joined(server, is_ephemeral=True)
        await again.engine.close()
        assert server.registrations[-1]["Expiry"].startswith("1970")


async def test_n24_two_ups_at_once_make_one_node() -> None:
    """Impatient users and scripts: the second `up` comes while the first is under way."""
    async with ControlDouble() as server:
        lone = LoneEngine(control_dial=HostDial())
        await lone.engine.start()
        prefs = Prefs(control_url=server.url, want_running=True).to_go()

        async def up(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            await lone.backend.start({"UpdatePrefs": prefs, "AuthKey": "A"})
            await lone.backend.login_interactive()

        await asyncio.gather(*(up(n * 0.01) for n in range(4)))
        await _until(lambda: lone.engine.account.state in (State.STARTING, State.RUNNING))
        await asyncio.sleep(0.3)
        accepted = {request["NodeKey"] for request in server.registrations}
        key = lone.engine.account.prefs.node_key
        assert key is not None and server.polls[-1]["NodeKey"] == str(key.public()) and str(key.public()) in accepted
        assert len(lone.backend.profiles()) == 1
        assert lone.backend.status()["Self"]["PublicKey"] == str(key.public())
        await lone.engine.close()


async def test_s09_status_says_that_the_key_has_expired() -> None:
    """Not just that it is logged out: the remedy is `tsctl up`, and a server that renews the key ends it."""
    async with lone_engine() as lone:
        own = peer_json(1, Key=str(lone.key.public()))
        for change in ({"Expired": True}, {"KeyExpiry": "2020-01-01T00:00:00Z"}):
            lone.map(Node=own | change)
            assert lone.backend.status()["BackendState"] == "NeedsLogin"
            assert "key of this node has expired" in " ".join(lone.backend.status()["Health"])
            lone.map(Node=own)
            assert lone.backend.status()["BackendState"] == "Running" and lone.backend.status()["Health"] == []
        lone.map(Node=own | {"Expired": True})
        await lone.backend.edit_prefs({"WantRunning": False, "WantRunningSet": True})
        assert "expired" not in " ".join(lone.backend.status()["Health"])


async def test_c06_a_setting_that_nothing_acts_on_is_named() -> None:
    """Nobody should believe that an SSH server runs; the setting is kept, for a state that moves to another daemon."""
    async with lone_engine() as lone:
        edit = {"RunSSH": True, "RunSSHSet": True, "AutoUpdate": {"Apply": True}, "AutoUpdateSet": {"ApplySet": True}}
        assert (await lone.backend.edit_prefs(edit))["RunSSH"] is True
        [text] = lone.backend.status()["Health"]
        assert text.endswith("no such thing: --ssh, --auto-update.")
        await lone.backend.edit_prefs({"RunSSHSet": True, "AutoUpdateSet": {"ApplySet": True}})
        assert lone.backend.status()["Health"] == []


@pytest.mark.parametrize("answer", ["refuses the connection", "never answers", "has an error"])
async def test_n23_status_says_at_once_that_the_server_is_not_reached(answer: str) -> None:
    """While the first login waits, and not eight minutes later; it ends with the first word of the server."""
    async with ControlDouble() as server:

        async def dial(host: str, port: int, **options: Any) -> Any:
            if answer == "never answers":
                await asyncio.Event().wait()
            if answer == "refuses the connection":
                raise ControlError(f"cannot connect to {host}:{port}: refused")
            return await HostDial()(host, port, **options)

        async def fail(request: dict[str, Any]) -> tuple[int, str, dict[str, str]]:
            return 500, "boom", {}

        server.on_register = fail  # type: ignore[assignment]
        lone = LoneEngine(control_dial=dial)
        await lone.engine.start()
        prefs = Prefs(control_url=server.url, want_running=True).to_go()
        await lone.backend.start({"UpdatePrefs": prefs, "AuthKey": "A"})
        await lone.backend.login_interactive()
        told = {"refuses the connection": "refused", "never answers": "no answer from", "has an error": "boom"}[answer]
        lone.clock.advance(3.0)  # type: ignore[attr-defined]
        await _until(lambda: told in " ".join(lone.backend.status()["Health"]))
        assert "has not been reached yet" in lone.backend.status()["Health"][0]
        if answer == "has an error":
            server.on_register = server._accept
            await _until(lambda: lone.engine.account.state is not State.NEEDS_LOGIN)
        else:
            await lone.backend.logout()
        assert "reached" not in " ".join(lone.backend.status()["Health"])
        await lone.engine.close()


async def test_n23_a_warning_that_becomes_visible_by_waiting_reaches_the_watchers() -> None:
    """`up` prints it while it waits: nothing else changes meanwhile that would bring it along."""
    async with lone_engine(is_up=False, clock=SystemClock()) as lone:
        watch = lone.backend.watch(0)
        await lone.backend.start({"UpdatePrefs": Prefs(control_url="http://192.0.2.1", want_running=True).to_go()})
        await lone.backend.login_interactive()
        async with asyncio.timeout(20):
            while "no-control" not in str((await anext(watch)).get("Health")):
                pass
        watch.close()
