"""Flags and environment of the daemon."""

import os
import tomllib
from pathlib import Path

import pytest

from tsd.base.errors import ConfigError
from tsd.base.version import VERSION
from tsd.daemon import cli, compat
from tsd.daemon.flags import HelpWanted, Settings, VersionWanted, parse

ROOT = Path(__file__).resolve().parents[3]


def test_the_argv_of_the_field_is_understood(tmp_path: Path) -> None:
    argv = [
        f"--statedir={tmp_path}",
        f"--socket={tmp_path}/tailscale.sock",
        "--socks5-server=localhost:0",
        "--debug=localhost:0",
        "--tun=userspace-networking",
        "-verbose=2",
    ]
    settings = parse(argv, {}, compat=True)
    assert settings.state == str(tmp_path / "tailscaled.state")
    assert settings.state_dir == tmp_path
    assert settings.socket == f"{tmp_path}/tailscale.sock"
    assert (settings.socks5_server, settings.debug, settings.verbose) == ("localhost:0", "localhost:0", 2)
    assert settings.tun == "userspace-networking"
    assert parse(argv, {}).state == str(tmp_path / "tsd.state")


def test_mtu_from_flag_and_knob() -> None:
    assert parse([], {}).mtu_bytes == 1280
    assert parse(["--mtu=1400"], {"TS_DEBUG_MTU": "1300"}).mtu_bytes == 1400
    assert parse([], {"TS_DEBUG_MTU": "1300"}).mtu_bytes == 1300
    for wrong in ("575", "9001", "big", "-1"):
        with pytest.raises(ConfigError, match="mtu"):
            parse([f"--mtu={wrong}"], {})


@pytest.mark.parametrize("word", ["-port=7", "--port=7"])
def test_one_dash_or_two_and_values_apart(word: str) -> None:
    assert parse([word], {}).port == 7
    assert parse(word.split("="), {}).port == 7
    assert parse([word, "--port", "8"], {}).port == 8


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["up"], "takes flags only"),
        (["--", "x"], "takes flags only"),
        (["--nope"], "flag provided but not defined: -nope"),
        (["--port"], "flag needs an argument: -port"),
        (["--port=x"], "want a whole number"),
        (["--port=70000"], "0 to 65535"),
        (["--cleanup=maybe"], "invalid boolean"),
        (["--encrypt-state"], "no TPM"),
        (["--socks5-server=1080"], "want .address.:port"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        parse(argv, {})
    assert "\n" not in str(caught.value)


def test_switches_and_questions() -> None:
    assert parse(["--cleanup"], {}).is_cleanup
    assert not parse(["--cleanup=false", "--encrypt-state=false"], {}).is_cleanup
    with pytest.raises(VersionWanted):
        parse(["--version"], {})
    with pytest.raises(HelpWanted, match="--socks5-server"):
        parse(["-h"], {})


def test_logs_are_uploaded_only_where_a_target_is_named() -> None:
    target = {"TS_LOG_TARGET": "http://127.0.0.1:1"}
    assert not parse([], {}).uploads_logs
    assert parse([], target).uploads_logs
    assert not parse(["--no-logs-no-support"], target).uploads_logs
    assert not parse([], {**target, "TS_NO_LOGS_NO_SUPPORT": "true"}).uploads_logs


def test_state_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = parse(["--state=mem:"], {})
    assert memory.is_ephemeral and memory.state_dir is None
    assert parse([f"--state={tmp_path}/x.state"], {}).state_dir == tmp_path
    assert parse([], {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}).state == "/var/lib/a/tsd.state"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    settings = parse([], {"XDG_DATA_HOME": "/d", "XDG_RUNTIME_DIR": "/r"})
    assert (settings.state, settings.socket) == ("/d/tsd/tsd.state", "/r/tsd/tsd.sock")
    assert settings.tun == "userspace-networking"


def test_k10_no_home_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os.path, "expanduser", lambda _: "~")
    settings = parse([], {})
    assert settings.is_ephemeral
    assert capsys.readouterr().err.count("\n") == 1


def test_environment_fills_in() -> None:
    settings = parse([], {"PORT": "41641", "TS_LOG_VERBOSITY": "1", "TS_PARENT_DEATH_FD": "3", "TS_X": "true"})
    assert (settings.port, settings.verbose, settings.parent_death_fd) == (41641, 1, 3)
    assert settings.knob_on("TS_X") and not settings.knob_on("TS_Y")
    assert parse([], {"TS_PARENT_DEATH_FD": "1"}).parent_death_fd == -1


def test_drop_in_is_recognised_by_name_or_variable() -> None:
    assert compat.is_compat("/usr/sbin/tailscaled", {})
    assert compat.is_compat("tsd", {"TSD_COMPAT": "tailscaled"})
    assert not compat.is_compat("/usr/bin/tsd", {})
    assert compat.names(True, "darwin").system_socket == "/var/run/tailscaled.socket"


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tsd", "up"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["tsd", "--version"]) == 0
    assert cli.main(["tsd", "--help"]) == 0


def test_loops() -> None:
    cli.loop_factory("asyncio")().close()
    cli.loop_factory("")().close()
    with pytest.raises(ConfigError):
        cli.loop_factory("trio")


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
