"""An exit node as its client sees it: what leaves the host while it works, is away, or the daemon itself is gone.

Every packet that the client's underlay sees and that is not tsd's own is a leak.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from harness.netlab import wait_for
from harness.nodes import TsdNode
from harness.routerlab import EXIT, INTERNET, LAN4, LAN6, RouterLab
from harness.sockets import shout

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


VIA = "fd7a:115c:a1e0:b1a:0:7:c633:6400"
"""198.51.100.0 at site 7."""


class Talker:
    """Somebody on the client who talks to the Internet and to his neighbours all the time."""

    def __init__(self, net: RouterLab) -> None:
        self._net = net
        self._targets = [*INTERNET.values(), *(net.underlay(net.i, version) for version in (4, 6))]
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self.leaks: list[str] = []

    def __enter__(self) -> Talker:
        self._net.leaks()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        self.leaks += self._net.leaks()

    def _talk(self) -> None:
        while not self._is_done.is_set():
            shout(self._net.c.namespace, *self._targets)
            time.sleep(0.02)


@pytest.fixture
def through(net: RouterLab) -> Iterator[RouterLab]:
    """The client uses the router as its exit node."""
    net.c.call("set", "--exit-node=r")
    _is_through(net)
    yield net
    net.c.call("set", "--exit-node=", "--exit-node-allow-lan-access=false")


def _is_through(net: RouterLab) -> None:
    for version in (4, 6):
        router = net.underlay(net.r.namespace, version)
        assert net.who(INTERNET[version], router) == router, net.c.tail()


def _health(net: RouterLab) -> str:
    return " ".join(net.c.status()["Health"] or [])


def test_the_sniffer_sees_what_goes_out_without_an_exit_node(net: RouterLab) -> None:
    net.leaks()
    shout(net.c.namespace, *INTERNET.values())
    time.sleep(0.2)
    assert len(net.leaks()) == 2


def test_p05_nothing_leaks_while_the_exit_node_is_away(through: RouterLab) -> None:
    with Talker(through) as talker:
        through.coord.call("nodes.approve-routes", node="r", routes=[LAN4, LAN6])
        wait_for(lambda: "does not offer to be an exit node" in _health(through), 20, "the reason")
        assert not through.who(INTERNET[4], "", through.c.namespace, timeout_s=0.5)
        through.coord.call("nodes.approve-routes", node="r", routes=[LAN4, LAN6, *EXIT])
        _is_through(through)
        through.r.freeze(1.5)
    assert talker.leaks == []
    wait_for(lambda: "exit node" not in _health(through), 20, "no reason any more")


def test_p05_nothing_leaks_while_the_interface_is_down_or_without_ipv6(through: RouterLab) -> None:
    run, name = through.lab.run, through.c.namespace
    with Talker(through) as talker:
        run(name, "ip", "link", "set", "tsd0", "down")
        time.sleep(1)
        run(name, "ip", "link", "set", "tsd0", "up")
        _is_through(through)
        run(name, "sysctl", "-qw", "net.ipv6.conf.tsd0.disable_ipv6=1")
        time.sleep(1)
        run(name, "sysctl", "-qw", "net.ipv6.conf.tsd0.disable_ipv6=0")
        run(name, "ip", "link", "set", "tsd0", "down")
        run(name, "ip", "link", "set", "tsd0", "up")
        _is_through(through)
    assert talker.leaks == []


def test_p05_nothing_leaks_while_modes_change(through: RouterLab) -> None:
    with Talker(through) as talker:
        for mode, backend in (("off", "nft"), ("nodivert", "iptables"), ("on", "iptables"), ("on", "auto")):
            through.c.call("set", f"--netfilter-mode={mode}", f"--netfilter-backend={backend}")
        _is_through(through)
    assert talker.leaks == []


def test_p05_a_killed_daemon_leaves_the_host_closed_until_it_is_back_or_cleaned_up(through: RouterLab) -> None:
    net = through
    with Talker(net) as talker:
        net.c.kill()
        time.sleep(0.3)
        (net.c.folder / "node.sock").unlink()
        net.c.start()
        _is_through(net)
        net.c.kill()
        assert "nothing leaves this host" in net.c.cleanup("signal")  # systemd runs it before the next start
        time.sleep(0.3)
        net.c.start()
        _is_through(net)
    assert talker.leaks == []
    net.c.kill()
    (net.c.folder / "node.sock").unlink()
    net.c.cleanup()
    direct = net.underlay(net.c.namespace, 4)
    assert net.who(INTERNET[4], direct) == direct
    net.c.start()
    net.c.call("down")
    assert net.who(INTERNET[4], direct) == direct
    net.c.kill()
    (net.c.folder / "node.sock").unlink()
    net.c.start()
    assert net.who(INTERNET[4], direct) == direct
    net.c.call("up")
    _is_through(net)


def test_p05_a_deleted_interface_leaves_the_host_closed_until_tsd_is_back(through: RouterLab) -> None:
    net = through
    with Talker(net) as talker:
        net.lab.run(net.c.namespace, "ip", "link", "del", "tsd0")
        process = net.c.process
        wait_for(lambda: process is not None and not process.is_running, 30, "the end of the daemon")
        time.sleep(0.3)
        assert "nothing leaves this host" in net.c.cleanup("exit-code"), net.c.tail()
        time.sleep(0.3)
        net.c.start()
        _is_through(net)
    assert talker.leaks == [], net.c.tail()


def test_the_local_network_only_when_asked_for(through: RouterLab) -> None:
    for version in (4, 6):
        neighbour = through.underlay(through.i, version)
        assert through.who(neighbour, "", timeout_s=0.5) == ""
    through.c.call("set", "--exit-node-allow-lan-access")
    for version in (4, 6):
        own, neighbour = (through.underlay(name, version) for name in (through.c.namespace, through.i))
        assert through.who(neighbour, own) == own
    _is_through(through)


def test_auto_takes_what_there_is_and_lists_say_so(net: RouterLab) -> None:
    assert "r." in net.c.call("exit-node", "list").stdout
    assert "--exit-node=r." in net.c.call("exit-node", "suggest").stdout
    net.c.call("set", "--exit-node=auto:any")
    try:
        _is_through(net)
        assert net.c.call("get", "exit-node").stdout.strip() == "auto:any"
        assert [p["HostName"] for p in net.c.status()["Peer"].values() if p["ExitNode"]] == ["r"]
        assert "selected" in net.c.call("exit-node", "list").stdout
    finally:
        net.c.call("set", "--exit-node=")


def test_f09_strict_reverse_paths_do_not_cut_the_client_off(net: RouterLab) -> None:
    """Only for the interface concerned, and given back; without our rules the reason is told."""

    def value(key: str) -> str:
        return net.lab.run(net.c.namespace, "sysctl", "-n", f"net.ipv4.conf.{key}").strip()

    for name in ("all", "eth0"):
        net.lab.run(net.c.namespace, "sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=1")
    try:
        net.c.call("set", "--exit-node=r")
        _is_through(net)
        wait_for(lambda: value("eth0.src_valid_mark") == "1", 10, "marks that count")
        assert (value("all.src_valid_mark"), value("all.rp_filter"), value("eth0.rp_filter")) == ("0", "1", "1")
        net.c.call("ping", "--c=3", "--until-direct=false", "r")
        net.c.call("set", "--netfilter-mode=off")
        wait_for(lambda: "rp_filter is strict on eth0" in _health(net), 20, "the reason")
        assert value("eth0.src_valid_mark") == "0"
    finally:
        net.c.call("set", "--netfilter-mode=on", "--exit-node=")
        net.c.call("down")
        assert value("eth0.src_valid_mark") == "0"
        for name in ("all", "eth0"):
            net.lab.run(net.c.namespace, "sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=0")
        net.c.call("up")


def test_a_userspace_node_as_exit_node_and_subnet_router(
    net: RouterLab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It goes on by the sockets of its host, which is the Internet host here; so that one sees itself."""
    host, behind = net.i, "198.51.100.9"
    net.lab.run(host, "ip", "addr", "add", behind, "dev", "lo")
    node = TsdNode(net.lab, host, tmp_path_factory.mktemp("u") / "u", "u")
    node.start()
    try:
        node.up(
            net.coord.url,
            net.coord.auth_key(),
            f"--advertise-routes=198.51.100.0/24,{VIA}/120",
            "--advertise-exit-node",
        )
        net.coord.call("nodes.approve-routes", node="u", routes=["198.51.100.0/24", f"{VIA}/120", *EXIT])
        for target in (behind, f"{VIA[:-2]}09"):
            assert net.who(target, behind) == behind, node.tail()
            assert net.ping(net.c.namespace, target)
        wait_for(lambda: (net.c.peer("u") or {}).get("ExitNodeOption"), 20, "the offer")
        net.c.call("set", "--exit-node=u")
        with Talker(net) as talker:
            for version in (4, 6):
                assert net.who(INTERNET[version], INTERNET[version]) == INTERNET[version], node.tail()
        assert talker.leaks == []
    finally:
        net.c.call("set", "--exit-node=")
        node.call("logout", check=False)
        node.stop()
        net.lab.run(host, "ip", "addr", "del", f"{behind}/32", "dev", "lo")
