"""`RtNetlink` against a real kernel: done twice, read back, one failure among many, a namespace without the right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address, ip_network

import pytest

from harness.netlab import NetLab, inside
from harness.nodes import ROOT
from tsplatform.linux import rtnetlink as rt
from tsplatform.linux.rtnetlink import Route, RtNetlink, Rule

TABLE = 53


@pytest.fixture
def kernel() -> Iterator[RtNetlink]:
    if os.geteuid():
        pytest.skip("needs root")
    with NetLab(f"tsdN{os.getpid()}", "10.97.9") as lab, inside(lab.add_host("n")):
        netlink = RtNetlink()
        yield netlink
        netlink.close()


@pytest.mark.root
@pytest.mark.parametrize(("version", "first"), [(4, "100.64.0.0"), (6, "fd7a:115c:a1e0::")])
def test_routes_are_added_twice_read_back_and_deleted_twice(kernel: RtNetlink, version: int, first: str) -> None:
    index = kernel.index_of("eth0")
    start = int(ip_address(first))
    length = 32 if version == 4 else 128
    routes = [Route(ip_network((start + number, length))) for number in range(1, 451)]
    routes += [Route(ip_network("0.0.0.0/0" if version == 4 else "::/0"))]
    routes += [Route(ip_network("192.0.2.0/24" if version == 4 else "2001:db8::/64"), is_throw=True)]
    for _ in range(2):
        assert kernel.apply([rt.add_route(route, TABLE, index) for route in routes]) == []
        assert {route for route, _ in kernel.routes(version, TABLE)} == set(routes)
    there = kernel.routes(version, TABLE)
    assert {through for route, through in there if not route.is_throw} == {index}
    assert not kernel.routes(version, TABLE + 1)
    for _ in range(2):
        assert kernel.apply([rt.delete_route(route, TABLE, through) for route, through in there]) == []
        assert kernel.routes(version, TABLE) == []


@pytest.mark.root
@pytest.mark.parametrize("version", [4, 6])
def test_rules_and_addresses(kernel: RtNetlink, version: int) -> None:
    index = kernel.index_of("eth0")
    rules = [Rule(version, 5310, 254, 0x80000, 0xFF0000), Rule(version, 5350, 0, 0x80000, 0xFF0000)]
    rules += [Rule(version, 5370, TABLE), Rule(version, 5390, 1000)]
    ip, length = (ip_address("100.64.0.1"), 32) if version == 4 else (ip_address("fd7a:115c:a1e0::1"), 128)
    for _ in range(2):
        assert kernel.apply([rt.add_address(index, ip, length), *map(rt.add_rule, rules)]) == []
        assert kernel.rules(version, 5300, 5400) == rules
        assert (index, ip, length) in kernel.addresses(index) and (index, ip, length) in kernel.addresses()
    for _ in range(2):
        assert kernel.apply([rt.delete_address(index, ip, length), *map(rt.delete_rule, rules)]) == []
        assert kernel.rules(version, 5300, 5400) == []
        assert (index, ip, length) not in kernel.addresses()
    assert len(kernel.rules(version, 0, 1 << 32)) >= 2


@pytest.mark.root
def test_what_fails_is_named_and_the_rest_is_done(kernel: RtNetlink) -> None:
    """Also from another thread than the one that opened the socket."""
    index = kernel.index_of("eth0")
    routes = [Route(ip_network((int(ip_address("100.64.0.0")) + number, 32))) for number in range(250)]
    changes = [rt.add_route(route, TABLE, 9999 if at in (7, 249) else index) for at, route in enumerate(routes)]
    with ThreadPoolExecutor(1) as pool:
        failures = pool.submit(kernel.apply, changes).result(10)
        assert failures == [f"add the route 100.64.0.{at}/32: No such device" for at in (7, 249)]
        assert len(pool.submit(kernel.routes, 4, TABLE).result(10)) == 248
    assert kernel.apply([rt.set_link(9999, is_up=True)]) == ["set the interface up: No such device"]
    assert kernel.apply([rt.set_link(index, is_up=False), rt.limit_gso(index, 60000)]) == []
    assert kernel.routes(4, TABLE) == [], "the kernel keeps routes of an interface that is down"
    assert kernel.index_of("nothing") == 0


def test_a_daemon_without_a_network_device_does_not_load_the_library() -> None:
    words = [sys.executable, "-c", "import sys, tsd.daemon.compose; print([m for m in sys.modules if 'pyroute2' in m])"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/platform:{ROOT}/native"}
    assert subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout.strip() == "[]"
