"""Peers, driver, dialer, sockets, hostinfo, metrics: the small parts of the engine by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.clock import ManualClock
from tsd.base.errors import HullError
from tsd.base.keys import MachinePrivate, NodePrivate
from tsd.base.machine import Deadline
from tsd.engine.account.prefs import Prefs
from tsd.engine.control import hostinfo
from tsd.engine.driver import Driver
from tsd.engine.names.dialer import Dialer
from tsd.engine.path.datapath import Traffic
from tsd.engine.path.sockets import UdpSockets
from tsd.engine.peers import PeerTable, node_addresses
from tsd.engine.report import metrics
from tsd.tailcfg.node import Node


def key(number: int) -> str:
    return str(NodePrivate(bytes([number]) * 32).public())


def node(number: int, name: str = "", **values: Any) -> Node:
    addresses = (f"100.64.0.{number}/32", f"fd7a:115c:a1e0::{number}/128")
    return Node(id=number, name=name or f"n{number}.tn.example.", key=key(number), addresses=addresses, **values)


class TestPeerTable:
    def test_a_peer_is_found_every_way(self) -> None:
        table = PeerTable()
        peer, replaced = table.upsert(node(1))
        assert replaced is None and len(table) == 1
        assert table.by_id(1) is table.by_handle(peer.handle) is table.by_key(peer.node_key) is peer
        assert table.by_address(ip_address("fd7a:115c:a1e0::1")) is peer

    def test_the_handle_stays_with_the_key(self) -> None:
        table = PeerTable()
        first, _ = table.upsert(node(1))
        same, replaced = table.upsert(node(1, "renamed.tn.example."))
        assert same is first and replaced is None
        assert first.node.name == "renamed.tn.example."

    def test_a_new_key_is_a_new_handle(self) -> None:
        table = PeerTable()
        first, _ = table.upsert(node(1))
        second, replaced = table.upsert(Node(id=1, name="n1.tn.example.", key=key(9)))
        assert replaced is first and second.handle != first.handle
        assert table.by_handle(first.handle) is None and table.by_key(first.node_key) is None

    def test_an_address_that_moved_belongs_to_the_new_owner(self) -> None:
        table = PeerTable()
        table.upsert(node(1))
        moved, _ = table.upsert(Node(id=2, name="n2.", key=key(2), addresses=("100.64.0.1/32",)))
        table.remove(1)
        assert table.by_address(ip_address("100.64.0.1")) is moved

    def test_entries_that_are_no_addresses_are_left_out(self) -> None:
        odd = Node(id=1, key=key(1), addresses=("100.64.0.1/32", "10.0.0.0/8", "nonsense", ""))
        assert node_addresses(odd) == (ip_address("100.64.0.1"),)
        assert node_addresses(Node(id=2, key=key(2), addresses=None)) == ()


class _Machine:
    """Wants to be woken once; each wake-up makes two outputs, the second from the first."""

    def __init__(self, at: float) -> None:
        self.at: float | None = at
        self.outputs: list[str] = []

    def next_deadline(self) -> Deadline | None:
        return None if self.at is None else Deadline(self.at, "test")

    def on_deadline(self, now: float) -> None:
        self.at = None
        self.outputs.append("woken")

    def take_outputs(self) -> list[str]:
        taken, self.outputs = self.outputs, []
        return taken


class TestDriver:
    async def test_outputs_of_outputs_are_drained_too(self) -> None:
        clock = ManualClock()
        driver, machine, seen = Driver(clock), _Machine(clock.now() + 0.01), []

        def handle(output: str) -> None:
            seen.append(output)
            if output == "woken":
                machine.outputs.append("follow-up")
                driver.kick()

        driver.add(machine, handle)
        driver.kick()
        clock.advance(0.01)
        await asyncio.sleep(0.05)
        assert seen == ["woken", "follow-up"]

    async def test_an_early_timer_counts_as_reached(self) -> None:
        clock = ManualClock()
        driver, machine = Driver(clock), _Machine(clock.now() + 0.01)
        driver.add(machine, lambda output: None)
        driver.kick()
        await asyncio.sleep(0.05)
        assert machine.at is None

    async def test_w17_a_machine_that_fails_does_not_stop_the_others(self) -> None:
        class Broken(_Machine):
            asked = 0

            def on_deadline(self, now: float) -> None:
                self.asked += 1
                raise ValueError("broken")

        clock = ManualClock()
        driver, broken, sound = Driver(clock), Broken(clock.now() + 0.01), _Machine(clock.now() + 0.01)
        driver.add(broken, lambda output: None)
        driver.add(sound, lambda output: None)
        driver.kick()
        await asyncio.sleep(0.1)
        assert sound.at is None, "the sound one had its turn"
        assert broken.asked == 1, "no busy loop"
        driver.close()

    async def test_closed_means_quiet(self) -> None:
        clock = ManualClock()
        driver, machine = Driver(clock), _Machine(clock.now())
        driver.add(machine, lambda output: None)
        driver.kick()
        driver.close()
        await asyncio.sleep(0.02)
        assert machine.at is not None


class _Names:
    def tailnet_addresses(self, name: str) -> list[IPAddress]:
        if name == "twice":
            return [parse_ip("100.64.0.7"), parse_ip("127.0.0.1")]
        return [parse_ip("100.64.0.7")] if name == "web" else []

    def is_overlay(self, ip: IPAddress) -> bool:
        return ip == parse_ip("100.64.0.7")

    def is_own(self, ip: IPAddress) -> bool:
        return ip == parse_ip("100.64.0.1")

    def held_back(self, ip: IPAddress) -> str:
        return "the exit node is away" if ip == parse_ip("192.0.2.66") else ""

    async def resolve_upstream(self, name: str) -> list[IPAddress]:
        if name == "local":
            return [parse_ip("127.0.0.1")]
        raise OSError(f"no address for {name}")


class _Net:
    def __init__(self) -> None:
        self.asked: list[AddrPort] = []
        self.is_silent = False

    async def connect(self, remote: AddrPort, timeout_s: float = 10.0) -> Any:
        self.asked.append(remote)
        if self.is_silent:
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        raise ConnectionRefusedError("refused")

    async def open_datagram(self, local: AddrPort | None, remote_family: int = 4) -> Any:
        return "port"


class TestDialer:
    async def test_u05_names_and_routes_choose_the_way(self) -> None:
        net = _Net()
        dialer = Dialer(net, _Names())  # type: ignore[arg-type]
        with pytest.raises(ConnectionRefusedError):
            await dialer.dial("web", 80)
        assert net.asked == [AddrPort(parse_ip("100.64.0.7"), 80)]
        with pytest.raises(OSError, match="no address"):
            await dialer.dial("nosuch", 80)
        assert await dialer.open_datagram(parse_ip("100.64.0.7")) == "port"
        assert await dialer.open_datagram(parse_ip("192.0.2.1")) is None

    async def test_u05_our_own_address_is_the_loopback_of_either_family(self) -> None:
        dialer = Dialer(_Net(), _Names())  # type: ignore[arg-type]
        try:
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "::1", 0)
        except OSError:
            pytest.skip("this host has no ::1")
        port = server.sockets[0].getsockname()[1]
        (await dialer.dial("100.64.0.1", port)).abort()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await dialer.dial("100.64.0.1", port)

    async def test_service_addresses_are_answered_here_or_refused_at_once(self) -> None:
        dialer = Dialer(_Net(), _Names())  # type: ignore[arg-type]
        for host in ("100.100.100.100", "[fd7a:115c:a1e0::53]"):
            with pytest.raises(ConnectionRefusedError):
                await dialer.dial(host, 53)
        dialer.open_service = lambda remote: ("service", remote.port)  # type: ignore[assignment, return-value]
        assert await dialer.dial("100.100.100.100", 53) == ("service", 53)  # type: ignore[comparison-overlap]

    async def test_foreign_and_own_addresses_use_the_host(self) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hi")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        dialer = Dialer(_Net(), _Names())  # type: ignore[arg-type]
        for host in ("local", "127.0.0.1", "100.64.0.1"):
            stream = await dialer.dial(host, port)
            assert await stream.read(10) == b"hi"
            await stream.close()
        server.close()

    async def test_a_silent_first_address_leaves_time_for_the_second(self) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        net = _Net()
        net.is_silent = True
        dialer = Dialer(net, _Names())  # type: ignore[arg-type]
        stream = await dialer.dial("twice", server.sockets[0].getsockname()[1], 5.0)
        await stream.close()
        assert len(net.asked) == 1
        server.close()


class _Udp:
    def __init__(self, family: int, port: int) -> None:
        self.family, self.port = family, port or 50000 + family
        self.is_open = True

    def send(self, datagrams: bytes, datagram_bytes: int, to: AddrPort) -> bool:
        return True

    def close(self) -> None:
        self.is_open = False


class TestSockets:
    def opener(self, taken: set[int], opened: list[_Udp], without_v6: bool = False) -> Callable[..., Any]:
        def open_udp(family: int, port: int, on_batch: Any, on_error: Any) -> _Udp:
            if port in taken or (without_v6 and family == 6):
                raise HullError("bind", "in use")
            opened.append(_Udp(family, port))
            return opened[-1]

        return open_udp

    def test_configured_port_then_any(self) -> None:
        opened: list[_Udp] = []
        sockets = UdpSockets(self.opener({41641}, opened), 0, lambda *a: None, lambda *a: None)
        sockets.bind()
        assert sockets.port_v4 == 50004 and sockets.port_v6 == 50004 and not sockets.problem
        sockets.bind()
        assert sockets.port_v4 == 50004 and not opened[0].is_open

    def test_f05_no_ipv6_is_no_problem(self) -> None:
        sockets = UdpSockets(self.opener(set(), [], without_v6=True), 4000, lambda *a: None, lambda *a: None)
        sockets.bind()
        assert sockets.port_v4 == 4000 and sockets.port_v6 == 0 and not sockets.problem
        assert not sockets.send(AddrPort(parse_ip("2001:db8::1"), 1), b"x", 1)

    def test_no_ipv4_is_said(self) -> None:
        sockets = UdpSockets(self.opener({0, 41641}, []), 0, lambda *a: None, lambda *a: None)
        sockets.bind()
        assert "in use" in sockets.problem


def test_hostinfo_tells_wishes_and_ports() -> None:
    facts = hostinfo.HostFacts("linux", "6.1", "box", "x86_64")
    prefs = Prefs(hostname="given", advertise_tags=("tag:b", "tag:a"), advertise_routes=(ip_network("10.0.0.0/8"),))
    machine = MachinePrivate(bytes(31) + b"\x40").public()
    ports = {parse_ip("100.64.0.1"): 1234}
    info = hostinfo.build(facts, prefs, machine, "1", is_userspace=True, peerapi_ports=ports, net_info=None)
    assert (info.hostname, info.request_tags, info.routable_ips) == ("given", ("tag:a", "tag:b"), ("10.0.0.0/8",))
    assert info.service_port("peerapi4") == 1234 and info.service_port("peerapi-dns-proxy") == 1
    assert len(info.backend_log_id) == 64 and info.no_logs_no_support


def test_user_metrics_have_the_names_of_the_field() -> None:
    traffic = Traffic()
    traffic.derp.rx_bytes = 5
    traffic.inbound_drops.add("acl", 2)
    traffic.inbound_drops.add("something of ours", 3)
    text = metrics.user_metrics(traffic, metrics.Gauges(home_derp_region=900))
    assert 'tailscaled_inbound_bytes_total{path="derp"} 5\n' in text
    assert 'tailscaled_inbound_dropped_packets_total{reason="acl"} 2\n' in text
    assert 'tailscaled_inbound_dropped_packets_total{reason="error"} 3\n' in text
    assert "tailscaled_home_derp_region_id 900\n" in text
