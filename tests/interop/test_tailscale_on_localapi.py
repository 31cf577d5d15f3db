"""The real command-line client on our LocalAPI server, with a fake backend behind it: every command the field uses."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from harness.fakebackend import FakeBackend
from harness.fakedaemon import RecordingServer, serving
from harness.headscale import peer_binary

pytestmark = [pytest.mark.peers]
Run = Callable[..., subprocess.CompletedProcess[str]]


class Rig(NamedTuple):
    backend: FakeBackend
    server: RecordingServer
    run: Run


@pytest.fixture
def rig() -> Iterator[Rig]:
    binary = peer_binary("tailscale")
    backend = FakeBackend()
    with tempfile.TemporaryDirectory(prefix="tsd") as folder, serving(f"{folder}/s", backend) as server:

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            server.recorded.clear()
            line = [binary, f"--socket={folder}/s", *words]
            return subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)

        yield Rig(backend, server, run)


@pytest.mark.parametrize(
    ("words", "code", "start"),
    [
        (["status"], 0, "100.64.0.1  a "),
        (["status", "--peers=false"], 0, "100.64.0.1  a "),
        (["ip"], 0, "100.64.0.1\n"),
        (["ip", "-4", "b"], 0, "100.64.0.2\n"),
        (["ping", "-c", "1", "b"], 0, "pong from b (100.64.0.2) via 192.0.2.2:41641 in 12ms"),
        (["ping", "--tsmp", "b"], 0, "pong from b (100.64.0.2, 4321) via TSMP in 12ms"),
        (["ping", "--icmp", "b"], 0, "pong from b (100.64.0.2) via ICMP in 12ms"),
        (["ping", "--peerapi", "b"], 0, "hit peerapi of 100.64.0.2"),
        (["ping", "100.64.0.1"], 0, "100.64.0.1 is local Tailscale IP"),
        (["whois", "100.64.0.2"], 0, "Machine:\n  Name:          b.tn.example"),
        (["whoami"], 0, "Machine:\n  Name:          a.tn.example"),
        (["debug", "prefs"], 0, "{"),
        (["debug", "derp-map"], 0, "{"),
        (["debug", "statedir"], 0, "/var/lib/tsd"),
        (["debug", "rebind"], 0, ""),
        (["debug", "metrics"], 0, "# TYPE"),
        (["version", "--daemon"], 0, "Client: "),
        (["set", "--hostname=x"], 0, ""),
        (["get", "hostname"], 0, ""),
        (["metrics"], 0, "# TYPE"),
        (["switch", "--list"], 0, "ID    Tailnet"),
        (["dns", "status"], 0, "\n=== 'Use Tailscale DNS'"),
        (["dns", "query", "b.tn.example"], 0, "DNS query for"),
        (["lock", "status"], 0, "Tailnet Lock is NOT enabled."),
        (["serve", "status"], 0, "No serve config"),
        (["wait", "--timeout=5s"], 0, ""),
        (["bugreport"], 0, "BUG-"),
        (["exit-node", "list"], 0, "\n IP"),
        (["exit-node", "suggest"], 0, "No exit node suggestion"),
        (["service", "list"], 0, "No Tailscale Services"),
        (["file", "cp", "--targets"], 0, ""),
        (["file", "get", "/tmp"], 0, ""),
        (["appc-routes"], 0, ""),
        (["nc", "b", "1"], 1, ""),
        (["down"], 0, ""),
        (["logout"], 0, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_command(rig: Rig, words: list[str], code: int, start: str) -> None:
    done = rig.run(*words)
    assert done.returncode == code and done.stdout.startswith(start), done
    assert "Warning" not in done.stderr


def test_login_down_up_logout(rig: Rig) -> None:
    server = "--login-server=http://control.example"
    assert rig.run("logout").returncode == 0
    assert rig.run("status").stdout.startswith("Logged out.")
    assert rig.run("up", server, "--auth-key=good").returncode == 0
    assert rig.server.recorded == [
        "GET status",
        "GET prefs",
        "GET watch-ipn-bus?mask=0",
        "POST check-prefs",
        "POST start",
        "POST login-interactive",
        "GET status?peers=false",
    ]
    assert rig.run("down").returncode == 0 and rig.run("status").returncode == 1
    assert rig.run("up").returncode == 0 and rig.backend.state == "Running"
    bad = rig.run("up", server, "--auth-key=bad")
    assert bad.returncode == 1 and "backend error: invalid key" in bad.stderr


def test_status_json_survives_the_typed_decoder(rig: Rig) -> None:
    found = json.loads(rig.run("status", "--json").stdout)
    assert found["BackendState"] == "Running" and len(found["Peer"]) == 2
    assert found["Self"]["TailscaleIPs"][0] == "100.64.0.1"


def test_full_patch_bodies_change_only_what_is_masked(rig: Rig) -> None:
    rig.backend.current |= {"CorpDNS": False, "ShieldsUp": True}
    assert rig.run("set", "--hostname=y").returncode == 0
    assert (rig.backend.current["CorpDNS"], rig.backend.current["ShieldsUp"]) == (False, True)
    assert rig.backend.current["Hostname"] == "y"
