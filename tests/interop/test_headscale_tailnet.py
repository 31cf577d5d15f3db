"""tsd in a tailnet run by a real headscale, beside a TUN and a userspace tailscaled.

Every test runs twice: with tsd as the node under test, and with tailscaled in its place, which proves the tests.
Order matters: later tests take nodes away.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.headscale import ALLOW_ALL, Headscale, peer_binary
from harness.netlab import NetLab, wait_for
from harness.nodes import Node, TailscaledNode, TsdNode, TunTailscaledNode, real_cli

pytestmark = [pytest.mark.peers, pytest.mark.root, pytest.mark.interop, pytest.mark.timeout(240)]

WEB = 8000
BIG_BYTES = 100 << 20
SUBJECTS = {"tsd": TsdNode, "tailscaled": TailscaledNode}
PINGS = {"disco": (), "tsmp": ("--tsmp",), "icmp": ("--icmp",), "peerapi": ("--peerapi",)}


class Tailnet:
    """headscale, a relay, the subject `s`, a TUN tailscaled `k` and a userspace tailscaled `r`."""

    def __init__(self, lab: NetLab, folder: Path, subject: type[Node]) -> None:
        self.lab = lab
        self.folder = folder
        self.subject_kind = subject
        hub = lab.add_host("h")
        address = lab.address(hub)
        relay = [peer_binary("derper"), f"-a={address}:4443", "-http-port=-1", "-certmode=manual"]
        relay += [
            f"-hostname={address}",
            f"-certdir={folder / 'certs'}",
            f"-c={folder / 'derper.key'}",
            "-stun-port=3478",
        ]
        lab.start(hub, relay, folder / "derper.log")
        self.headscale = Headscale(lab, hub, folder / "headscale").start()
        self.user = self.headscale.create_user("lab")
        self.headscale.set_policy(ALLOW_ALL)
        self.key = self.headscale.create_key(self.user, reusable=True)
        self.web = folder / "web"
        self.web.mkdir()
        (self.web / "hello").write_text("hello")
        (self.web / "big").write_bytes(os.urandom(BIG_BYTES))
        self.s = self.add("s", subject)
        self.k = self.add("k", TunTailscaledNode)
        self.r = self.add("r", TailscaledNode)
        for node in (self.s, self.k, self.r):
            node.serve(WEB, self.web)
        for other in ("k", "r"):
            self.s.wait_for_peer(other)

    def add(self, name: str, kind: type[Node], *flags: str) -> Node:
        node = kind(self.lab, self.lab.add_host(name), self.folder / name, name)
        node.start()
        node.up(self.headscale.url, self.key, *flags)
        return node


@pytest.fixture(scope="module", params=list(SUBJECTS))
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tailnet]:
    for name in ("headscale", "derper", "tailscaled", "tailscale"):
        peer_binary(name)
    with NetLab(f"hs{os.getpid()}", "10.98.1") as lab:
        yield Tailnet(lab, tmp_path_factory.mktemp(request.param), SUBJECTS[request.param])


@pytest.mark.parametrize("kind", PINGS)
@pytest.mark.parametrize("peer", ["k", "r"])
def test_pings_both_ways(net: Tailnet, kind: str, peer: str) -> None:
    other: Node = getattr(net, peer)
    for near, far in ((net.s, other), (other, net.s)):
        for address in (far.ip4, far.ip6):
            said = near.ping(address, *PINGS[kind], "--c=8", "--timeout=3s")
            assert "hit peerapi" in said if kind == "peerapi" else "pong from" in said


@pytest.mark.parametrize("peer", ["k", "r"])
def test_http_both_ways_by_every_name(net: Tailnet, peer: str) -> None:
    other: Node = getattr(net, peer)
    for near, far in ((net.s, other), (other, net.s)):
        hosts = [far.ip4, f"[{far.ip6}]"]
        hosts += [far.name, f"{far.name}.tn.example"] if near.is_userspace else []
        for host in hosts:
            for via in ("socks", "http") if near.is_userspace else ("socks",):
                fetched = near.curl(f"http://{host}:{WEB}/hello", via=via)
                assert fetched.stdout == b"hello", (near.name, host, via, fetched.stderr, near.tail())


def test_closed_port_is_refused_at_once(net: Tailnet) -> None:
    for near, far in ((net.s, net.k), (net.k, net.s)):
        started = time.monotonic()
        assert near.curl(f"http://{far.ip4}:9/").returncode != 0
        assert time.monotonic() - started < 15


@pytest.mark.parametrize("peer", ["k", "r"])
def test_100_megabytes_each_way_intact(net: Tailnet, peer: str) -> None:
    other: Node = getattr(net, peer)
    big = (net.web / "big").read_bytes()
    fetched = net.s.curl(f"http://{other.ip4}:{WEB}/big")
    assert fetched.stdout == big, fetched.stderr
    name = f"from-s-{peer}"
    sent = net.s.curl(f"http://{other.ip4}:{WEB}/{name}", "-T", str(net.web / "big"))
    assert sent.returncode == 0 and (net.web / name).read_bytes() == big, sent.stderr
    (net.web / name).unlink()


def test_200_requests_at_once(net: Tailnet) -> None:
    target = f"http://{net.k.ip4}:{WEB}/hello"
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: net.s.curl(target).stdout, range(200)))
    assert answers == [b"hello"] * 200


def _udp(net: Tailnet, node: Node, is_blocked: bool) -> None:
    """Drop all UDP of a node, both ways."""
    if not is_blocked:
        net.lab.run(node.namespace, "nft", "delete", "table", "inet", "block")
        return
    net.lab.run(node.namespace, "nft", "add", "table", "inet", "block")
    for hook in ("input", "output"):
        chain = f"{{ type filter hook {hook} priority 0; }}"
        net.lab.run(node.namespace, "nft", "add", "chain", "inet", "block", hook, chain)
        net.lab.run(node.namespace, "nft", "add", "rule", "inet", "block", hook, "meta", "l4proto", "udp", "drop")


def test_udp_blocked_goes_by_relay_and_back_to_direct(net: Tailnet) -> None:
    net.s.ping(net.k.ip4, "--c=10", "--timeout=3s")
    net.s.wait_for_peer("k")
    _udp(net, net.s, True)
    try:

        def is_relayed() -> bool:
            fetched = net.s.curl(f"http://{net.k.ip4}:{WEB}/hello", timeout_s=15)
            peer = net.s.peer("k")
            return fetched.stdout == b"hello" and peer is not None and peer["CurAddr"] == ""

        wait_for(is_relayed, 40, "traffic by relay")
    finally:
        _udp(net, net.s, False)

    def is_direct() -> bool:
        net.s.ping(net.k.ip4, "--c=3", "--timeout=2s", check=False)
        peer = net.s.peer("k")
        return peer is not None and peer["CurAddr"] != ""

    wait_for(is_direct, 60, "a direct path again")


def test_acl_change_while_running(net: Tailnet) -> None:
    url = f"http://{net.s.ip4}:{WEB}/hello"
    assert net.k.curl(url).stdout == b"hello"
    only_pings = {"acls": [{"action": "accept", "src": ["*"], "dst": ["*:9"]}]}
    net.headscale.set_policy(only_pings)
    try:
        wait_for(lambda: net.k.curl(url, timeout_s=3).returncode != 0, 20, "the ACL to deny")
    finally:
        net.headscale.set_policy(ALLOW_ALL)
    wait_for(lambda: net.k.curl(url, timeout_s=3).stdout == b"hello", 20, "the ACL to allow")


def test_node_added_renamed_expired_deleted(net: Tailnet) -> None:
    extra = net.add("x", TailscaledNode)
    net.s.wait_for_peer("x")
    # tailscaled lists a peer a moment before it knows it.
    wait_for(lambda: "pong" in net.s.ping(extra.ip4, "--c=8", "--timeout=3s", check=False), 30, "a pong of x")
    node_id = str(net.headscale.node("x")["id"])
    net.headscale.cli("nodes", "rename", "-i", node_id, "renamed")
    net.s.wait_for_peer("renamed")
    net.headscale.cli("nodes", "expire", "-i", node_id)
    wait_for(lambda: (net.s.peer("renamed") or {}).get("Expired") is True, 20, "the peer to expire")
    assert "pong" not in net.s.ping(extra_address(net, "renamed"), "--c=1", "--timeout=2s", check=False)
    net.headscale.cli("nodes", "delete", "-i", node_id, "--force")
    wait_for(lambda: net.s.peer("renamed") is None, 20, "the peer to go")
    extra.stop()


def extra_address(net: Tailnet, name: str) -> str:
    peer = net.s.peer(name)
    assert peer is not None
    return str(peer["TailscaleIPs"][0])


def test_headscale_restart(net: Tailnet) -> None:
    net.headscale.restart()
    assert net.s.curl(f"http://{net.k.ip4}:{WEB}/hello").stdout == b"hello"
    late = net.add("late", TailscaledNode)
    net.s.wait_for_peer("late", 60)
    late.call("logout")
    late.stop()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_restart_keeps_the_identity(net: Tailnet, how: str) -> None:
    before = net.s.status()["Self"]
    (net.s.stop if how == "SIGTERM" else net.s.kill)()
    started = time.monotonic()
    net.s.start()
    wait_for(lambda: net.s.state_name == "Running", 20, "Running")
    took_s = time.monotonic() - started
    after = net.s.status()["Self"]
    assert (after["ID"], after["PublicKey"], after["TailscaleIPs"]) == (
        before["ID"],
        before["PublicKey"],
        before["TailscaleIPs"],
    )
    assert took_s < 15
    wait_for(lambda: net.k.curl(f"http://{net.s.ip4}:{WEB}/hello", timeout_s=4).stdout == b"hello", 30, "traffic")


def test_frozen_for_15_seconds(net: Tailnet) -> None:
    assert "pong" in net.k.ping(net.s.ip4, "--c=8", "--timeout=3s")
    net.s.freeze(15)
    wait_for(lambda: net.k.curl(f"http://{net.s.ip4}:{WEB}/hello", timeout_s=5).stdout == b"hello", 30, "traffic")
    wait_for(lambda: net.s.state_name == "Running", 10, "Running")


def test_down_and_up(net: Tailnet) -> None:
    net.s.call("down")
    assert net.s.state_name == "Stopped"
    assert net.s.call("status", check=False).returncode == 1
    assert net.k.curl(f"http://{net.s.ip4}:{WEB}/hello", timeout_s=3).returncode != 0
    net.s.call("up", f"--login-server={net.headscale.url}", "--hostname=s")
    wait_for(lambda: net.s.state_name == "Running", 20, "Running")
    wait_for(lambda: net.k.curl(f"http://{net.s.ip4}:{WEB}/hello", timeout_s=5).stdout == b"hello", 30, "traffic")


def test_wrong_key_is_refused_in_words(net: Tailnet) -> None:
    stranger = net.subject_kind(net.lab, net.lab.add_host("w"), net.folder / "w", "w")
    stranger.start()
    done = stranger.up(net.headscale.url, "hskey-auth-000000000000-nosuch", "--timeout=10s", check=False)
    assert done.returncode == 1 and done.stderr.strip(), (done.stdout, done.stderr)
    assert stranger.state_name == "NeedsLogin"
    stranger.up(net.headscale.url, net.key)
    assert stranger.state_name == "Running"
    stranger.call("logout")
    assert stranger.state_name == "NeedsLogin"
    wait_for(lambda: (net.s.peer("w") or {"Expired": True}).get("Expired") is True, 20, "the node to be gone")
    stranger.stop()


def test_ephemeral_node_disappears(net: Tailnet) -> None:
    gone = net.subject_kind(net.lab, net.lab.add_host("e"), net.folder / "e", "e")
    gone.state = "mem:"
    gone.start()
    gone.up(net.headscale.url, net.headscale.create_key(net.user, ephemeral=True))
    net.s.wait_for_peer("e")
    gone.stop()
    wait_for(lambda: net.s.peer("e") is None, 100, "the ephemeral node to go")


REAL_CLI = (
    "status", "status --json", "ip", "ping --c=8 k", "netcheck", "debug prefs", "debug derp-map", "version --daemon",
    "set --hostname=s", "get", "metrics", "switch --list", "dns status", "lock status", "serve status",
    "wait --timeout=5s",
)  # fmt: skip


@pytest.mark.parametrize("words", REAL_CLI)
def test_the_real_cli_drives_the_socket(net: Tailnet, words: str) -> None:
    done = real_cli(net.s, *words.split())
    assert done.returncode == 0, (done.stdout, done.stderr)
    if words == "status --json":
        assert json.loads(done.stdout)["BackendState"] == "Running"
    if words == "ip":
        assert done.stdout.split() == net.s.ips()


def test_the_real_cli_asks_who_is(net: Tailnet) -> None:
    done = real_cli(net.s, "whois", net.k.ip4)
    assert done.returncode == 0 and "k.tn.example" in done.stdout, (done.stdout, done.stderr)


def test_logout(net: Tailnet) -> None:
    net.s.call("logout")
    assert net.s.state_name == "NeedsLogin"
    assert not [peer for peer in (net.s.status().get("Peer") or {}).values() if peer["InNetworkMap"]]
    wait_for(lambda: (net.k.peer("s") or {"Expired": True}).get("Expired") is True, 20, "the others to notice")
