"""`tsd --tun=tsd0` in a network namespace: traffic beside userspace and TUN nodes, repair, and what is left behind.

`k` and `m` have a TUN, `u` is a userspace node, `tsd coord` runs in `h`. Later tests stop and kill `k`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.coordproc import CoordProcess
from harness.hoststate import answered, is_settled, snapshot
from harness.netlab import NetLab, wait_for
from harness.nodes import ROOT, Node, TsdNode, TunTsdNode

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

WEB, ECHO, IPERF = 8000, 7000, 5201
BIG_BYTES = 30 << 20
KINDS: dict[str, type[Node]] = {"k": TunTsdNode, "m": TunTsdNode, "u": TsdNode}


class Tailnet:
    def __init__(self, lab: NetLab, folder: Path, coord: CoordProcess) -> None:
        self.lab = lab
        self.folder = folder
        self.coord = coord
        self.key = self.coord.auth_key(reusable=True)
        self.web = folder / "web"
        self.web.mkdir()
        (self.web / "hello").write_text("hello")
        (self.web / "big").write_bytes(os.urandom(BIG_BYTES))
        namespaces = {name: lab.add_host(name) for name in KINDS}
        wait_for(lambda: all(is_settled(lab, namespace) for namespace in namespaces.values()), 10, "addresses")
        self.before = {name: snapshot(lab, namespace) for name, namespace in namespaces.items()}
        self.nodes = {name: kind(lab, namespaces[name], folder / name, name) for name, kind in KINDS.items()}
        for node in self.nodes.values():
            node.start()
            node.up(self.coord.url, self.key)
            node.serve(WEB, self.web)
            self.run(node, "udpecho", "serve", str(ECHO))
        for near in self.nodes.values():
            for far in self.nodes.values():
                if near is not far:
                    near.wait_for_peer(far.name)
        self.k, self.m, self.u = (self.nodes[name] for name in "kmu")

    def run(self, node: Node, module: str, *words: str) -> None:
        """A harness program in the background."""
        line = [sys.executable, "-m", f"harness.{module}", *words]
        self.lab.start(node.namespace, line, node.folder / f"{module}.log", {"PYTHONPATH": str(ROOT / "tests")})
        time.sleep(0.5)

    def ask_udp(self, node: Node, host: str, size: int, count: int) -> int:
        socks = ["1055"] if node.is_userspace else []
        line = ["env", f"PYTHONPATH={ROOT / 'tests'}", sys.executable, "-m", "harness.udpecho", "ask"]
        return int(self.lab.run(node.namespace, *line, host, str(ECHO), str(size), str(count), *socks, timeout_s=60))


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tailnet]:
    with NetLab(f"tsdK{os.getpid()}", "10.97.5") as lab:
        hub, folder = lab.add_host("h"), tmp_path_factory.mktemp("hull")
        with CoordProcess(
            folder / "coord", netns=hub, address=lab.address(hub), control_port=8080, derp_port=3340, stun_port=3478
        ) as coord:
            yield Tailnet(lab, folder, coord)


def _ping(net: Tailnet, node: Node, host: str, *flags: str) -> str:
    return net.lab.run(node.namespace, "ping", "-W", "3", *flags, host, check=False)


@pytest.mark.parametrize("size", [56, 1232, 8000])
@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("far", ["u", "m"])
def test_kernel_pings_also_in_fragments(net: Tailnet, far: str, version: int, size: int) -> None:
    host = net.nodes[far].ip4 if version == 4 else net.nodes[far].ip6
    said = _ping(net, net.k, host, "-c", "5", "-i", "0.2", "-s", str(size))
    assert answered(said) >= (5 if size < 8000 else 4), said


def test_the_threads_of_the_pump_move_the_packets(net: Tailnet) -> None:
    status = net.k.status()
    if "native" not in status["Pump"]:
        pytest.skip("the native core is not built")
    assert status["Pump"].endswith("own threads"), status["Pump"]
    before = _pump_counters(net.k)
    assert answered(_ping(net, net.k, net.m.ip4, "-c", "20", "-i", "0.05")) == 20
    after = _pump_counters(net.k)
    sent, asked = (after[name] - before[name] for name in ("udp4_datagrams_sent", "filter_asked"))
    assert sent >= 15, (before, after)
    assert asked <= 5 and not after["up_overflow"], (before, after)


def _pump_counters(node: Node) -> dict[str, int]:
    rows = (line.split() for line in node.call("debug", "metrics").stdout.splitlines() if line.startswith("tsd_pump_"))
    return {name.removeprefix("tsd_pump_"): int(value) for name, value in rows}


@pytest.mark.parametrize("kind", ["", "--tsmp", "--icmp", "--peerapi"])
def test_pings_of_the_tailnet_both_ways(net: Tailnet, kind: str) -> None:
    for near, far in ((net.u, net.k), (net.k, net.u), (net.k, net.m)):
        for host in (far.ip4, far.ip6):
            said = near.ping(host, *([kind] if kind else []), "--c=8", "--timeout=3s")
            assert "hit peerapi" in said if kind == "--peerapi" else "pong from" in said


@pytest.mark.parametrize(("near", "far"), [("k", "u"), ("u", "k"), ("k", "m")])
def test_tcp_and_udp_on_both_families(net: Tailnet, near: str, far: str) -> None:
    source, target = net.nodes[near], net.nodes[far]
    big = (net.web / "big").read_bytes()
    for host in (target.ip4, target.ip6):
        url = f"http://[{host}]:{WEB}" if ":" in host else f"http://{host}:{WEB}"
        assert source.curl(f"{url}/big").stdout == big
        sent = source.curl(f"{url}/sent-{near}", "-T", str(net.web / "big"))
        assert sent.returncode == 0 and (net.web / f"sent-{near}").read_bytes() == big, sent.stderr
        for size in (0, 1, 1200, 1400, 8000):
            assert net.ask_udp(source, host, size, 10) >= 9, (host, size)


def test_a_closed_port_is_refused_at_once(net: Tailnet) -> None:
    for host in (net.m.ip4, net.u.ip4):
        started = time.monotonic()
        assert net.k.curl(f"http://{host}:9/").returncode != 0
        assert time.monotonic() - started < 15


def test_f04_the_host_reaches_its_own_address(net: Tailnet) -> None:
    for host in (net.k.ip4, f"[{net.k.ip6}]"):
        assert net.k.curl(f"http://{host}:{WEB}/hello").stdout == b"hello"


def test_our_own_traffic_stays_out_of_the_tunnel(net: Tailnet) -> None:
    """A marked look-up of a peer's address finds no way, also while the table has one."""
    assert "dev tsd0" in net.lab.run(net.k.namespace, "ip", "route", "get", net.m.ip4)
    marked = net.lab.run(net.k.namespace, "ip", "route", "get", net.m.ip4, "mark", "0x200000", check=False)
    assert "tsd0" not in marked
    sockets = net.lab.run(net.k.namespace, "ss", "-uanpe")
    ours = [line for line in sockets.splitlines() if ":41641" in line]
    assert ours and all("fwmark:0x200000" in line for line in ours), sockets


@pytest.mark.parametrize("over", ["udp", "tcp"])
@pytest.mark.parametrize("server", ["100.100.100.100", "fd7a:115c:a1e0::53"])
def test_names_on_the_service_addresses(net: Tailnet, server: str, over: str) -> None:
    suffix = net.k.status()["MagicDNSSuffix"]
    script = (
        "import dns.message, dns.query, sys\n"
        f"q = dns.message.make_query('u.{suffix}.', 'A')\n"
        f"r = dns.query.{over}(q, {server!r}, timeout=5)\n"
        "print(' '.join(str(d) for s in r.answer for d in s))"
    )
    assert net.lab.run(net.k.namespace, sys.executable, "-c", script).strip() == net.u.ip4


def test_only_dns_is_on_the_service_address(net: Tailnet) -> None:
    for host in ("100.100.100.100", "[fd7a:115c:a1e0::53]"):
        assert net.k.curl(f"http://{host}:80/", timeout_s=5).returncode == 7, "not refused"
    assert answered(_ping(net, net.k, "100.100.100.100", "-c", "2", "-i", "0.2")) == 2


def test_the_host_resolves_names_of_the_tailnet(net: Tailnet) -> None:
    suffix = net.k.status()["MagicDNSSuffix"]
    for name in ("u", f"u.{suffix}"):
        assert net.lab.run(net.k.namespace, "getent", "ahostsv4", name).split()[0] == net.u.ip4
    assert net.k.curl(f"http://m:{WEB}/hello").stdout == b"hello"
    before = net.before["k"]["resolv.conf"]
    now = net.lab.run(net.k.namespace, "cat", "/etc/resolv.conf")
    assert "nameserver 100.100.100.100" in now and "timeout:1" in before and "timeout:1" in now


def test_an_overwritten_resolv_conf_is_back_in_5_seconds(net: Tailnet) -> None:
    ours = net.lab.run(net.k.namespace, "cat", "/etc/resolv.conf")
    theirs = ours.replace("nameserver 100.100.100.100", "nameserver 192.0.2.1").partition("\n")[2]
    net.lab.run(net.k.namespace, "sh", "-c", f"printf '%s' '{theirs}' > /etc/resolv.conf")
    wait_for(lambda: net.lab.run(net.k.namespace, "cat", "/etc/resolv.conf") == ours, 5, "our resolv.conf")
    net.lab.run(net.k.namespace, "sh", "-c", f"printf '%s' '{net.before['k']['resolv.conf']}' > /etc/resolv.conf")
    wait_for(lambda: net.lab.run(net.k.namespace, "cat", "/etc/resolv.conf") == ours, 5, "our resolv.conf")


def _iperf(net: Tailnet, near: Node, host: str, *flags: str) -> float:
    """Gbit/s."""
    said = net.lab.run(near.namespace, "iperf3", "-J", "-t", "3", "-c", host, *flags, timeout_s=60)
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 1e9


def test_iperf_figures(net: Tailnet) -> None:
    for node in (net.m, net.u):
        net.lab.start(node.namespace, ["iperf3", "-s", "-p", str(IPERF)], node.folder / "iperf.log")
    time.sleep(1)
    figures = {
        f"{far} {' '.join(flags)}": round(_iperf(net, net.k, net.nodes[far].ip4, *flags), 3)
        for far in ("m", "u")
        for flags in ((), ("-R",), ("-P", "8"))
    }
    print(json.dumps(figures))
    assert min(figures.values()) > 0.05, figures


def test_flushed_rules_routes_and_firewall_come_back(net: Tailnet) -> None:
    whole = snapshot(net.lab, net.k.namespace)
    for line in (
        "ip rule del pref 5310",
        "ip rule del pref 5370",
        "ip -6 rule del pref 5370",
        "ip route flush table 53",
        "ip -6 route flush table 53",
        "ip addr flush dev tsd0 scope global",
        "nft flush ruleset",
    ):
        net.lab.run(net.k.namespace, *line.split())
    wait_for(lambda: _same(net, net.k, whole), 20, "everything put back")
    assert answered(_ping(net, net.k, net.m.ip4, "-c", "2", "-i", "0.2")) == 2


def _same(net: Tailnet, node: Node, wanted: dict[str, str]) -> bool:
    now = snapshot(net.lab, node.namespace)
    return all(sorted(now[what].split("\n")) == sorted(text.split("\n")) for what, text in wanted.items())


def test_interface_down_and_up(net: Tailnet) -> None:
    net.lab.run(net.k.namespace, "ip", "link", "set", "tsd0", "down")
    assert answered(_ping(net, net.m, net.k.ip4, "-c", "1", "-W", "1")) == 0
    said = "tsd0 was set down: ip link set tsd0 up"
    wait_for(lambda: said in _health(net.k), 30, "the reason in status")
    net.lab.run(net.k.namespace, "ip", "link", "set", "tsd0", "up")
    wait_for(lambda: answered(_ping(net, net.k, net.m.ip6, "-c", "1", "-W", "1")) == 1, 20, "traffic")
    assert answered(_ping(net, net.m, net.k.ip4, "-c", "2", "-i", "0.2")) == 2
    wait_for(lambda: "tsd0" not in _health(net.k), 30, "no reason any more")


@pytest.mark.parametrize("pump", ["", "batch"])
def test_a_deleted_interface_ends_the_daemon(net: Tailnet, pump: str) -> None:
    """With an exit code that makes a service manager start it again, and with everything taken back."""
    node = net.m
    node.stop()
    node.environ["TSD_PUMP"] = pump
    node.start()
    wait_for(lambda: answered(_ping(net, node, net.u.ip4, "-c", "1", "-W", "1")) == 1, 20, "traffic")
    assert node.process is not None
    net.lab.run(node.namespace, "ip", "link", "del", "tsd0")
    wait_for(lambda: not node.process.is_running, 30, "the end of the daemon")
    last = node.tail().splitlines()[-1]
    assert node.process.exit_code == 1, node.tail()
    assert last.startswith("tsd: read from the network device tsd0: somebody deleted the interface"), node.tail()
    assert "Traceback" not in node.tail(), node.tail()
    assert snapshot(net.lab, node.namespace) == net.before["m"]
    node.environ["TSD_PUMP"] = ""
    node.start()
    wait_for(lambda: answered(_ping(net, node, net.u.ip4, "-c", "1", "-W", "1")) == 1, 20, "traffic")


def _health(node: Node) -> str:
    return " ".join(node.status()["Health"] or [])


def test_down_takes_everything_back_and_up_brings_it(net: Tailnet) -> None:
    net.k.call("down")
    now = snapshot(net.lab, net.k.namespace)
    assert now["firewall"] == "" and "53" not in now["rules"] + now["rules6"]
    assert "tsd0" not in now["routes"] + now["routes6"]
    net.k.call("up", f"--login-server={net.coord.url}", "--hostname=k")
    wait_for(lambda: answered(_ping(net, net.k, net.m.ip4, "-c", "1", "-W", "1")) == 1, 20, "traffic")


def test_a_second_daemon_takes_other_names(net: Tailnet) -> None:
    second = TunTsdNode(net.lab, net.k.namespace, net.folder / "k2", "k2")
    second.device = "tsd0,userspace-networking"
    second.start()
    assert "in use" in second.tail() or "busy" in second.tail()
    second.stop()
    second.device = "tsd1"
    second.start()
    second.up(net.coord.url, net.key)
    rules = net.lab.run(net.k.namespace, "ip", "rule")
    assert "lookup 53 " in rules and "lookup 54 " in rules
    second.call("logout")
    second.stop()
    assert "lookup 54 " not in net.lab.run(net.k.namespace, "ip", "rule")
    assert answered(_ping(net, net.k, net.m.ip4, "-c", "2", "-i", "0.2")) == 2


def test_nothing_is_left_after_a_stop(net: Tailnet) -> None:
    net.k.stop()
    assert snapshot(net.lab, net.k.namespace) == net.before["k"]
    net.k.start()
    wait_for(lambda: answered(_ping(net, net.k, net.m.ip4, "-c", "1", "-W", "1")) == 1, 20, "traffic")


def test_f16_nothing_is_left_after_kill_9_and_cleanup(net: Tailnet) -> None:
    assert isinstance(net.k, TunTsdNode)
    net.k.cleanup()
    assert answered(_ping(net, net.k, net.m.ip4, "-c", "1", "-W", "2")) == 1, "cleanup harmed a running daemon"
    net.k.kill()
    left = snapshot(net.lab, net.k.namespace)
    assert "5370" in left["rules"] and "table inet tsd" in left["firewall"]
    assert "undone" in net.k.cleanup()
    assert snapshot(net.lab, net.k.namespace) == net.before["k"]
    assert not (net.k.folder / "undo.json").exists()
    net.k.cleanup()


def test_a_start_undoes_what_a_crash_left(net: Tailnet) -> None:
    net.k.start()
    wait_for(lambda: "5370" in net.lab.run(net.k.namespace, "ip", "rule"), 20, "rules")
    net.k.kill()
    (net.k.folder / "node.sock").unlink()
    net.k.start()
    wait_for(lambda: answered(_ping(net, net.k, net.m.ip4, "-c", "1", "-W", "1")) == 1, 20, "traffic")
    net.k.kill()
    assert isinstance(net.k, TunTsdNode)
    net.k.device = "userspace-networking"
    net.k.start()
    assert snapshot(net.lab, net.k.namespace) == net.before["k"]
    net.k.stop()


def test_f02_a_host_whose_firewall_programs_all_fail_has_routes_and_a_warning(net: Tailnet) -> None:
    """As on kernels without nf_tables and ip_tables."""
    programs = "/usr/sbin/nft /usr/sbin/iptables /usr/sbin/iptables-nft /usr/sbin/iptables-legacy"
    hide = f'for p in {programs}; do p=$(readlink -f $p) && [ -e "$p" ] && mount --bind /bin/false $p; done; exec "$@"'
    words = ["unshare", "-m", "sh", "-c", hide, "sh", sys.executable, "-m", "tsd"]
    node = net.k
    assert isinstance(node, TunTsdNode)
    node.device = "tsd0"
    node.daemon_words = lambda: words  # type: ignore[method-assign]
    node.start()
    wait_for(lambda: answered(_ping(net, node, net.m.ip4, "-c", "1", "-W", "1")) == 1, 30, f"traffic\n{node.tail()}")
    wait_for(lambda: "firewall" in str(node.status()["Health"]), 20, f"the warning\n{node.tail()}")
    node.stop()
    del node.daemon_words


@pytest.mark.parametrize(
    ("wrapper", "wanted"),
    [
        (["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"], "CAP_NET_ADMIN"),
        (["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/net && exec "$@"', "sh"], "/dev/net/tun"),
    ],
)
def test_k10_what_is_missing_is_named_with_the_fix(net: Tailnet, wrapper: list[str], wanted: str) -> None:
    folder = net.folder / "denied"
    folder.mkdir(exist_ok=True)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/platform:{ROOT}/native"}
    words = [sys.executable, "-m", "tsd", "--tun=tsd0", f"--statedir={folder}", f"--socket={folder}/s"]
    line = ["ip", "netns", "exec", net.k.namespace, *wrapper, *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=environ)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and wanted in said and "--tun=userspace-networking" in said, done.stderr
