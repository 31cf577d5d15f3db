"""The DERP client over real sockets, against the product's own router."""

import asyncio

import pytest
import uvloop

from harness.derpd import DerpServer
from tsd.base.addr import parse_ip
from tsd.base.clock import SystemClock
from tsd.base.entropy import system_entropy
from tsd.base.keys import NodePrivate
from tsd.tailcfg.derpmap import DERPMap
from tsd.transport.derp import DerpOptions
from tsd.transport.derp_pool import DerpPool, PoolCallbacks
from tsd.transport.proxy_env import ProxySettings

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Client:
    def __init__(self, server: DerpServer, proxy: str = "", **node_fields) -> None:
        self.private = NodePrivate.generate(system_entropy)
        self.key = self.private.public()
        self.packets: list[bytes] = []
        self.gone: list[tuple[object, bool]] = []
        self.states: list[tuple[int, bool, str]] = []
        self.health: list[str] = []
        proxies = ProxySettings(https_proxy=proxy)
        options = DerpOptions(
            self.private, SystemClock(), system_entropy, lambda s: None, server.plain, proxies=proxies
        )
        callbacks = PoolCallbacks(
            lambda region, src, packets: self.packets.extend(packets),
            lambda region, key, not_here: self.gone.append((key, not_here)),
            lambda *state: self.states.append(state),
            lambda region, text: self.health.append(text),
        )
        self.pool = DerpPool(options, callbacks)
        self.pool.set_map(server.map(**node_fields))
        self.pool.set_home(900)

    async def ready(self) -> None:
        await until(lambda: self.pool.is_connected(900))


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def run(factory, main) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("factory", LOOPS)
@pytest.mark.parametrize("options", [{}, {"with_meta": False}, {"plain": True}])
def test_packets_both_ways_and_peer_gone(factory, options):
    async def main() -> None:
        server = DerpServer(**options)
        await server.start()
        a, b = Client(server), Client(server)
        a.pool.send(900, b.key, b"before the login")
        await b.ready()
        b.pool.send(900, a.key, b"one")
        await a.ready()
        a.pool.send(900, b.key, b"two")
        a.pool.send_many(900, b.key, b"aabbc", 2)
        await until(lambda: len(b.packets) >= 4)
        assert b.packets[-4:] == [b"two", b"aa", b"bb", b"c"]
        is_fast = [b"Derp-Fast-Start" in r for r in server.requests]
        assert is_fast == [options == {}] * 2
        a.pool.close()
        await until(lambda: b.gone)
        assert b.gone == [(a.key, False)]
        b.pool.close()
        await server.stop()

    run(factory, main)


@pytest.mark.parametrize("factory", LOOPS)
def test_bulk_over_one_connection(factory):
    async def main() -> None:
        server = DerpServer()
        await server.start()
        a, b = Client(server), Client(server)
        await a.ready()
        await b.ready()
        batch = b"".join(bytes([i]) * 1300 for i in range(64))
        for _ in range(20):
            a.pool.send_many(900, b.key, batch, 1300)
            await asyncio.sleep(0.002)
        await until(lambda: len(b.packets) == 20 * 64)
        assert b"".join(b.packets) == batch * 20
        a.pool.close()
        b.pool.close()
        await server.stop()

    run(factory, main)


def test_lost_connection_comes_back_and_refusals_are_told():
    async def main() -> None:
        server = DerpServer()
        await server.start()
        a = Client(server)
        await a.ready()
        server.drop_all()
        await until(lambda: not a.pool.is_connected(900))
        await a.ready()
        assert [s[1] for s in a.states] == [True, False, True]
        a.pool.close()
        for wrong in ({"cert_name": "sha256-raw:" + "0" * 64}, {"host_name": "wrong.test"}, {"derp_port": 1}):
            c = Client(server, **wrong)
            await until(lambda c=c: c.states)
            assert not c.states[0][1] and c.states[0][2]
            c.pool.close()
        server.with_meta, server.status = False, b"503 Busy"
        await server.stop()
        await server.start()
        d = Client(server)
        await until(lambda: "503" in d.pool.last_error(900))
        d.pool.close()
        await server.stop()

    run(LOOPS[0], main)


def test_n24_empty_map_keeps_links_and_vanished_home_is_left():
    async def main() -> None:
        server = DerpServer()
        await server.start()
        a = Client(server)
        await a.ready()
        a.pool.set_map(DERPMap(regions={}))
        assert a.pool.is_connected(900) and a.health
        a.pool.set_map(server.map())
        assert a.pool.is_connected(900)
        a.pool.set_map(server.map(901))
        assert not a.pool.is_connected(900) and not a.pool.send(900, a.key, b"x")
        a.pool.set_home(901)
        await until(lambda: a.pool.is_connected(901))
        a.pool.close()
        await server.stop()

    run(LOOPS[0], main)


def test_unknown_regions_are_drops_and_dead_ones_back_off():
    async def main() -> None:
        server = DerpServer()
        await server.start()
        await server.stop()
        a = Client(server)
        await until(lambda: a.pool.unreachable())
        assert a.pool.unreachable() == {900}
        assert len(a.states) == 3 and not any(s[1] for s in a.states)
        assert not a.pool.send(0, a.key, b"x") and not a.pool.send(77, a.key, b"x")
        assert a.pool.drops["no relay"] == 2
        a.pool.close()

    run(LOOPS[0], main)


def test_a_relay_that_refuses_after_tls_is_not_stormed():
    async def main() -> None:
        server = DerpServer(with_meta=False)
        server.status = b"503 Busy"
        await server.start()
        a = Client(server)
        await asyncio.sleep(2)
        assert 3 <= len(server.requests) <= 5 and a.pool.unreachable() == {900}
        a.pool.close()
        await server.stop()

    run(LOOPS[0], main)


@pytest.mark.parametrize("factory", LOOPS)
def test_w25_no_frame_is_ever_cut(factory):
    """Many tasks send through a slow relay and a third of them is cancelled at random."""

    async def main() -> None:
        server = DerpServer()
        await server.start()
        a, b = Client(server), Client(server)
        await a.ready()
        await b.ready()

        async def sender(i: int) -> None:
            for _ in range(50):
                a.pool.send_many(900, b.key, bytes([i]) * 13000, 1300)
                a.pool.send(900, b.key, bytes([i]) * 1300)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(sender(i)) for i in range(30)]
        connection = next(iter(server.transports))
        for n, task in enumerate(tasks):
            server.transports[connection].pause_reading()
            await asyncio.sleep(0.005)
            server.transports[connection].resume_reading()
            await asyncio.sleep(0.005)
            if n % 3 == 0:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        a.pool.send(900, b.key, b"last")
        await until(lambda: b.packets and b.packets[-1] == b"last")
        assert all(len(p) == 1300 and len(set(p)) == 1 for p in b.packets[:-1])
        assert not server.router.drops or set(server.router.drops) == {"queue full"}
        a.pool.close()
        b.pool.close()
        await server.stop()

    run(factory, main)


def test_w26_memory_stays_flat_towards_a_stalled_relay():
    async def main() -> None:
        server = DerpServer()
        await server.start()
        a, b = Client(server), Client(server)
        await a.ready()
        for transport in server.transports.values():
            transport.pause_reading()
        for _ in range(2000):
            a.pool.send_many(900, b.key, bytes(26000), 1300)
        link = a.pool._links[900].connection
        assert link._data.size_bytes <= 1 << 20 and link.dropped > 0
        a.pool.close()
        b.pool.close()
        await server.stop()

    run(LOOPS[0], main)


def test_relays_are_reached_through_the_proxy_of_the_environment():
    async def main() -> None:
        server = DerpServer()
        await server.start()
        heads: list[bytes] = []

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                writer.write(data)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            there = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer), return_exceptions=True)

        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        where = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        a = Client(server, where, ipv4="192.0.2.1")
        await a.ready()
        assert heads[0].startswith(f"CONNECT relay.test:{server.port} ".encode())
        a.pool.close()
        refused = Client(server, "socks5://127.0.0.1:1")
        await until(lambda: refused.states)
        assert "not supported" in refused.states[0][2]
        refused.pool.close()
        proxy.close()
        await server.stop()

    run(LOOPS[0], main)


def test_a_connection_from_an_address_that_is_gone_is_replaced_at_once():
    async def main() -> None:
        server = DerpServer(plain=True)
        await server.start()
        client = Client(server)
        await client.ready()
        client.pool.link_changed([parse_ip("127.0.0.1")])
        client.pool.link_changed()
        await asyncio.sleep(0.05)
        assert [up for _, up, _ in client.states] == [True]
        client.pool.link_changed([parse_ip("192.0.2.1")])
        assert client.states[-1] == (900, False, "local address is gone")
        await until(lambda: [up for _, up, _ in client.states] == [True, False, True])
        client.pool.close()
        await server.stop()

    run(LOOPS[0], main)
