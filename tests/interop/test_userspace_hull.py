"""The userspace hull as a user meets it: two tsd in the tailnet of `tsd coord`, everything through their proxies.

Many connections at once, big transfers, the ways a TCP connection can end, datagrams, names; then the same over a
network that loses, reorders and duplicates.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.coordproc import CoordProcess
from harness.impair import ImpairedLab
from harness.netlab import NetLab, inside, wait_for
from harness.nodes import ROOT, TsdNode
from harness.proxyclient import Refused, SocksDatagrams, Streams, via_http, via_socks
from harness.trafficserver import reset, stream_of
from tsd.dns import wire as codec

pytestmark = [pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(240)]

WEB, TRAFFIC = 8000, 7000
PROXIES: dict[str, Callable[[str, int], Awaitable[Streams]]] = {"socks": via_socks, "http": via_http}
MEGABYTE = 1 << 20


class Pair:
    """coord, and tsd nodes a and b with a web server and a traffic server behind each."""

    def __init__(self, lab: NetLab, coord: CoordProcess, folder: Path) -> None:
        self.lab = lab
        self.coord = coord
        a, b = f"{lab.prefix}-a", f"{lab.prefix}-b"
        key = self.coord.auth_key(reusable=True, user="alice")
        self.web = folder / "web"
        self.web.mkdir()
        self.a, self.b = TsdNode(lab, a, folder / "a", "a"), TsdNode(lab, b, folder / "b", "b")
        for node in (self.a, self.b):
            node.start()
            node.up(self.coord.url, key)
            node.serve(WEB, self.web)
            words = [sys.executable, "-m", "harness.trafficserver", str(TRAFFIC)]
            lab.start(node.namespace, words, folder / f"traffic-{node.name}.log", {"PYTHONPATH": str(ROOT / "tests")})
        self.ips = {"a": self.a.ips(), "b": self.b.ips()}
        self.a.wait_for_peer("b")
        self.b.wait_for_peer("a")
        wait_for(lambda: f"via {lab.address(b)}:" in self.a.ping("b", "--c=5", check=False), 60, "a direct path")
        wait_for(lambda: f"via {lab.address(a)}:" in self.b.ping("a", "--c=5", check=False), 60, "a direct path back")

    def run(self, work: Coroutine[Any, Any, Any], node: str = "a") -> Any:
        """On a loop of its own, with the sockets of that node's namespace."""
        with inside(f"{self.lab.prefix}-{node}"):
            return asyncio.run(work)

    def ask(self, question: str, node: str = "b") -> str:
        """A command to that node's traffic server, from its own host."""

        async def asking() -> str:
            return (await say(await asyncio.open_connection("127.0.0.1", TRAFFIC), question)).decode()

        return str(self.run(asking(), node))


@contextlib.contextmanager
def running(lab: NetLab, folder: Path) -> Iterator[Pair]:
    hub, *_ = [lab.add_host(name) for name in ("h0", "a", "b")]
    if isinstance(lab, ImpairedLab):
        lab.plug_in()
    ports = {"control_port": 8080, "derp_port": 3340, "stun_port": 3478}
    with CoordProcess(folder / "coord", netns=hub, address=lab.address(hub), **ports) as coord:
        yield Pair(lab, coord, folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with NetLab(f"tsdTu{os.getpid()}", "10.95.0") as lab, running(lab, tmp_path_factory.mktemp("hull")) as made:
        yield made


async def say(streams: Streams, command: str, payload: bytes = b"") -> bytes:
    """Send the command and the payload, half-close, and read all of the answer."""
    reader, writer = streams
    try:
        writer.write(command.encode() + b"\n" + payload)
        writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


# --- many and much


@pytest.mark.parametrize("via", list(PROXIES))
def test_500_connections_at_once(pair: Pair, via: str) -> None:
    """All are open before the first one talks; each gets back its own bytes."""

    async def work() -> None:
        async with asyncio.timeout(120):
            opened = await asyncio.gather(*(PROXIES[via](pair.ips["b"][i % 2], TRAFFIC) for i in range(500)))
            payloads = [stream_of(f"{via}{i}", 20_000 + i) for i in range(500)]
            answers = await asyncio.gather(
                *(say(streams, "echo", payload) for streams, payload in zip(opened, payloads, strict=True))
            )
        assert answers == payloads

    pair.run(work())
    wait_for(lambda: pair.ask("count") == "0", 20, "the end of all connections")


def test_500_requests_through_the_http_proxy(pair: Pair) -> None:
    """Plain GETs, 100 at a time, each on its own connection."""
    (pair.web / "hello").write_text("hello")
    slots = asyncio.Semaphore(100)

    async def fetch() -> bytes:
        async with slots:
            reader, writer = await asyncio.open_connection("127.0.0.1", 1056)
            url = f"http://b:{WEB}/hello"
            writer.write(f"GET {url} HTTP/1.1\r\nHost: b:{WEB}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return answer

    async def work() -> None:
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*(fetch() for _ in range(500)))
        assert all(answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\nhello") for answer in answers)

    pair.run(work())


@pytest.mark.parametrize("megabytes", [200, pytest.param(1024, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_a_big_transfer_each_way(pair: Pair, megabytes: int) -> None:
    big = pair.web / "big"
    big.write_bytes(os.urandom(MEGABYTE) * megabytes)
    with big.open("rb") as file:
        wanted = hashlib.file_digest(file, "sha256").hexdigest()
    url, limit_s = f"http://{pair.ips['b'][0]}:{WEB}", 60.0 + megabytes / 2
    try:
        for how, words in (("down", ("/big", "-o", str(pair.web / "down"))), ("up", ("/up", "-T", str(big)))):
            began = time.monotonic()
            done = pair.a.curl(url + words[0], "-f", *words[1:], timeout_s=limit_s)
            assert done.returncode == 0, (done.stderr, pair.a.tail())
            print(f"{how}: {megabytes / (time.monotonic() - began):.0f} MiB/s")
            with (pair.web / how).open("rb") as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == wanted
    finally:
        for name in ("big", "down", "up"):
            (pair.web / name).unlink(missing_ok=True)


# --- how connections begin and end


@pytest.mark.parametrize("via", list(PROXIES))
def test_half_close(pair: Pair, via: str) -> None:
    """The answer comes after our FIN; and the other way round the server ends first and still hears us."""
    payload = stream_of("half", 3 * MEGABYTE)

    async def work() -> None:
        async with asyncio.timeout(60):
            answer = await say(await PROXIES[via]("b", TRAFFIC), "hash", payload)
            assert answer.decode() == hashlib.sha256(payload).hexdigest()
            reader, writer = await PROXIES[via]("b", TRAFFIC)
            writer.write(b"send 100000 x\n")
            assert await reader.read() == stream_of("x", 100_000)
            writer.close()

    pair.run(work())


def test_nc_passes_a_half_close_on(pair: Pair) -> None:
    payload = stream_of("nc", MEGABYTE)
    line = ["ip", "netns", "exec", pair.a.namespace, *pair.a.cli_words(), f"--socket={pair.a.socket}"]
    done = subprocess.run(
        [*line, "nc", "b", str(TRAFFIC)],
        input=b"hash\n" + payload, capture_output=True, timeout=60, check=False, env=pair.a._env(),
    )  # fmt: skip
    assert (done.returncode, done.stdout.decode()) == (0, hashlib.sha256(payload).hexdigest()), done.stderr


@pytest.mark.parametrize("via", list(PROXIES))
def test_a_reset_arrives_as_a_reset(pair: Pair, via: str) -> None:
    """From the server to the client, also after data; and from the client to the server."""

    async def work() -> None:
        async with asyncio.timeout(60):
            for command in (b"reset\n", b"reset 50000\n"):
                reader, writer = await PROXIES[via]("b", TRAFFIC)
                writer.write(command)
                with pytest.raises(ConnectionResetError):
                    await reader.read()
                writer.close()
            reader, writer = await PROXIES[via]("b", TRAFFIC)
            writer.write(f"watch reset-{via}\nmore".encode())
            await writer.drain()
            await until_ended(f"reset-{via}", "open")
            reset(writer)
            await until_ended(f"reset-{via}", "reset")

    pair.run(work())


async def until_ended(name: str, wanted: str) -> None:
    """Asks b's traffic server, through the proxy."""
    async with asyncio.timeout(20):
        while (await say(await via_socks("b", TRAFFIC), f"ended {name}")).decode() != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("family", [0, 1], ids=["IPv4", "IPv6"])
def test_a_closed_port_is_refused_at_once(pair: Pair, family: int) -> None:
    async def work() -> None:
        for open_it, code in ((via_socks, 5), (via_http, 500)):
            began = time.monotonic()
            with pytest.raises(Refused) as refused:
                await open_it(pair.ips["b"][family], 9)
            assert refused.value.code == code and time.monotonic() - began < 8

    pair.run(work())


@pytest.mark.parametrize("via", list(PROXIES))
@pytest.mark.parametrize("service", ["100.100.100.100", "fd7a:115c:a1e0::53"])
def test_the_service_address_answers_dns_and_refuses_all_else_at_once(pair: Pair, via: str, service: str) -> None:
    async def work() -> list[str]:
        began = time.monotonic()
        with pytest.raises(Refused):
            await PROXIES[via](service, 80)
        assert time.monotonic() - began < 8
        name = str(pair.b.status()["Self"]["DNSName"])
        query = codec.question(name, "A")
        reader, writer = await PROXIES[via](service, 53)
        try:
            writer.write(len(query).to_bytes(2, "big") + query)
            async with asyncio.timeout(20):
                size = int.from_bytes(await reader.readexactly(2), "big")
                return [str(ip) for ip in codec.addresses_in(await reader.readexactly(size))]
        finally:
            writer.close()

    assert pair.run(work()) == [pair.ips["b"][0]]


@pytest.mark.parametrize("pause_s", [4, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(400)])])
def test_a_reader_that_pauses(pair: Pair, pause_s: int) -> None:
    """Windows close to nothing on the way there and on the way back, and open again without loss."""
    payload = stream_of("slow", 24 * MEGABYTE)

    async def upload() -> None:
        answer = await say(await via_socks("b", TRAFFIC), f"hash {pause_s}", payload)
        assert answer.decode() == hashlib.sha256(payload).hexdigest()

    async def download() -> None:
        reader, writer = await via_http("b", TRAFFIC)
        writer.write(f"send {len(payload)} slow\n".encode())
        await asyncio.sleep(pause_s)
        assert await reader.read() == payload
        writer.close()

    async def work() -> None:
        async with asyncio.timeout(60 + 3 * pause_s):
            await asyncio.gather(upload(), download())

    pair.run(work())


CLIENT_THAT_HANGS_ON = """
import asyncio, sys
from harness.proxyclient import via_http, via_socks
async def main():
    opened = []
    for i in range(30):
        opened.append(await (via_socks if i % 2 else via_http)("b", 7000))
        opened[-1][1].write(b"watch killed%d\\n" % i + b"x" * 3000)
    print("open", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_killed_client_leaves_nothing_open(pair: Pair) -> None:
    line = ["ip", "netns", "exec", pair.a.namespace, sys.executable, "-c", CLIENT_THAT_HANGS_ON]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    client = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ)
    assert client.stdout is not None
    assert client.stdout.readline() == "open\n"
    wait_for(lambda: pair.ask("count") == "30", 20, "30 connections")
    client.send_signal(signal.SIGKILL)
    client.wait()
    wait_for(lambda: pair.ask("count") == "0", 20, "the end of all connections")


def test_whois_of_a_proxied_connection(pair: Pair) -> None:
    """The service behind b sees a connection from 127.0.0.1; b's daemon knows who that is."""

    async def work() -> tuple[dict[str, Any], str]:
        reader, writer = await via_socks("b", TRAFFIC)
        writer.write(b"peer\n")
        seen = (await reader.readline()).decode().strip()
        said = await asyncio.to_thread(pair.b.call, "whois", "--json", seen)
        writer.close()
        return json.loads(said.stdout), seen

    found, seen = pair.run(work())
    assert seen.startswith("127.0.0.1:")
    assert found["Node"]["Name"] == "a.tsd.internal." and found["UserProfile"]["LoginName"] == "alice@tsd.internal"
    assert pair.ips["a"][0] in pair.b.call("whois", pair.ips["a"][0]).stdout
    wait_for(lambda: pair.b.call("whois", seen, check=False).returncode == 1, 15, "the flow to be forgotten")


# --- datagrams, names, pings


@pytest.mark.parametrize("node", ["a", "b"])
def test_datagrams_both_ways(pair: Pair, node: str) -> None:
    """DNS-like (short question, longer answer) and 1200 bytes, to addresses and names, on one association."""
    other = "b" if node == "a" else "a"

    async def work() -> None:
        async with SocksDatagrams() as socks:
            for host in (pair.ips[other][0], pair.ips[other][1], other, f"{other}.tsd.internal"):
                source, port, answer = await socks.ask(host, TRAFFIC, b"dns?" + bytes(24))
                assert answer == (b"dns?" + bytes(24)) * 3 and port == TRAFFIC and source in pair.ips[other]
                long = stream_of(host, 1200)
                assert (await socks.ask(host, TRAFFIC, long))[2] == long
            burst = {number.to_bytes(2, "big") + bytes(1198) for number in range(50)}
            for payload in burst:
                socks.send(other, TRAFFIC, payload)
            assert {(await socks.receive(10.0))[2] for _ in burst} == burst

    pair.run(work(), node)


@pytest.mark.parametrize("via", list(PROXIES))
@pytest.mark.parametrize("name", ["b", "B", "b.", "b.tsd.internal", "B.Tsd.Internal", "b.tsd.internal."])
def test_names(pair: Pair, via: str, name: str) -> None:
    async def work() -> None:
        assert await say(await PROXIES[via](name, TRAFFIC), "echo", b"hi") == b"hi"

    pair.run(work())


def test_an_unknown_name_fails_in_time(pair: Pair) -> None:
    async def work() -> None:
        for name in ("nosuch", "nosuch.tsd.internal"):
            for open_it in PROXIES.values():
                async with asyncio.timeout(12):
                    with pytest.raises(Refused):
                        await open_it(name, TRAFFIC)

    pair.run(work())


def test_icmp_both_ways(pair: Pair) -> None:
    for near, far in ((pair.a, "b"), (pair.b, "a")):
        for address in pair.ips[far]:
            assert f"pong from {far}" in near.ping(address, "--icmp", "--c=2", "--timeout=8s")


# --- a bad network

IMPAIRMENTS = {
    "loss": {"loss": 0.05},
    "reordering": {"reorder": 0.05},
    "duplication": {"duplicate": 0.05},
    "all": {"loss": 0.05, "reorder": 0.05, "duplicate": 0.05, "delay_s": 0.002},
}


@pytest.fixture(scope="module")
def bad_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not Path("/dev/net/tun").exists():
        pytest.skip("needs /dev/net/tun")
    with ImpairedLab("tsdTi", "10.94.0", seed=7) as lab, running(lab, tmp_path_factory.mktemp("impaired")) as made:
        yield made


@pytest.mark.parametrize("kind", list(IMPAIRMENTS))
def test_transfers_over_a_bad_network(bad_pair: Pair, kind: str) -> None:
    """Both directions at once, beside connections that echo; every byte is right and everything ends."""
    lab = bad_pair.lab
    assert isinstance(lab, ImpairedLab)
    before = lab.impair(**IMPAIRMENTS[kind])
    payload = stream_of(kind, 2 * MEGABYTE)

    async def transfers() -> None:
        up = say(await via_socks("b", TRAFFIC), "hash", payload)
        down = say(await via_http("b", TRAFFIC), f"send {len(payload)} {kind}")
        small = [stream_of(f"{kind}{number}", 30_000) for number in range(20)]
        echoes = [say(await via_socks("b", TRAFFIC), "echo", data) for data in small]
        hashed, received, *echoed = await asyncio.gather(up, down, *echoes)
        assert hashed.decode() == hashlib.sha256(payload).hexdigest()
        assert received == payload
        assert echoed == small

    async def work() -> None:
        async with asyncio.timeout(100):
            await transfers()

    try:
        began = time.monotonic()
        bad_pair.run(work())
        took_s = time.monotonic() - began
    finally:
        counts = lab.impair()
    print(f"{kind}: {took_s:.1f} s, { ({name: counts[name] - before[name] for name in counts}) }")
    assert counts["frames"] - before["frames"] > len(payload) // 1400, "most went by relay"
    wait_for(lambda: bad_pair.ask("count") == "0", 20, "the end of all connections")


def test_datagrams_over_a_bad_network_are_whole(bad_pair: Pair) -> None:
    lab = bad_pair.lab
    assert isinstance(lab, ImpairedLab)
    lab.impair(**IMPAIRMENTS["all"])

    async def work() -> None:
        async with SocksDatagrams() as socks:
            for number in range(30):
                payload = stream_of(str(number), 1200)
                for _ in range(10):
                    socks.send("b", TRAFFIC, payload)
                    with contextlib.suppress(TimeoutError):
                        answer = (await socks.receive(1.0))[2]
                        assert len(answer) == 1200
                        if answer == payload:
                            break
                else:
                    raise AssertionError(f"datagram {number} never came back")

    try:
        bad_pair.run(work())
    finally:
        lab.impair()
