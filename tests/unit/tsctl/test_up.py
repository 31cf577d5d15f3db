"""`tsctl up`: what it asks, edits and refuses; keys; waiting; `set` and `get`."""

import json
import shlex
import tempfile
from pathlib import Path

import pytest

from harness.fakebackend import FakeBackend, node_of
from tsctl.goflags import UsageError
from tsctl.up import given_auth_key, up_command
from tsd.localapi import schema

SERVER = "--login-server=http://control.example"


def calls_named(backend: FakeBackend, name: str) -> list:
    return [value for kind, value in backend.calls if kind == name]


def test_just_an_edit_sets_only_what_is_mentioned(tsctl, backend: FakeBackend) -> None:
    assert tsctl("up", SERVER, "--hostname=web", "--accept-routes").code == 0
    edit = calls_named(backend, "edit_prefs")[-1]
    masks = {key for key in edit if key.endswith("Set")}
    assert masks == {"WantRunningSet", "ControlURLSet", "HostnameSet", "RouteAllSet"}
    assert edit["Hostname"] == "web" and edit["RouteAll"] is True


def test_bare_up_changes_nothing_and_stays_quiet(tsctl, backend: FakeBackend) -> None:
    before = backend.prefs()
    outcome = tsctl("up")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    assert backend.prefs() == before


def test_accidental_revert_is_refused_with_a_command_that_works(tsctl, backend: FakeBackend) -> None:
    backend.current |= {
        "Hostname": "my host",
        "AdvertiseRoutes": ["10.0.0.0/8", "0.0.0.0/0", "::/0"],
        "CorpDNS": False,
        "ExitNodeID": "2",
        "ExitNodeAllowLANAccess": True,
        "AdvertiseTags": ["tag:x"],
        "NoSNAT": True,
    }
    before = backend.prefs()
    outcome = tsctl("up", "--accept-routes")
    assert outcome.code == 1 and backend.prefs() == before
    command = next(line.strip() for line in outcome.err.splitlines() if line.startswith("\ttsctl "))
    words = shlex.split(command)[2:]
    assert words[1] == "--accept-routes"
    assert set(words[2:]) == {
        "--accept-dns=false",
        "--advertise-exit-node",
        "--advertise-routes=10.0.0.0/8",
        "--advertise-tags=tag:x",
        "--exit-node=100.64.0.2",
        "--exit-node-allow-lan-access",
        "--hostname=my host",
        SERVER,
        "--snat-subnet-routes=false",
    }
    assert words[2:] == sorted(words[2:])
    assert tsctl(*words).code == 0
    after = backend.prefs()
    assert after["RouteAll"] is True and after["Hostname"] == "my host" and after["CorpDNS"] is False
    assert sorted(after["AdvertiseRoutes"]) == sorted(before["AdvertiseRoutes"])


@pytest.mark.parametrize("words", [(), ("--auth-key=k",), ("--force-reauth", "--accept-risk=all")])
def test_a_login_that_names_no_settings_keeps_them(tsctl, backend: FakeBackend, words: tuple[str, ...]) -> None:
    """As after the key has expired, when the remedy is `tsctl up` or `tsctl up --force-reauth`."""
    backend.current |= {"Hostname": "my host", "RouteAll": True}
    backend.state = schema.NEEDS_LOGIN
    tsctl("up", "--timeout=1s", *words)
    started = calls_named(backend, "start")[-1]
    assert started["UpdatePrefs"]["Hostname"] == "my host" and started["UpdatePrefs"]["RouteAll"] is True
    assert started["UpdatePrefs"]["ControlURL"] == "http://control.example"


def test_settings_from_before_the_first_login_stay(tsctl, backend: FakeBackend) -> None:
    backend.current |= {"ControlURL": "", "Hostname": "early", "RouteAll": True, "AdvertiseRoutes": ["10.0.0.0/8"]}
    backend.state = schema.NEEDS_LOGIN
    tsctl("up", SERVER, "--accept-dns=false", "--auth-key=k", "--timeout=1s")
    prefs = calls_named(backend, "start")[-1]["UpdatePrefs"]
    assert (prefs["Hostname"], prefs["RouteAll"], prefs["CorpDNS"]) == ("early", True, False)
    assert prefs["AdvertiseRoutes"] == ["10.0.0.0/8"] and prefs["ControlURL"] == "http://control.example"
    backend.current |= {"ControlURL": ""}
    backend.state = schema.NEEDS_LOGIN
    tsctl("up", SERVER, "--reset", "--auth-key=k", "--timeout=1s")
    assert calls_named(backend, "start")[-1]["UpdatePrefs"]["Hostname"] == ""


def test_reset_puts_the_rest_to_defaults(tsctl, backend: FakeBackend) -> None:
    backend.current |= {"Hostname": "x", "ProfileName": "nick"}
    assert tsctl("up", SERVER, "--reset").code == 0
    assert backend.current["Hostname"] == "" and backend.current["ProfileName"] == "nick"


def test_operator_is_kept_for_the_operator(tsctl, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "alice")
    backend.current["OperatorUser"] = "alice"
    assert tsctl("up", SERVER).code == 0
    backend.current["OperatorUser"] = "bob"
    assert "--operator=bob" in tsctl("up", SERVER).err


def test_trailing_slash_of_the_server_is_no_change(tsctl, backend: FakeBackend) -> None:
    assert tsctl("up", SERVER + "/").code == 0
    other = tsctl("up", "--login-server=http://other.example")
    assert other.code == 1 and "--force-reauth" in other.err
    assert tsctl("up", "--login-server=nonsense").code == 2


def test_default_valued_flag_counts_as_mentioned(tsctl, backend: FakeBackend) -> None:
    backend.current["Hostname"] = "x"
    assert tsctl("up", SERVER, "--hostname=").code == 0 and backend.current["Hostname"] == ""


def test_refused_key_reaches_the_user(tsctl, backend: FakeBackend) -> None:
    outcome = tsctl("up", SERVER, "--auth-key=bad")
    assert outcome.code == 1 and outcome.err == "backend error: invalid key: it does not exist\n"


def test_timeout_tells_the_reason(tsctl, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(options: dict) -> None:
        warning = {"WarnableCode": "x", "Severity": "high", "Text": "cannot reach the coordination server"}
        backend.notify(Health={"Warnings": {"x": warning}})

    monkeypatch.setattr(backend, "start", start)
    monkeypatch.setattr("tsctl.upwait.QUIET_S", 0.1)
    outcome = tsctl("up", SERVER, "--auth-key=k", "--timeout=500ms")
    assert outcome.code == 1 and "still waiting: cannot reach the coordination server" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("timeout waiting for tsd")
    as_json = tsctl("up", SERVER, "--auth-key=k", "--timeout=300ms", "--json")
    assert as_json.code == 1 and "timeout" in json.loads(as_json.out)["Error"]


class TestLogin:
    @pytest.fixture
    def backend(self, logged_out_backend: FakeBackend) -> FakeBackend:
        return logged_out_backend

    def test_interactive(self, tsctl, backend: FakeBackend) -> None:
        tsctl.later(0.3, backend.approve)
        outcome = tsctl("up", SERVER)
        assert outcome.code == 0 and outcome.out == ""
        assert "\nTo authenticate, visit:\n\n\thttp://control.example/register/abc\n\n" in outcome.err
        assert outcome.err.endswith("Success.\n")
        assert outcome.calls == [
            "GET status",
            "GET prefs",
            "GET watch-ipn-bus?mask=0",
            "POST check-prefs",
            "POST start",
            "POST login-interactive",
            "GET status?peers=false",
        ]

    def test_interactive_json(self, tsctl, backend: FakeBackend) -> None:
        tsctl.later(0.3, backend.approve)
        outcome = tsctl("up", SERVER, "--json")
        first, end = json.JSONDecoder().raw_decode(outcome.out)
        assert first["AuthURL"].endswith("/abc") and first["QR"].startswith("data:image/png;base64,")
        assert json.loads(outcome.out[end:]) == {"BackendState": "Running"}

    def test_qr_forms(self, tsctl, backend: FakeBackend) -> None:
        tsctl.later(0.3, backend.approve)
        assert "##" in tsctl("up", SERVER, "--qr", "--qr-format=ascii").err
        assert tsctl("up", SERVER, "--qr-format=huge").code == 2

    def test_key_is_silent(self, tsctl, backend: FakeBackend) -> None:
        outcome = tsctl("up", SERVER, "--authkey=k")
        assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
        assert calls_named(backend, "start")[0]["AuthKey"] == "k"
        prefs = calls_named(backend, "start")[0]["UpdatePrefs"]
        assert prefs["WantRunning"] is True and prefs["LoggedOut"] is False and prefs["CorpDNS"] is True

    def test_machine_approval(self, tsctl, backend: FakeBackend) -> None:
        async def start(options: dict) -> None:
            backend.current = {**options["UpdatePrefs"]}
            backend.set_state(schema.NEEDS_MACHINE_AUTH)

        backend.start = start  # type: ignore[method-assign]
        tsctl.later(0.3, backend.approve)
        outcome = tsctl("up", SERVER, "--auth-key=k")
        assert "To approve your machine, visit (as admin):\n\n\thttp://control.example/admin" in outcome.err

    def test_login_makes_a_profile_first(self, tsctl, backend: FakeBackend) -> None:
        outcome = tsctl("login", SERVER, "--auth-key=k", "--nickname=work")
        assert outcome.code == 0 and outcome.calls[:2] == ["PUT profiles/", "GET status"]
        assert backend.current["ProfileName"] == "work"


def test_force_reauth_waits_for_a_new_key(tsctl, backend: FakeBackend) -> None:
    def new_key() -> None:
        backend.notify(SelfChange=node_of({**backend._self_status(), "PublicKey": "nodekey:" + "77" * 32}))

    tsctl.later(0.6, new_key)
    outcome = tsctl("up", SERVER, "--force-reauth", "--accept-risk=lose-ssh", "--timeout=5s")
    assert outcome.code == 0 and "To authenticate, visit:" in outcome.err and outcome.err.endswith("Success.\n")


@pytest.mark.parametrize(
    ("contents", "key"),
    [(b"tskey-1\n", "tskey-1"), (b"tskey-1\r\n", "tskey-1"), (b"  tskey-1 \n\n", "tskey-1"), (b"\xef\xbb\xbfk\n", "k")],
)
def test_key_file_is_trimmed(contents: bytes, key: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(contents)
    assert given_auth_key(parsed_key(f"file:{tmp_path}/key")) == key


def parsed_key(value: str):
    from tsctl.context import Context
    from tsctl.goflags import parse

    return parse(up_command(Context("/nosuch", [])).flags, [f"--auth-key={value}"])


@pytest.mark.parametrize("contents", [b"", b"\r\n", b"\xff\xfe\x00"])
def test_bad_key_files_are_one_line_and_exit_2(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(contents)
    with pytest.raises(UsageError) as caught:
        given_auth_key(parsed_key(f"file:{tmp_path}/key"))
    assert caught.value.code == 2 and "\n" not in caught.value.text and str(tmp_path) in caught.value.text


def test_key_that_is_a_folder_missing_or_empty(tmp_path: Path) -> None:
    for value in (f"file:{tmp_path}", f"file:{tmp_path}/no", "file:", ""):
        with pytest.raises(UsageError):
            given_auth_key(parsed_key(value))


def test_set_edits_only_that(tsctl, backend: FakeBackend) -> None:
    assert tsctl("set", "--hostname=x", "--auto-update=false").code == 0
    edit = calls_named(backend, "edit_prefs")[-1]
    assert edit == {
        "Hostname": "x",
        "HostnameSet": True,
        "AutoUpdate": {"Check": True, "Apply": False},
        "AutoUpdateSet": {"CheckSet": True, "ApplySet": True},
    }


def test_set_routes_and_exit_offer_keep_each_other(tsctl, backend: FakeBackend) -> None:
    tsctl("set", "--advertise-exit-node")
    assert backend.current["AdvertiseRoutes"] == ["0.0.0.0/0", "::/0"]
    tsctl("set", "--advertise-routes=192.168.0.0/24,10.0.0.0/8")
    assert backend.current["AdvertiseRoutes"] == ["0.0.0.0/0", "::/0", "10.0.0.0/8", "192.168.0.0/24"]
    tsctl("set", "--advertise-exit-node=false")
    assert backend.current["AdvertiseRoutes"] == ["10.0.0.0/8", "192.168.0.0/24"]
    tsctl("set", "--advertise-routes=")
    assert backend.current["AdvertiseRoutes"] is None


def test_get_forms(tsctl, backend: FakeBackend) -> None:
    tsctl("set", "--hostname=x y", "--exit-node=b", "--relay-server-port=0")
    assert tsctl("get", "hostname").out == "x y\n" and tsctl("get", "exit-node").out == "100.64.0.2\n"
    assert tsctl("get", "relay-server-port").out == "0\n" and tsctl("get", "sync").out == "false\n"
    names = [line.split()[0] for line in tsctl("get").out.splitlines()]
    assert names[0] == "NAME" and names[1:] == sorted(names[1:]) and len(names) == 22
    assert "netfilter-backend" not in names, "unknown to scripts of the field, unless somebody chose one"
    tsctl("set", "--netfilter-backend=nft")
    assert "--netfilter-backend=nft" in shlex.split(tsctl("get", "--set-flags").out)
    assert json.loads(tsctl("get", "--json").out)["hostname"] == "x y"
    flags = shlex.split(tsctl("get", "--set-flags").out)
    assert "--hostname=x y" in flags and tsctl("set", *flags).code == 0


def test_ssh_risk(tsctl, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CLIENT", "100.64.0.2 1234 22")
    refused = tsctl("down")
    assert refused.code == 1 and "aborted, no changes made" in refused.err and refused.calls == []
    assert tsctl("down", "--accept-risk=lose-ssh").code == 0
    monkeypatch.setenv("SSH_CLIENT", "192.0.2.7 1234 22")
    assert tsctl("up").code == 0


def test_daemon_gone_while_waiting(tsctl, backend: FakeBackend) -> None:
    async def start(options: dict) -> None:
        for watch in list(backend.watches):
            watch.queue.put_nowait(None)

    backend.start = start  # type: ignore[method-assign]
    outcome = tsctl("up", SERVER, "--auth-key=k")
    assert outcome.code == 1 and "went away" in outcome.err


def test_socket_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from tsctl import client

    monkeypatch.setenv("TSD_SOCKET", "/x/y.sock")
    assert client.default_socket() == "/x/y.sock"
    monkeypatch.delenv("TSD_SOCKET")
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(client, "SYSTEM_SOCKET", f"{folder}/none")
        monkeypatch.setattr(client.os, "geteuid", lambda: 1000)
        assert client.default_socket() == f"{folder}/tsd/tsd.sock"


def test_set_tells_what_the_daemon_only_keeps(tsctl, backend: FakeBackend) -> None:
    assert "Web interface now running" in tsctl("set", "--webclient").out, "a daemon that has one"
    backend.health = ["Kept but without effect, because this version of tsd has no such thing: --ssh, --webclient."]
    outcome = tsctl("set", "--webclient")
    assert (outcome.code, outcome.out) == (0, "") and outcome.err == backend.health[0] + "\n"
    assert tsctl("set", "--ssh=false").err == "" and tsctl("set", "--hostname=x").err == ""
