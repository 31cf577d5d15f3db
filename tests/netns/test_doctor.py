"""`tsctl doctor` against real faults: each is made in a network namespace, named with its fix, and gone afterwards.

`k` has a TUN, `u` is a userspace node, `tsd coord` runs in `h`. A healthy node gives no fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.coordproc import CoordProcess
from harness.netlab import NetLab, wait_for
from harness.nodes import ROOT, Node, TsdNode, TunTsdNode

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


class Lab:
    def __init__(self, lab: NetLab, folder: Path, coord: CoordProcess) -> None:
        self.lab = lab
        self.folder = folder
        self.coord = coord
        self.key = coord.auth_key(reusable=True)
        self.k: Node = TunTsdNode(lab, lab.add_host("k"), folder / "k", "k")
        self.u: Node = TsdNode(lab, lab.add_host("u"), folder / "u", "u")
        for node in (self.k, self.u):
            node.start()
            node.up(coord.url, self.key)
        self.k.wait_for_peer("u")
        self.u.wait_for_peer("k")

    def doctor(self, node: Node, *flags: str, socket: str = "", code: int | None = None) -> dict[str, Any]:
        """Findings by check; the texts of all when the exit status is another."""
        words = [sys.executable, "-m", "tsctl", f"--socket={socket or node.socket}", "doctor", "--json", *flags]
        done = subprocess.run(
            ["ip", "netns", "exec", node.namespace, *words], capture_output=True, text=True, timeout=60, env=_env()
        )
        assert done.stdout.startswith("{"), f"{done.stdout}\n{done.stderr}\n{node.tail()}"
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if found["ok"] else 1)
        assert code is None or done.returncode == code, f"{done.stdout}\n{node.tail()}"
        return found

    def faults(self, node: Node, *flags: str) -> dict[str, dict[str, str]]:
        return {one["check"]: one for one in self.doctor(node, *flags)["findings"] if one["severity"] == "fault"}

    def sh(self, node: Node, line: str) -> None:
        self.lab.run(node.namespace, "sh", "-c", line)


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/platform:{ROOT}/native"}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with NetLab(f"tsdD{os.getpid()}", "10.93.7") as lab:
        hub, folder = lab.add_host("h"), tmp_path_factory.mktemp("doctor")
        with CoordProcess(
            folder / "coord", netns=hub, address=lab.address(hub), control_port=8080, derp_port=3340, stun_port=3478
        ) as coord:
            yield Lab(lab, folder, coord)


def test_a_healthy_node_has_no_finding(net: Lab) -> None:
    for node, checks in ((net.k, {"routing", "firewall", "names", "rights"}), (net.u, set[str]())):
        with contextlib.suppress(TimeoutError):
            wait_for(lambda node=node: net.doctor(node)["findings"] == [], 60)  # type: ignore[misc]
        found = net.doctor(node, code=0)
        assert found["findings"] == [], f"{found}\n{node.tail()}"
        assert {"daemon", "state", "control", "relays", "udp", "clock"} | checks <= set(found["passed"]), found


def test_full_sized_packets_are_asked_of_a_direct_peer(net: Lab) -> None:
    net.k.ping("u", "--until-direct", "--c=20")
    address = net.u.ip4

    def look() -> dict[str, Any]:
        net.lab.run(net.k.namespace, "ping", "-c", "2", "-i", "0.2", address, check=False)
        return net.doctor(net.k)

    def fault() -> str:
        return next((one["cause"] for one in look()["findings"] if one["check"] == "path-mtu"), "")

    wait_for(lambda: "path-mtu" in look()["passed"], 30, "a direct path")
    with _undone(
        net,
        net.k,
        "nft add table inet hole; nft 'add chain inet hole out { type filter hook output priority 0; }';"
        " nft add rule inet hole out oifname eth0 udp length gt 1272 drop",
        "nft delete table inet hole",
    ):
        wait_for(lambda: "MTU black hole" in fault(), 30, "the black hole")


@contextlib.contextmanager
def _undone(net: Lab, node: Node, do: str, undo: str) -> Iterator[None]:
    net.sh(node, do)
    try:
        yield
    finally:
        net.sh(node, undo)


def test_no_daemon_and_a_dead_one(net: Lab) -> None:
    found = net.doctor(net.k, socket="/nonexistent/tsd.sock")
    causes = [one for one in found["findings"] if one["check"] == "daemon"]
    assert causes[0]["layer"] == "hull"
    assert str(net.k.socket) in causes[0]["fix"] or "systemctl start" in causes[0]["fix"]
    dead = net.folder / "dead.sock"
    script = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(dead)!r}); s.listen()"
    subprocess.run([sys.executable, "-c", script], check=True)
    found = net.doctor(net.k, socket=str(dead), code=1)
    assert "has died" in next(one["cause"] for one in found["findings"] if one["check"] == "daemon")


def test_an_interface_set_down_by_hand(net: Lab) -> None:
    fix = "ip link set tsd0 up"

    def is_told() -> bool:
        net.sh(net.k, "ip link set tsd0 down")  # a repair that was under way may have set it up again
        return net.faults(net.k, "--network=false").get("device", {}).get("fix") == fix

    with _undone(net, net.k, "true", fix):
        wait_for(is_told, 30, "the finding")
    wait_for(lambda: not net.faults(net.k, "--network=false"), 60, "everything put back")


@pytest.mark.parametrize("family", ["inet", "ip"])
def test_f08_a_foreign_drop(net: Lab, family: str) -> None:
    made = (
        f"nft add table {family} strict;"
        f" nft 'add chain {family} strict input {{ type filter hook input priority 10; policy drop; }}';"
        f" nft add rule {family} strict input iifname '{{ lo, eth0 }}' accept"
    )
    with _undone(net, net.k, made, f"nft delete table {family} strict"):
        found = net.faults(net.k, "--network=false")
        assert f"{family} strict input" in found["firewall"]["cause"], found
        fix = found["firewall"]["fix"].partition(",")[0]
        net.sh(net.k, fix)
        assert "firewall" not in net.faults(net.k, "--network=false")


@pytest.mark.parametrize(
    ("chain", "rule"),
    [
        ("output priority 0; policy drop", "oifname { lo, eth0 } accept"),
        ("input priority 0", "ip saddr { 10.0.0.0/30, 100.64.0.0/10 } drop"),
        ("prerouting priority -300", "iifname tsd0 drop"),
    ],
)
def test_f08_a_drop_of_another_kind(net: Lab, chain: str, rule: str) -> None:
    """What leaves through our device, addresses that are no one's elsewhere, and what never gets to the input."""
    made = f"nft add table inet o; nft 'add chain inet o c {{ type filter hook {chain}; }}'"
    made += f"; nft 'add rule inet o c {rule}'"
    with _undone(net, net.k, made, "nft delete table inet o"):
        found = net.faults(net.k, "--network=false")
        assert "inet o c" in found["firewall"]["cause"], found
        net.sh(net.k, found["firewall"]["fix"].partition(",")[0])
        assert "firewall" not in net.faults(net.k, "--network=false")
        wait_for(lambda: "names" not in net.faults(net.k, "--network=false"), 30, "names")


@pytest.mark.parametrize(
    ("route", "rule"),
    [
        ("blackhole default", "pref 100"),
        ("default dev eth0", "not fwmark 0xca6c"),  # as wg-quick does it: the kernel puts it before all others
    ],
)
def test_a_rule_of_another_program_before_ours(net: Lab, route: str, rule: str) -> None:
    undo = "ip route flush table 99; while ip rule del table 99 2>/dev/null; do :; done"
    with _undone(net, net.k, f"ip route add {route} table 99; ip rule add {rule} lookup 99", undo):
        wait_for(lambda: "asked before ours" in str(net.k.status()["Health"]), 30, "the warning")
        found = net.faults(net.k, "--network=false")
        assert found["routing"]["layer"] == "hull" and "another program" in found["routing"]["cause"], found
        net.sh(net.k, found["routing"]["fix"].partition(",")[0])
        assert "routing" not in net.faults(net.k, "--network=false")
        assert "lookup 99" in net.lab.run(net.k.namespace, "ip", "rule")
        wait_for(lambda: "asked before ours" not in str(net.k.status()["Health"]), 30, "the end of the warning")


def test_f10_forwarding_off_with_advertised_routes(net: Lab) -> None:
    net.sh(net.k, "sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0")
    net.k.call("set", "--advertise-routes=10.55.0.0/16,fd55::/64")
    try:
        found = [o for o in net.doctor(net.k, "--network=false")["findings"] if o["check"] == "ip-forwarding"]
        assert len(found) == 2 and all("10.55.0.0/16" in one["cause"] for one in found), found
        for one in found:
            net.sh(net.k, one["fix"].partition(",")[0])
        assert "ip-forwarding" not in net.faults(net.k, "--network=false")
        net.sh(net.k, "sysctl -qw net.ipv4.ip_forward=0")
        net.sh(net.k, "sysctl -qw net.ipv4.conf.tsd0.forwarding=1 net.ipv4.conf.eth0.forwarding=1")
        assert "ip-forwarding" not in net.faults(net.k, "--network=false"), "false alarm"
    finally:
        net.k.call("set", "--advertise-routes=")


def test_the_resolver_file_in_other_hands(net: Lab) -> None:
    """Written again and again; tsd puts its own back. Either what does not resolve or the fight itself is named."""
    stop = threading.Event()
    path = f"/etc/netns/{net.k.namespace}/resolv.conf"

    def write() -> None:
        while not stop.wait(0.02):
            Path(path).write_text("# by a script\nnameserver 192.0.2.1\noptions timeout:1 attempts:1\n")

    def told() -> dict[str, str] | None:
        found = net.faults(net.k, "--network=false")
        return next(
            (one for check, one in found.items() if check == "names" or "dns" in check or "resolv" in check), None
        )

    seen: list[dict[str, str] | None] = []
    thread = threading.Thread(target=write)
    thread.start()
    try:
        wait_for(lambda: seen.append(told()) or seen[-1], 60, "the fault")
    finally:
        stop.set()
        thread.join()
    assert seen[-1] is not None and seen[-1]["layer"] == "hull"
    assert "resolv.conf" in seen[-1]["cause"], seen
    wait_for(lambda: "names" not in net.faults(net.k, "--network=false"), 60, "the names are back")


def test_the_control_server_by_layer(net: Lab) -> None:
    drop = "nft add table inet wall; nft 'add chain inet wall out { type filter hook output priority 0; }';"
    with _undone(net, net.u, f"{drop} nft add rule inet wall out tcp dport 8080 reject", "nft delete table inet wall"):
        found = {one["check"]: one for one in net.doctor(net.u)["findings"]}
        assert "TCP fails" in found["control"]["cause"] and found["control"]["layer"] == "network", found


def test_a_blocked_relay_and_blocked_udp(net: Lab) -> None:
    drop = "nft add table inet wall; nft 'add chain inet wall out { type filter hook output priority 0; }';"
    rules = " nft add rule inet wall out tcp dport 3340 reject; nft add rule inet wall out udp dport 3478 drop"
    with _undone(net, net.u, drop + rules, "nft delete table inet wall"):
        found = net.faults(net.u)
        assert "TCP fails" in found["relays"]["cause"], found
        assert "UDP is blocked" in found["udp"]["cause"], found


def test_stopped_and_expired(net: Lab) -> None:
    net.u.call("down")
    assert net.faults(net.u, "--network=false")["state"]["fix"] == "tsctl up"
    net.u.call("up", f"--login-server={net.coord.url}", "--hostname=u")
    wait_for(lambda: not net.faults(net.u, "--network=false"), 60, "all well again")
    net.coord.call("nodes.expire", node="u")
    wait_for(lambda: {"key", "state"} & set(net.faults(net.u, "--network=false")), 60, "the expiry")
    found = net.faults(net.u, "--network=false")
    assert all(one["layer"] == "control" for one in found.values()), found
    assert "--force-reauth" in found.get("key", {}).get("fix", "--force-reauth")


def test_a_container_without_the_device_or_the_right(net: Lab) -> None:
    """No /dev/net/tun; then CAP_NET_ADMIN taken away: the fallback is named with what is missing."""
    bare = TunTsdNode(net.lab, net.lab.add_host("c"), net.folder / "c", "c")
    bare.device = "tsd0,userspace-networking"
    bare.daemon_words = lambda: ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", *_tsd()]  # type: ignore[method-assign]
    bare.start()
    found = net.faults(bare, "--network=false")
    assert "userspace networking is used" in found["device"]["cause"], found
    assert "CAP_NET_ADMIN" in found["rights"]["cause"] and "--cap-add" in found["rights"]["fix"]
    bare.stop()


def _tsd() -> list[str]:
    return [sys.executable, "-m", "tsd"]


def test_a_second_daemon_is_noted(net: Lab) -> None:
    second = TsdNode(net.lab, net.k.namespace, net.folder / "k2", "k2")
    second.start()
    try:
        found = [one for one in net.doctor(net.k, "--network=false")["findings"] if one["check"] == "alone"]
        assert found and found[0]["severity"] == "note" and str(second.socket) in found[0]["cause"]
    finally:
        second.stop()


def test_somebody_who_keeps_flushing_is_seen(net: Lab) -> None:
    """tsd puts everything back; what is gone at a look, or keeps going, is named nevertheless."""
    stop = threading.Event()

    def flush() -> None:
        while not stop.wait(0.05):
            for line in ("ip route flush table 53", "ip rule del pref 5370"):
                net.lab.run(net.k.namespace, *line.split(), check=False)

    def seen() -> str:
        found = net.faults(net.k, "--network=false")
        return next((one["cause"] for check, one in found.items() if check in ("routing", "health routing-fight")), "")

    causes: list[str] = []
    thread = threading.Thread(target=flush)
    thread.start()
    try:
        wait_for(lambda: causes.append(seen()) or causes[-1], 30, "the flush seen")
    finally:
        stop.set()
        thread.join()
    assert "53" in causes[-1] or "rout" in causes[-1]
    wait_for(lambda: "routing" not in net.faults(net.k, "--network=false"), 60, "everything put back")


def test_an_exit_node_that_is_used_gives_no_alarm_and_one_that_goes_away_is_told(net: Lab) -> None:
    """What doctor itself asks must not go by the exit node."""
    away = TsdNode(net.lab, net.lab.add_host("e"), net.folder / "e", "e")
    away.start()
    away.up(net.coord.url, net.key, "--advertise-exit-node")
    net.coord.call("nodes.approve-routes", node="e", routes=["0.0.0.0/0", "::/0"])
    net.k.wait_for_peer("e", ExitNodeOption=True)
    gateway = net.lab.address(f"{net.lab.prefix}-h")
    with _undone(net, net.k, f"ip route add default via {gateway}", "ip route del default"):
        net.k.call("set", "--exit-node=e")
        try:
            wait_for(lambda: not net.faults(net.k), 60, f"no fault; {net.k.tail()}")
            away.kill()
            wait_for(lambda: "exit node e is offline" in str(net.k.status()["Health"]), 60, "the warning")
            assert "offline" in net.faults(net.k)["health exit-node-gone"]["cause"]
        finally:
            net.k.call("set", "--exit-node=")
