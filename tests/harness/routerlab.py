"""The topology of a subnet router that is an exit node: client, router, LAN host and Internet host, IPv4 and IPv6.

c ---- hub ---- r ---- l        c, r: tsd with a TUN; h: coordination server and relay
        |                       i: way to the Internet of c and r, and a host there
      h, i                      l: behind r only, knows the tailnet's addresses by r
"""

from __future__ import annotations

import re
from pathlib import Path

from harness.coordproc import CoordProcess
from harness.hoststate import answered, is_settled
from harness.netlab import NetLab, sh, wait_for
from harness.nodes import TunTsdNode
from harness.sockets import Sniffer, WhoServer, soon, who_am_i

LAN4, LAN6 = "192.0.2.0/24", "2001:db8:5::/64"
ROUTER = {4: "192.0.2.1", 6: "2001:db8:5::1"}
LAN_HOST = {4: "192.0.2.2", 6: "2001:db8:5::2"}
INTERNET = {4: "203.0.113.9", 6: "2001:db8:9::9"}
EXIT = ["0.0.0.0/0", "::/0"]
TAILNET = {4: "100.64.0.0/10", 6: "fd7a:115c:a1e0::/48"}


class RouterLab:
    """`start` after changing what should be different from the start."""

    def __init__(self, lab: NetLab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.h, self.i, self.l = (lab.add_host(name) for name in "hil")
        self.c = TunTsdNode(lab, lab.add_host("c"), folder / "c", "c")
        self.r = TunTsdNode(lab, lab.add_host("r"), folder / "r", "r")
        for node in (self.c, self.r):
            node.environ["TS_DEBUG_FIREWALL_MODE"] = ""
        self._own: dict[str, list[str]] = {}
        self._wire()
        self.coord = CoordProcess(
            folder / "coord",
            netns=self.h,
            address=lab.address(self.h),
            control_port=8080,
            derp_port=3340,
            stun_port=3478,
        )
        self.servers = [WhoServer(name) for name in (self.i, self.l, self.c.namespace)]
        self.sniffer = Sniffer(lab.hub, f"p{lab.number(self.c.namespace)}")

    def _wire(self) -> None:
        lab, router = self.lab, self.r.namespace
        sh("ip", "-n", self.l, "link", "set", "eth0", "down")
        sh("ip", "-n", router, "link", "add", "lan0", "type", "veth", "peer", "name", "lan0", "netns", self.l)
        for name, addresses in ((router, ROUTER), (self.l, LAN_HOST)):
            sh("ip", "-n", name, "addr", "add", f"{addresses[4]}/24", "dev", "lan0")
            sh("ip", "-n", name, "addr", "add", f"{addresses[6]}/64", "dev", "lan0", "nodad")
            sh("ip", "-n", name, "link", "set", "lan0", "up")
        for version, address in INTERNET.items():
            sh("ip", "-n", self.i, f"-{version}", "addr", "add", address, "dev", "lo")
            sh("ip", "-n", self.l, f"-{version}", "route", "add", TAILNET[version], "via", ROUTER[version])
            gateway, through_r = (self.underlay(name, version) for name in (self.i, router))
            sh("ip", "-n", self.i, f"-{version}", "route", "add", TAILNET[version], "via", through_r)
            for name in (router, self.c.namespace):
                sh("ip", "-n", name, f"-{version}", "route", "add", "default", "via", gateway)
        for key in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
            for name in (router, self.i):
                lab.run(name, "sysctl", "-qw", f"{key}=1")
        wait_for(lambda: all(is_settled(lab, name) for name in (router, self.c.namespace)), 10, "addresses")

    def underlay(self, namespace: str, version: int) -> str:
        return self.lab.address(namespace) if version == 4 else f"fd99::{self.lab.number(namespace)}"

    def start(self) -> RouterLab:
        self.coord.start()
        self.c.launch()
        self.r.launch()
        key = self.coord.auth_key(reusable=True)
        self.c.wait_until_up()
        self.r.wait_until_up()
        self.c.up(self.coord.url, key, "--accept-routes")
        self.r.up(self.coord.url, key, f"--advertise-routes={LAN4},{LAN6}", "--advertise-exit-node")
        self.coord.call("nodes.approve-routes", node="r", routes=[LAN4, LAN6, *EXIT])
        self.reset()
        return self

    def reset(self) -> None:
        """Both daemons as after the start; waits until all is reachable."""
        modes = [
            "--netfilter-mode=on",
            "--netfilter-backend=auto",
            "--snat-subnet-routes",
            "--stateful-filtering=false",
        ]
        self.r.call("set", *modes)
        self.c.call("set", *modes, "--exit-node=", "--exit-node-allow-lan-access=false")
        for version in (4, 6):
            seen = self.who(LAN_HOST[version], ROUTER[version])
            assert seen == ROUTER[version], f"the LAN host sees {seen}:\n{self.c.tail()}\n{self.r.tail()}"

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.sniffer.close()
        self.coord.stop()

    # --- looking

    def who(self, host: str, wanted: str = "", namespace: str = "", timeout_s: float = 15.0) -> str:
        """As which address a host sees the client; waits for the one that is wanted."""
        return soon(
            lambda: who_am_i(namespace or self.c.namespace, host, timeout_s=min(2.0, timeout_s)), wanted, timeout_s
        )

    def ping(self, namespace: str, target: str, count: int = 1) -> int:
        line = ["ping", "-c", str(count), "-i", "0.2", "-W", "1", target]
        return answered(self.lab.run(namespace, *line, check=False))

    def own(self, node: TunTsdNode, version: int) -> str:
        if node.name not in self._own:
            self._own[node.name] = node.ips()
        return next(ip for ip in self._own[node.name] if (":" in ip) == (version == 6))

    def leaks(self) -> list[str]:
        """What left the client that is not its own; coordination server and relay are."""
        return self.sniffer.foreign(*(self.underlay(self.h, version) for version in (4, 6)))


class Wiring:
    """What an admin does in mode nodivert: the lines that tsctl prints, and taking them back."""

    def __init__(self, net: RouterLab, said: str) -> None:
        self._net = net
        self.lines = [line.strip() for line in said.splitlines() if line.startswith("  ")]

    def do(self) -> None:
        for line in self.lines:
            self._net.lab.run(self._net.r.namespace, "sh", "-ec", line)

    def undo(self) -> None:
        for line in self.lines:
            if " -I " in line:
                back = line.replace(" -I ", " -D ")
            else:
                back = re.sub(r"^nft 'add chain (.*?) \{.*$", r"nft delete chain \1", line)
            self._net.lab.run(self._net.r.namespace, "sh", "-ec", back)
