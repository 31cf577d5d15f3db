"""Reported faults of the underlay that need more than one room: sockets, relays, home region, key twins."""

from __future__ import annotations

import asyncio
from ipaddress import IPv4Address

from harness.derpd import DerpServer
from tsd.base.addr import AddrPort
from tsd.base.clock import SystemClock
from tsd.base.entropy import SeededEntropy, system_entropy
from tsd.base.keys import DiscoPrivate, NodePrivate
from tsd.disco.box import DiscoKeyring
from tsd.disco.messages import Ping
from tsd.magicsock.magicsock import Magicsock
from tsd.magicsock.types import DerpSource, PeerPaths, SendUdp
from tsd.netcheck.home import HomeChooser
from tsd.netcheck.report import Report
from tsd.tailcfg.derpmap import DERPMap, problems
from tsd.transport.derp import DerpOptions
from tsd.transport.derp_pool import DerpPool, PoolCallbacks
from tsd.transport.udp import UdpSocket


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Client:
    def __init__(self, derp_map: DERPMap, private: NodePrivate | None = None) -> None:
        self.private = private or NodePrivate.generate(system_entropy)
        self.packets: list[bytes] = []
        self.states: list[bool] = []
        self.health: list[str] = []
        self.pool = DerpPool(
            DerpOptions(self.private, SystemClock(), system_entropy, lambda sock: None),
            PoolCallbacks(
                lambda region, source, packets: self.packets.extend(packets),
                on_connected=lambda region, is_up, reason: self.states.append(is_up),
                on_health=lambda region, text: self.health.append(text),
            ),
        )
        self.pool.set_map(derp_map)
        self.pool.set_home(900)


async def test_w05_pings_to_a_port_no_longer_bound_get_no_pong():
    entropy = SeededEntropy(5)
    ours, theirs = DiscoPrivate.generate(entropy), DiscoPrivate.generate(entropy)
    sock = Magicsock(NodePrivate.generate(entropy), ours, entropy=entropy)
    sock.set_peer(1, PeerPaths(NodePrivate.generate(entropy).public(), theirs.public()), 1.0)
    pongs: list[SendUdp] = []

    def on_batch(view: memoryview, size: int, source: AddrPort) -> None:
        sock.receive_disco(bytes(view), source, 2.0)
        pongs.extend(o for o in sock.take_outputs() if isinstance(o, SendUdp))

    old = UdpSocket(4, 0, lambda s: None, on_batch)
    new = UdpSocket(4, 0, lambda s: None, on_batch)
    sender = UdpSocket(4, 0, lambda s: None, lambda *_: None)
    old.close()
    ring = DiscoKeyring(theirs)
    for number, port in enumerate((old.port, new.port)):
        raw = ring.seal_to(ours.public().raw, entropy(24), Ping(bytes([number]) * 12).encode())
        sender.send(raw, 0, AddrPort(IPv4Address("127.0.0.1"), port))
    await until(lambda: pongs)
    await asyncio.sleep(0.05)
    assert len(pongs) == 1
    new.close()
    sender.close()


async def test_w06_relayed_ping_from_the_old_key_gets_no_answer():
    entropy = SeededEntropy(6)
    ours, old, new = (DiscoPrivate.generate(entropy) for _ in range(3))
    node = NodePrivate.generate(entropy).public()
    sock = Magicsock(NodePrivate.generate(entropy), ours, entropy=entropy)
    for key in (old, new):
        sock.set_peer(1, PeerPaths(node, key.public(), (), 3), 1.0)
    for key, answers in ((old, 0), (new, 1)):
        raw = DiscoKeyring(key).seal_to(ours.public().raw, entropy(24), Ping(entropy(12)).encode())
        sock.receive_disco(raw, DerpSource(3, node), 2.0)
        assert len(sock.take_outputs()) == answers


async def test_w13_twins_do_not_storm_the_relay():
    """Two machines with one key: both stay connected, the one that spoke last is reached."""
    server = DerpServer()
    await server.start()
    a = Client(server.map())
    twin = Client(server.map(), a.private)
    other = Client(server.map())
    for client in (a, twin, other):
        await until(lambda c=client: c.pool.is_connected(900))
    for speaker in (a, twin, a):
        speaker.pool.send(900, other.private.public(), b"from a twin")
        await until(lambda: other.packets)
        other.packets.clear()
        other.pool.send(900, a.private.public(), b"answer")
        await until(lambda s=speaker: s.packets)
        speaker.packets.clear()
    assert a.states == [True] and twin.states == [True] and len(server.requests) == 3
    for client in (a, twin, other):
        client.pool.close()
    await server.stop()


async def test_w13_a_relay_that_keeps_forgetting_us_names_the_twin():
    server = DerpServer()
    await server.start()
    a = Client(server.map())
    for _ in range(2):
        await until(lambda: a.pool.is_connected(900))
        a.pool._links[900].connection.close("relay has forgotten this connection")
    assert any("same node key" in text for text in a.health)
    a.pool.close()
    await server.stop()


async def test_n18_custom_port_is_used_and_bad_hosts_are_named():
    server = DerpServer()
    await server.start()
    assert server.port not in (0, 443)
    a = Client(server.map(stun_port=-1, ipv6="none"))
    await until(lambda: a.pool.is_connected(900))
    a.pool.close()
    found = problems(server.map(host_name="https://relay.test"))
    assert len(found) == 1 and "https://relay.test" in found[0]
    await server.stop()


async def test_n24_an_empty_map_is_reported_and_links_stay():
    server = DerpServer()
    await server.start()
    a, b = Client(server.map()), Client(server.map())
    await until(lambda: a.pool.is_connected(900) and b.pool.is_connected(900))
    a.pool.set_map(DERPMap(regions={}))
    a.pool.send(900, b.private.public(), b"still here")
    await until(lambda: b.packets)
    assert a.health and a.states == [True]
    a.pool.close()
    b.pool.close()
    await server.stop()


async def test_f17_home_whose_relay_is_blocked_is_left():
    """STUN of region 900 answers, its relay does not; region 901 is slower but whole."""
    server = DerpServer()
    await server.start()
    dead = server.map(derp_port=1).regions[900]
    whole = server.map(901).regions[901]
    a = Client(DERPMap(regions={900: dead, 901: whole}))
    await until(a.pool.unreachable)
    chooser = HomeChooser()
    chooser.home = 900
    report = Report(now=100.0, region_latency_s={900: 0.01, 901: 0.2})
    home = chooser.choose(report, 99.0, last_heard=a.pool.last_heard, unreachable=a.pool.unreachable())
    assert home == 901
    a.pool.set_home(home)
    await until(lambda: a.pool.is_connected(901))
    a.pool.close()
    await server.stop()
