"""The alpha0 configuration file."""

import json
from pathlib import Path

import pytest

from tsd.base.authkey import read_auth_key
from tsd.base.errors import ConfigError
from tsd.daemon.config import blank_comments, load_config, parse_config
from tsd.engine.account.edits import MaskedPrefs, apply_edits
from tsd.engine.account.prefs import Prefs

FULL = """
// what this node is
{
  "Version": "alpha0", /* the only one */
  "ServerURL": "http://127.0.0.1:8080",
  "Hostname": "edge-1",
  "acceptDNS": false,
  "acceptRoutes": true,
  "exitNode": "100.64.0.9",
  "AdvertiseRoutes": ["192.0.2.0/24"],
  "NetfilterMode": "nodivert",
  "Locked": false,
  "note//": null,
}
"""


def test_everything_becomes_one_masked_edit() -> None:
    config = parse_config(FULL.replace('"note//": null,', ""), "f")
    prefs = apply_edits(Prefs.fresh(), MaskedPrefs.from_go(config.masked_prefs))
    assert prefs.control_url == "http://127.0.0.1:8080"
    assert (prefs.hostname, prefs.corp_dns, prefs.route_all, prefs.netfilter_mode) == ("edge-1", False, True, 1)
    assert str(prefs.exit_node_ip) == "100.64.0.9"
    assert prefs.want_running and not config.is_locked


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "Version"),
        ("[]", "object"),
        ('{"Version": "alpha0", "Hostnam": "x"}', "unknown key 'Hostnam'"),
        ('{"Version": "alpha0", "Hostname": 5}', "Hostname: want a string"),
        ('{"Hostname": "x"}', '"Version" is missing'),
        ('{"Version": "alpha0", "AdvertiseRoutes": ["192.0.2.1/24"]}', "192.0.2.0/24 is meant"),
        ('{"Version": "alpha0",\n "Hostname" "x"}', "line 2"),
        ("", "is empty; write at least"),
        ('{"Version": "alpha0", "Enabled": "no"}', "Enabled: want true or false, not 'no'"),
        ('{"Version": "alpha0", "locked": 0}', "locked: want true or false"),
        ('{"Version": "alpha0", "advertiseExitNode": "false"}', "advertiseExitNode: want true or false"),
        ('{"Version": "alpha0", "exitNode": 5}', "exitNode: want a string"),
    ],
)
def test_mistakes_name_the_place(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config(text, "f")


def test_a_byte_order_mark_and_foreign_line_ends_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{\r\n"Version": "alpha0", // as of Windows\r\n"Hostname": "x"\r\n}\r\n')
    config = load_config(str(path))
    assert config is not None and config.masked_prefs["Hostname"] == "x"


def test_comments_keep_positions() -> None:
    text = '{"a": "// no /* comment", /* x\ny */ "b": [1, 2, ], }'
    assert len(blank_comments(text)) == len(text)
    assert json.loads(blank_comments(text)) == {"a": "// no /* comment", "b": [1, 2]}
    assert json.loads(blank_comments('{"a,": "b\\"", }')) == {"a,": 'b"'}


def test_auth_keys_from_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"tskey-auth-x\r\n")
    assert read_auth_key(f"file:{path}") == "tskey-auth-x"
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"Version": "alpha0", "AuthKey": f"file:{path}"}))
    loaded = load_config(str(config))
    assert loaded is not None and loaded.auth_key == "tskey-auth-x"
    assert loaded.masked_prefs["LoggedOutSet"] is True
    path.write_bytes(b"'tskey-auth-x'\n")
    assert read_auth_key(f"file:{path}") == read_auth_key('"tskey-auth-x"') == "tskey-auth-x"
    for wrong, text in ((b"", "is empty"), (b"a b", "white space"), (b"\xff", "not text")):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=text):
            read_auth_key(f"file:{path}")
    with pytest.raises(ConfigError, match="No such file"):
        read_auth_key(f"file:{tmp_path}/absent")
    assert load_config(f"optional:{tmp_path}/absent") is None
    with pytest.raises(ConfigError, match="no such file"):
        load_config(f"{tmp_path}/absent")


@pytest.mark.parametrize("key", ["0" * 48, "hskey-auth-abc_1", "tskey-client-x?ephemeral=true&preauthorized=1"])
def test_s08_keys_are_opaque(key: str) -> None:
    assert read_auth_key(key) == key
