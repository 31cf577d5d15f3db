"""Opening the state at start."""

from pathlib import Path

import pytest

from tsd.base.errors import ConfigError, StateError
from tsd.daemon.flags import Settings, parse
from tsd.daemon.statefiles import open_state


def _settings(folder: Path, state: str = "") -> Settings:
    return parse([f"--state={state or folder / 'tsd.state'}", f"--socket={folder / 'tsd.sock'}"], {})


def test_w13_a_second_daemon_on_the_state_is_refused(tmp_path: Path) -> None:
    first = open_state(_settings(tmp_path))
    assert not first.error
    with pytest.raises(StateError, match="in use by another daemon"):
        open_state(_settings(tmp_path))
    other_socket = parse([f"--state={tmp_path / 'tsd.state'}", f"--socket={tmp_path / 'other.sock'}"], {})
    with pytest.raises(StateError, match=r"the state file .* in use"):
        open_state(other_socket)
    with pytest.raises(StateError, match=r"the socket .* in use"):
        open_state(_settings(tmp_path, "mem:"))
    first.close()
    open_state(other_socket).close()


def test_a_state_that_cannot_be_read_is_reported_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "tsd.state").write_text("garbage")
    opened = open_state(_settings(tmp_path))
    assert "is damaged" in opened.error
    assert not opened.store.is_durable
    opened.store.put("_machinekey", b"x")
    assert (tmp_path / "tsd.state").read_text() == "garbage"
    opened.close()


def test_s05_a_link_that_leads_in_a_circle_is_told(tmp_path: Path) -> None:
    (tmp_path / "tsd.state").symlink_to("tsd.state")
    opened = open_state(_settings(tmp_path))
    assert "leads in a circle" in opened.error
    opened.close()


def test_unknown_kinds_are_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        open_state(_settings(tmp_path, "kube:x"))


def test_a_recovered_state_comes_with_a_notice(tmp_path: Path) -> None:
    opened = open_state(_settings(tmp_path))
    opened.store.put("a", b"1")
    opened.close()
    (tmp_path / "tsd.state").write_bytes(b"")
    opened = open_state(_settings(tmp_path))
    assert not opened.error
    assert "goes on from the backup" in opened.notice
    opened.close()
