"""4via6 with a TUN on both sides: IPv4 hosts of numbered sites, by TCP, UDP, ICMP, name; and what is out of reach."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from pathlib import Path

import pytest

from harness.netlab import inside, wait_for
from harness.nodes import ROOT, TunTailscaledNode
from harness.routerlab import EXIT, LAN4, LAN6, LAN_HOST, ROUTER, RouterLab
from harness.sockets import WHO, WhoServer, soon, who_am_i

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

SITE, THEIR_SITE = 7, 300
UDP_PORT = 9002


def via(address: str, site: int = SITE) -> str:
    return str(IPv6Address((0xFD7A115CA1E00B1A << 64) | site << 32 | int(IPv4Address(address))))


WHOLE_SITE = str(IPv6Network((via("0.0.0.0"), 96)))
THEIR_ROUTE = str(IPv6Network((via("10.97.20.0", THEIR_SITE), 120)))
HOST = via(LAN_HOST[4])


def _udp(namespace: str, target: str, size: int, net: RouterLab, count: int = 3) -> int:
    """How many datagrams came back whole."""
    words = [sys.executable, "-m", "harness.udpecho", "ask", target, str(UDP_PORT), str(size), str(count)]
    return int(net.lab.run(namespace, "env", f"PYTHONPATH={ROOT}/tests:{ROOT}", *words))


def _serve_udp(net: RouterLab, namespace: str, folder: Path) -> None:
    words = [sys.executable, "-m", "harness.udpecho", "serve", str(UDP_PORT)]
    net.lab.start(namespace, words, folder / f"{namespace}.log", {"PYTHONPATH": f"{ROOT}/tests:{ROOT}"})
    wait_for(lambda: f":{UDP_PORT}" in net.lab.run(namespace, "ss", "-lun"), 20, "the UDP server")


@pytest.fixture(scope="module")
def site(net: RouterLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterLab]:
    """The router offers its LAN as IPv4 network of a site, too."""
    folder = tmp_path_factory.mktemp("sites")
    here = WhoServer(net.r.namespace, WHO + 1)
    _serve_udp(net, net.l, folder)
    net.r.call("set", f"--advertise-routes={LAN4},{LAN6},{WHOLE_SITE}")
    net.coord.call("nodes.approve-routes", node="r", routes=[LAN4, LAN6, WHOLE_SITE, *EXIT])
    seen = net.who(HOST, ROUTER[4])
    assert seen == ROUTER[4], f"{seen!r}\n{net.c.tail()}\n{net.r.tail()}"
    yield net
    here.close()
    net.r.call("set", f"--advertise-routes={LAN4},{LAN6}")
    net.coord.call("nodes.approve-routes", node="r", routes=[LAN4, LAN6, *EXIT])


def test_tcp_udp_and_ping_reach_a_host_of_the_site(site: RouterLab) -> None:
    client = site.c.namespace
    assert site.ping(client, HOST, 3) == 3
    assert _udp(client, HOST, 100, site) == 3
    assert _udp(client, HOST, 4000, site) == 3, "in fragments"
    assert who_am_i(client, HOST, 9999) == "", "a port that nobody listens on"
    assert not site.ping(client, via("192.0.2.77")), "a host that is not there"


def test_much_data_in_both_directions(site: RouterLab) -> None:
    served = (
        "import socket; s = socket.create_server(('192.0.2.2', 9003)); s.settimeout(60); c = s.accept()[0]; n = 0\n"
        "while d := c.recv(65536): c.sendall(d)\nc.close()"
    )
    site.lab.start(site.l, [sys.executable, "-c", served], site.folder / "echo.log")
    wait_for(lambda: "9003" in site.lab.run(site.l, "ss", "-ltn"), 20, "the listener")
    ask = f"""
import hashlib, os, socket, threading
data = os.urandom(4 << 20)
s = socket.create_connection(({HOST!r}, 9003), 10)
def send(): s.sendall(data); s.shutdown(1)
threading.Thread(target=send).start()
back = hashlib.sha256()
while d := s.recv(65536): back.update(d)
print(back.digest() == hashlib.sha256(data).digest())
"""
    assert site.lab.run(site.c.namespace, sys.executable, "-c", ask, timeout_s=60).strip() == "True"


def test_by_its_name(site: RouterLab) -> None:
    """In the resolver of the client's host."""
    name = f"{LAN_HOST[4].replace('.', '-')}-via-{SITE}"
    suffix = site.c.status()["MagicDNSSuffix"]
    ask = f"import socket; print(socket.getaddrinfo({f'{name}.{suffix}'!r}, 80)[0][4][0])"

    def answer() -> str:
        return site.lab.run(site.c.namespace, sys.executable, "-c", ask, check=False).strip()

    assert soon(answer, HOST) == HOST, site.c.tail()


def test_programs_of_the_router_itself(site: RouterLab) -> None:
    assert site.who(HOST, ROUTER[4], site.r.namespace) == ROUTER[4], site.lab.run(site.r.namespace, "ip", "-6", "rule")
    assert site.ping(site.r.namespace, HOST)


@pytest.mark.parametrize("inner", ["127.0.0.1", "100.64.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1"])
def test_what_is_no_host_of_the_site_is_not_reached(site: RouterLab, inner: str) -> None:
    """Above all the router's own loopback: the packet filter sees only the outer address."""
    assert who_am_i(site.r.namespace, "127.0.0.1", WHO + 1) == "127.0.0.1"
    assert who_am_i(site.c.namespace, via(inner), WHO + 1, 0.5) == ""
    assert inner != "127.0.0.1" or not site.ping(site.c.namespace, via(inner))


def test_another_site_is_not_this_one(site: RouterLab) -> None:
    assert who_am_i(site.c.namespace, via(LAN_HOST[4], SITE + 1), timeout_s=1.0) == ""


def test_nobody_gets_there_through_the_router_but_the_tailnet(site: RouterLab) -> None:
    """A host of the LAN that sends to such an address, under its own or a forged source."""
    for source in ("2001:db8:5::2", "fd7a:115c:a1e0::dead"):
        site.lab.run(site.l, "ip", "-6", "addr", "replace", f"{source}/128", "dev", "lo")
        with inside(site.l):
            sock = socket.socket(socket.AF_INET6)
        with sock:
            sock.settimeout(1.0)
            sock.bind((source, 0))
            with pytest.raises(OSError):
                sock.connect((via(ROUTER[4]), WHO + 1))
    site.lab.run(site.l, "ip", "-6", "addr", "flush", "dev", "lo", "to", "fd7a:115c:a1e0::/48")


def test_the_packet_filter_decides(site: RouterLab) -> None:
    rule = '{"acls": [{"action": "accept", "src": ["*"], "dst": ["%s:%s"]}]}'
    allow_all = '{"acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}]}'
    client = site.c.namespace
    try:
        site.coord.set_policy(rule % (via(LAN_HOST[4]), UDP_PORT))
        assert soon(lambda: who_am_i(client, HOST, timeout_s=1.0), "") == ""
        assert _udp(client, HOST, 100, site) == 3
        site.coord.set_policy(rule % (via("192.0.2.66"), "*"))
        wait_for(lambda: not site.ping(client, HOST), 15, "silence")
        assert _udp(client, HOST, 100, site, 1) == 0
        site.coord.set_policy(allow_all)
        assert site.who(HOST, ROUTER[4]) == ROUTER[4]
        site.r.call("set", "--shields-up")
        assert soon(lambda: who_am_i(client, HOST, timeout_s=1.0), "") == ""
    finally:
        site.r.call("set", "--shields-up=false")
        site.coord.set_policy(allow_all)
    assert site.who(HOST, ROUTER[4]) == ROUTER[4]


def test_no_forwarding_of_the_kernel_is_needed(site: RouterLab) -> None:
    keys = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")
    try:
        for key in keys:
            site.lab.run(site.r.namespace, "sysctl", "-qw", f"{key}=0")
        said = site.r.call("set", f"--advertise-routes={WHOLE_SITE}", "--advertise-exit-node=false").stdout
        assert "forward" not in said
        assert site.who(HOST, ROUTER[4]) == ROUTER[4]
        wait_for(lambda: "forward" not in " ".join(site.r.status()["Health"] or []), 20, "no complaint")
    finally:
        for key in keys:
            site.lab.run(site.r.namespace, "sysctl", "-qw", f"{key}=1")
        site.r.call("set", f"--advertise-routes={LAN4},{LAN6},{WHOLE_SITE}", "--advertise-exit-node")


@pytest.mark.peers
def test_with_a_real_tailscaled_in_both_roles(site: RouterLab, tmp_path_factory: pytest.TempPathFactory) -> None:
    theirs = TunTailscaledNode(site.lab, site.lab.add_host("t"), tmp_path_factory.mktemp("t") / "t", "t")
    theirs.start()
    try:
        theirs.up(site.coord.url, site.coord.auth_key(), "--accept-routes", f"--advertise-routes={THEIR_ROUTE}")
        site.coord.call("nodes.approve-routes", node="t", routes=[THEIR_ROUTE])
        assert site.who(HOST, ROUTER[4], theirs.namespace, 40) == ROUTER[4], f"{theirs.tail()}\n{site.r.tail()}"
        _serve_udp(site, site.i, site.folder)
        at_theirs = via(site.lab.address(site.i), THEIR_SITE)
        router = site.lab.address(theirs.namespace)
        assert site.who(at_theirs, router, timeout_s=40) == router, f"{theirs.tail()}\n{site.c.tail()}"
        for client, target in ((theirs.namespace, HOST), (site.c.namespace, at_theirs)):
            assert site.ping(client, target, 3) == 3
            assert _udp(client, target, 100, site) == 3
        assert _udp(theirs.namespace, HOST, 4000, site) == 3, "in fragments, which tailscaled's router does not take"
    finally:
        theirs.stop()
