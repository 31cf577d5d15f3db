"""tsd on a TUN in headscale's tailnet beside a tailscaled on a TUN, with derper as the relay.

`s` is tsd, `k` tailscaled. The last test stops and kills `s`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.headscale import ALLOW_ALL, Headscale, peer_binary
from harness.hoststate import answered, is_settled, snapshot
from harness.netlab import NetLab, wait_for
from harness.nodes import ROOT, Node, TunTailscaledNode, TunTsdNode

pytestmark = [pytest.mark.peers, pytest.mark.root, pytest.mark.interop, pytest.mark.timeout(240)]

WEB, ECHO = 8000, 7000
BIG_BYTES = 100 << 20


class Tailnet:
    def __init__(self, lab: NetLab, folder: Path) -> None:
        self.lab = lab
        hub = lab.add_host("h")
        address = lab.address(hub)
        relay = [peer_binary("derper"), f"-a={address}:4443", "-http-port=-1", "-certmode=manual"]
        relay += [f"-hostname={address}", f"-certdir={folder / 'certs'}", f"-c={folder / 'derper.key'}"]
        lab.start(hub, [*relay, "-stun-port=3478"], folder / "derper.log")
        headscale = Headscale(lab, hub, folder / "headscale").start()
        headscale.set_policy(ALLOW_ALL)
        key = headscale.create_key(headscale.create_user("lab"), reusable=True)
        self.web = folder / "web"
        self.web.mkdir()
        (self.web / "big").write_bytes(os.urandom(BIG_BYTES))
        namespaces = {name: lab.add_host(name) for name in ("s", "k")}
        wait_for(lambda: all(is_settled(lab, name) for name in namespaces.values()), 10, "addresses")
        self.before = snapshot(lab, namespaces["s"])
        self.s = TunTsdNode(lab, namespaces["s"], folder / "s", "s")
        self.k = TunTailscaledNode(lab, namespaces["k"], folder / "k", "k")
        for node in (self.s, self.k):
            node.start()
            node.up(headscale.url, key)
            node.serve(WEB, self.web)
            line = [sys.executable, "-m", "harness.udpecho", "serve", str(ECHO)]
            lab.start(node.namespace, line, node.folder / "echo.log", {"PYTHONPATH": str(ROOT / "tests")})
        self.s.wait_for_peer("k")
        self.k.wait_for_peer("s")

    def ways(self) -> list[tuple[Node, str]]:
        """(from, address) both ways on both families."""
        return [(a, host) for a, b in ((self.s, self.k), (self.k, self.s)) for host in (b.ip4, b.ip6)]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tailnet]:
    for name in ("headscale", "derper", "tailscaled", "tailscale"):
        peer_binary(name)
    with NetLab(f"tsdKh{os.getpid()}", "10.97.7") as lab:
        yield Tailnet(lab, tmp_path_factory.mktemp("tun"))


def _ping(net: Tailnet, node: Node, host: str, *flags: str) -> int:
    return answered(net.lab.run(node.namespace, "ping", "-W", "3", "-i", "0.2", *flags, host, check=False))


@pytest.mark.parametrize("size", [56, 8000])
def test_kernel_pings_both_ways_also_in_fragments(net: Tailnet, size: int) -> None:
    for node, host in net.ways():
        assert _ping(net, node, host, "-c", "6", "-s", str(size)) >= 5, (node.name, host)


@pytest.mark.parametrize("kind", ["", "--tsmp", "--icmp", "--peerapi"])
def test_pings_of_the_tailnet_both_ways(net: Tailnet, kind: str) -> None:
    for node, host in net.ways():
        said = node.ping(host, *([kind] if kind else []), "--c=8", "--timeout=3s")
        assert "hit peerapi" in said if kind == "--peerapi" else "pong from" in said


def test_udp_both_ways(net: Tailnet) -> None:
    line = ["env", f"PYTHONPATH={ROOT / 'tests'}", sys.executable, "-m", "harness.udpecho", "ask"]
    for node, host in net.ways():
        for size in (1, 1232, 8000):
            came = net.lab.run(node.namespace, *line, host, str(ECHO), str(size), "10", timeout_s=60)
            assert int(came) >= 9, (node.name, host, size)


def test_100_megabytes_each_way_intact(net: Tailnet) -> None:
    big = (net.web / "big").read_bytes()
    for node, host in net.ways():
        url = f"http://[{host}]:{WEB}" if ":" in host else f"http://{host}:{WEB}"
        began = time.monotonic()
        fetched = node.curl(f"{url}/big")
        print(f"{node.name} from {host}: {BIG_BYTES / (time.monotonic() - began) / 1e6:.0f} MB/s")
        assert fetched.stdout == big, fetched.stderr


def _block_udp(net: Tailnet, is_blocked: bool) -> None:
    if not is_blocked:
        net.lab.run(net.s.namespace, "nft", "delete", "table", "inet", "block")
        return
    net.lab.run(net.s.namespace, "nft", "add", "table", "inet", "block")
    for hook in ("input", "output"):
        chain = f"{{ type filter hook {hook} priority 0; }}"
        net.lab.run(net.s.namespace, "nft", "add", "chain", "inet", "block", hook, chain)
        rule = ["iifname" if hook == "input" else "oifname", "eth0", "meta", "l4proto", "udp", "drop"]
        net.lab.run(net.s.namespace, "nft", "add", "rule", "inet", "block", hook, *rule)


def test_relayed_while_udp_is_blocked_and_direct_again_after(net: Tailnet) -> None:
    _block_udp(net, True)
    try:

        def is_relayed() -> bool:
            came = _ping(net, net.s, net.k.ip4, "-c", "2") and _ping(net, net.k, net.s.ip6, "-c", "2")
            peer = net.s.peer("k")
            return bool(came) and peer is not None and peer["CurAddr"] == ""

        wait_for(is_relayed, 60, "traffic by relay")
    finally:
        _block_udp(net, False)

    def is_direct() -> bool:
        net.s.ping(net.k.ip4, "--c=3", "--timeout=2s", check=False)
        peer = net.s.peer("k")
        return peer is not None and peer["CurAddr"] != ""

    wait_for(is_direct, 60, "a direct path again")


def test_nothing_is_left_on_the_host(net: Tailnet) -> None:
    net.s.stop()
    assert snapshot(net.lab, net.s.namespace) == net.before
    net.s.start()
    wait_for(lambda: _ping(net, net.s, net.k.ip4, "-c", "1"), 20, "traffic")
    net.s.kill()
    net.s.cleanup()
    assert snapshot(net.lab, net.s.namespace) == net.before
