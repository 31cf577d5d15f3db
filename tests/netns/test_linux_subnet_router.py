"""A subnet router's finer points: filtering by state, large pages, forged sources, networks that overlap.

Modes, backends and sources seen are in test_linux_matrix.py.
"""

from __future__ import annotations

import sys

import pytest

from harness.hoststate import answered
from harness.netlab import wait_for
from harness.routerlab import EXIT, LAN4, LAN6, LAN_HOST, ROUTER, RouterLab

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

HOST4 = LAN_HOST[4]


def _firewall(net: RouterLab) -> str:
    return net.lab.run(net.r.namespace, "nft", "list", "ruleset")


def _health(net: RouterLab, node: str) -> str:
    return " ".join((net.r if node == "r" else net.c).status()["Health"] or [])


def test_stateful_filtering_lets_only_answers_into_the_tunnel(net: RouterLab) -> None:
    client = net.own(net.c, 4)
    net.r.call("set", "--stateful-filtering=true")
    wait_for(lambda: "ct state" in _firewall(net).split("chain tsd-forward")[1].split("}")[0], 10, "the rule")
    assert net.ping(net.c.namespace, HOST4)
    assert not net.ping(net.l, client)
    net.r.call("set", "--stateful-filtering=false")
    wait_for(lambda: net.ping(net.l, client), 10, "traffic from the LAN")


def test_f13_large_pages_pass_from_a_lan_with_a_larger_mtu(net: RouterLab) -> None:
    """Segments of the LAN host fit the tunnel, because the MSS of its SYN is clamped."""
    log = net.folder / "mss.log"
    served = (
        "import socket; s = socket.create_server(('192.0.2.2', 9001)); s.settimeout(20); c = s.accept()[0]; "
        "print(c.getsockopt(6, 2)); c.sendall(bytes(4 << 20)); c.close()"
    )
    net.lab.start(net.l, [sys.executable, "-c", served], log)
    wait_for(lambda: "9001" in net.lab.run(net.l, "ss", "-ltn"), 10, "the listener")
    ask = (
        "import socket; s = socket.create_connection(('192.0.2.2', 9001), 5); n = 0\n"
        "while d := s.recv(65536): n += len(d)\nprint(n)"
    )
    assert net.lab.run(net.c.namespace, sys.executable, "-c", ask).strip() == str(4 << 20)
    assert int(log.read_text()) <= 1240


def test_strangers_with_an_address_of_the_overlay_are_dropped(net: RouterLab) -> None:
    net.lab.run(net.l, "ip", "addr", "add", "100.64.9.9/32", "dev", "lan0")
    try:
        line = ["ping", "-c", "2", "-i", "0.2", "-W", "1", "-I", "100.64.9.9", ROUTER[4]]
        assert answered(net.lab.run(net.l, *line, check=False)) == 0
        rules = net.lab.run(net.r.namespace, "nft", "-j", "list", "chain", "inet", "tsd", "tsd-input")
        assert "drop" in rules
    finally:
        net.lab.run(net.l, "ip", "addr", "del", "100.64.9.9/32", "dev", "lan0")


def test_f06_a_host_that_lives_in_the_range_keeps_its_neighbours(net: RouterLab) -> None:
    """Both directions and for good: nothing of a provider's network in 100.64.0.0/10 is cut off."""
    run = net.lab.run
    run(net.r.namespace, "ip", "addr", "add", "100.100.5.2/20", "dev", "lan0")
    run(net.l, "ip", "addr", "add", "100.100.0.1/20", "dev", "lan0")
    try:
        wait_for(lambda: net.ping(net.l, "100.100.5.2"), 10, "the provider reaches the host")
        assert net.ping(net.r.namespace, "100.100.0.1")
        assert net.ping(net.r.namespace, net.own(net.c, 4)), "tailnet"
    finally:
        run(net.r.namespace, "ip", "addr", "del", "100.100.5.2/20", "dev", "lan0")
        run(net.l, "ip", "addr", "del", "100.100.0.1/20", "dev", "lan0")
    wait_for(lambda: "drop" in _firewall(net), 10, "the rule again")


def test_f07_a_router_keeps_its_own_lan_when_others_offer_it(net: RouterLab) -> None:
    net.c.call("set", f"--advertise-routes={LAN4}")
    net.coord.call("nodes.approve-routes", node="c", routes=[LAN4])
    net.r.call("set", "--accept-routes")
    try:
        assert "lan0" in net.lab.run(net.r.namespace, "ip", "route", "get", HOST4)
        assert net.ping(net.r.namespace, HOST4)
    finally:
        net.r.call("set", "--accept-routes=false")
        net.c.call("set", "--advertise-routes=")
        net.coord.call("nodes.approve-routes", node="c", routes=[])


def test_f07_a_lan_that_comes_later_wins_too_and_it_is_said(net: RouterLab) -> None:
    """The client moves into a network that its peer offers, and out of it again."""
    run, name = net.lab.run, net.c.namespace
    assert "tsd0" in run(name, "ip", "route", "get", HOST4)
    run(name, "ip", "addr", "add", "192.0.2.77/25", "dev", "eth0")
    try:
        wait_for(lambda: "dev eth0" in run(name, "ip", "route", "get", HOST4), 10, "the network of the host")
        assert "tsd0" in run(name, "ip", "route", "get", "192.0.2.200"), "outside of it"
        wait_for(lambda: "192.0.2.0/25" in _health(net, "c"), 20, "the notice")
    finally:
        run(name, "ip", "addr", "del", "192.0.2.77/25", "dev", "eth0")
    wait_for(lambda: "tsd0" in run(name, "ip", "route", "get", HOST4), 10, "the tunnel")
    wait_for(lambda: "192.0.2.0/25" not in _health(net, "c"), 20, "no notice")


def test_f07_the_network_of_an_interface_that_is_down_is_reached_through_the_tunnel(net: RouterLab) -> None:
    """It keeps its address, but leads nowhere: a laptop that left its desk."""
    run, name = net.lab.run, net.c.namespace

    def goes_by(device: str) -> bool:
        return f"dev {device}" in run(name, "ip", "route", "get", HOST4, check=False)

    run(name, "ip", "link", "add", "br9", "type", "bridge")
    try:
        run(name, "ip", "addr", "add", "192.0.2.77/25", "dev", "br9")
        run(name, "ip", "link", "set", "br9", "up")
        wait_for(lambda: goes_by("br9"), 10, "the network of the host")
        run(name, "ip", "link", "set", "br9", "down")
        wait_for(lambda: goes_by("tsd0"), 10, "the tunnel")
    finally:
        run(name, "ip", "link", "del", "br9")


def test_f10_forwarding_that_is_off_is_said_with_the_key_of_the_interface(net: RouterLab) -> None:
    def key(name: str, value: int) -> None:
        net.lab.run(net.r.namespace, "sysctl", "-qw", f"net.ipv4.conf.{name}={value}")

    key("lan0.forwarding", 0)
    wait_for(lambda: "net.ipv4.conf.lan0.forwarding=1" in _health(net, "r"), 20, "the interface")
    said = net.r.call("set", f"--advertise-routes={LAN4},{LAN6}").stdout
    assert "net.ipv4.conf.lan0.forwarding=1" in said
    key("lan0.forwarding", 1)
    wait_for(lambda: "forward" not in _health(net, "r"), 20, "silence")
    net.coord.call("nodes.approve-routes", node="r", routes=[LAN4, LAN6, *EXIT])
