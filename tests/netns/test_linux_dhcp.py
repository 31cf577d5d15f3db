"""A provider's DHCP inside 100.64.0.0/10 while our firewall drops strangers from there: leases come and are renewed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.debs import unpacked
from harness.netlab import Process, inside, sh, wait_for
from harness.routerlab import LAN_HOST, ROUTER, RouterLab, Wiring

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

SERVER = "100.100.0.1"
BOOTPS, BOOTPC, OTHER_PORT = 67, 68, 69

_SCRIPT = """#!/bin/sh
case $1 in
bound|renew)
    ip addr replace "$ip/$mask" dev "$interface"
    [ "$serverid" = "$router" ] || ip route replace "$serverid" via "$router" dev "$interface" ;;
deconfig) ip addr flush dev "$interface" scope global ;;
esac
echo "$1 $ip" >> "$LEASES"
"""


class Provider(NamedTuple):
    gateway: str
    mask: str
    first: str
    last: str


INSIDE = Provider(SERVER, "255.255.240.0", "100.100.5.20", "100.100.5.40")
"""Server and leases in the range."""
BEHIND = Provider("198.51.100.1", "255.255.255.0", "198.51.100.20", "198.51.100.40")
"""The server is in the range, the leases are not: the drop stays in force."""


class DhcpLab:
    """A wire between the router and its provider `w`."""

    def __init__(self, net: RouterLab, folder: Path) -> None:
        self.net = net
        self.folder = folder
        self.router, self.w = net.r.namespace, net.lab.add_host("w")
        sh("ip", "-n", self.w, "link", "add", "isp0", "type", "veth", "peer", "name", "wan0", "netns", self.router)
        sh("ip", "-n", self.w, "link", "set", "isp0", "up")
        sh("ip", "-n", self.router, "link", "set", "wan0", "up")
        self.busybox = str(unpacked("busybox") / "bin/busybox")
        self.leases = folder / "leases"
        script = folder / "script"
        script.write_text(_SCRIPT)
        script.chmod(0o755)
        self._script = str(script)

    @contextlib.contextmanager
    def serving(self, provider: Provider) -> Iterator[None]:
        lab = self.net.lab
        for address, mask in {SERVER: "32", provider.gateway: provider.mask}.items():
            sh("ip", "-n", self.w, "addr", "add", f"{address}/{mask}", "dev", "isp0")
        config = self.folder / "udhcpd.conf"
        (self.folder / "lease_file").write_bytes(b"")
        config.write_text(
            f"start {provider.first}\nend {provider.last}\ninterface isp0\nmax_leases 20\n"
            f"lease_file {self.folder}/lease_file\npidfile {self.folder}/pid\noption lease 600\n"
            f"option subnet {provider.mask}\noption router {provider.gateway}\n"
        )
        words = [self.busybox, "udhcpd", "-f", "-a", "100", "-I", SERVER, str(config)]
        server = lab.start(self.w, words, self.folder / "udhcpd.log")
        try:
            wait_for(lambda: f":{BOOTPS}" in lab.run(self.w, "ss", "-lun"), 10, "the DHCP server")
            yield
        finally:
            server.stop()
            sh("ip", "-n", self.w, "addr", "flush", "dev", "isp0", "scope", "global")

    @contextlib.contextmanager
    def client(self) -> Iterator[Process]:
        self.leases.write_text("")
        words = [self.busybox, "udhcpc", "-f", "-i", "wan0", "-s", self._script, "-t", "20", "-T", "1"]
        environ = {"LEASES": str(self.leases)}
        process = self.net.lab.start(self.router, words, self.folder / "udhcpc.log", environ)
        try:
            yield process
        finally:
            process.stop()
            sh("ip", "-n", self.router, "addr", "flush", "dev", "wan0", "scope", "global")

    def wait(self, event: str) -> str:
        """The address of the lease."""

        def happened() -> list[str]:
            return [line for line in self.leases.read_text().splitlines() if line.startswith(f"{event} ")]

        try:
            wait_for(happened, 30, event)
        except TimeoutError as err:
            logs = [(self.folder / f"{name}.log").read_text()[-2000:] for name in ("udhcpc", "udhcpd")]
            raise TimeoutError(f"{err}; saw {self.leases.read_text()!r}\n{logs}") from None
        return happened()[-1].split()[1]

    def passes(self, port: int, target: str) -> bool:
        """Whether a datagram that nobody asked for gets from the server's port 67 to a port of the router."""
        with inside(self.router):
            receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with inside(self.w):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with receiver, sender:
            for sock in (receiver, sender):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            receiver.bind((target, port))
            receiver.settimeout(0.3)
            sender.bind((SERVER, BOOTPS))
            for _ in range(3):
                sender.sendto(b"?", (target, port))
                with contextlib.suppress(TimeoutError):
                    return bool(receiver.recv(10))
        return False


@pytest.fixture(scope="module")
def dhcp(net: RouterLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DhcpLab]:
    made = DhcpLab(net, tmp_path_factory.mktemp("dhcp"))
    yield made
    sh("ip", "-n", made.w, "link", "del", "isp0")
    net.reset()


@pytest.fixture(params=[(mode, backend) for mode in ("on", "nodivert") for backend in ("nft", "iptables-nft")])
def firewall(net: RouterLab, request: pytest.FixtureRequest) -> Iterator[None]:
    """Our chains in force, whoever leads to them."""
    mode, backend = request.param
    if shutil.which(backend) is None:
        pytest.skip(f"needs {backend}: apt-get install iptables nftables")
    said = net.r.call("set", f"--netfilter-mode={mode}", f"--netfilter-backend={backend}").stdout
    wiring = Wiring(net, said if mode == "nodivert" else "")
    wiring.do()
    yield
    wiring.undo()


@pytest.mark.usefixtures("firewall")
def test_f06_a_lease_comes_and_is_renewed(net: RouterLab, dhcp: DhcpLab) -> None:
    with dhcp.serving(BEHIND), dhcp.client() as client:
        address = dhcp.wait("bound")
        wait_for(lambda: not dhcp.passes(OTHER_PORT, address), 60, "the drop of strangers")
        client.send(signal.SIGUSR1)
        assert dhcp.wait("renew") == address
        client.stop()
        assert dhcp.passes(BOOTPC, address) and not dhcp.passes(OTHER_PORT, address)
    with dhcp.serving(INSIDE), dhcp.client() as client:
        address = dhcp.wait("bound")
        assert address.startswith("100.100.5.")
        client.send(signal.SIGUSR1)
        assert dhcp.wait("renew") == address
        wait_for(lambda: net.ping(dhcp.w, address), 20, "the provider reaches the host")
        assert net.ping(net.r.namespace, SERVER)
        assert net.ping(net.r.namespace, net.own(net.c, 4)), "the tailnet"
    assert net.who(LAN_HOST[4], ROUTER[4]) == ROUTER[4]
