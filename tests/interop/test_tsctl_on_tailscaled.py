"""tsctl on the socket of a real tailscaled, in a tailnet of a real headscale and derper."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.headscale import ALLOW_ALL, Headscale, peer_binary
from harness.netlab import NetLab, inside, wait_for
from harness.nodes import TailscaledNode, real_cli

pytestmark = [
    pytest.mark.root,
    pytest.mark.peers,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
]


class Driven(TailscaledNode):
    """tailscaled, driven by tsctl."""

    def cli_words(self) -> list[str]:
        return [sys.executable, "-m", "tsctl"]


class Net(NamedTuple):
    lab: NetLab
    headscale: Headscale
    user: int
    a: Driven
    b: Driven


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    peer_binary("tailscaled")
    folder = tmp_path_factory.mktemp("tsdG")
    with NetLab(f"tsdG{os.getpid()}") as lab:
        hs = lab.add_host("hs")
        address = lab.address(hs)
        words = [peer_binary("derper"), "-a", f"{address}:4443", "-certmode", "manual", "-certdir", str(folder)]
        words += ["-hostname", address, "-http-port", "80", "-c", str(folder / "derper.conf")]
        derper = lab.start(hs, words, folder / "derper.log")
        wait_for(lambda: "serving on" in derper.tail(), what="derper")
        headscale = Headscale(lab, hs, folder / "headscale").start()
        headscale.set_policy(ALLOW_ALL)
        user = headscale.create_user("u")
        nodes = [Driven(lab, lab.add_host(name), folder / name, name) for name in ("a", "b")]
        with tempfile.TemporaryDirectory(prefix="tsdG") as open_folder:
            os.chmod(open_folder, 0o755)
            for node in nodes:
                node.socket = Path(open_folder) / f"{node.name}.sock"
                node.start()
            yield Net(lab, headscale, user, nodes[0], nodes[1])


@pytest.fixture(scope="module")
def joined(net: Net) -> Net:
    """Both nodes up: a by a key in a file with CRLF, b by a URL that is approved."""
    key_file = net.a.folder / "key"
    key_file.write_bytes(net.headscale.create_key(net.user).encode() + b"\r\n")
    done = net.a.up(net.headscale.url, f"file:{key_file}")
    assert (done.stdout, done.stderr) == ("", "")
    approve_in_background(net, lambda: net.b.status().get("AuthURL") or "")
    done = net.b.up(net.headscale.url, "", "--timeout=30s")
    assert "\nTo authenticate, visit:\n\n\thttp" in done.stderr and done.stderr.endswith("Success.\n")
    net.a.wait_for_peer("b", Online=True)
    net.b.wait_for_peer("a", Online=True)
    return net


def approve_in_background(net: Net, url: Callable[[], str]) -> None:
    def work() -> None:
        wait_for(url, 20, "a login URL")
        net.headscale.approve_login(url(), "u")

    threading.Thread(target=work, daemon=True).start()


def test_before_login(net: Net) -> None:
    if net.a.status()["BackendState"] == "Running":
        pytest.skip("runs only before the others")
    assert net.a.call("status", check=False).returncode == 1
    assert net.a.call("ip", check=False).stderr.startswith("no current Tailscale IPs")
    assert net.a.call("switch", "--list").stdout.split() == ["ID", "Tailnet", "Account"]
    bad = net.a.call("up", f"--login-server={net.headscale.url}", "--auth-key=hskey-auth-x-y", check=False)
    assert bad.returncode == 1 and bad.stderr.startswith("backend error: ")


def test_status_tables_agree_with_the_real_cli(joined: Net) -> None:
    real, ours = real_cli(joined.a, "status"), joined.a.call("status")

    def cells(text: str) -> list[list[str]]:
        return [line.split()[:4] for line in text.splitlines() if line[:1].isdigit()]

    assert ours.returncode == real.returncode == 0 and cells(ours.stdout) == cells(real.stdout)
    ours_json, real_json = json.loads(joined.a.call("status", "--json").stdout), real_cli(joined.a, "status", "--json")
    assert ours_json.keys() == json.loads(real_json.stdout).keys()


@pytest.mark.parametrize(
    "words",
    [
        ["ip"],
        ["ip", "-4", "b"],
        ["ip", "-6"],
        ["get"],
        ["get", "--json"],
        ["get", "--set-flags"],
        ["switch", "--list"],
        ["switch", "--list", "--json"],
        ["lock", "status"],
        ["lock", "status", "--json"],
        ["serve", "status"],
        ["serve", "status", "--json"],
        ["debug", "prefs"],
        ["debug", "derp-map"],
        ["exit-node", "suggest"],
        ["dns", "query", "--json", "b.tn.example"],
        ["dns", "status", "--json"],
        ["wait", "--timeout=5s"],
        ["whoami"],
        ["whoami", "--json"],
        ["bugreport"],
        ["ping", "100.64.0.1"],
    ],
    ids=" ".join,
)
def test_same_output_as_the_real_cli(joined: Net, words: list[str]) -> None:
    real, ours = real_cli(joined.a, *words), joined.a.call(*words, check=False)
    assert ours.returncode == real.returncode, (ours, real)
    if words[:2] == ["get", "--set-flags"] or "--json" in words or words[:1] == ["debug"]:
        assert sorted(ours.stdout.split()) == sorted(real.stdout.split())
    else:
        assert [line.rstrip() for line in ours.stdout.splitlines()] == [
            line.rstrip() for line in real.stdout.splitlines()
        ]


def test_whois(joined: Net) -> None:
    ours, real = joined.a.call("whois", "--json", joined.b.ip4), real_cli(joined.a, "whois", "--json", joined.b.ip4)
    assert json.loads(ours.stdout)["Node"]["Name"] == json.loads(real.stdout)["Node"]["Name"] == "b.tn.example."
    missing = joined.a.call("whois", "192.0.2.1", check=False)
    assert missing.returncode == 1 and missing.stderr == "peer not found\n"


def test_the_four_pings(joined: Net) -> None:
    assert "pong from b (100.64.0.2) via " in joined.a.ping("b")
    assert "via TSMP in" in joined.a.ping("b", "--tsmp")
    assert "via ICMP in" in joined.a.ping("b", "--icmp")
    assert "hit peerapi of 100.64.0.2 (b.tn.example.) at http://" in joined.a.ping("b", "--peerapi")
    failed = joined.a.call("ping", "-c", "1", "--timeout=1s", "100.64.0.77", check=False)
    assert failed.returncode == 1 and failed.stderr == "no matching peer\n"


def test_nc_both_ways(joined: Net) -> None:
    with inside(joined.b.namespace):
        server = socket.create_server(("127.0.0.1", 8123))

    def serve() -> None:
        while True:
            client, _ = server.accept()
            received = client.recv(100)
            client.sendall(b"you said " + received)
            client.close()

    threading.Thread(target=serve, daemon=True).start()
    line = ["ip", "netns", "exec", joined.a.namespace, *joined.a.cli_words(), f"--socket={joined.a.socket}"]
    done = subprocess.run(
        [*line, "nc", "b", "8123"], input=b"hello\n", capture_output=True, timeout=30, env=joined.a._env()
    )
    assert done.stdout == b"you said hello\n", done
    refused = joined.a.call("nc", "b", "8124", check=False)
    assert refused.returncode == 1 and refused.stderr.startswith('cannot connect to "b" port 8124')


def test_netcheck_finds_the_relay(joined: Net) -> None:
    report = json.loads(joined.a.call("netcheck", "--format=json").stdout)
    assert report["UDP"] is True and report["PreferredDERP"] == 900 and report["GlobalV4"].startswith("10.99.0.")
    text = joined.a.call("netcheck").stdout
    assert "\t* UDP: true\n" in text and "\t* Nearest DERP: Lab\n" in text and "\t\t- lab: " in text


def test_doctor_sees_what_it_can(joined: Net) -> None:
    """The rest is skipped with a reason; that it is not tsd is a note, no fault."""
    found = json.loads(joined.a.call("doctor", "--json", check=False).stdout)
    faults = [one for one in found["findings"] if one["severity"] == "fault" and not one["check"].startswith("health")]
    assert faults == [], found
    assert {"daemon", "state", "control", "relays", "clock"} <= set(found["passed"]), found
    assert any("is tailscaled" in one["cause"] for one in found["findings"])
    joined.a.call("down")
    stopped = json.loads(joined.a.call("doctor", "--json", "--network=false", check=False).stdout)
    assert "state" in {one["check"] for one in stopped["findings"]}
    joined.a.call("up", f"--login-server={joined.headscale.url}", "--hostname=a", "--accept-routes=false", check=False)
    wait_for(lambda: joined.a.state_name == "Running", 60, "up again")


def test_set_get_down_up(joined: Net) -> None:
    assert joined.a.call("set", "--hostname=renamed", "--accept-routes").returncode == 0
    assert real_cli(joined.a, "get", "hostname").stdout == "renamed\n"
    refused = joined.a.call("up", "--hostname=a", check=False)
    assert refused.returncode == 1
    command = next(line.strip() for line in refused.stderr.splitlines() if line.startswith("\t"))
    assert command == (
        f"tsctl --socket={joined.a.socket} up --hostname=a --accept-routes --login-server={joined.headscale.url}"
    )
    assert joined.a.call(*command.split()[2:]).returncode == 0
    assert real_cli(joined.a, "get", "accept-routes").stdout == "true\n"
    assert joined.a.call("down").returncode == 0
    assert joined.a.call("status", check=False).returncode == 1
    assert joined.a.call("down").stderr == "tsd was already stopped.\n"
    assert joined.a.call("up", "--timeout=20s").returncode == 0
    assert joined.a.state_name == "Running"
    assert joined.a.call("set", "--accept-routes=false").returncode == 0


def test_debug_and_streams(joined: Net) -> None:
    watched = joined.a.call("debug", "watch-ipn", "--initial", "--count=1")
    assert json.loads(watched.stdout)["State"] == 6 and watched.stderr == "Connected.\n"
    assert joined.a.call("debug", "netmap").stdout.startswith("{")
    assert joined.a.call("debug", "rebind").returncode == 0 and joined.a.call("debug", "restun").returncode == 0
    assert "tailscaled_" in joined.a.call("metrics").stdout and "# TYPE" in joined.a.call("debug", "metrics").stdout
    assert "Daemon: 1." in joined.a.call("version", "--daemon").stdout


def test_unprivileged_user_is_told_what_to_do(joined: Net) -> None:
    modules = "base64,json,shlex,tsctl.root,tsctl.account,tsctl.risk"
    code = f"import os,sys,{modules}; os.setuid(65534); sys.argv=['tsctl',*sys.argv[1:]]; tsctl.main()"
    line = [sys.executable, "-c", code, f"--socket={joined.a.socket}", "down"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=20, env=joined.a._env())
    assert done.returncode == 1 and done.stderr.startswith("Access denied: ")
    assert f"sudo tsctl --socket={joined.a.socket} set --operator=$USER" in done.stderr


def test_force_reauth_and_logout_come_last(joined: Net) -> None:
    old_key = joined.a.status()["Self"]["PublicKey"]
    approve_in_background(joined, lambda: joined.a.status().get("AuthURL") or "")
    done = joined.a.up(joined.headscale.url, "", "--force-reauth", "--timeout=30s")
    assert "To authenticate, visit:" in done.stderr and done.stderr.endswith("Success.\n")
    assert joined.a.status()["Self"]["PublicKey"] != old_key
    assert joined.a.call("logout").stdout == ""
    wait_for(lambda: joined.a.state_name == "NeedsLogin", 10, "the logout")
    logged_out = joined.a.call("status", check=False)
    assert logged_out.returncode == 1 and logged_out.stdout.startswith("Logged out.")
