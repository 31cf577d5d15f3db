"""Prefs: Go JSON both ways, masked edits, side effects, refusals."""

import json
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest

from tsd.base.entropy import SeededEntropy
from tsd.base.keys import LockPrivate, NodePrivate
from tsd.engine.account import gojson
from tsd.engine.account.edits import EditContext, MaskedPrefs, apply_edits, check, edit
from tsd.engine.account.prefs import DEFAULT_CONTROL_URL, ZERO_NODE_KEY, Persist, Prefs, PrefsError, UserProfile

# The order and form of a real tailscaled's answer.
REAL = json.loads(
    """{
 "ControlURL": "http://192.0.2.1:8080", "RouteAll": true, "ExitNodeID": "", "ExitNodeIP": "",
 "InternalExitNodePrior": "", "ExitNodeAllowLANAccess": false, "CorpDNS": true, "RunSSH": false,
 "RunWebClient": false, "WantRunning": true, "LoggedOut": false, "ShieldsUp": false, "AdvertiseTags": null,
 "Hostname": "n2", "NotepadURLs": false, "AdvertiseRoutes": null, "AdvertiseServices": null, "Sync": null,
 "NoSNAT": false, "NoStatefulFiltering": true, "NetfilterMode": 2, "AutoUpdate": {"Check": true, "Apply": false},
 "AppConnector": {"Advertise": false}, "PostureChecking": false, "NetfilterKind": "", "RemoteConfig": false,
 "DriveShares": null, "Config": {"PrivateNodeKey": "%s", "OldPrivateNodeKey": "%s",
 "UserProfile": {"ID": 1, "LoginName": "lab", "DisplayName": "lab"}, "NetworkLockKey": "nlpriv:%s", "NodeID": "2"}
}""".replace("%s", ZERO_NODE_KEY, 2).replace("%s", "0" * 128)
)


def _persist() -> Persist:
    entropy = SeededEntropy(1)
    return Persist(
        private_node_key=NodePrivate.generate(entropy),
        old_private_node_key=NodePrivate.generate(entropy),
        user_profile=UserProfile(7, "lab@example.com", "Lab", "https://p.example", ("g",)),
        network_lock_key=LockPrivate.generate(entropy),
        node_id="n7",
        disallowed_tka_state_ids=("x",),
    )


def test_a_real_answer_round_trips_in_order() -> None:
    assert json.dumps(Prefs.from_go(REAL).to_go()) == json.dumps(REAL)


def test_everything_round_trips() -> None:
    prefs = Prefs.from_go(
        {
            "ExitNodeIP": "100.64.0.1",
            "AutoExitNode": "any",
            "AdvertiseTags": ["tag:a"],
            "AdvertiseRoutes": ["192.0.2.0/24", "::/0"],
            "Sync": False,
            "NoStatefulFiltering": None,
            "RelayServerPort": 0,
            "RelayServerStaticEndpoints": ["192.0.2.1:9", "[::1]:9"],
            "DriveShares": [{"name": "d", "path": "/d"}],
            "OperatorUser": "op",
            "Egg": True,
            "ForceDaemon": True,
            "AutoUpdate": {"Check": False, "Apply": True},
        },
        replace(Prefs(), persist=_persist()),
    )
    raw = prefs.to_go(with_keys=True)
    assert Prefs.from_go(json.loads(json.dumps(raw))) == prefs
    assert raw["RelayServerPort"] == 0


def test_keys_are_stripped_unless_asked_for() -> None:
    prefs = Prefs(persist=_persist())
    shown, stored = prefs.to_go()["Config"], prefs.to_go(with_keys=True)["Config"]
    assert shown["PrivateNodeKey"] == ZERO_NODE_KEY
    assert shown["NodeID"] == "n7" and shown["UserProfile"]["LoginName"] == "lab@example.com"
    assert stored["PrivateNodeKey"].startswith("privkey:") and stored["PrivateNodeKey"] != ZERO_NODE_KEY
    assert "secret" in repr(prefs) and stored["PrivateNodeKey"] not in repr(prefs)


def test_defaults() -> None:
    prefs = Prefs()
    assert prefs.corp_dns and prefs.netfilter_mode == 2 and prefs.no_stateful_filtering and prefs.auto_update_check
    assert not prefs.logged_out and Prefs.fresh().logged_out
    assert prefs.control_url_or_default == DEFAULT_CONTROL_URL
    assert Prefs(control_url="https://login.tailscale.com").control_url_or_default == DEFAULT_CONTROL_URL


@pytest.mark.parametrize(
    "raw",
    [
        {"RouteAll": "yes"},
        {"ControlURL": 5},
        {"NetfilterMode": 3},
        {"NetfilterMode": 1.5},
        {"AdvertiseRoutes": ["192.0.2.0"]},
        {"AdvertiseRoutes": ["nonsense/9"]},
        {"AdvertiseTags": "tag:a"},
        {"ExitNodeIP": "host"},
        {"RelayServerPort": 65536},
        {"RelayServerStaticEndpoints": ["nowhere"]},
        {"DriveShares": [5]},
        {"AutoUpdate": True},
        {"Config": {"PrivateNodeKey": ""}},
        {"Config": {"PrivateNodeKey": "privkey:00"}},
        {"Config": []},
        [],
        5,
    ],
)
def test_wrong_types_name_the_field(raw: Any) -> None:
    with pytest.raises(PrefsError) as caught:
        Prefs.from_go(raw)
    if isinstance(raw, dict):
        assert next(iter(raw)) in str(caught.value)


def test_only_masked_fields_change() -> None:
    prefs = Prefs.from_go(REAL)
    body = {**Prefs().to_go(), "Hostname": "new", "HostnameSet": True, "Sync": False, "Config": None}
    assert edit(prefs, body) == replace(prefs, hostname="new")


def test_null_is_the_zero_value_and_case_does_not_matter() -> None:
    prefs = Prefs(relay_server_port=5, hostname="x", corp_dns=True, advertise_tags=("tag:a",))
    edited = edit(
        prefs,
        {
            "RELAYSERVERPORTSET": True,
            "relayserverport": None,
            "corpDNSSet": True,
            "AdvertiseTagsSet": True,
            "unknown": 1,
        },
    )
    assert (edited.relay_server_port, edited.corp_dns, edited.advertise_tags, edited.hostname) == (None, False, (), "x")


def test_auto_update_has_its_own_mask() -> None:
    prefs = Prefs()
    body = {"AutoUpdate": {"Check": False, "Apply": True}, "AutoUpdateSet": {"ApplySet": True}}
    edited = edit(prefs, body)
    assert edited.auto_update_check and edited.auto_update_apply is True
    assert MaskedPrefs.from_go(body).touched() == ["AutoUpdate"]
    with pytest.raises(PrefsError):
        edit(prefs, {"AutoUpdateSet": True})


def test_choosing_an_exit_node_ends_automatic_choice() -> None:
    prefs = Prefs(auto_exit_node="any", internal_exit_node_prior="n9")
    assert edit(prefs, {"ExitNodeID": "n1", "ExitNodeIDSet": True}).auto_exit_node == ""
    assert edit(prefs, {"ExitNodeIP": "100.64.0.1", "ExitNodeIPSet": True}).auto_exit_node == ""
    assert edit(prefs, {"ExitNodeID": "", "ExitNodeIDSet": True}).internal_exit_node_prior == ""


def test_the_egg_is_swallowed_and_internal_fields_are_refused() -> None:
    assert not edit(Prefs(), {"Egg": True, "EggSet": True}).egg
    with pytest.raises(PrefsError, match="can't set Internal fields"):
        edit(Prefs(), {"InternalExitNodePriorSet": True})


def test_what_cannot_be() -> None:
    exit_routes = (ip_network("0.0.0.0/0"), ip_network("::/0"))
    with pytest.raises(PrefsError, match="exit node and use an exit node"):
        check(Prefs(advertise_routes=exit_routes, exit_node_id="n1"), EditContext())
    assert not Prefs(advertise_routes=exit_routes[:1]).advertises_exit_node
    with pytest.raises(PrefsError) as caught:
        edit(
            Prefs(),
            {"ShieldsUp": True, "ShieldsUpSet": True, "RunSSH": True, "RunSSHSet": True},
            EditContext(is_funnel_on=True, ssh_refusal="not enabled"),
        )
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(PrefsError, match="config file is locked"):
        edit(Prefs(), {"Hostname": "x", "HostnameSet": True}, EditContext(is_config_locked=True))
    edit(Prefs(), {}, EditContext(is_config_locked=True))


def test_s13_an_edit_without_flags_changes_nothing() -> None:
    prefs = Prefs.from_go({"AdvertiseRoutes": ["192.0.2.0/24"], "WantRunning": False})
    up = apply_edits(prefs, MaskedPrefs.from_go({"WantRunning": True, "WantRunningSet": True}))
    assert up == replace(prefs, want_running=True)


def test_json_is_written_as_go_writes_it() -> None:
    assert gojson.dumps({"a": "<é&>"}) == '{"a":"\\u003cé\\u0026\\u003e"}'.encode()
    with pytest.raises(PrefsError):
        gojson.loads(b"\xff", "x")
