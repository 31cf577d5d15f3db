"""The variables of a container (K02, K03, K04), and what comes out of them."""

import re
from pathlib import Path

import pytest

from tsd.base.errors import ConfigError
from tsd.daemon import container, container_env
from tsd.daemon.container_env import read


def test_nothing_set_is_an_ephemeral_node_in_user_space() -> None:
    boot = read({})
    assert boot.daemon_flags == ("--socket=/tmp/tailscaled.sock", "--tun=userspace-networking", "--state=mem:")
    assert boot.up_flags == ("--accept-dns=false",) and boot.listen == "" and boot.timeout_s == 60
    assert "each start is a new, ephemeral node" in boot.notes[0]


def test_k04_the_extra_arguments_are_the_last_word() -> None:
    boot = read(
        {
            "TS_HOSTNAME": "a",
            "TS_ACCEPT_DNS": "true",
            "TS_EXTRA_ARGS": "--hostname=b --accept-dns=false --advertise-tags=tag:a,tag:b '--nickname' x",
        }
        | {"TS_EXTRA_ARGS": "--hostname=b --accept-dns=false --advertise-tags tag:a,tag:b --timeout 5s"}
    )
    assert boot.up_flags == ("--accept-dns=false", "--hostname=b", "--advertise-tags=tag:a,tag:b", "--timeout=5.0s")
    assert boot.set_flags == ("--accept-dns=false", "--hostname=b"), "what only a login can change is left out"
    assert sum("TS_EXTRA_ARGS counts" in note for note in boot.notes) == 2


def test_k04_blanks_in_quotes_and_an_empty_value_that_means_something() -> None:
    assert "--hostname=Ann's box" in read({"TS_EXTRA_ARGS": '--hostname "Ann\'s box"'}).up_flags
    assert "--advertise-routes=" in read({"TS_ROUTES": ""}).up_flags, "set but empty clears"
    assert not any("routes" in flag for flag in read({}).up_flags)


def test_k04_quotes_of_a_compose_list_are_not_part_of_the_value() -> None:
    boot = read(
        {"TS_AUTHKEY": '"tskey-auth-x"', "TS_EXTRA_ARGS": "'--hostname=a --accept-routes'", "TS_USERSPACE": '"true"'}
    )
    assert boot.auth_key == "tskey-auth-x" and boot.up_flags[1:] == ("--hostname=a", "--accept-routes=true")
    assert "TS_AUTHKEY: the quotes around its value are left out" in boot.notes
    assert "--hostname=b c" in read({"TS_EXTRA_ARGS": "\"--hostname=b c\" '--accept-routes'"}).up_flags


def test_k04_two_names_for_the_key() -> None:
    assert read({"TS_AUTH_KEY": "k"}).auth_key == read({"TS_AUTHKEY": "k", "TS_AUTH_KEY": "k"}).auth_key == "k"
    boot = read({"TS_AUTHKEY": "one", "TS_AUTH_KEY": "two"})
    assert boot.auth_key == "one" and "TS_AUTHKEY is used" in boot.notes[0]
    assert read({"TS_AUTHKEY": "one", "TS_EXTRA_ARGS": "--authkey=three"}).auth_key == "three"
    assert not any("one" in flag or "three" in flag for flag in boot.up_flags)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"TS_USERSPACE": "maybe"}, "TS_USERSPACE=maybe: want true or false"),
        ({"TS_ACCEPT_DNS": "2"}, "TS_ACCEPT_DNS=2: want"),
        ({"TS_AUTH_ONCE": "ja"}, "TS_AUTH_ONCE=ja: want"),
        ({"TS_BOOT_TIMEOUT": "60"}, "TS_BOOT_TIMEOUT=60: want a duration"),
        ({"TS_EXTRA_ARGS": "--hostname='x"}, "TS_EXTRA_ARGS=.*quotation"),
        ({"TS_EXTRA_ARGS": "--nonsense"}, "TS_EXTRA_ARGS: flag provided but not defined: -nonsense"),
        ({"TS_EXTRA_ARGS": "--hostname=Ann s box"}, "'s' is not a flag; quote"),
        ({"TS_EXTRA_ARGS": "--help"}, "--help is not a setting"),
        ({"TS_TAILSCALED_EXTRA_ARGS": "--nonsense"}, "TS_TAILSCALED_EXTRA_ARGS.*-nonsense"),
        ({"TS_SOCKS5_SERVER": "1055"}, "-socks5-server: want"),
        ({"TS_AUTHKEY": "k", "TS_CLIENT_ID": "c"}, "TS_AUTHKEY and TS_CLIENT_ID are both set"),
        ({"TS_CLIENT_ID": "c"}, "OAuth clients are not supported"),
        ({"TS_KUBE_SECRET": "s"}, "TS_STATE_DIR"),
        ({"TS_SERVE_CONFIG": "/x.json"}, "serves nothing"),
        ({"TS_DEST_IP": "10.0.0.1"}, "TS_DEST_IP: "),
        ({"TS_ENABLE_METRICS": "1", "TS_LOCAL_ADDR_PORT": "9002x"}, "TS_LOCAL_ADDR_PORT=9002x: want"),
        ({"TSD_REQUIRE_DURABLE_STATE": "true"}, "TS_STATE_DIR is not"),
    ],
)
def test_k04_wrong_values_are_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(environ)


def test_k02_a_folder_that_goes_with_the_container_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "there"
    assert read({"TS_STATE_DIR": str(folder)}).daemon_flags[2:] == (f"--statedir={folder}",)
    monkeypatch.setattr(container_env, "_goes_with_the_container", lambda folder: True)
    assert "is not on a volume" in read({"TS_STATE_DIR": str(folder)}).notes[0]
    with pytest.raises(ConfigError, match="mount one there"):
        read({"TS_STATE_DIR": str(folder), "TSD_REQUIRE_DURABLE_STATE": "1"})


def test_a_folder_of_the_fields_image_goes_on_as_the_same_node(tmp_path: Path) -> None:
    (tmp_path / "tailscaled.state").write_text("{}")
    flags = read({"TS_STATE_DIR": str(tmp_path)}).daemon_flags
    assert flags[2:] == (f"--statedir={tmp_path}", f"--state={tmp_path}/tailscaled.state")


def test_arguments_are_refused_and_help_names_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert container.main({}, ["--help"]) == 0
    told = capsys.readouterr().err
    read_by_us = set(re.findall(r"\bTSD?_[A-Z0-9_]+", Path(container_env.__file__).read_text()))
    refused = {*container_env._REFUSED, "TS_HEALTHCHECK_ADDR_PORT", *container_env.SECRETS}
    assert {name for name in read_by_us - refused if name not in told} == set()
    assert container.main({}, ["run"]) == 2 and "takes no arguments: 'run'" in capsys.readouterr().err
