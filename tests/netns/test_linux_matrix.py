"""Each mode of the firewall on each backend, switched while running: subnet router and exit node, IPv4 and IPv6.

The router's LAN host and the Internet host say as whom they see the client.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator

import pytest

from harness.netlab import wait_for
from harness.routerlab import INTERNET, LAN_HOST, ROUTER, RouterLab, Wiring
from harness.sockets import shout

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

BACKENDS = ["nft", "iptables-nft", "iptables-legacy"]
MODES = ["on", "nodivert", "off"]


def _builtin(net: RouterLab) -> list[str]:
    """Rules in chains that are not ours."""
    save = net.lab.run(net.r.namespace, "sh", "-c", "iptables-nft-save; ip6tables-nft-save; iptables-legacy-save")
    return [line for line in save.splitlines() if re.match(r"-A (?!tsd-)", line)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_f03_routes_and_exit_node(net: RouterLab, mode: str, backend: str) -> None:
    if shutil.which(backend) is None:
        pytest.skip(f"needs {backend}: apt-get install iptables nftables")
    said = net.r.call("set", f"--netfilter-mode={mode}", f"--netfilter-backend={backend}").stdout
    wiring = Wiring(net, said if mode == "nodivert" else "")
    wait_for(lambda: _places(net) == ({backend} if mode != "off" else set()), 15, "our rules in one place")
    if mode == "nodivert":
        assert wiring.lines and not _builtin(net), said
        wiring.do()
    with _closed_by_default(net, backend if mode == "on" else ""):
        _subnet(net, mode)
        _exit_node(net, mode)
    wiring.undo()
    if mode != "on":
        assert not _builtin(net)


def _places(net: RouterLab) -> set[str]:
    """Where rules of ours are."""
    run = net.lab.run
    found = {"nft": run(net.r.namespace, "nft", "list", "tables")}
    found |= {flavour: run(net.r.namespace, f"{flavour}-save") for flavour in BACKENDS[1:]}
    return {name for name, text in found.items() if "inet tsd" in text or ":tsd-forward" in text}


@contextlib.contextmanager
def _closed_by_default(net: RouterLab, flavour: str) -> Iterator[None]:
    """A host whose iptables forward nothing by default, as docker leaves them: an accept in the same table is final."""
    if not flavour.startswith("iptables"):
        yield
        return
    for program in (flavour, flavour.replace("iptables", "ip6tables")):
        net.lab.run(net.r.namespace, program, "-P", "FORWARD", "DROP")
    try:
        yield
    finally:
        for program in (flavour, flavour.replace("iptables", "ip6tables")):
            net.lab.run(net.r.namespace, program, "-P", "FORWARD", "ACCEPT")


def _subnet(net: RouterLab, mode: str) -> None:
    for version in (4, 6):
        client = net.own(net.c, version)
        for snat in ("true", "false") if mode != "off" else ("true",):
            net.r.call("set", f"--snat-subnet-routes={snat}")
            wanted = ROUTER[version] if mode != "off" and snat == "true" else client
            assert net.who(LAN_HOST[version], wanted) == wanted, f"{snat}\n{net.r.tail()}"
        assert net.who(client, LAN_HOST[version], net.l) == LAN_HOST[version], "LAN host to tailnet node"
        assert net.ping(net.c.namespace, net.own(net.r, version))
        assert net.ping(net.r.namespace, client)
        net.r.call("set", "--snat-subnet-routes=true")


def _exit_node(net: RouterLab, mode: str) -> None:
    for version in (4, 6):
        direct = net.underlay(net.c.namespace, version)
        assert net.who(INTERNET[version], direct) == direct
    net.c.call("set", "--exit-node=r")
    try:
        net.leaks()
        for version in (4, 6):
            router = net.underlay(net.r.namespace, version)
            wanted = router if mode != "off" else net.own(net.c, version)
            assert net.who(INTERNET[version], wanted) == wanted, net.r.tail()
            shout(net.c.namespace, INTERNET[version], net.underlay(net.i, version))
        assert net.leaks() == []
    finally:
        net.c.call("set", "--exit-node=")
