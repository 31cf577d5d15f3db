"""Our DERP client, STUN client and probes against the field's own relay."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.headscale import peer_binary
from harness.netlab import NetLab, inside, wait_for
from tsd.base.addr import AddrPort, parse_ip
from tsd.base.clock import SystemClock
from tsd.base.entropy import system_entropy
from tsd.base.keys import NodePrivate
from tsd.netcheck.netcheck import NetcheckMachine, ReportReady, SendStun
from tsd.tailcfg.derpmap import DERPMap, DERPNode, DERPRegion
from tsd.transport import certificates
from tsd.transport.derp import DerpOptions
from tsd.transport.derp_pool import DerpPool, PoolCallbacks
from tsd.transport.netprobe import captive_portal, https_latency
from tsd.transport.udp import UdpSocket

pytestmark = [pytest.mark.root, pytest.mark.peers]


@dataclass
class Relay:
    namespace: str
    map: DERPMap
    address: str


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    binary = peer_binary("derper")
    folder: Path = tmp_path_factory.mktemp("derper")
    with NetLab(f"tsdD{os.getpid()}") as lab:
        namespace = lab.add_host("derp")
        address = lab.address(namespace)
        cert, key = certificates.self_signed([address], time.time())
        (folder / f"{address}.crt").write_bytes(cert)
        (folder / f"{address}.key").write_bytes(key)
        words = [binary, "-a", f"{address}:4443", "-certmode", "manual", "-certdir", str(folder)]
        words += ["-hostname", address, "-http-port", "80", "-c", str(folder / "derper.conf")]
        process = lab.start(namespace, words, folder / "log", {"TS_NO_LOGS_NO_SUPPORT": "true"})
        wait_for(lambda: "serving on" in process.tail(), what="derper")
        node = DERPNode(
            name="900a",
            region_id=900,
            host_name=address,
            cert_name=certificates.pin_of(cert),
            ipv4=address,
            ipv6="none",
            derp_port=4443,
            can_port80=True,
        )
        region = DERPRegion(region_id=900, region_code="lab", region_name="Lab", nodes=(node,))
        yield Relay(namespace, DERPMap(regions={900: region}), address)


class Client:
    """A pool with the relay as home."""

    def __init__(self, relay: Relay) -> None:
        self.private = NodePrivate.generate(system_entropy)
        self.key = self.private.public()
        self.packets: list[bytes] = []
        self.gone: list[tuple[object, bool]] = []
        self.options = DerpOptions(self.private, SystemClock(), system_entropy, lambda sock: None)
        callbacks = PoolCallbacks(
            lambda region, source, packets: self.packets.extend(packets),
            lambda region, key, is_not_here: self.gone.append((key, is_not_here)),
        )
        self.pool = DerpPool(self.options, callbacks)
        self.pool.set_map(relay.map)
        self.pool.set_home(900)


async def until(condition) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def pair(relay: Relay) -> AsyncIterator[tuple[Client, Client]]:
    with inside(relay.namespace):
        a, b = Client(relay), Client(relay)
        await until(lambda: a.pool.is_connected(900) and b.pool.is_connected(900))
        yield a, b
        a.pool.close()
        b.pool.close()


async def test_fast_start_login_and_packets(pair):
    a, b = pair
    link = a.pool._links[900].connection
    assert link._machine.server_key is not None and link._head is None
    a.pool.send_many(900, b.key, b"aabbc", 2)
    b.pool.send(900, a.key, b"hello")
    await until(lambda: len(b.packets) == 3 and a.packets)
    assert b.packets == [b"aa", b"bb", b"c"] and a.packets == [b"hello"]


async def test_peer_gone_and_not_here(pair):
    a, b = pair
    stranger = NodePrivate.generate(system_entropy).public()
    a.pool.send(900, stranger, b"TS\xf0\x9f\x92\xac" + bytes(60))
    await until(lambda: a.gone)
    assert a.gone == [(stranger, True)]
    b.pool.send(900, a.key, b"x")
    await until(lambda: a.packets)
    b.pool.close()
    await until(lambda: len(a.gone) == 2)
    assert a.gone[1] == (b.key, False)


async def test_liveness_probe_is_answered(pair):
    """The real relay pongs, and hands back what we send to ourselves."""
    a, _ = pair
    connection = a.pool._links[900].connection
    connection.probe()
    assert connection._machine._ping and connection._machine._loopback
    await until(lambda: not connection._machine._ping and not connection._machine._loopback)
    assert a.packets == []


async def test_bulk_through_short_queues(pair):
    """Ten megabytes, paced: the relay's queues of 32 packets lose little of it."""
    a, b = pair
    batch = bytes(1300 * 48)
    for _ in range(160):
        a.pool.send_many(900, b.key, batch, 1300)
        await until(lambda: a.pool._links[900].connection._data.size_bytes < 100_000)
    await asyncio.sleep(0.5)
    assert len(b.packets) > 160 * 48 * 0.7


async def test_netcheck_and_probes(relay: Relay):
    with inside(relay.namespace):
        machine = NetcheckMachine(entropy=system_entropy)
        clock = SystemClock()
        found: list[ReportReady] = []

        def drain() -> None:
            for output in machine.take_outputs():
                if isinstance(output, SendStun):
                    socket.send(output.datagram, 0, output.address)
                elif isinstance(output, ReportReady):
                    found.append(output)

        def on_batch(view: memoryview, size: int, source: AddrPort) -> None:
            machine.receive_stun(bytes(view), source, clock.now())
            drain()

        socket = UdpSocket(4, 0, lambda sock: None, on_batch)
        machine.start(relay.map, clock.now(), resolved={})
        drain()
        await until(lambda: found)
        report = found[0].report
        assert list(report.global_v4) == [AddrPort(parse_ip(relay.address), socket.port)]
        assert report.preferred_derp == 900
        socket.close()
        client = Client(relay)
        latency = await https_latency(relay.map.region(900), client.options)
        assert latency is not None and latency < 5
        assert await captive_portal(relay.map, client.options) is False
        client.pool.close()
