"""A daemon behind a home router that runs miniupnpd: PCP, NAT-PMP and UPnP with somebody else's implementation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.debs import unpacked
from harness.netlab import NetLab, Process, sh, wait_for

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.interop,
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not shutil.which("nft"), reason="nft is not installed"),
]

OUTSIDE = "8.8.4.77"
"""The router's address outside; miniupnpd refuses those that documentation uses. Nothing leaves the namespaces."""
CHAINS = """
table inet filter {
  chain forward { type filter hook forward priority 0; jump miniupnpd; }
  chain miniupnpd { }
  chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
  chain prerouting_miniupnpd { }
  chain postrouting { type nat hook postrouting priority 100; jump postrouting_miniupnpd; }
  chain postrouting_miniupnpd { }
}
"""
PROBE = """
import asyncio, json, sys
from tsd.base.clock import SystemClock
from tsd.base.entropy import system_entropy
from tsd.engine.path.portmapping import PortMapping
from tsd.engine.path.sockets import host_udp
from tsd.transport.dial import HostDial
from tsplatform.links import read_state

async def main():
    open_udp = host_udp(lambda sock: None)
    mapping = PortMapping(open_udp=open_udp, dial=HostDial(), clock=SystemClock(), entropy=system_entropy)
    changed = asyncio.Event()
    mapping.on_changed = changed.set
    mapping.look(read_state(), 41641)
    async with asyncio.timeout(30):
        await changed.wait()
    seen = mapping.seen
    print(json.dumps([str(mapping.external), seen.upnp, seen.pmp, seen.pcp]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await mapping.close()

asyncio.run(main())
"""


class Router:
    def __init__(self, lab: NetLab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self.inside, self.home = lab.add_host("router"), lab.add_host("home")
        self.process: Process | None = None
        sh("ip", "-n", self.inside, "link", "add", "wan0", "type", "bridge")
        sh("ip", "-n", self.inside, "addr", "add", f"{OUTSIDE}/24", "dev", "wan0")
        sh("ip", "-n", self.inside, "link", "set", "wan0", "up")
        sh("ip", "-n", self.home, "route", "add", "default", "via", lab.address(self.inside))
        (folder / "chains").write_text(CHAINS)
        lab.run(self.inside, "nft", "-f", str(folder / "chains"))

    def start(self, *, pcp_and_pmp: bool, upnp: bool) -> None:
        if self.process is not None:
            self.process.stop()
        yes = {True: "yes", False: "no"}
        settings = {
            "ext_ifname": "wan0", "ext_ip": OUTSIDE, "listening_ip": "eth0", "enable_natpmp": yes[pcp_and_pmp],
            "enable_upnp": yes[upnp], "secure_mode": "yes", "uuid": "00000000-0000-0000-0000-000000000001",
            "lease_file": str(self._folder / "leases"),
        }  # fmt: skip
        lines = [f"{name}={value}" for name, value in settings.items()] + ["allow 1024-65535 0.0.0.0/0 1024-65535"]
        (self._folder / "conf").write_text("\n".join(lines) + "\n")
        pid = self._folder / "pid"
        pid.unlink(missing_ok=True)
        program = unpacked("miniupnpd-nftables") / "usr/sbin/miniupnpd"
        words = [str(program), "-d", "-f", str(self._folder / "conf"), "-P", str(pid)]
        self.process = self._lab.start(self.inside, words, self._folder / "miniupnpd.log")
        wait_for(lambda: "isten" in self.process.tail() or pid.exists(), 20, "miniupnpd")  # type: ignore[union-attr]

    def rules(self) -> str:
        return self._lab.run(self.inside, "nft", "list", "chain", "inet", "filter", "prerouting_miniupnpd")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with NetLab(f"tsdH{os.getpid()}", "192.168.77") as lab:
        yield Router(lab, tmp_path_factory.mktemp("router"))


@pytest.mark.parametrize(("pcp_and_pmp", "upnp"), [(True, False), (False, True), (True, True)])
def test_a_port_is_mapped_and_given_back(router: Router, tmp_path: Path, pcp_and_pmp: bool, upnp: bool) -> None:
    router.start(pcp_and_pmp=pcp_and_pmp, upnp=upnp)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/platform:{ROOT}/native"}
    words = ["ip", "netns", "exec", router.home, sys.executable, "-c", PROBE]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as probe:
        assert probe.stdin is not None and probe.stdout is not None
        line = probe.stdout.readline()
        assert line, router.process.tail() if router.process else ""
        external, saw_upnp, saw_pmp, saw_pcp = json.loads(line)
        assert saw_pcp or saw_pmp if pcp_and_pmp else saw_upnp
        address, _, port = external.rpartition(":")
        assert address == OUTSIDE
        assert port in router.rules() and "41641" in router.rules()
        probe.stdin.close()
        assert probe.wait(30) == 0
    wait_for(lambda: "41641" not in router.rules(), 10, "the end of the mapping")
