"""Profiles: the layout of the store, switching, and what happens to broken entries."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import StateError
from tsd.base.keys import NodePrivate
from tsd.engine.account.prefs import Persist, Prefs, UserProfile
from tsd.engine.account.profiles import NetworkProfile, ProfileNotFound, Profiles
from tsplatform.state_file import MemoryStore


def _profiles(store: MemoryStore, seed: int = 1) -> Profiles:
    return Profiles(store, SeededEntropy(seed), ManualClock())


def _logged_in(number: int = 1, url: str = "http://192.0.2.1") -> Prefs:
    persist = Persist(
        private_node_key=NodePrivate.generate(SeededEntropy(number)),
        user_profile=UserProfile(number, f"user{number}"),
        node_id=f"n{number}",
    )
    return Prefs(control_url=url, want_running=True, hostname="h", persist=persist)


def test_a_login_is_stored_in_tailscaleds_layout() -> None:
    store = MemoryStore()
    profiles = _profiles(store)
    assert profiles.current.id == "" and profiles.prefs == Prefs.fresh()
    profile = profiles.save(_logged_in(), NetworkProfile("tn.example", "192.0.2.1"))
    assert profile.key == f"profile-{profile.id}" and len(profile.id) == 4
    assert store.get("_current-profile") == profile.key.encode()
    listed = json.loads(store.get("_profiles") or b"")
    assert list(listed) == [profile.id]
    assert list(listed[profile.id]) == [
        "ID",
        "Name",
        "NetworkProfile",
        "Key",
        "UserProfile",
        "NodeID",
        "LocalUserID",
        "ControlURL",
        "Created",
    ]
    assert listed[profile.id]["UserProfile"] == {"ID": 1, "LoginName": "user1", "DisplayName": "user1"}
    prefs = store.get(profile.key) or b""
    assert prefs.startswith(b'{\n\t"ControlURL": "http://192.0.2.1"')
    assert set(store.names()) == {"_current-profile", "_profiles", profile.key}


def test_everything_is_there_after_a_restart() -> None:
    store = MemoryStore()
    profiles = _profiles(store)
    saved = profiles.save(_logged_in(), NetworkProfile("tn.example"))
    machine = profiles.machine_key()
    again = _profiles(store, seed=2)
    assert again.current == saved
    assert again.prefs == _logged_in()
    assert again.machine_key() == machine


def test_an_unfinished_login_goes_on_with_the_same_key() -> None:
    store = MemoryStore()
    profiles = _profiles(store)
    persist = Persist(private_node_key=NodePrivate.generate(SeededEntropy(9)))
    half = Prefs(control_url="http://192.0.2.1", want_running=True, persist=persist)
    profiles.save(half)
    again = _profiles(store)
    assert again.current.id == "" and again.prefs == half
    again.save(_logged_in())
    assert "_tsd-draft" not in store.names()


def test_switching_and_deleting() -> None:
    store = MemoryStore()
    profiles = _profiles(store)
    switched: list[str] = []
    profiles.on_switch = lambda: switched.append(profiles.current.id)
    first = profiles.save(_logged_in(1))
    profiles.new()
    assert profiles.prefs == Prefs.fresh()
    second = profiles.save(_logged_in(2))
    assert {p.id for p in profiles.list()} == {first.id, second.id}
    assert not profiles.switch(second.id)
    assert profiles.switch(first.id)
    assert profiles.prefs.persist == _logged_in(1).persist
    profiles.delete(first.id)
    assert profiles.current.id == "" and store.get(first.key) is None
    assert [p.id for p in _profiles(store).list()] == [second.id]
    with pytest.raises(ProfileNotFound):
        profiles.switch("ffff")
    with pytest.raises(ProfileNotFound):
        profiles.delete("ffff")
    assert switched == ["", first.id, ""]


def test_logging_in_as_a_known_node_takes_its_profile() -> None:
    store = MemoryStore()
    profiles = _profiles(store)
    first = profiles.save(_logged_in(1))
    profiles.new()
    again = profiles.save(replace(_logged_in(1), hostname="other"))
    assert again.id == first.id
    assert len(profiles.list()) == 1
    profiles.new()
    assert profiles.save(_logged_in(1, url="http://198.51.100.1")).id != first.id


def test_the_profile_name_can_be_chosen() -> None:
    profiles = _profiles(MemoryStore())
    assert profiles.save(_logged_in()).name == "user1"
    assert profiles.save(replace(_logged_in(), profile_name="work")).name == "work"


@pytest.mark.parametrize(
    ("key_field", "stored"),
    [
        ("", None),
        ("profile-dead", None),
        ("profile-dead", b""),
        ("profile-dead", b'{"Config": {"PrivateNodeKey": ""}}'),
        ("profile-dead", b'{"Config": {"PrivateNodeKey": "privkey:00'),
    ],
)
def test_s02_a_broken_profile_is_set_aside_and_the_others_load(key_field: str, stored: bytes | None) -> None:
    store = MemoryStore()
    good = _profiles(store).save(_logged_in())
    listed: dict[str, Any] = json.loads(store.get("_profiles") or b"")
    listed["dead"] = {**listed[good.id], "ID": "dead", "Key": key_field}
    store.put("_profiles", json.dumps(listed).encode())
    if stored is not None:
        store.put("profile-dead", stored)
    profiles = _profiles(store)
    assert profiles.current == good
    assert list(profiles.set_aside) == ["dead"]
    profiles.save(replace(profiles.prefs, hostname="x"))
    assert "dead" in json.loads(store.get("_profiles") or b"")
    assert store.get("profile-dead") == stored
    with pytest.raises(ProfileNotFound):
        profiles.switch("dead")


def test_a_broken_list_or_machine_key_is_never_replaced() -> None:
    store = MemoryStore()
    store.put("_profiles", b"[")
    with pytest.raises(StateError, match="restore the file"):
        _profiles(store)
    store = MemoryStore()
    store.put("_machinekey", b"privkey:1234")
    with pytest.raises(StateError, match="_machinekey"):
        _profiles(store).machine_key()
    assert store.get("_machinekey") == b"privkey:1234"


def test_prefs_from_before_profiles_are_taken_over() -> None:
    old = MemoryStore()
    key = _profiles(old).save(_logged_in()).key
    store = MemoryStore()
    store.put("_daemon", old.get(key))
    profiles = _profiles(store)
    assert profiles.prefs == _logged_in()
    assert profiles.current.id
    assert store.get("_daemon") == old.get(key)


def test_s11_a_login_without_anybody_watching_persists() -> None:
    store = MemoryStore()
    _profiles(store).save(_logged_in())
    assert _profiles(store).prefs.want_running


def test_idle_saves_write_nothing() -> None:
    store = MemoryStore()
    profiles = _profiles(store)
    profiles.save(_logged_in())
    before = {name: store.get(name) for name in store.names()}
    profiles.save(profiles.prefs)
    assert {name: store.get(name) for name in store.names()} == before


def test_own_addresses_are_known_after_a_restart_and_go_with_the_profile() -> None:
    store = MemoryStore()
    profiles = _profiles(store)
    profiles.remember_addresses(["100.64.0.1"])
    assert profiles.addresses() == ()
    profile = profiles.save(_logged_in())
    profiles.remember_addresses(["100.64.0.1", "fd7a:115c:a1e0::1"])
    assert _profiles(store).addresses() == ("100.64.0.1", "fd7a:115c:a1e0::1")
    profiles.delete(profile.id)
    assert set(store.names()) <= {"_profiles", "_current-profile"}
