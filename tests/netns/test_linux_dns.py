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
from harness.headscale import peer_binary
from harness.hostbox import HostBox
from harness.netlab import ETC_NETNS, NetLab, Process, wait_for
from harness.nodes import Node, TailscaledNode, TsdNode, TunTsdNode
from harness.resolvers import Resolved, dnsmasq, unbound

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

DIG = """
import dns.flags, dns.message, dns.query, dns.rcode, sys
for words in sys.argv[1:]:
    name, kind, server, over = words.split()
    r = getattr(dns.query, over)(dns.message.make_query(name, kind), server, timeout=8)
    data = " ".join(str(d) for s in r.answer for d in s)
    print(dns.rcode.to_text(r.rcode()), "TC" if r.flags & dns.flags.TC else "-", data)
"""
V4, V6 = "100.100.100.100", "fd7a:115c:a1e0::53"
NOBODY = "10.97.7.250"
"""The first resolver of corp.example: the second one has to answer."""
NOW_S = 30.0
"""Measured within a second; a loaded machine takes longer."""


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

    def digs(self, *questions: str) -> list[str]:
        """Our resolver's answers to "name type server udp|tcp"."""
        return [line.strip() for line in self.box.run(sys.executable, "-c", DIG, *questions).splitlines()]

    def dig(self, name: str) -> str:
        return self.digs(f"{name} A {V4} udp")[0]

    def resolve(self, name: str) -> str:
        """As any program of the host does."""
        return self.box.run("getent", "ahostsv4", name, check=False).partition(" ")[0]


class World:
    upstream: Process

    def __init__(self, lab: NetLab, folder: Path, coord: CoordProcess, addresses: dict[str, str]) -> None:
        self.lab, self.folder, self.coord = lab, folder, coord
        self.x, self.y = addresses["x"], addresses["y"]
        self.key = coord.auth_key(reusable=True)
        namespace = lab.add_host("u")
        (ETC_NETNS / namespace / "resolv.conf").write_text(f"nameserver {self.x}\n")
        self.u = TsdNode(lab, namespace, folder / "u", "u")
        self.u.start()
        self.u.up(coord.url, self.key, "--advertise-exit-node")
        coord.call("nodes.approve-routes", node="u", routes=["0.0.0.0/0", "::/0"])

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
        upstream = dnsmasq(lab, f"{lab.prefix}-x", folder / "x", world)
        corp = ["srv.corp.example. A 10.9.9.9", "srv.corp.example. AAAA 2001:db8::9"]
        unbound(lab, f"{lab.prefix}-y", folder / "y", at["y"], "corp.example", corp)
        with CoordProcess(
            folder / "coord",
            netns=hub,
            address=lab.address(hub),
            control_port=8080,
            derp_port=3340,
            stun_port=3478,
            extra=(f"--dns=corp.example={NOBODY}", f"--dns=corp.example={at['y']}"),
        ) as coord:
            made = World(lab, folder, coord, at)
            made.upstream = upstream
            yield made


def check_names(world: World, node: BoxedNode) -> None:
    """Peers, a split zone, everything else and reverse, as the host's programs see them."""
    wanted = {"u": world.u.ip4, "u.tsd.internal": world.u.ip4, "www.world.example": "192.0.2.80"}
    wanted |= {"srv.corp.example": "10.9.9.9", "no.tsd.internal": "", "no.world.example": ""}
    for name, ip in wanted.items():
        wait_for(
            lambda name=name, ip=ip: node.resolve(name) == ip, NOW_S, f"{name} is {ip or 'unknown'}; {node.tail()}"
        )
    assert "u.tsd.internal" in node.box.run("getent", "hosts", world.u.ip4)


def check_forwarder(world: World, node: BoxedNode) -> None:
    """Our own resolver, asked directly: large answers over UDP and TCP, unknown names, reverse."""
    reverse = ".".join(reversed(world.u.ip4.split("."))) + ".in-addr.arpa"
    wanted = {
        f"www.world.example A {V4} udp": "NOERROR - 192.0.2.80",
        f"www.world.example A {V6} udp": "NOERROR - 192.0.2.80",
        f"srv.corp.example AAAA {V4} tcp": "NOERROR - 2001:db8::9",
        f"srv.corp.example AAAA {V6} tcp": "NOERROR - 2001:db8::9",
        f"no.world.example A {V4} udp": "NXDOMAIN -",
        f"no.tsd.internal A {V4} udp": "NXDOMAIN -",
        f"no.corp.example A {V4} udp": "NXDOMAIN -",
        f"80.2.0.192.in-addr.arpa PTR {V4} udp": "NOERROR - www.world.example.",
        f"{reverse} PTR {V4} udp": "NOERROR - u.tsd.internal.",
    }
    assert dict(zip(wanted, node.digs(*wanted), strict=True)) == wanted
    big = "big.world.example TXT"
    cut, whole, alias = node.digs(f"{big} {V4} udp", f"{big} {V4} tcp", f"alias.world.example A {V4} udp")
    assert cut.startswith("NOERROR TC") and whole.startswith("NOERROR - ") and whole.count("t" * 198) == 20
    assert world.u.ip4 in alias


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
    wait_for(
        lambda: "dns-set-os-config-failed" in kr.call("status", "--json").stdout or kr.dns()["Trouble"], NOW_S, "why"
    )
    resolved.start()
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0"), NOW_S, f"our server; {kr.tail()}")
    wait_for(lambda: kr.dns()["Trouble"] == "", NOW_S, "the end of the trouble")
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
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0"), NOW_S, f"our server; {kr.tail()}")
    resolved.control("domain", "tsd0", "evil.example")
    wait_for(lambda: "tsd.internal" in resolved.control("domain", "tsd0"), NOW_S, f"our zones; {kr.tail()}")
    resolved.control("revert", "tsd0")
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0"), NOW_S, f"our server; {kr.tail()}")


def test_d10_a_restarted_resolved_is_told_again(world: World, resolved: Resolved, kr: BoxedNode) -> None:
    resolved.stop()
    resolved.start()
    started = time.monotonic()
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0", check=False), NOW_S, kr.tail())
    print(f"after {time.monotonic() - started:.2f} s")
    check_names(world, kr)


def test_names_by_way_of_an_exit_node(world: World, resolved: Resolved, kr: BoxedNode) -> None:
    """All names go to us, and from us inside the tunnel to the exit node, which asks its own resolvers."""
    kr.call("set", "--exit-node=u")
    wait_for(lambda: "~." in resolved.control("domain", "tsd0"), NOW_S, f"all names; {kr.tail()}")
    assert resolved.control("default-route", "tsd0").strip().endswith("yes")
    asked = world.upstream.log.read_text()
    found = json.loads(kr.call("dns", "query", "--json", "www.world.example").stdout)
    assert found["AnsweredBy"]["Transport"] == "http" and world.u.ip4 in found["AnsweredBy"]["Addr"], found
    assert kr.resolve("www.world.example") == "192.0.2.80" and kr.resolve("u.tsd.internal") == world.u.ip4
    news = [line for line in world.upstream.log.read_text()[len(asked) :].splitlines() if "query[" in line]
    assert news and all(line.endswith(f"from {world.lab.address(world.u.namespace)}") for line in news), news
    assert kr.dig("no.world.example").startswith("NXDOMAIN")
    kr.call("set", "--exit-node=")
    wait_for(lambda: "~." not in resolved.control("domain", "tsd0"), NOW_S, f"only our zones; {kr.tail()}")
    assert resolved.control("default-route", "tsd0").strip().endswith("no")


def test_d11_nothing_of_ours_stays_in_resolved(world: World, resolved: Resolved, kr: BoxedNode) -> None:
    kr.call("down")
    wait_for(lambda: "100.100.100.100" not in resolved.control("dns", "tsd0"), NOW_S, "the server gone")
    assert resolved.control("default-route", "tsd0").strip().endswith("no")
    assert kr.resolve("www.world.example") == "192.0.2.80" and kr.resolve("u.tsd.internal") == ""
    kr.call("up")
    wait_for(lambda: "100.100.100.100" in resolved.control("dns", "tsd0"), NOW_S, kr.tail())
    kr.stop()
    assert "tsd0" not in resolved.control("dns") and kr.resolve("www.world.example") == "192.0.2.80"
    after = resolved.box.resolv_conf()
    assert after.startswith("../run/systemd/resolve/stub-resolv.conf\n") and after.endswith("search lan\n777\n")
    assert not list(kr.folder.glob("*undo*"))


# --- openresolv and Debian's resolvconf


def check_record(world: World, node: BoxedNode, before: str, *, cleans_up: bool) -> None:
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
    wait_for(lambda: "100.100.100.100" in box.resolv_conf(), NOW_S, f"our server; {node.tail()}")
    node.call("down")
    assert box.resolv_conf() == before
    node.call("up")
    wait_for(lambda: "100.100.100.100" in box.resolv_conf(), NOW_S, node.tail())
    node.stop()
    assert box.resolv_conf() == before
    node.start()
    wait_for(lambda: "100.100.100.100" in box.resolv_conf(), NOW_S, node.tail())
    assert node.process is not None
    node.process.send(signal.SIGKILL)
    wait_for(lambda: node.process is not None and not node.process.is_running, NOW_S, "the end")
    assert "100.100.100.100" in box.resolv_conf()
    if cleans_up:
        assert "resolvconf" in node.cleanup()
    else:
        node.start()
        wait_for(lambda: "records of resolvconf" in node.tail(), NOW_S, node.tail())
        node.stop()
    assert box.resolv_conf() == before and not list(node.folder.glob("*undo*"))


def test_d12_openresolv(world: World) -> None:
    box = world.box("o", "openresolv")
    box.run("resolvconf", "-a", "eth0.dhcp", given=f"nameserver {world.x}\nsearch lan\n")
    before = box.resolv_conf()
    assert "Generated by resolvconf" in before
    node = world.join(box, "ko")
    assert node.dns()["Mode"] == "openresolv"
    check_record(world, node, before, cleans_up=True)


def test_d12_debian_resolvconf(world: World) -> None:
    box = world.box("d", "resolvconf")
    box.run(
        "mkdir", "-p", "/run/resolvconf/interface", "/etc/resolvconf/update-libc.d", "/etc/resolvconf/resolv.conf.d"
    )
    box.run("sh", "-c", "rm -f /etc/resolvconf/update.d/unbound; touch /run/resolvconf/enable-updates")
    box.run("ln", "-sf", "/run/resolvconf/resolv.conf", "/etc/resolv.conf")
    box.run("resolvconf", "-a", "eth0.dhclient", given=f"nameserver {world.x}\nsearch lan\noptions timeout:2\n")
    before = box.resolv_conf()
    node = world.join(box, "kd")
    assert node.dns()["Mode"] == "debian-resolvconf"
    assert "options timeout:2" in box.resolv_conf()
    check_record(world, node, before, cleans_up=False)
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
    wait_for(lambda: "as their own upstream" in node.call("status").stdout, NOW_S, f"a warning; {node.tail()}")
    asked = circle.log.read_text().count("query[")
    assert asked < 20, f"{asked} questions went round"
    assert node.resolve("u") == world.u.ip4
    circle.stop()
    dnsmasq(world.lab, box.namespace, box.folder, ["listen-address=127.0.0.1", "bind-interfaces", f"server={world.x}"])
    wait_for(lambda: node.dig("www.world.example") == "NOERROR - 192.0.2.80", NOW_S, f"the world again; {node.tail()}")
    wait_for(lambda: "as their own upstream" not in node.call("status").stdout, NOW_S, "the end of the warning")
    node.stop()
    assert box.resolv_conf().startswith("nameserver 127.0.0.1\n")


def test_d08_a_file_that_is_mounted_over_the_host_s_is_rewritten_in_place(world: World) -> None:
    """As `ip netns exec` and containers have it: a rename would escape to the host's own file."""
    namespace = world.lab.add_host("m")
    shield, host = ETC_NETNS / namespace / "resolv.conf", Path("/etc/resolv.conf")
    shield.write_text(f"nameserver {world.x}\n")
    before = (host.read_bytes(), host.stat().st_ino, shield.stat().st_ino)
    node = TunTsdNode(world.lab, namespace, world.folder / "m", "m")
    node.start()
    node.up(world.coord.url, world.key)
    wait_for(lambda: "100.100.100.100" in shield.read_text(), NOW_S, node.tail())
    shield.write_text("nameserver 192.0.2.66\n")
    started = time.monotonic()
    wait_for(lambda: "100.100.100.100" in shield.read_text(), NOW_S, node.tail())
    print(f"put back after {time.monotonic() - started:.2f} s")
    node.stop()
    assert shield.read_text() == "nameserver 192.0.2.66\n", "what stood there last is what comes back"
    assert (host.read_bytes(), host.stat().st_ino, shield.stat().st_ino) == before


# --- beside the real tailscaled


@pytest.mark.peers
def test_exit_nodes_of_both_kinds_answer_each_other(world: World) -> None:
    """tsd asks the real tailscaled's PeerAPI for names, and the other way round."""
    peer_binary("tailscaled")
    namespace = world.lab.add_host("t")
    (ETC_NETNS / namespace / "resolv.conf").write_text(f"nameserver {world.x}\n")
    real = TailscaledNode(world.lab, namespace, world.folder / "t", "t")
    real.start()
    real.up(world.coord.url, world.key, "--advertise-exit-node")
    world.coord.call("nodes.approve-routes", node="t", routes=["0.0.0.0/0", "::/0"])
    for asking, answering in ((world.u, real), (real, world.u)):
        asking.call("set", "--advertise-exit-node=false")
        asking.wait_for_peer(answering.name, ExitNodeOption=True, Online=True)
        asking.call("set", f"--exit-node={answering.name}")
        wait_for(lambda a=asking, b=answering: b.ip4 in _asked(a), 30, f"names by {answering.name}; {asking.tail()}")
        assert "192.0.2.80" in _asked(asking)
        asking.call("set", "--exit-node=")
        asking.call("set", "--advertise-exit-node")


def _asked(node: Node) -> str:
    return node.call("dns", "query", "www.world.example", check=False).stdout
