"""Cases of state files, prefs and start-up (sections 5, 8 and the wire cases that touch the state)."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import StateError
from tsd.base.keys import NodePrivate
from tsd.daemon.flags import parse
from tsd.daemon.statefiles import open_state
from tsd.engine.account.edits import edit
from tsd.engine.account.prefs import Persist, Prefs, UserProfile
from tsd.engine.account.profiles import Profiles
from tsd.engine.report.health import Health
from tsplatform import fsync
from tsplatform.links import LinkWatcher
from tsplatform.state_file import FileStore, MemoryStore


def _profiles(store: FileStore | MemoryStore) -> Profiles:
    return Profiles(store, SeededEntropy(3), ManualClock())


def _logged_in() -> Prefs:
    persist = Persist(NodePrivate.generate(SeededEntropy(1)), user_profile=UserProfile(1, "lab"), node_id="n1")
    return Prefs(control_url="http://192.0.2.1", want_running=True, persist=persist)


def test_s02_unclean_write_never_makes_a_new_node(tmp_path: Path) -> None:
    path = tmp_path / "tsd.state"
    profiles = _profiles(FileStore(path))
    profiles.save(_logged_in())
    machine = profiles.machine_key()
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:length])
        again = _profiles(FileStore(path))
        assert again.machine_key() == machine
        assert again.prefs == _logged_in()


def test_s03_sealed_state_is_reported_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tsd.state"
    path.write_text('{"key": "QQ==", "nonce": "QQ==", "data": "QQ=="}')
    before = path.read_bytes()
    opened = open_state(parse([f"--state={path}", f"--socket={tmp_path}/s"], {}))
    assert "sealed" in opened.error and "--state" in opened.error
    assert path.read_bytes() == before
    opened.close()


def test_s04_disk_full_goes_on_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tsd.state"
    health = Health(ManualClock())
    store = FileStore(path, lambda text: health.set_if("state-store-write", bool(text), error=text))
    profiles = _profiles(store)
    profiles.save(_logged_in())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fsync, "replace", full)
    profiles.save(edit(profiles.prefs, {"Hostname": "new", "HostnameSet": True}))
    assert profiles.prefs.hostname == "new"
    assert "No space left" in health.texts()[0]
    monkeypatch.undo()
    assert _profiles(FileStore(path)).prefs.hostname == ""
    assert store.retry()
    assert health.texts() == []
    assert _profiles(FileStore(path)).prefs.hostname == "new"


def test_s05_a_world_writable_folder_is_refused_with_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StateError, match=rf"{folder} \(owner uid {os.geteuid()}, mode 0777\)"):
        FileStore(folder / "tsd.state")


def test_s06_idle_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "tsd.state")
    profiles = _profiles(store)
    profiles.save(_logged_in())
    profiles.machine_key()
    monkeypatch.setattr(fsync, "replace", lambda *_: pytest.fail("written while idle"))
    for _ in range(100):
        profiles.save(profiles.prefs)
        profiles.machine_key()
        store.retry()


def test_s11_a_login_without_gui_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tsd.state"
    _profiles(FileStore(path)).save(_logged_in())
    assert _profiles(FileStore(path)).prefs == _logged_in()


def test_s13_prefs_are_kept_over_down_and_restart(tmp_path: Path) -> None:
    path = tmp_path / "tsd.state"
    profiles = _profiles(FileStore(path))
    profiles.save(replace(_logged_in(), hostname="edge"))
    body = {"AdvertiseRoutes": ["192.0.2.0/24"], "AdvertiseRoutesSet": True}
    profiles.save(edit(profiles.prefs, body))
    profiles.save(edit(profiles.prefs, {"WantRunning": False, "WantRunningSet": True}))
    again = _profiles(FileStore(path))
    up = edit(again.prefs, {**Prefs().to_go(), "WantRunning": True, "WantRunningSet": True})
    assert up == replace(again.prefs, want_running=True)
    assert [str(route) for route in up.advertise_routes] == ["192.0.2.0/24"]


def test_w13_a_copy_on_one_machine_is_stopped_at_once(tmp_path: Path) -> None:
    settings = parse([f"--state={tmp_path}/tsd.state", f"--socket={tmp_path}/s"], {})
    first = open_state(settings)
    with pytest.raises(StateError, match=rf"pid {os.getpid()}"):
        open_state(parse([f"--state={tmp_path}/tsd.state", f"--socket={tmp_path}/t"], {}))
    first.close()


def test_w18_what_must_not_go_back_is_kept_in_the_state(tmp_path: Path) -> None:
    path = tmp_path / "tsd.state"
    FileStore(path).put("_tsd-tai64n", b"\x40" + bytes(11))
    assert FileStore(path).get("_tsd-tai64n") == b"\x40" + bytes(11)


def test_k02_a_mounted_folder_keeps_the_identity_and_memory_is_ephemeral(tmp_path: Path) -> None:
    keys = set()
    for _ in range(5):
        opened = open_state(parse([f"--statedir={tmp_path}", f"--socket={tmp_path}/s"], {}))
        keys.add(_profiles(opened.store).machine_key().text())
        opened.close()
    assert len(keys) == 1
    in_memory = parse(["--state=mem:", f"--socket={tmp_path}/s"], {})
    opened = open_state(in_memory)
    assert not opened.store.is_durable and in_memory.is_ephemeral, "the server forgets such a node by itself"
    opened.close()


def test_k06_a_missing_pointer_with_one_profile(tmp_path: Path) -> None:
    path = tmp_path / "tsd.state"
    _profiles(FileStore(path)).save(_logged_in())
    store = FileStore(path)
    store.put("_current-profile", None)
    assert _profiles(FileStore(path)).prefs == _logged_in()
    second = replace(_logged_in(), control_url="http://192.0.2.2")
    profiles = _profiles(store)
    profiles.new()
    profiles.save(second)
    assert len(profiles.list()) == 2
    store.put("_current-profile", None)
    assert _profiles(FileStore(path)).prefs == Prefs.fresh(), "with several there is a doubt: nobody is logged in"
    store.put("_current-profile", b"profile-gone")
    assert _profiles(FileStore(path)).prefs == Prefs.fresh()


def test_k06_a_pointer_to_nothing_with_one_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tsd.state"
    _profiles(FileStore(path)).save(_logged_in())
    FileStore(path).put("_current-profile", b"profile-gone")
    assert _profiles(FileStore(path)).prefs == _logged_in()
    assert "does not exist; the only one there is" in caplog.text
    store = FileStore(path)
    store.put("_machinekey", None)
    _profiles(store).machine_key()
    assert "the machine key is missing, so a new one is made" in caplog.text


def test_k06_a_login_that_the_list_of_profiles_has_lost_goes_on(tmp_path: Path) -> None:
    """As long as the pointer and the prefs are there; after a log-out they are not."""
    path = tmp_path / "tsd.state"
    _profiles(FileStore(path)).save(_logged_in())
    FileStore(path).put("_profiles", None)
    adopted = _profiles(FileStore(path))
    assert adopted.prefs == _logged_in() and len(adopted.list()) == 1
    adopted.save(_logged_in())
    assert _profiles(FileStore(path)).current == adopted.current
    adopted.delete(adopted.current.id)
    assert _profiles(FileStore(path)).current.id == ""


def test_k06_a_file_that_is_replaced_while_running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tsd.state"
    store = FileStore(path)
    profiles = _profiles(store)
    profiles.save(_logged_in())
    other = tmp_path / "other"
    other.write_text("{}")
    for change in (lambda: os.replace(other, path), path.unlink, lambda: path.write_text("half a fi")):
        change()
        assert profiles.prefs == _logged_in()
        caplog.clear()
        profiles.save(edit(profiles.prefs, {"Hostname": f"h{path.exists()}", "HostnameSet": True}))
        assert "changed by another program" in caplog.text
        assert _profiles(FileStore(path)).prefs == profiles.prefs
        profiles.save(_logged_in())
        assert caplog.text.count("another program") == 1


def test_k06_a_state_file_that_is_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tsd.state"
    path.write_text("{}")

    def busy(source: object, target: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "rename", busy)
    store = FileStore(path)
    store.put("a", b"b")
    assert store.trouble == "" and FileStore(path).get("a") == b"b"


def test_s04_disk_full_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault comes in the middle of a write, at fsync, or at the rename: file and backup stay what they were."""
    path = tmp_path / "tsd.state"
    store = FileStore(path)
    store.put("a", b"1")
    before = path.read_bytes(), store.backup_path.read_bytes()

    def fault(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fault)
            store.put("a", name.encode())
        assert "No space left" in store.trouble and store.get("a") == name.encode()
        assert (path.read_bytes(), store.backup_path.read_bytes()) == before
    assert store.retry() and FileStore(path).get("a") == b"rename"


async def test_k10_no_netlink_falls_back_to_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    from tsplatform import links, netlink

    def refused() -> None:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(netlink, "open_changes", refused)
    monkeypatch.setattr(netlink, "interfaces", refused)
    monkeypatch.setattr(links, "TICK_S", 0.01)
    watcher = LinkWatcher()
    states = iter([watcher.state(), replace(watcher.state(), default_interface_v4="new0")])
    last = replace(watcher.state(), default_interface_v4="new0")
    polled = LinkWatcher(read=lambda: next(states, last))
    async with asyncio.timeout(5):
        async for state in polled.changes():
            assert state.default_interface_v4 == "new0"
            break
