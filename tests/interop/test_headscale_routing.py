"""tsd and a real tailscaled as subnet router and exit node for each other, in headscale's tailnet.

`s` is tsd, `k` tailscaled; each has a LAN host of its own, and `i` is the Internet of both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.headscale import ALLOW_ALL, Headscale, peer_binary
from harness.hoststate import answered, is_settled
from harness.netlab import NetLab, sh, wait_for
from harness.nodes import Node, TunTailscaledNode, TunTsdNode
from harness.sockets import WhoServer, soon, who_am_i

pytestmark = [pytest.mark.peers, pytest.mark.root, pytest.mark.interop, pytest.mark.timeout(240)]

INTERNET = {4: "203.0.113.9", 6: "2001:db8:9::9"}
LANS = {"s": {4: "192.0.2", 6: "2001:db8:5:"}, "k": {4: "198.51.100", 6: "2001:db8:6:"}}
TAILNET = {4: "100.64.0.0/10", 6: "fd7a:115c:a1e0::/48"}
VERSIONS = (4, 6)


def _lan(name: str, version: int, number: int) -> str:
    return f"{LANS[name][version]}{'.' if version == 4 else ':'}{number}"


def _prefixes(name: str) -> list[str]:
    return [f"{LANS[name][4]}.0/24", f"{LANS[name][6]}:/64"]


class Tailnet:
    def __init__(self, lab: NetLab, folder: Path) -> None:
        self.lab = lab
        hub, self.internet = lab.add_host("h"), lab.add_host("i")
        self.headscale = self._headscale(lab, hub, folder)
        key = self.headscale.create_key(self.headscale.create_user("lab"), reusable=True)
        s, k = lab.add_host("s"), lab.add_host("k")
        self.nodes: dict[str, Node] = {
            "s": TunTsdNode(lab, s, folder / "s", "s"),
            "k": TunTailscaledNode(lab, k, folder / "k", "k"),
        }
        self.hosts = {name: lab.add_host(f"{name}l") for name in self.nodes}
        self._wire()
        self.servers = [WhoServer(name) for name in (self.internet, *self.hosts.values())]
        for node in self.nodes.values():
            node.launch()
        for name, node in self.nodes.items():
            node.wait_until_up()
            routes = ",".join(_prefixes(name))
            node.up(self.headscale.url, key, "--accept-routes", f"--advertise-routes={routes}", "--advertise-exit-node")

    def _headscale(self, lab: NetLab, hub: str, folder: Path) -> Headscale:
        address = lab.address(hub)
        relay = [peer_binary("derper"), f"-a={address}:4443", "-http-port=-1", "-certmode=manual"]
        relay += [f"-hostname={address}", f"-certdir={folder / 'certs'}", f"-c={folder / 'derper.key'}"]
        lab.start(hub, [*relay, "-stun-port=3478"], folder / "derper.log")
        headscale = Headscale(lab, hub, folder / "headscale").start()
        approvers = {prefix: ["lab@"] for name in LANS for prefix in _prefixes(name)}
        headscale.set_policy({**ALLOW_ALL, "autoApprovers": {"routes": approvers, "exitNode": ["lab@"]}})
        return headscale

    def _wire(self) -> None:
        for version, address in INTERNET.items():
            sh("ip", "-n", self.internet, f"-{version}", "addr", "add", address, "dev", "lo")
        for name, host in self.hosts.items():
            router = self.nodes[name].namespace
            sh("ip", "-n", host, "link", "set", "eth0", "down")
            sh("ip", "-n", router, "link", "add", "lan0", "type", "veth", "peer", "name", "lan0", "netns", host)
            for where, number in ((router, 1), (host, 2)):
                sh("ip", "-n", where, "addr", "add", f"{_lan(name, 4, number)}/24", "dev", "lan0")
                sh("ip", "-n", where, "addr", "add", f"{_lan(name, 6, number)}/64", "dev", "lan0", "nodad")
                sh("ip", "-n", where, "link", "set", "lan0", "up")
            for version in VERSIONS:
                sh("ip", "-n", host, f"-{version}", "route", "add", TAILNET[version], "via", _lan(name, version, 1))
                gateway = self.underlay(self.internet, version)
                sh("ip", "-n", router, f"-{version}", "route", "add", "default", "via", gateway)
            for key in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
                self.lab.run(router, "sysctl", "-qw", f"{key}=1")
            wait_for(lambda router=router: is_settled(self.lab, router), 10, "addresses")  # type: ignore[misc]

    def underlay(self, namespace: str, version: int) -> str:
        return self.lab.address(namespace) if version == 4 else f"fd99::{self.lab.number(namespace)}"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tailnet]:
    for name in ("headscale", "derper", "tailscaled", "tailscale"):
        peer_binary(name)
    with NetLab(f"tsdRh{os.getpid()}", "10.97.21") as lab:
        tailnet = Tailnet(lab, tmp_path_factory.mktemp("routing"))
        yield tailnet
        for server in tailnet.servers:
            server.close()


def _seen(net: Tailnet, user: str, target: str, wanted: str) -> str:
    return soon(lambda: who_am_i(net.nodes[user].namespace, target), wanted, 40)


@pytest.mark.parametrize(("user", "router"), [("s", "k"), ("k", "s")])
def test_subnet_router_of_the_other(net: Tailnet, user: str, router: str) -> None:
    """Both families, both ways; the LAN host sees the router, or with --snat-subnet-routes=false the node."""
    node = net.nodes[router]
    own = {4: net.nodes[user].ip4, 6: net.nodes[user].ip6}
    for version in VERSIONS:
        target, masked = _lan(router, version, 2), _lan(router, version, 1)
        assert _seen(net, user, target, masked) == masked, net.nodes["s"].tail()
    node.call("set", "--snat-subnet-routes=false")
    for version in VERSIONS:
        assert _seen(net, user, _lan(router, version, 2), own[version]) == own[version]
        ping = net.lab.run(net.hosts[router], "ping", "-c", "3", "-i", "0.2", "-W", "2", own[version], check=False)
        assert answered(ping), "LAN host to tailnet node"
    node.call("set", "--snat-subnet-routes=true")


@pytest.mark.parametrize(("user", "router"), [("s", "k"), ("k", "s")])
def test_exit_node_of_the_other(net: Tailnet, user: str, router: str) -> None:
    client, server = net.nodes[user], net.nodes[router]
    for node in (client, server):
        node.call("set", "--exit-node=", "--advertise-exit-node=false")
    server.call("set", "--advertise-exit-node")
    wait_for(lambda: (client.peer(router) or {}).get("ExitNodeOption"), 40, "the offer of an exit node")
    client.call("set", f"--exit-node={server.ip4}")
    try:
        for version in VERSIONS:
            wanted = net.underlay(server.namespace, version)
            assert _seen(net, user, INTERNET[version], wanted) == wanted, net.nodes["s"].tail()
    finally:
        client.call("set", "--exit-node=")
    for version in VERSIONS:
        own = net.underlay(client.namespace, version)
        assert _seen(net, user, INTERNET[version], own) == own
