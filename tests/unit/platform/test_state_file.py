"""The state file: layout, repair, refusal, and what happens when the disk does not play along."""

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from tsd.base.errors import ConfigError, StateError
from tsplatform import fsync
from tsplatform.state_file import FileStore, MemoryStore, encode, open_store


def test_layout_is_tailscaleds(tmp_path: Path) -> None:
    path = tmp_path / "tsd" / "tsd.state"
    store = FileStore(path)
    assert not path.exists()
    store.put("_machinekey", b"privkey:00")
    raw = path.read_text()
    assert raw == '{\n  "_machinekey": "' + base64.b64encode(b"privkey:00").decode() + '"\n}'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert json.loads((tmp_path / "tsd" / "tsd.state.bak").read_text()) == json.loads(raw)
    assert FileStore(path).get("_machinekey") == b"privkey:00"


def test_nothing_is_written_when_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "s")
    store.put("a", b"1")
    monkeypatch.setattr(fsync, "replace", lambda *_: pytest.fail("written"))
    store.put("a", b"1")
    store.put("absent", None)


def test_none_deletes(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s")
    store.put("a", b"1")
    store.put("a", None)
    assert FileStore(tmp_path / "s").get("a") is None


@pytest.mark.parametrize("damage", [b"", b"\0\0\0", b'{"a": "MQ', b"[]", b'{"a": 5}', b'{"a": "!"}', b"\xff\xfe"])
def test_a_damaged_file_is_recovered_from_the_backup(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "s"
    FileStore(path).put("a", b"1")
    path.write_bytes(damage)
    store = FileStore(path)
    assert store.get("a") == b"1"
    assert "goes on from the backup" in store.notice
    assert (tmp_path / "s.damaged").read_bytes() == damage
    assert FileStore(path).notice == ""


@pytest.mark.parametrize("damage", [b"", b"{", b'{"a": 5}'])
def test_a_damaged_file_without_backup_is_refused_and_left_alone(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "s"
    path.write_bytes(damage)
    with pytest.raises(StateError, match=r"to join as a new machine, remove it"):
        FileStore(path)
    assert path.read_bytes() == damage


@pytest.mark.parametrize("damage", [b"", b"\0" * 500, b"{"])
def test_s02_what_tailscaled_was_writing_when_the_power_went_is_taken(tmp_path: Path, damage: bytes) -> None:
    """TS#20515: an empty state file beside a whole temporary one, which the renaming had not reached the disk of."""
    path = tmp_path / "tailscaled.state"
    path.write_bytes(damage)
    for age_s, name, raw in ((9, "tmp11", {"_machinekey": b"older"}), (5, "tmp7", {"_machinekey": b"newer"})):
        beside = tmp_path / f"{path.name}.{name}"
        beside.write_bytes(encode(raw))
        beside.chmod(0o600)
        os.utime(beside, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / f"{path.name}.tmp99").write_bytes(b'{"_machinekey": "AA')
    store = FileStore(path)
    assert store.get("_machinekey") == b"newer"
    assert "what was being written last, tailscaled.state.tmp7" in store.notice
    assert FileStore(path).get("_machinekey") == b"newer"


def test_a_missing_file_with_a_backup_goes_on_as_the_same_node(tmp_path: Path) -> None:
    path = tmp_path / "s"
    FileStore(path).put("a", b"1")
    path.unlink()
    store = FileStore(path)
    assert store.get("a") == b"1"
    assert "is missing" in store.notice
    assert path.exists()


def test_the_backup_follows_what_another_program_wrote(tmp_path: Path) -> None:
    path = tmp_path / "s"
    FileStore(path).put("a", b"1")
    path.write_text('{"a": "Mg=="}')
    FileStore(path)
    path.write_bytes(b"")
    assert FileStore(path).get("a") == b"2"


def test_a_sealed_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text('{"key": "", "nonce": "", "data": ""}')
    with pytest.raises(StateError, match=r"sealed by a TPM.*--encrypt-state=false"):
        FileStore(path)


def test_a_failing_disk_keeps_the_values_and_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    path = tmp_path / "s"
    store = FileStore(path, told.append)
    store.put("a", b"1")
    good = path.read_bytes()
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, bytes(data)[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    store.put("a", b"2")
    store.put("b", b"3")
    assert store.get("a") == b"2"
    assert "No space left" in store.trouble
    assert path.read_bytes() == good
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "s.bak"]
    assert not store.retry()
    monkeypatch.undo()
    assert store.retry()
    assert [bool(text) for text in told] == [True, False]
    assert FileStore(path).get("b") == b"3"


def test_a_failing_backup_does_not_stop_the_state(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s")
    store.put("a", b"1")
    (tmp_path / "s.bak").unlink()
    (tmp_path / "s.bak").mkdir()
    (tmp_path / "s.bak" / "x").touch()
    store.put("a", b"2")
    assert not store.trouble


def test_folders_and_files_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StateError, match=r"mode 0777.*writable for everybody"):
        FileStore(folder / "s")
    path = tmp_path / "s"
    path.write_text("{}")
    path.chmod(0o644)
    FileStore(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "d").mkdir()
    with pytest.raises(StateError, match="not a regular file"):
        FileStore(tmp_path / "d")


def test_a_symbolic_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "persist" / "real.state"
    real.parent.mkdir()
    link = tmp_path / "s"
    link.symlink_to(real)
    FileStore(link).put("a", b"1")
    assert link.is_symlink()
    assert real.exists()


def _as_nobody(folder: Path, path: Path) -> str:
    """The error that uid 65534 gets for `path`."""
    for parent in folder.parents[:4]:
        if parent.stat().st_uid == os.geteuid() and str(parent).count("/") > 1:
            parent.chmod(parent.stat().st_mode | 0o055)
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            FileStore(path)
            os.write(write_fd, b"no error")
        except Exception as err:
            os.write(write_fd, f"{type(err).__name__}: {err}".encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_what_another_user_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "s"
    path.write_text("{}")
    path.chmod(0o644)
    assert "belongs to another user than tsd (uid 65534)" in _as_nobody(tmp_path, path)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    assert "mode 0700) is closed to uid 65534" in _as_nobody(tmp_path, closed / "s")
    assert "cannot be made" in _as_nobody(tmp_path, tmp_path / "new" / "s")


def test_kinds_of_stores(tmp_path: Path) -> None:
    assert isinstance(open_store("mem:"), MemoryStore)
    assert isinstance(open_store(str(tmp_path / "s")), FileStore)
    with pytest.raises(ConfigError, match="not supported"):
        open_store("kube:secret")
