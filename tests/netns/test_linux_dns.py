"""`tsd` with a TUN on hosts whose names are kept by the real systemd-resolved, openresolv and Debian's resolvconf.

Upstreams are a real dnsmasq (the world, at `x`) and unbound (the zone corp.example, at `y`); `u` is a userspace peer.
Each host is a box with files of its own; nothing of this machine's is touched.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.coordproc import CoordProcess
from harness.debs import unpacked
from harness.hostbox import HostBox
from harness.netlab import NetLab, wait_for
from harness.nodes import TsdNode, TunTsdNode
from harness.resolvers import Resolved, dnsmasq, unbound

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

DIG = """
import dns.flags, dns.message, dns.query, dns.rcode, sys
name, kind, server, over = sys.argv[1:]
q = dns.message.make_query(name, kind)
r = getattr(dns.query, over)(q, server, timeout=8)
print(dns.rcode.to_text(r.rcode()), "TC" if r.flags & dns.flags.TC else "-", *(str(d) for s in r.answer for d in s))
"""


class BoxedNode(TunTsdNode):
    """A daemon and its CLI inside a box."""

    def __init__(self, box: HostBox, folder: Path, name: str) -> None:
        super().__init__(box.lab, box.namespace, folder, name)
        self.box = box

    def daemon_words(self) -> list[str]:
        return [*self.box.prefix, *super().daemon_words()]

    def cli_words(self) -> list[str]:
        return [*self.box.prefix, *super().cli_words()]

    def dns(self) -> dict[str, object]:
        found = json.loads(self.call("dns", "status", "--json").stdout)["SystemDNS"]
        return dict(found["Manager"])

    def dig(self, name: str, kind: str = "A", server: str = "100.100.100.100", over: str = "udp") -> str:
        return self.box.run(sys.executable, "-c", DIG, name, kind, server, over).strip()

    def resolve(self, name: str) -> str:
        """As any program of the host does."""
        return self.box.run("getent", "ahostsv4", name, check=False).partition(" ")[0]


class World:
    def __init__(self, lab: NetLab, folder: Path, coord: CoordProcess, addresses: dict[str, str]) -> None:
        self.lab, self.folder, self.coord = lab, folder, coord
        self.x, self.y = addresses["x"], addresses["y"]
        self.key = coord.auth_key(reusable=True)
        self.u = TsdNode(lab, lab.add_host("u"), folder / "u", "u")
        self.u.start()
        self.u.up(coord.url, self.key)

    def box(self, short: str, *packages: str) -> HostBox:
        return HostBox(self.lab, self.lab.add_host(short), self.folder / short, [unpacked(name) for name in packages])

    def join(self, box: HostBox, name: str) -> BoxedNode:
        node = BoxedNode(box, self.folder / f"node-{name}", name)
        node.start()
        node.up(self.coord.url, self.key)
        return node


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with NetLab(f"tsdN{os.getpid()}", "10.97.7") as lab:
        hub, folder = lab.add_host("h"), tmp_path_factory.mktemp("names")
        at = {short: lab.address(lab.add_host(short)) for short in ("x", "y")}
        (folder / "x").mkdir()
        (folder / "y").mkdir()
        world = [
            f"listen-address={at['x']}",
            "bind-interfaces",
            "address=/www.world.example/192.0.2.80",
            *(f"txt-record=big.world.example,{number:02}{'t' * 198}" for number in range(20)),
            "ptr-record=80.2.0.192.in-addr.arpa,www.world.example",
            "cname=alias.world.example,u.tsd.internal",
            "local=/world.example/",
            "local=/lan/",
        ]
        dnsmasq(lab, f"{lab.prefix}-x", folder / "x", world)
        corp = ["srv.corp.example. A 10.9.9.9", "srv.corp.example. AAAA 2001:db8::9"]
        unbound(lab, f"{lab.prefix}-y", folder / "y", at["y"], "corp.example", corp)
        with CoordProcess(
            folder / "coord",
            netns=hub,
            address=lab.address(hub),
            control_port=8080,
            derp_port=3340,
            stun_port=3478,
            extra=(f"--dns=corp.example={at['y']}",),
        ) as coord:
            yield World(lab, folder, coord, at)


def check_names(world: World, node: BoxedNode) -> None:
    """Peers, a split zone, everything else and reverse, as the host's programs see them."""
    wanted = {"u": world.u.ip4, "u.tsd.internal": world.u.ip4, "www.world.example": "192.0.2.80"}
    wanted |= {"srv.corp.example": "10.9.9.9", "no.tsd.internal": "", "no.world.example": ""}
    for name, ip in wanted.items():
        wait_for(lambda name=name, ip=ip: node.resolve(name) == ip, 20, f"{name} is {ip or 'unknown'}; {node.tail()}")
    assert "u.tsd.internal" in node.box.run("getent", "hosts", world.u.ip4)


def check_forwarder(world: World, node: BoxedNode) -> None:
    """Our own resolver, asked directly: large answers over UDP and TCP, unknown names, reverse."""
    for server in ("100.100.100.100", "fd7a:115c:a1e0::53"):
        assert node.dig("www.world.example", server=server) == "NOERROR - 192.0.2.80"
        assert node.dig("srv.corp.example", "AAAA", server, "tcp") == "NOERROR - 2001:db8::9"
    assert node.dig("big.world.example", "TXT").startswith("NOERROR TC")
    whole = node.dig("big.world.example", "TXT", over="tcp")
    assert whole.startswith("NOERROR - ") and whole.count("t" * 198) == 20
    assert node.dig("no.world.example").startswith("NXDOMAIN")
    assert node.dig("no.tsd.internal").startswith("NXDOMAIN")
    assert node.dig("no.corp.example").startswith("NXDOMAIN")
    assert node.dig("80.2.0.192.in-addr.arpa", "PTR") == "NOERROR - www.world.example."
    reverse = ".".join(reversed(world.u.ip4.split("."))) + ".in-addr.arpa"
    assert node.dig(reverse, "PTR") == "NOERROR - u.tsd.internal."
    assert world.u.ip4 in node.dig("alias.world.example")


def check_query(world: World, node: BoxedNode) -> None:
    found = json.loads(node.call("dns", "query", "--json", "srv.corp.example").stdout)
    assert found["AnsweredBy"] == {"Addr": world.y, "Transport": "udp"}
    said = node.call("dns", "query", "srv.corp.example").stdout
    assert f"Answered by: {world.y} over udp" in said and "10.9.9.9" in said


# --- systemd-resolved


@pytest.fixture(scope="module")
def resolved(world: World) -> Resolved:
    return Resolved(world.box("r", "systemd-resolved", "libsystemd-shared"), world.x)


@pytest.fixture(scope="module")
def kr(world: World, resolved: Resolved) -> BoxedNode:
    """Started before systemd-resolved: the link in /etc leads nowhere yet."""
    return world.join(resolved.box, "kr")


def test_d09_a_resolved_that_comes_later_is_waited_for(world: World, resolved: Resolved, kr: BoxedNode) -> None:
    assert "stub-resolv.conf" in resolved.box.run("readlink", "/etc/resolv.conf")
    told = kr.dns()
    assert told["Mode"] == "systemd-resolved" and "link to systemd-resolved" in " ".join(told["Because"])  # type: ignore[arg-type]
    wait_for(lambda: "dns-set-os-config-failed" in kr.call("status", "--json").stdout or kr.dns()["Trouble"], 10, "why")
    resolved.start()
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0"), 20, f"our server; {kr.tail()}")
    wait_for(lambda: kr.dns()["Trouble"] == "", 10, "the end of the trouble")
    assert "stub-resolv.conf" in resolved.box.run("readlink", "/etc/resolv.conf")


def test_resolved_sends_only_our_zones_to_us(world: World, resolved: Resolved, kr: BoxedNode) -> None:
    zones = resolved.control("domain", "tsd0")
    assert "tsd.internal" in zones and "~corp.example" in zones and "~64.100.in-addr.arpa" in zones
    assert resolved.control("default-route", "tsd0").strip().endswith("no")
    assert world.x in resolved.control("dns").splitlines()[0]
    check_names(world, kr)
    check_forwarder(world, kr)
    check_query(world, kr)


def test_settings_that_others_change_in_resolved_come_back(resolved: Resolved, kr: BoxedNode) -> None:
    resolved.control("dns", "tsd0", "192.0.2.66")
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0"), 5, f"our server; {kr.tail()}")
    resolved.control("domain", "tsd0", "evil.example")
    wait_for(lambda: "tsd.internal" in resolved.control("domain", "tsd0"), 5, f"our zones; {kr.tail()}")
    resolved.control("revert", "tsd0")
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0"), 5, f"our server; {kr.tail()}")


def test_d10_a_restarted_resolved_is_told_again(world: World, resolved: Resolved, kr: BoxedNode) -> None:
    resolved.stop()
    resolved.start()
    started = time.monotonic()
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0", check=False), 10, kr.tail())
    print(f"after {time.monotonic() - started:.2f} s")
    check_names(world, kr)


def test_d11_nothing_of_ours_stays_in_resolved(world: World, resolved: Resolved, kr: BoxedNode) -> None:
    kr.call("down")
    wait_for(lambda: "100.100.100.100" not in resolved.control("dns", "tsd0"), 10, "the server gone")
    assert resolved.control("default-route", "tsd0").strip().endswith("no")
    assert kr.resolve("www.world.example") == "192.0.2.80" and kr.resolve("u.tsd.internal") == ""
    kr.call("up")
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0"), 10, kr.tail())
    kr.stop()
    assert "tsd0" not in resolved.control("dns") and kr.resolve("www.world.example") == "192.0.2.80"
    after = resolved.box.resolv_conf()
    assert after.startswith("../run/systemd/resolve/stub-resolv.conf\n") and after.endswith("search lan\n777\n")
    assert not list(kr.folder.glob("*undo*"))


# --- openresolv and Debian's resolvconf


def check_record(world: World, node: BoxedNode, before: str) -> None:
    """Set up, trampled, stopped, killed and cleaned up: the file is the same to the byte."""
    box = node.box
    check_names(world, node)
    check_forwarder(world, node)
    ours = box.resolv_conf()
    assert "nameserver 100.100.100.100" in ours and world.x not in ours
    box.run("resolvconf", "-a", "eth1.other", given="nameserver 192.0.2.99\n", check=False)
    assert "192.0.2.99" not in box.resolv_conf()
    box.run("resolvconf", "-d", "eth1.other", check=False)
    box.run("sh", "-c", "echo nameserver 192.0.2.66 > /etc/resolv.conf")
    wait_for(lambda: "100.100.100.100" in box.resolv_conf(), 6, f"our server; {node.tail()}")
    node.call("down")
    assert box.resolv_conf() == before
    node.call("up")
    wait_for(lambda: "100.100.100.100" in box.resolv_conf(), 10, node.tail())
    node.stop()
    assert box.resolv_conf() == before
    node.start()
    wait_for(lambda: "100.100.100.100" in box.resolv_conf(), 10, node.tail())
    assert node.process is not None
    node.process.send(signal.SIGKILL)
    wait_for(lambda: node.process is not None and not node.process.is_running, 10, "the end")
    assert "100.100.100.100" in box.resolv_conf()
    assert "resolvconf" in node.cleanup()
    assert box.resolv_conf() == before and not list(node.folder.glob("*undo*"))


def test_d12_openresolv(world: World) -> None:
    box = world.box("o", "openresolv")
    box.run("resolvconf", "-a", "eth0.dhcp", given=f"nameserver {world.x}\nsearch lan\n")
    before = box.resolv_conf()
    assert "Generated by resolvconf" in before
    node = world.join(box, "ko")
    assert node.dns()["Mode"] == "openresolv"
    check_record(world, node, before)


def test_d12_debian_resolvconf(world: World) -> None:
    box = world.box("d", "resolvconf")
    box.run(
        "mkdir", "-p", "/run/resolvconf/interface", "/etc/resolvconf/update-libc.d", "/etc/resolvconf/resolv.conf.d"
    )
    box.run("sh", "-c", "rm -f /etc/resolvconf/update.d/unbound; echo '# made by resolvconf(8)' "
            "> /etc/resolvconf/resolv.conf.d/head; touch /run/resolvconf/enable-updates")  # fmt: skip
    box.run("ln", "-sf", "/run/resolvconf/resolv.conf", "/etc/resolv.conf")
    box.run("resolvconf", "-a", "eth0.dhclient", given=f"nameserver {world.x}\nsearch lan\noptions timeout:2\n")
    before = box.resolv_conf()
    node = world.join(box, "kd")
    assert node.dns()["Mode"] == "debian-resolvconf"
    assert "options timeout:2" in box.resolv_conf()
    check_record(world, node, before)
    assert box.run("ls", "/etc/resolvconf/update-libc.d").split() == []


# --- a file that nobody manages


def test_d05_a_local_resolver_that_asks_us_is_found_and_left_out(world: World) -> None:
    """dnsmasq on the host has our service address as its upstream, and the host's file leads to dnsmasq."""
    box = world.box("l")
    box.run("sh", "-c", "echo nameserver 127.0.0.1 > /etc/resolv.conf")
    circle = dnsmasq(world.lab, box.namespace, box.folder, ["listen-address=127.0.0.1", "bind-interfaces",
                                                            "server=100.100.100.100"])  # fmt: skip
    node = world.join(box, "kl")
    assert node.dns()["Mode"] == "direct" and "nameserver 100.100.100.100" in box.resolv_conf()
    started = time.monotonic()
    for number in range(4):
        assert node.dig(f"n{number}.world.example").startswith("SERVFAIL")
    assert time.monotonic() - started < 30
    wait_for(lambda: "as their own upstream" in node.call("status").stdout, 15, f"a warning; {node.tail()}")
    asked = circle.log.read_text().count("query[")
    assert asked < 20, f"{asked} questions went round"
    assert node.resolve("u") == world.u.ip4
    circle.stop()
    dnsmasq(world.lab, box.namespace, box.folder, ["listen-address=127.0.0.1", "bind-interfaces", f"server={world.x}"])
    wait_for(lambda: node.dig("www.world.example") == "NOERROR - 192.0.2.80", 20, f"the world again; {node.tail()}")
    wait_for(lambda: "as their own upstream" not in node.call("status").stdout, 15, "the end of the warning")
    node.stop()
    assert box.resolv_conf().startswith("nameserver 127.0.0.1\n")
