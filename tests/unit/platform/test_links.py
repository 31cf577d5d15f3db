"""Link state, the rules for own endpoints, and the monitor's debouncing and wake-up detection."""

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from tsd.hull import LinkState
from tsplatform import links, netlink
from tsplatform.links import LinkWatcher, default_interface_v6, default_route_v4, read_state
from tsplatform.underlay import HostUnderlay, endpoint_addresses


def _state(default_v4: str = "", **addresses: list[str]) -> LinkState:
    return LinkState(
        {name: tuple(ip_network(text) for text in texts) for name, texts in addresses.items()}, default_v4, "", True
    )


@pytest.mark.parametrize(
    ("state", "offered"),
    [
        (_state(lo=["127.0.0.1", "::1"], eth0=["192.0.2.5", "fe80::1"]), ["192.0.2.5"]),
        (_state(default_v4="z9", a1=["192.0.2.5"], z9=["198.51.100.1"]), ["198.51.100.1", "192.0.2.5"]),
        (_state(eth0=["100.64.3.4", "100.115.92.9", "fd7a:115c:a1e0::3"]), ["100.115.92.9"]),
        (_state(eth0=["169.254.1.1", "fd00::1"]), ["169.254.1.1", "fd00::1"]),
        (_state(eth0=["192.0.2.5", "169.254.1.1", "fd00::1"]), ["192.0.2.5"]),
        (
            _state(eth0=["2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::1"]),
            ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"],
        ),
        (_state(zt5=["192.0.2.1"], wt0=["192.0.2.2"], tailscale0=["192.0.2.3"], lo=["127.0.0.1"]), ["127.0.0.1"]),
        (LinkState(), []),
    ],
)
def test_which_local_addresses_are_offered(state: LinkState, offered: list[str]) -> None:
    assert endpoint_addresses(state) == [ip_address(text) for text in offered]


def test_default_routes_from_proc(tmp_path: Path) -> None:
    route = tmp_path / "route"
    route.write_text(
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth1 00000000 010200C0 0003 0 0 200 00000000 0 0 0\n"
        "eth0 00000000 010200C0 0003 0 0 100 00000000 0 0 0\n"
        "tsd0 00000000 010200C0 0003 0 0 1 00000000 0 0 0\n"
        "eth2 0000A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
    )
    assert default_route_v4(route) == ("eth0", ip_address("192.0.2.1"))
    route6 = tmp_path / "ipv6_route"
    zero = "0" * 32
    route6.write_text(
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo\n"
        f"{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00450003 eth0\n"
    )
    assert default_interface_v6(route6) == "eth0"
    assert default_route_v4(tmp_path / "absent") == ("", None)


def test_the_hosts_own_state_has_loopback() -> None:
    state = read_state()
    assert ip_network("127.0.0.1") in state.interface_addresses.get("lo", ())
    assert isinstance(HostUnderlay(LinkWatcher()).addresses(), list)


@pytest.mark.parametrize("cut", range(0, 40))
def test_cut_netlink_messages_never_loop(cut: int) -> None:
    message = (20).to_bytes(4, "little") + bytes(12) + bytes(4)
    assert len(list(netlink.messages((message * 2)[:cut]))) <= 2


async def test_only_real_changes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "DEBOUNCE_S", 0.0)
    monkeypatch.setattr(links, "TICK_S", 0.01)
    first, second = _state(eth0=["192.0.2.1"]), _state(eth0=["192.0.2.2"])
    reads = iter([first, first, first, second])
    last = second
    watcher = LinkWatcher(read=lambda: next(reads, last))
    async with asyncio.timeout(5), contextlib.aclosing(watcher.changes()) as changes:
        assert await anext(changes) == second
    assert watcher.state() == second


async def test_a_wake_is_told_though_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "TICK_S", 0.01)
    asleep = iter([0.0, 0.0, 0.0, 30.0])
    monkeypatch.setattr(links, "_asleep_s", lambda: next(asleep, 30.0))
    same = _state(eth0=["192.0.2.1"])
    watcher = LinkWatcher(read=lambda: same)
    async with asyncio.timeout(5), contextlib.aclosing(watcher.changes()) as changes:
        assert await anext(changes) == same


def _udp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


async def test_watching_goes_on_after_an_error_on_the_socket() -> None:
    """Under uvloop an error (a queue that ran over) would be the last that is heard. Here: a refused datagram."""
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    with _udp() as sock, _udp() as peer:
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        peer.bind(("127.0.0.1", 0))
        target = peer.getsockname()
        sock.connect(target)
        peer.close()
        netlink.watch(loop, sock, heard.set)
        try:
            for _ in range(2):
                sock.send(b"x")
                async with asyncio.timeout(5):
                    await heard.wait()
                heard.clear()
            with _udp() as again:
                again.bind(target)
                again.sendto(b"y", sock.getsockname())
                async with asyncio.timeout(5):
                    await heard.wait()
        finally:
            loop.remove_reader(sock)


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"hlinks{os.getpid()}"
    made = shutil.which("ip") and subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if not made:
        pytest.skip("needs root and ip netns")
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.root
def test_netlink_reports_a_new_address(namespace: str) -> None:
    program = """
import asyncio, subprocess
from tsplatform.links import LinkWatcher
async def main():
    watcher = LinkWatcher()
    print(watcher.state().is_up)
    async def change():
        await asyncio.sleep(0.2)
        for command in ("link add d0 type veth peer name d1", "link set d0 up", "link set d1 up",
                        "addr add 192.0.2.7/24 dev d0",
                        "route add default via 192.0.2.1"):
            subprocess.run(["ip", *command.split()], check=True)
    task = asyncio.create_task(change())
    async for state in watcher.changes():
        if state.default_interface_v4 == "d0":
            print(state.interface_addresses["d0"][0], state.is_up)
            break
    await task
asyncio.run(asyncio.wait_for(main(), 8))
"""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=20)
    assert out.stdout.split("\n")[:2] == ["False", "192.0.2.7/32 True"], out.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and netlink")
def test_a_process_without_free_files_does_not_take_the_network_for_down(caplog: pytest.LogCaptureFixture) -> None:
    watcher = LinkWatcher()
    before = watcher.state()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        after = watcher.refresh()
    assert after == before
    assert "what was seen last counts" in caplog.text
