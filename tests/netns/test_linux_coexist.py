"""Beside others on one host: firewalls like those of docker, ufw and firewalld, a second tsd, a real tailscaled.

Rulesets are cut down to the hooks, policies and order that these programs leave behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from harness.coordproc import CoordProcess
from harness.hoststate import snapshot
from harness.netlab import wait_for
from harness.nodes import TsdNode, TunTailscaledNode, TunTsdNode
from harness.routerlab import INTERNET, LAN_HOST, ROUTER, RouterLab
from harness.sockets import who_am_i

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

DOCKER = """*filter
:INPUT ACCEPT
:FORWARD DROP
:DOCKER-USER - [0:0]
:DOCKER-ISOLATION - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-ISOLATION
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-ISOLATION -j RETURN
-A DOCKER-USER -j RETURN
COMMIT
"""
UFW = """*filter
:INPUT DROP
:FORWARD DROP
:ufw-before-input - [0:0]
-A INPUT -j ufw-before-input
-A ufw-before-input -i lo -j ACCEPT
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -p %s -j ACCEPT
COMMIT
"""
FIREWALLD = """
table inet firewalld {
  chain filter_INPUT { type filter hook input priority filter + 10; policy accept;
    ct state { established, related } accept; iifname "lo" accept; jump filter_INPUT_ZONES
    reject with icmpx type admin-prohibited; }
  chain filter_FORWARD { type filter hook forward priority filter + 10; policy accept;
    ct state { established, related } accept; jump filter_FORWARD_ZONES
    reject with icmpx type admin-prohibited; }
  chain filter_INPUT_ZONES { iifname "eth0" accept; meta l4proto ipv6-icmp accept; %s }
  chain filter_FORWARD_ZONES { iifname "lan0" accept; %s }
}
"""
TRUSTED = 'iifname "tsd0" accept;'


def _health(node: TunTsdNode) -> str:
    return " ".join(node.status()["Health"] or [])


def _load(net: RouterLab, program: str, text: str) -> None:
    net.lab.run(net.r.namespace, "sh", "-ec", f"{program} <<'EOF'\n{text}\nEOF")


@contextlib.contextmanager
def _iptables_of(net: RouterLab, rules: str) -> Iterator[None]:
    for family, neighbours in (("iptables", "igmp"), ("ip6tables", "ipv6-icmp")):
        _load(net, f"{family}-nft-restore --noflush", rules.replace("%s", neighbours))
    try:
        yield
    finally:
        for family in ("iptables", "ip6tables"):
            for words in ("-P INPUT ACCEPT", "-P FORWARD ACCEPT", "-F", "-X"):
                net.lab.run(net.r.namespace, f"{family}-nft", *words.split(), check=False)
        net.r.call("set", "--netfilter-backend=nft")
        for family in ("ip", "ip6"):
            net.lab.run(net.r.namespace, "nft", "delete", "table", family, "filter", check=False)
        net.r.call("set", "--netfilter-backend=auto")


def _works(net: RouterLab) -> None:
    for version in (4, 6):
        assert net.who(LAN_HOST[version], ROUTER[version]) == ROUTER[version], net.r.tail()
        wait_for(lambda: net.ping(net.c.namespace, net.own(net.r, version)), 20, "the router itself")  # noqa: B023


def _is_dead(net: RouterLab) -> bool:
    return who_am_i(net.c.namespace, LAN_HOST[4], timeout_s=0.5) == ""


@pytest.mark.parametrize(("rules", "hook"), [(DOCKER, "FORWARD"), (UFW, "INPUT")], ids=["docker", "ufw"])
def test_f08_rules_like_those_of_docker_and_ufw(net: RouterLab, rules: str, hook: str) -> None:
    """A table of our own cannot overrule them, which is told; the choice that is left to us goes in before them."""
    net.r.call("set", "--netfilter-backend=nft")
    with _iptables_of(net, rules):
        wait_for(lambda: _is_dead(net), 10, "the drop")
        wait_for(lambda: f"ip filter {hook} (policy drop)" in _health(net.r), 20, "its name")
        assert "--netfilter-backend=iptables" in _health(net.r)
        net.r.call("set", "--netfilter-backend=auto")
        _works(net)
        wait_for(lambda: "policy drop" not in _health(net.r), 30, "no complaint")
        saved = net.lab.run(net.r.namespace, "iptables-nft-save", "-t", "filter")
        first = next(line for line in saved.splitlines() if line.startswith(f"-A {hook} "))
        assert first.endswith(f"tsd-{hook.lower()}")
    _works(net)


def test_rules_like_those_of_firewalld_are_named_and_reloads_survived(net: RouterLab) -> None:
    _load(net, "nft -f -", FIREWALLD % ("", ""))
    try:
        wait_for(lambda: "inet firewalld filter_FORWARD (a reject of everything)" in _health(net.r), 20, "its name")
        assert "firewall-cmd --permanent --zone=trusted --add-interface=tsd0" in _health(net.r)
        for _ in range(2):  # as a reload does it
            _load(net, "nft -f -", "delete table inet firewalld\n" + FIREWALLD % (TRUSTED, TRUSTED))
            _works(net)
        wait_for(lambda: "firewalld" not in _health(net.r), 30, "no complaint")
    finally:
        net.lab.run(net.r.namespace, "nft", "delete", "table", "inet", "firewalld")


@pytest.fixture(scope="module")
def other(net: RouterLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordProcess]:
    """A second tailnet, with other addresses."""
    prefixes = ("--prefix-v4=100.127.0.0/24", "--prefix-v6=fd00:127::/64")
    ports = {"control_port": 8081, "derp_port": 3341, "stun_port": 3479}
    state = tmp_path_factory.mktemp("other") / "coord"
    with CoordProcess(state, netns=net.h, address=net.lab.address(net.h), extra=prefixes, **ports) as coord:
        yield coord


@pytest.fixture(scope="module")
def peer(net: RouterLab, other: CoordProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TsdNode]:
    """A node of the second tailnet."""
    node = TsdNode(net.lab, net.i, tmp_path_factory.mktemp("peer") / "p", "p")
    node.start()
    node.up(other.url, other.auth_key())
    yield node
    node.stop()


def test_two_daemons_on_two_tailnets(
    net: RouterLab, other: CoordProcess, peer: TsdNode, tmp_path_factory: pytest.TempPathFactory
) -> None:
    second = TunTsdNode(net.lab, net.c.namespace, tmp_path_factory.mktemp("two") / "c2", "c2")
    second.device = "tsd1"
    before = snapshot(net.lab, net.c.namespace)
    second.start()
    second.up(other.url, other.auth_key())
    wait_for(lambda: net.ping(net.c.namespace, peer.ip4), 20, "the second tailnet")
    assert net.ping(net.c.namespace, peer.ip6)
    _works(net)
    net.c.call("set", "--exit-node=r")
    router = net.underlay(net.r.namespace, 4)
    assert net.who(INTERNET[4], router) == router
    assert net.ping(net.c.namespace, peer.ip4) and net.ping(net.c.namespace, peer.ip6), "beside the exit node"
    net.c.call("set", "--exit-node=")
    second.stop()
    wait_for(lambda: snapshot(net.lab, net.c.namespace) == before, 10, "what was there before the second")


@pytest.mark.peers
def test_beside_a_real_tailscaled(
    net: RouterLab, other: CoordProcess, peer: TsdNode, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It drops every source in 100.64.0.0/10 that does not come through its own tunnel, also ours."""
    theirs = TunTailscaledNode(net.lab, net.r.namespace, tmp_path_factory.mktemp("t") / "t", "t")
    theirs.start()
    try:
        theirs.up(other.url, other.auth_key(), "--netfilter-mode=on")
        wait_for(lambda: net.ping(net.r.namespace, peer.ip4), 30, "the other tailnet by tailscaled")
        assert net.ping(net.r.namespace, peer.ip6)
        net.r.call("set", "--netfilter-backend=nft")
        wait_for(lambda: "ip filter ts-input" in _health(net.r), 20, "the rule that drops our traffic")
        net.r.call("set", "--netfilter-backend=auto")
        _works(net)
        rules = net.lab.run(net.r.namespace, "ip", "rule")
        assert "5270:" in rules and "5370:" in rules
        net.r.call("down")
        assert net.ping(net.r.namespace, peer.ip4), "tailscaled without tsd"
        net.r.call("up")
        _works(net)
        assert net.ping(net.r.namespace, peer.ip4), "both again"
    finally:
        theirs.stop()
    _works(net)
