"""The account with a scripted control client: login flows, the order of what watchers hear, logout, switching."""

from __future__ import annotations

import asyncio

import pytest

from harness.accountscript import SERVER, URL, Daemon
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ConfigError, TsdError
from tsd.base.keys import NodePrivate
from tsd.engine.account.account import LOGIN_URL_LIFE_S, STORE_UNHEALTHY
from tsd.engine.account.prefs import Prefs, PrefsError
from tsd.engine.account.profiles import ProfileNotFound
from tsd.engine.account.states import State
from tsd.tailcfg.register import RegisterResponse

BEFORE_NOW, AFTER_NOW = "2023-11-14T00:00:00Z", "2033-01-01T00:00:00Z"


@pytest.fixture
def daemon() -> Daemon:
    daemon = Daemon()
    daemon.account.begin()
    daemon.heard()
    return daemon


def test_a_fresh_daemon_asks_nobody_and_needs_login() -> None:
    daemon = Daemon()
    daemon.account.begin()
    assert daemon.account.state is State.NEEDS_LOGIN
    assert daemon.links == [] and daemon.heard() == ["State 2"]
    assert daemon.account.prefs.logged_out and not daemon.account.has_node_key


async def test_interactive_login(daemon: Daemon) -> None:
    await daemon.up()
    assert daemon.heard() == ["Prefs", "State 2"]
    [(node_key, old, auth_key)] = daemon.link.logins
    assert daemon.link.url == SERVER and (old, auth_key) == (None, "")
    daemon.account.on_auth_url(URL)
    assert daemon.account.auth_url == URL and daemon.heard() == ["BrowseToURL"]
    daemon.account.on_auth_url(URL)
    assert daemon.heard() == []
    daemon.accept()
    assert daemon.heard() == ["LoginFinished", "Prefs"]
    assert daemon.account.state is State.NEEDS_LOGIN and daemon.account.has_node_key
    daemon.map(node_key)
    assert daemon.heard() == ["Prefs", "State 5", "State 6"]
    persist = daemon.account.prefs.persist
    assert persist is not None and persist.user_profile.login_name == "ann@example" and persist.node_id == "n1"
    assert daemon.profiles.current.name == "ann@example" and daemon.profiles.addresses() == ("100.64.0.1",)
    assert daemon.account.auth_url == ""


async def test_whoever_visits_the_url_wants_the_node_to_run(daemon: Daemon) -> None:
    await daemon.up(WantRunning=False)
    daemon.account.on_auth_url(URL)
    daemon.map(daemon.accept())
    assert daemon.account.prefs.want_running and daemon.account.state is State.RUNNING


async def test_a_login_by_key_leaves_stopped_what_shall_stay_stopped(daemon: Daemon) -> None:
    await daemon.up(WantRunning=False, auth_key="k")
    daemon.map(daemon.accept())
    assert daemon.account.state is State.STOPPED and daemon.link.is_paused


async def test_auth_key_login_shows_no_url(daemon: Daemon) -> None:
    await daemon.up(auth_key="k1")
    assert daemon.link.logins[-1][2] == "k1"
    daemon.map(daemon.accept())
    heard = daemon.heard()
    assert heard == ["Prefs", "State 2", "LoginFinished", "Prefs", "Prefs", "State 5", "State 6"]


async def test_s08_a_key_with_white_space_inside_is_refused_before_anything_changes(daemon: Daemon) -> None:
    before = daemon.account.prefs
    with pytest.raises(ConfigError, match="white space"):
        await daemon.account.start({"UpdatePrefs": {"WantRunning": True, "Hostname": "h"}, "AuthKey": "tskey auth"})
    assert daemon.account.prefs == before


async def test_a_key_is_for_one_start_only(daemon: Daemon) -> None:
    """A spent one-off key must not come back with the next, interactive, login."""
    await daemon.join(auth_key="one-off")
    await daemon.up(force=True)
    assert [auth_key for _, _, auth_key in daemon.link.logins] == ["", ""]


async def test_up_with_a_key_while_running(daemon: Daemon) -> None:
    node_key = await daemon.join()
    await daemon.up(auth_key="k2")
    assert daemon.heard() == ["Prefs", "State 5", "State 6"]
    assert daemon.link.logins == [(node_key, None, "k2")], "the link holds the key back as long as the login is valid"
    daemon.accept()
    assert daemon.heard() == ["LoginFinished", "Prefs"]
    assert daemon.account.node_key == node_key and daemon.account.state is State.RUNNING


async def test_force_reauth_while_running(daemon: Daemon) -> None:
    old_key = await daemon.join()
    await daemon.up(force=True)
    assert daemon.heard() == ["Prefs", "State 5", "State 6"]
    new_key, told_old, _ = daemon.link.logins[-1]
    assert told_old == old_key and new_key != old_key
    assert daemon.account.node_key == old_key, "the old key stays in force until the new one is accepted"
    daemon.account.on_auth_url(URL)
    daemon.accept()
    daemon.map(new_key)
    assert daemon.heard() == ["BrowseToURL", "LoginFinished", "Prefs"]
    persist = daemon.account.prefs.persist
    assert persist is not None and (persist.private_node_key, persist.old_private_node_key) == (new_key, old_key)


async def test_refused_key_is_told_once(daemon: Daemon) -> None:
    await daemon.up(auth_key="bad")
    daemon.heard()
    for _ in range(3):
        daemon.account.on_refused("the server does not know this auth key")
    assert daemon.heard() == ["ErrMessage"]
    assert daemon.account.prefs.want_running and daemon.account.state is State.NEEDS_LOGIN
    assert any("does not know" in text for text in daemon.health.texts())
    await daemon.up(auth_key="bad")
    assert not daemon.health.is_broken("login-state")
    daemon.account.on_refused("the server does not know this auth key")
    assert daemon.heard() == ["Prefs", "State 2", "ErrMessage"]
    await daemon.up(auth_key="good")
    daemon.map(daemon.accept())
    assert daemon.account.state is State.RUNNING and not daemon.health.is_broken("login-state")


async def test_a_valid_url_is_shown_again_and_an_old_one_is_not(daemon: Daemon) -> None:
    await daemon.up()
    daemon.account.on_auth_url(URL)
    daemon.heard()
    await daemon.account.login_interactive()
    assert daemon.heard() == ["BrowseToURL"] and len(daemon.link.logins) == 1
    daemon.clock.advance(LOGIN_URL_LIFE_S + 1)
    await daemon.account.login_interactive()
    assert daemon.heard() == [] and len(daemon.link.logins) == 2
    daemon.account.on_auth_url(URL)
    assert daemon.heard() == ["BrowseToURL"], "whoever asked sees it although it is the same"


@pytest.mark.parametrize(
    ("server", "url", "told"),
    [
        (SERVER, "http://192.0.2.1/a", ["BrowseToURL"]),
        (SERVER, "https://192.0.2.1/a", ["BrowseToURL"]),
        ("https://vpn.example", "http://vpn.example/a", []),
        (SERVER, "file:///etc/passwd", ["ErrMessage"]),
        (SERVER, "javascript:alert(1)", ["ErrMessage"]),
    ],
)
async def test_only_web_urls_are_shown(daemon: Daemon, server: str, url: str, told: list[str]) -> None:
    await daemon.up(ControlURL=server)
    daemon.heard()
    daemon.account.on_auth_url(url)
    assert daemon.heard() == told
    is_refused = told == ["ErrMessage"]
    assert daemon.account.auth_url == ("" if is_refused else url), "what `status` shows"
    assert any("neither https nor http" in text for text in daemon.health.texts()) == is_refused
    daemon.account.tell_url(url)
    assert daemon.heard() == (["BrowseToURL"] if told == ["BrowseToURL"] else [])


async def test_machine_approval(daemon: Daemon) -> None:
    await daemon.up()
    daemon.account.on_auth_url(URL)
    node_key = daemon.accept()
    daemon.heard()
    daemon.map(node_key, machine_authorized=False)
    assert daemon.account.state is State.NEEDS_MACHINE_AUTH and daemon.heard() == ["Prefs", "State 3"]
    await daemon.up()
    assert daemon.heard() == ["Prefs", "State 3"], "a second `up` must learn that approval is what is missing"
    daemon.map(node_key)
    assert daemon.heard() == ["State 5", "State 6"]


async def test_starting_ends_with_the_first_relay_or_session(daemon: Daemon) -> None:
    daemon.relays = 0
    await daemon.up(auth_key="k")
    daemon.map(daemon.accept())
    assert daemon.account.state is State.STARTING
    daemon.relays = 1
    assert daemon.account.update_state() is State.RUNNING


async def test_down_and_up(daemon: Daemon) -> None:
    await daemon.join()
    daemon.account.edit_prefs({"WantRunning": False, "WantRunningSet": True})
    assert daemon.heard() == ["State 4", "Prefs"] and daemon.link.is_paused
    daemon.account.edit_prefs({"WantRunning": True, "WantRunningSet": True})
    assert daemon.heard() == ["State 5", "Prefs", "State 6"] and not daemon.link.is_paused
    assert len(daemon.links) == 1, "no new login"


async def test_down_ends_the_attempts_of_a_first_login_and_up_goes_on(daemon: Daemon) -> None:
    down = {"WantRunning": False, "WantRunningSet": True}
    await daemon.up()
    daemon.account.on_auth_url(URL)
    daemon.account.edit_prefs(down)
    assert daemon.link.is_closed and daemon.account.auth_url == "" and daemon.account.state is State.NEEDS_LOGIN
    assert not daemon.health.is_broken("no-control")
    await daemon.up(auth_key="k")
    assert len(daemon.links) == 2 and daemon.link.logins[-1][2] == "k"
    daemon.account.edit_prefs(down)
    assert daemon.link.is_closed
    await daemon.up()
    assert daemon.link.logins[-1][2] == "k", "a key that was not used yet is not to be given again"
    daemon.map(daemon.accept())
    assert daemon.account.state is State.RUNNING
    await daemon.up(force=True)
    assert daemon.link.logins[-1][2] == "", "and is used once"


async def test_the_key_of_a_stopped_first_login_is_not_given_to_another_server(daemon: Daemon) -> None:
    await daemon.up(auth_key="k")
    daemon.account.edit_prefs({"WantRunning": False, "WantRunningSet": True})
    await daemon.up(ControlURL="https://other.example")
    assert [auth_key for _, _, auth_key in daemon.link.logins] == [""]


async def test_set_tells_prefs_and_nothing_when_nothing_changes(daemon: Daemon) -> None:
    await daemon.join()
    daemon.account.edit_prefs({"Hostname": "h", "HostnameSet": True})
    daemon.account.edit_prefs({"Hostname": "h", "HostnameSet": True})
    assert daemon.heard() == ["Prefs"]
    with pytest.raises(PrefsError):
        daemon.account.edit_prefs({"Hostname": 7, "HostnameSet": True})
    assert daemon.account.prefs.hostname == "h"


async def test_key_expiry_and_extension(daemon: Daemon) -> None:
    node_key = await daemon.join()
    daemon.map(node_key, key_expiry=BEFORE_NOW)
    assert daemon.account.state is State.NEEDS_LOGIN and not daemon.link.is_closed
    daemon.map(node_key, key_expiry=AFTER_NOW)
    assert daemon.account.state is State.RUNNING
    assert [word for word in daemon.heard() if word.startswith("State")] == ["State 2", "State 5", "State 6"]


async def test_a_new_key_on_an_expired_node_is_handed_on(daemon: Daemon) -> None:
    """S09: whoever has an expired login and a key must get in, or see a URL."""
    node_key = await daemon.join()
    daemon.map(node_key, key_expiry=BEFORE_NOW)
    await daemon.up(auth_key="k2")
    assert daemon.link.logins == [(node_key, None, "k2")]
    daemon.account.on_auth_url(URL)
    assert "BrowseToURL" in daemon.heard() and daemon.account.state is State.NEEDS_LOGIN


async def test_the_server_may_make_the_link_use_another_key(daemon: Daemon) -> None:
    old_key = await daemon.join()
    made = NodePrivate.generate(SeededEntropy(99))
    daemon.account.on_registered(RegisterResponse(), made)
    persist = daemon.account.prefs.persist
    assert persist is not None and (persist.private_node_key, persist.old_private_node_key) == (made, old_key)


async def test_logout(daemon: Daemon) -> None:
    await daemon.join()
    link = daemon.link
    await daemon.account.logout()
    assert daemon.heard() == ["State 4", "Prefs", "State 0", "Prefs", "State 2"]
    assert link.has_logged_out and link.is_closed and daemon.forgotten == 1
    assert daemon.account.prefs == Prefs.fresh() and daemon.profiles.list() == []
    assert not daemon.account.has_node_key and daemon.account.self_node is None
    await daemon.account.logout()
    assert daemon.account.state is State.NEEDS_LOGIN and len(daemon.links) == 1
    await daemon.join()
    assert daemon.account.state is State.RUNNING


async def test_logout_while_stopped_starts_at_no_state(daemon: Daemon) -> None:
    await daemon.join()
    daemon.account.edit_prefs({"WantRunning": False, "WantRunningSet": True})
    daemon.heard()
    await daemon.account.logout()
    assert [word for word in daemon.heard() if word.startswith("State")] == ["State 0", "State 2"]


async def test_up_waits_for_a_logout_under_way(daemon: Daemon) -> None:
    await daemon.join()
    daemon.link.logout_gate = asyncio.Event()
    leaving = asyncio.create_task(daemon.account.logout())
    await asyncio.sleep(0)
    coming = asyncio.create_task(daemon.up(auth_key="k", force=True))
    await asyncio.sleep(0)
    assert len(daemon.links) == 1
    daemon.links[0].logout_gate.set()  # type: ignore[union-attr]
    await asyncio.gather(leaving, coming)
    assert len(daemon.links) == 2 and daemon.account.prefs.want_running
    daemon.map(daemon.accept())
    assert daemon.account.state is State.RUNNING


async def test_a_switch_during_logout_loses_only_the_profile_that_was_left(daemon: Daemon) -> None:
    await daemon.join()
    first = daemon.profiles.current.id
    daemon.account.new_profile()
    await daemon.up(auth_key="k")
    daemon.accept(2, "bob@example")
    daemon.map(daemon.link.logins[-1][0], stable_id="n2")
    daemon.link.logout_gate = asyncio.Event()
    leaving = asyncio.create_task(daemon.account.logout())
    await asyncio.sleep(0)
    gate = daemon.link.logout_gate
    daemon.account.switch_profile(first)
    gate.set()
    await leaving
    assert [profile.id for profile in daemon.profiles.list()] == [first]
    assert daemon.profiles.current.id == first and daemon.link.logins


async def test_restart_goes_on_with_the_stored_key(daemon: Daemon) -> None:
    node_key = await daemon.join()
    again = Daemon(daemon.store, seed=2)
    again.account.begin()
    assert again.link.logins == [(node_key, None, "")] and not again.link.is_paused
    assert again.account.state is State.NO_STATE
    again.accept()
    again.map(node_key)
    assert again.account.state is State.RUNNING


async def test_restart_while_stopped_contacts_nobody(daemon: Daemon) -> None:
    await daemon.join()
    daemon.account.edit_prefs({"WantRunning": False, "WantRunningSet": True})
    again = Daemon(daemon.store, seed=2)
    again.account.begin()
    assert again.account.state is State.STOPPED and again.link.is_paused
    assert again.profiles.addresses() == ("100.64.0.1",)
    again.account.edit_prefs({"WantRunning": True, "WantRunningSet": True})
    assert again.account.state is State.STARTING and not again.link.is_paused and again.link.logins


async def test_profiles(daemon: Daemon) -> None:
    await daemon.join()
    first, first_link = daemon.profiles.current.id, daemon.link
    daemon.account.new_profile()
    assert daemon.heard() == ["State 0", "Prefs", "State 2"]
    assert first_link.is_closed and not first_link.has_logged_out
    await daemon.up()
    daemon.account.on_auth_url(URL)
    daemon.accept(2, "bob@example")
    daemon.map(daemon.link.logins[-1][0], stable_id="n2")
    second = daemon.profiles.current.id
    assert {profile.name for profile in daemon.profiles.list()} == {"ann@example", "bob@example"}
    daemon.account.switch_profile(first)
    assert daemon.profiles.current.id == first and daemon.account.self_node is None
    daemon.map(daemon.accept())
    assert daemon.account.state is State.RUNNING
    daemon.account.switch_profile(first)
    with pytest.raises(ProfileNotFound):
        daemon.account.switch_profile("ffff")
    assert daemon.account.state is State.RUNNING, "a switch that fails changes nothing"
    daemon.account.delete_profile(second)
    assert daemon.account.state is State.RUNNING
    daemon.account.delete_profile(first)
    assert daemon.account.state is State.NEEDS_LOGIN and daemon.profiles.list() == []


async def test_config_file_with_a_key_logs_in_by_itself() -> None:
    daemon = Daemon()
    masked = {"ControlURL": SERVER, "ControlURLSet": True, "WantRunning": True, "WantRunningSet": True}
    daemon.account.configure(masked, "k")
    daemon.account.begin()
    assert [auth_key for _, _, auth_key in daemon.link.logins] == ["k"]
    daemon.map(daemon.accept())
    assert daemon.account.state is State.RUNNING
    await daemon.account.start({})
    assert daemon.link.logins[-1][2] == "", "while running the file's key is not offered again"


async def test_unhealthy_store_starts_nothing() -> None:
    daemon = Daemon()
    daemon.account.is_store_healthy = False
    daemon.account.begin()
    assert daemon.account.state is State.NO_STATE and daemon.links == []
    with pytest.raises(TsdError, match=STORE_UNHEALTHY):
        await daemon.up()


async def test_start_refuses_prefs_that_cannot_be(daemon: Daemon) -> None:
    await daemon.join()
    both = {"AdvertiseRoutes": ["0.0.0.0/0", "::/0"], "ExitNodeID": "n9"}
    before = daemon.account.prefs
    with pytest.raises(PrefsError):
        await daemon.up(**both)
    assert daemon.account.prefs == before and daemon.account.state is State.RUNNING


async def test_a_url_that_nobody_asked_for_means_that_the_server_forgot_this_node(daemon: Daemon) -> None:
    node_key = await daemon.join()
    daemon.account.on_auth_url(URL)
    assert daemon.account.state is State.NEEDS_LOGIN and daemon.account.auth_url == URL
    assert daemon.account.self_node is None
    daemon.heard()
    daemon.account.on_registered(RegisterResponse(machine_authorized=True), node_key)
    assert daemon.account.state is not State.RUNNING, "what the old netmap said is void"
    daemon.map(node_key, addresses=("100.64.0.9/32",))
    assert daemon.account.state is State.RUNNING
