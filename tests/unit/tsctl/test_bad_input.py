"""Every command of tsctl, tsd and tsd coord with wrong input: one clear line and exit status 2, nothing raw."""

from __future__ import annotations

import pytest

from tsctl.root import TABLE
from tsd.coord.cli import run_command_line
from tsd.daemon import cli as daemon

TSCTL = [
    "bogus",
    "statsu",
    "status extra",
    "status --bogus",
    "status --json=maybe",
    "up extra",
    "up --timeout=xx",
    "up --login-server=nonsense",
    "up --advertise-routes=zz",
    "up --advertise-routes=10.0.0.1/8",
    "up --advertise-routes=0.0.0.0/0",
    "up --advertise-routes=fd7a:115c:a1e0:b1a:0:7::/95",
    "up --advertise-routes=fd7a:115c:a1e0:b1a:1:0:a00:0/104",
    "up --auth-key=file:/nope",
    "up --netfilter-mode=zz",
    "down extra",
    "set --hostname",
    "set --bogus=1",
    "set --shields-up=maybe",
    "set --advertise-routes=1.2.3.4",
    "get nosuch",
    "get a b",
    "login extra",
    "logout extra",
    "switch",
    "switch a b",
    "ip a b",
    "ip -1 -4",
    "ping",
    "ping a b",
    "ping --c=x b",
    "ping --c=-1 b",
    "ping --timeout=0s b",
    "ping 123456",
    "nc",
    "nc b",
    "nc b http",
    "nc b 99999",
    "netcheck extra",
    "netcheck --format=xml",
    "netcheck --bind-port=99999",
    "dns",
    "dns bogus",
    "dns query",
    "dns query b zz",
    "dns query b A extra",
    "whois",
    "whois 1.2.3",
    "whois b:99999",
    "whois a b",
    "whoami extra",
    "exit-node",
    "exit-node bogus",
    "exit-node list --filter",
    "exit-node suggest x",
    "up --login-server=192.0.2.1:8080",
    "up --login-server=http://192.0.2.1:99999",
    "up --login-server=http://u:p@192.0.2.1",
    "up --login-server=http://[::1",
    "up --login-server=http://192.0.2.1/?x",
    "ssh",
    "ssh -oProxyCommand=x",
    "serve",
    "serve bogus",
    "lock bogus",
    "lock status x",
    "metrics bogus",
    "metrics write",
    "wait extra",
    "wait --timeout=x",
    "version x",
    "bugreport a b",
    "debug",
    "debug bogus",
    "debug localapi",
    "completion",
    "completion tcsh",
    "doctor x",
    "doctor --json=maybe",
]
COORD = [
    "bogus",
    "--bogus",
    "--listen=zz",
    "--dns=zz",
    "--dns=zone=zz",
    "--node-expiry=zz",
    "--prefix-v4=zz",
    "--tls-cert=/nope",
    "--state=/etc/passwd",
    "keys bogus",
    "keys create extra",
    "keys create --expiry=zz",
    "keys revoke",
    "nodes expire",
    "nodes rename x",
    "policy set",
    "policy set /nope/policy",
    "status extra",
]
TSD = ["--bogus", "run", "--port=abc", "--port=70000", "--verbose=x", "--state", "--config=/nope", "--socks5-server=x"]
RAW = ("Traceback", "Errno", "400", "500", "Error:", "Usage:", "{", "<class")


def _is_one_clear_line(text: str) -> bool:
    return text.count("\n") == 1 and len(text) > 15 and not any(raw in text for raw in RAW)


@pytest.mark.parametrize("line", TSCTL)
def test_tsctl(tsctl, line: str) -> None:  # type: ignore[no-untyped-def]
    done = tsctl(*line.split())
    assert done.code == 2 and done.out == "" and _is_one_clear_line(done.err), done


def test_no_command_is_left_out() -> None:
    assert set(TABLE) <= {line.split()[0] for line in TSCTL}


@pytest.mark.parametrize("line", COORD)
def test_tsd_coord(line: str, capsys: pytest.CaptureFixture, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TSD_COORD_STATE", str(tmp_path))
    try:
        code: object = run_command_line(line.split())
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and _is_one_clear_line(err), (code, out, err)
    assert err.startswith("tsd coord")


@pytest.mark.parametrize("line", TSD)
def test_tsd(line: str, capsys: pytest.CaptureFixture) -> None:
    assert daemon.main(["tsd", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and _is_one_clear_line(err) and err.startswith("tsd: ")


def test_the_state_folder_is_taken_at_every_level(capsys: pytest.CaptureFixture) -> None:
    for line in ("--state=/nope/s keys list", "keys --state=/nope/s list", "keys list --state=/nope/s"):
        with pytest.raises(SystemExit) as end:
            run_command_line(line.split())
        assert end.value.code == 1 and "/nope/s/coord.sock" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["b", "B.tn.example", "b:22", "100.64.0.2", "100.64.0.2:22", "[fd7a:115c:a1e0::2]:22"])
def test_whois_takes_names(tsctl, word: str) -> None:  # type: ignore[no-untyped-def]
    done = tsctl("whois", word)
    assert done.code == 0 and "b.tn.example" in done.out, done


def test_whois_of_an_unknown_name_says_so(tsctl) -> None:  # type: ignore[no-untyped-def]
    done = tsctl("whois", "nosuch.invalid")
    assert done.code == 1 and "no machine of the tailnet has this name" in done.err and done.err.count("\n") == 1
