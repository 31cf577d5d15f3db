"""`tsd --tun` as subnet router: LAN host `l` behind router `r`, client `c`, all with the kernel's traffic.

Modes of the firewall are changed while running; the source address that the LAN host sees is asserted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.coordproc import CoordProcess
from harness.hoststate import answered
from harness.netlab import NetLab, sh, wait_for
from harness.nodes import TunTsdNode

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

LAN4, LAN6 = "192.0.2.0/24", "2001:db8:5::/64"
ROUTER4, ROUTER6, HOST4, HOST6 = "192.0.2.1", "2001:db8:5::1", "192.0.2.2", "2001:db8:5::2"
SEEN = (
    "import socket; s = socket.create_server((%r, 9000), family=%s, dualstack_ipv6=False); s.settimeout(20); "
    "print(s.accept()[1][0])"
)


class Tailnet:
    def __init__(self, lab: NetLab, folder: Path, coord: CoordProcess) -> None:
        self.lab = lab
        self.coord = coord
        router, client, self.host = (lab.add_host(name) for name in ("r", "c", "l"))
        self._wire_lan(router)
        self.r = TunTsdNode(lab, router, folder / "r", "r")
        self.c = TunTsdNode(lab, client, folder / "c", "c")
        key = self.coord.auth_key(reusable=True)
        for node, flags in ((self.r, [f"--advertise-routes={LAN4},{LAN6}"]), (self.c, ["--accept-routes"])):
            node.start()
            node.up(self.coord.url, key, *flags)
        self.coord.call("nodes.approve-routes", node="r", routes=[LAN4, LAN6])
        wait_for(lambda: self.ping(HOST4) and self.ping(HOST6), 30, "the LAN host")

    def _wire_lan(self, router: str) -> None:
        sh("ip", "-n", self.host, "link", "set", "eth0", "down")
        sh("ip", "-n", router, "link", "add", "lan0", "type", "veth", "peer", "name", "lan0", "netns", self.host)
        for name, number in ((router, 1), (self.host, 2)):
            sh("ip", "-n", name, "addr", "add", f"192.0.2.{number}/24", "dev", "lan0")
            sh("ip", "-n", name, "addr", "add", f"2001:db8:5::{number}/64", "dev", "lan0", "nodad")
            sh("ip", "-n", name, "link", "set", "lan0", "up")
        for key in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
            self.lab.run(router, "sysctl", "-qw", f"{key}=1")

    def ping(self, target: str, namespace: str = "") -> int:
        line = ["ping", "-c", "2", "-i", "0.2", "-W", "1", target]
        return answered(self.lab.run(namespace or self.c.namespace, *line, check=False))

    def source_seen(self, target: str) -> str:
        """Which address the LAN host sees when the client connects."""
        family = "socket.AF_INET6" if ":" in target else "socket.AF_INET"
        log = self.c.folder / "seen.log"
        log.write_text("")
        listening = self.lab.start(self.host, [sys.executable, "-c", SEEN % (target, family)], log)
        ask = f"import socket; socket.create_connection(({target!r}, 9000), 5)"
        wait_for(lambda: "9000" in self.lab.run(self.host, "ss", "-ltn"), 10, "the listener")
        self.lab.run(self.c.namespace, sys.executable, "-c", ask, check=False)
        wait_for(lambda: not listening.is_running, 25, "an answer")
        return log.read_text().strip()

    def firewall(self) -> str:
        return self.lab.run(self.r.namespace, "nft", "list", "ruleset")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tailnet]:
    with NetLab(f"tsdKr{os.getpid()}", "10.97.8") as lab:
        hub, folder = lab.add_host("h"), tmp_path_factory.mktemp("router")
        with CoordProcess(
            folder / "coord", netns=hub, address=lab.address(hub), control_port=8080, derp_port=3340, stun_port=3478
        ) as coord:
            yield Tailnet(lab, folder, coord)


def test_f03_the_lan_sees_the_router_unless_snat_is_off(net: Tailnet) -> None:
    assert net.source_seen(HOST4) == ROUTER4
    assert net.source_seen(HOST6) == ROUTER6
    for prefix, router in (("100.64.0.0/10", ROUTER4), ("fd7a:115c:a1e0::/48", ROUTER6)):
        net.lab.run(net.host, "ip", "route", "add", prefix, "via", router)
    net.r.call("set", "--snat-subnet-routes=false")
    wait_for(lambda: "masquerade" not in net.firewall(), 10, "no masquerading")
    assert net.source_seen(HOST4) == net.c.ip4
    assert net.source_seen(HOST6) == net.c.ip6
    assert net.ping(net.c.ip4, net.host) == 2, "a LAN host opens connections to tailnet nodes"
    net.r.call("set", "--snat-subnet-routes=true")
    wait_for(lambda: "masquerade" in net.firewall(), 10, "masquerading")
    assert net.source_seen(HOST4) == ROUTER4


def _mode_of(firewall: str) -> str:
    if "chain tsd-forward" not in firewall:
        return "off"
    return "on" if "type filter hook" in firewall else "nodivert"


def test_modes_of_the_firewall_are_changed_while_running(net: Tailnet) -> None:
    whole = net.firewall()
    for mode in ("nodivert", "off", "nodivert", "on"):
        net.r.call("set", f"--netfilter-mode={mode}")
        wait_for(lambda mode=mode: _mode_of(net.firewall()) == mode, 10, mode)  # type: ignore[misc]
        assert ("masquerade" in net.firewall()) == (mode != "off")
    wait_for(lambda: net.firewall() == whole, 10, "the same rules as before")
    assert net.source_seen(HOST4) == ROUTER4


def test_stateful_filtering_lets_only_answers_into_the_tunnel(net: Tailnet) -> None:
    net.r.call("set", "--stateful-filtering=true")
    wait_for(lambda: "ct state" in net.firewall().split("tsd-postrouting")[0].split("tsd-forward")[1], 10, "the rule")
    assert net.ping(HOST4) == 2
    assert net.ping(net.c.ip4, net.host) == 0
    net.r.call("set", "--stateful-filtering=false")
    wait_for(lambda: net.ping(net.c.ip4, net.host) == 2, 10, "traffic from the LAN")


def test_f13_large_pages_pass_from_a_lan_with_a_larger_mtu(net: Tailnet) -> None:
    """Segments of the LAN host fit the tunnel, because the MSS of its SYN is clamped."""
    log = net.c.folder / "mss.log"
    log.write_text("")
    served = (
        "import socket; s = socket.create_server(('192.0.2.2', 9001)); s.settimeout(20); c = s.accept()[0]; "
        "print(c.getsockopt(6, 2)); c.sendall(bytes(4 << 20)); c.close()"
    )
    net.lab.start(net.host, [sys.executable, "-c", served], log)
    wait_for(lambda: "9001" in net.lab.run(net.host, "ss", "-ltn"), 10, "the listener")
    ask = (
        "import socket; s = socket.create_connection(('192.0.2.2', 9001), 5); n = 0\n"
        "while d := s.recv(65536): n += len(d)\nprint(n)"
    )
    assert net.lab.run(net.c.namespace, sys.executable, "-c", ask).strip() == str(4 << 20)
    assert int(log.read_text()) <= 1240


def test_strangers_with_an_address_of_the_overlay_are_dropped(net: Tailnet) -> None:
    net.lab.run(net.host, "ip", "addr", "add", "100.64.9.9/32", "dev", "lan0")
    forged = net.lab.run(net.host, "ping", "-c", "2", "-i", "0.2", "-W", "1", "-I", "100.64.9.9", ROUTER4, check=False)
    assert answered(forged) == 0
    rules = net.lab.run(net.r.namespace, "nft", "-j", "list", "chain", "inet", "tsd", "tsd-input")
    assert "drop" in rules


def test_f07_a_router_keeps_its_own_lan_when_others_offer_it(net: Tailnet) -> None:
    net.c.call("set", f"--advertise-routes={LAN4}")
    net.coord.call("nodes.approve-routes", node="c", routes=[LAN4])
    net.r.call("set", "--accept-routes")
    assert "lan0" in net.lab.run(net.r.namespace, "ip", "route", "get", HOST4)
    assert net.ping(HOST4, net.r.namespace) == 2
