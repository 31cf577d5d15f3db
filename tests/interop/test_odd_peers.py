"""Peers of which control says almost nothing, or nonsense: no command breaks, in our CLI or the field's.

A real daemon process talks to a control double on loopback that sends hand-made maps. (A peer without Hostinfo crashes
the field's own status call.) With TSD_PEER_BIN the real command line is run on our socket too.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.control_double import ControlDouble, node_json
from harness.headscale import peer_binary
from harness.loopback import Daemon, wait_until

pytestmark = pytest.mark.timeout(180)

Json = dict[str, Any]
ZERO_TIME = "0001-01-01T00:00:00Z"


def peer(number: int, **changes: Any) -> Json:
    """A peer with every usual field; a change to `...` removes one."""
    whole = node_json(number) | {
        "Machine": f"mkey:{number:064x}", "DiscoKey": f"discokey:{number:064x}",
        "AllowedIPs": [f"100.64.0.{number}/32"], "Endpoints": [f"127.0.0.1:{50000 + number}"], "HomeDERP": 900,
        "Hostinfo": {"OS": "linux", "Hostname": f"host{number}", "Services": [{"Proto": "peerapi4", "Port": 1}]},
        "Created": "2026-01-01T00:00:00Z", "Online": True, "Cap": 100, "KeyExpiry": ZERO_TIME,
    }  # fmt: skip
    return {name: value for name, value in (whole | changes).items() if value is not ...}


ODD: dict[str, Json] = {
    "whole": peer(10),
    "without Hostinfo": peer(11, Hostinfo=...),
    "Hostinfo null": peer(12, Hostinfo=None),
    "Hostinfo empty": peer(13, Hostinfo={}),
    "Hostinfo of nulls": peer(14, Hostinfo={"Services": None, "NetInfo": None, "RoutableIPs": None, "Location": None}),
    "Hostinfo is a text": peer(15, Hostinfo="none"),
    "without a home relay": peer(16, HomeDERP=...),
    "without endpoints": peer(17, Endpoints=...),
    "without a disco key": peer(18, DiscoKey=...),
    "zero disco key": peer(19, DiscoKey="discokey:" + "0" * 64),
    "without a name": peer(20, Name=...),
    "empty name": peer(21, Name=""),
    "name without domain": peer(22, Name="lonely"),
    "odd name": peer(23, Name="Ein Name!.Ünïcode.TN.example."),
    "without a user": peer(24, User=...),
    "unknown user": peer(25, User=424242),
    "without addresses": peer(26, Addresses=..., AllowedIPs=...),
    "addresses null": peer(27, Addresses=None, AllowedIPs=None),
    "addresses are nonsense": peer(28, Addresses=["", "1.2.3", "fe80::1%eth0/128"], AllowedIPs=["x"]),
    "without allowed IPs": peer(29, AllowedIPs=...),
    "nothing allowed": peer(30, AllowedIPs=[]),
    "IPv6 only": peer(31, Addresses=["fd7a:115c:a1e0::31/128"], AllowedIPs=["fd7a:115c:a1e0::31/128"]),
    "without times": peer(32, Created=..., KeyExpiry=..., Online=..., LastSeen=...),
    "times null": peer(33, Created=None, KeyExpiry=None, Online=None, LastSeen=None),
    "odd times": peer(34, Created="yesterday", KeyExpiry="never", LastSeen="2026-13-77T99:00:00Z"),
    "expired": peer(35, KeyExpiry="2020-01-01T00:00:00Z", Online=False, LastSeen="2020-01-01T00:00:00Z"),
    "endpoints are nonsense": peer(36, Endpoints=["", "x", "1.2.3.4:99999", "[fe80::1%lo]:1", "127.0.0.1:50036"]),
    "relay that is not there": peer(37, HomeDERP=4711),
    "old form of the relay": peer(38, HomeDERP=..., DERP="127.3.3.40:900"),
    "empty capabilities": peer(39, Capabilities=None, CapMap={"x": None, "y": [], "z": [{"a": 1}, "b", None]}),
    "only tags": peer(40, User=0, Tags=["tag:a", "tag:b"]),
    "WireGuard only": peer(41, DiscoKey=..., HomeDERP=..., IsWireGuardOnly=True),
    "exit node": peer(42, AllowedIPs=["100.64.0.42/32", "0.0.0.0/0", "::/0"], PrimaryRoutes=["10.0.0.0/8"]),
    "only ID and key": {"ID": 43, "Key": f"nodekey:{43:064x}"},
    "ID, key and address": {"ID": 44, "Key": f"nodekey:{44:064x}", "Addresses": ["100.64.0.44/32"]},
    "same name as another": peer(45, Name="n10.tn.example."),
    "fields of the future": peer(46, Tomorrow={"a": [1]}, Hostinfo={"OS": "linux", "Tomorrow": 1}),
}
UNUSABLE: list[Any] = [{}, {"ID": 90}, {"ID": 91, "Key": "nodekey:zz"}, None, 7, "node", []]
RELAYS = {"Regions": {"900": {"RegionID": 900, "RegionCode": "lab", "Nodes": [
    {"Name": "900a", "RegionID": 900, "HostName": "127.0.0.1", "IPv4": "127.0.0.1", "DERPPort": 9, "STUNPort": -1}
]}}}  # fmt: skip
"""Nobody is there."""
FILTER = [{"SrcIPs": ["*"], "DstPorts": [{"IP": "*", "Ports": {"First": 0, "Last": 65535}}]}]


class Control:
    """The double on a thread of its own; `messages` are sent to each map request, then what `send` gives it."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.selfnode: Json = {}
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._queue: asyncio.Queue[Json] = asyncio.Queue()
        async with ControlDouble() as double:
            double.on_map = self._on_map
            self.double = double
            self.url = double.url
            self._ready.set()
            await self._stop.wait()

    async def _on_map(self, request: Json) -> AsyncIterator[bytes | Json]:
        first = {"Node": node_json(1, request["NodeKey"], Addresses=["100.64.0.1/32"]) | self.selfnode}
        yield first | self.messages[0]
        for message in self.messages[1:]:
            yield message
        while True:
            yield await self._queue.get()

    def send(self, message: Json) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, message)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


@pytest.fixture(scope="module")
def control() -> Iterator[Control]:
    made = Control()
    made.messages = [
        {"Peers": [*ODD.values(), *UNUSABLE], "DERPMap": RELAYS, "PacketFilter": FILTER, "Domain": "tn.example"},
        {"PeersChangedPatch": [{"NodeID": 999, "Online": True}, {"NodeID": 12, "Endpoints": ["nonsense"]}, {}]},
        {"PeerSeenChange": {"999": True, "12": False}, "OnlineChange": {"999": True, "33": True}},
    ]
    yield made
    made.close()


@pytest.fixture(scope="module")
def daemon(control: Control, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("odd") / "d").start()
    done = made.cli("up", f"--login-server={control.url}", "--auth-key=any", "--timeout=30s")
    assert done.returncode == 0, (done, made.text())
    wait_until(lambda: len(made.status()["Peer"] or {}) == len(ODD), 20, "all peers")
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def clean_log(daemon: Daemon) -> Iterator[None]:
    """Whatever is asked, nothing may fail inside."""
    yield
    text = daemon.text()
    assert "Traceback" not in text and "internal error" not in text, text[-3000:]


def test_status_json_has_every_peer(daemon: Daemon) -> None:
    found = daemon.status()["Peer"]
    assert {entry["PublicKey"] for entry in found.values()} == {node["Key"] for node in ODD.values()}
    for key, entry in found.items():
        assert entry["PublicKey"] == key
        for name, kind in (("HostName", str), ("DNSName", str), ("OS", str), ("TailscaleIPs", list), ("Online", bool)):
            assert isinstance(entry[name], kind), (name, entry)
    bare = found[ODD["only ID and key"]["Key"]]
    assert (bare["HostName"], bare["DNSName"], bare["TailscaleIPs"], bare["OS"]) == ("", "", [], "")


@pytest.mark.parametrize("words", [(), ("--active",), ("--peers=false",), ("--self=false",)], ids=" ".join)
def test_status_for_people(daemon: Daemon, words: tuple[str, ...]) -> None:
    shown = daemon.cli("status", *words)
    assert shown.returncode == 0, shown
    if not words:
        for number in (10, 11, 14, 25, 35, 44):
            assert f"100.64.0.{number} " in shown.stdout


ADDRESSES = sorted(
    address.partition("/")[0]
    for node in ODD.values()
    for address in node.get("Addresses") or ()
    if address.count(".") == 3 or "fd7a" in address
)


def test_whois_of_every_peer(daemon: Daemon) -> None:
    for address in ADDRESSES:
        plain = daemon.cli("whois", address)
        assert plain.returncode == 0 and "Machine:" in plain.stdout, (address, plain)
    found = json.loads(daemon.ok("whois", "--json", "100.64.0.11"))
    assert found["Node"]["ID"] == 11 and found["UserProfile"] is not None
    for nonsense in ("100.64.0.200", "1.2.3.4", "x", "", "[::]:0", "100.64.0.11:99999"):
        said = daemon.cli("whois", nonsense)
        assert said.returncode in (1, 2) and said.stderr.strip(), (nonsense, said)


def test_ping_of_odd_peers_ends_with_words(daemon: Daemon) -> None:
    targets = [
        "100.64.0.11",
        "100.64.0.16",
        "100.64.0.18",
        "100.64.0.37",
        "100.64.0.41",
        "100.64.0.44",
        "n13",
        "lonely",
    ]
    for target in targets:
        said = daemon.cli("ping", "--c=1", "--timeout=300ms", target)
        assert said.returncode == 1 and (said.stdout + said.stderr).strip(), (target, said)
    for kind in ("--tsmp", "--icmp", "--peerapi"):
        for target in ("100.64.0.11", "100.64.0.30", "100.64.0.44"):
            said = daemon.cli("ping", kind, "--c=1", "--timeout=300ms", target)
            assert said.returncode == 1 and (said.stdout + said.stderr).strip(), (kind, target, said)


@pytest.mark.parametrize(
    "words",
    ["ip", "ip 100.64.0.11", "exit-node list", "dns status", "dns query n11", "metrics", "netcheck", "debug netmap"],
)
def test_other_commands(daemon: Daemon, words: str) -> None:
    done = daemon.cli(*words.split())
    assert "Traceback" not in done.stderr and "Internal Server Error" not in done.stderr, done


REAL_CLI = (
    "status", "status --json", "status --active", "ip", "ip n11", "exit-node list", "dns status", "metrics",
    "switch --list", "debug netmap",
)  # fmt: skip


@pytest.mark.peers
@pytest.mark.parametrize("words", REAL_CLI)
def test_the_real_cli(daemon: Daemon, words: str) -> None:
    line = [peer_binary("tailscale"), f"--socket={daemon.socket}", *words.split()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert "panic" not in done.stderr and "Internal Server Error" not in done.stderr, done
    assert done.returncode == 0, done
    if words == "status --json":
        assert len(json.loads(done.stdout)["Peer"]) == len(ODD)


@pytest.mark.peers
def test_the_real_cli_asks_who_they_are(daemon: Daemon) -> None:
    for address in ADDRESSES:
        line = [peer_binary("tailscale"), f"--socket={daemon.socket}", "whois", "--json", address]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and json.loads(done.stdout)["Node"]["ID"], (address, done)


@pytest.mark.peers
def test_the_real_cli_pings_them(daemon: Daemon) -> None:
    for target in ("100.64.0.11", "100.64.0.18", "100.64.0.44"):
        line = [peer_binary("tailscale"), f"--socket={daemon.socket}", "ping", "--c=1", "--timeout=300ms", target]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and "panic" not in done.stderr and done.stdout + done.stderr, done


def test_deltas_make_them_odd_and_whole_again(daemon: Daemon, control: Control) -> None:
    """A known peer loses its fields, comes back whole, and goes."""
    bare = {"ID": 10, "Key": ODD["whole"]["Key"]}
    control.send({"PeersChanged": [bare, *UNUSABLE], "PeersRemoved": [999, 0, -1]})
    wait_until(lambda: entry(daemon, bare["Key"])["DNSName"] == "", 20, "the bare peer")
    control.send({"PeersChanged": [ODD["whole"]]})
    wait_until(lambda: entry(daemon, bare["Key"])["DNSName"] == "n10.tn.example.", 20, "the whole peer")
    control.send({"PeersRemoved": [10, 43]})
    wait_until(lambda: len(daemon.status()["Peer"]) == len(ODD) - 2, 20, "fewer peers")
    control.send({"PeersChanged": [ODD["whole"], ODD["only ID and key"]]})
    wait_until(lambda: len(daemon.status()["Peer"]) == len(ODD), 20, "all peers")


def entry(daemon: Daemon, key: str) -> Json:
    found: Json = daemon.status()["Peer"][key]
    return found


@pytest.mark.parametrize(
    "selfnode",
    [
        {"Name": "", "Hostinfo": None, "User": 0, "StableID": ""},
        {"Name": "me", "Hostinfo": "x", "CapMap": None, "Created": "x", "KeyExpiry": "x"},
        {"Addresses": None, "Name": "me.tn.example."},
    ],
    ids=["without names", "nonsense", "without addresses"],
)
def test_odd_self_node(tmp_path: Path, selfnode: Json) -> None:
    control = Control()
    control.selfnode = selfnode
    control.messages = [{"Peers": [ODD["only ID and key"], ODD["Hostinfo null"]], "DERPMap": RELAYS}]
    odd = Daemon(tmp_path / "d").start()
    try:
        done = odd.cli("up", f"--login-server={control.url}", "--auth-key=any", "--timeout=20s")
        assert done.returncode in (0, 1), done
        wait_until(lambda: odd.status()["Peer"], 20, "the peers")
        assert odd.cli("status").stdout
        for words in ("ip", "whois 100.64.0.12", "exit-node list", "dns status"):
            said = odd.cli(*words.split())
            assert "Internal Server Error" not in said.stderr and "Traceback" not in said.stderr, said
        assert "Traceback" not in odd.text(), odd.text()
    finally:
        odd.stop()
        control.close()
