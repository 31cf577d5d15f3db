"""How fast the userspace TCP/IP stack is: one stream and new connections, two nodes joined in memory in one process.

Usage: python benchmarks/netstack.py [--json FILE] [--megabytes N] [--loop asyncio|uvloop]

Rows: "stack" joins two sans-IO stacks directly (super-segments), "packets" the same cut into MTU-sized packets,
"sockets" is host socket → proxy bridge → stack → stack → forwarder → host socket, everything in this one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from ipaddress import ip_address
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "platform"), str(ROOT / "native"), str(ROOT / "tests")]

from harness.netwire import A4, B4, split  # noqa: E402
from harness.overlaypair import echo_once, host_server, overlay_pair, read_all  # noqa: E402
from tsd.base.addr import AddrPort  # noqa: E402
from tsd.base.entropy import SeededEntropy  # noqa: E402
from tsd.hull import Frame  # noqa: E402
from tsd.netstack.events import StreamAccepted  # noqa: E402
from tsd.netstack.stack import Stack  # noqa: E402
from tsd.netstack.tcp import constants as c  # noqa: E402
from tsd.netstack.tcp.connection import Connection  # noqa: E402
from tsplatform.userspace.proxy import ProxyServer  # noqa: E402

PIECE = bytes(256 << 10)


def _stacks() -> tuple[Stack, Stack]:
    a = Stack([ip_address(A4)], 1280, SeededEntropy(1))
    b = Stack([ip_address(B4)], 1280, SeededEntropy(2))
    b.listen(None, 80, None)
    return a, b


def one_stream(total: int, is_cut: bool) -> float:
    """MB/s of one TCP stream, stack to stack."""
    a, b = _stacks()
    now = 1000.0
    client = a.connect(AddrPort(ip_address(B4), 80), now)
    server: Connection | None = None
    sent = got = 0
    start = time.perf_counter()
    while got < total:
        a.flush(now)
        frames = a.take_frames()
        b.receive([Frame(p) for f in frames for p in split(f)] if is_cut else frames, now)
        for event in b.take_events():
            if isinstance(event, StreamAccepted):
                server = event.connection
        if server is not None:
            while (chunk := server.read_chunk(now)) is not None:
                got += len(chunk)
            b.touch(server)
            b.flush(now)
        a.receive(b.take_frames(), now)
        a.take_events()
        while client.state == c.ESTABLISHED and client.send_room > 0 and sent < total:
            client.write(PIECE)
            sent += len(PIECE)
        a.touch(client)
        now += 0.0002
    return got / 1e6 / (time.perf_counter() - start)


def new_connections(count: int) -> float:
    """Connections per second: open, one small request and answer, close both sides."""
    a, b = _stacks()
    now = 1000.0
    start = time.perf_counter()
    for _ in range(count):
        client = a.connect(AddrPort(ip_address(B4), 80), now)
        is_written = is_over = False
        while not is_over:
            a.flush(now)
            b.receive(a.take_frames(), now)
            for event in b.take_events():
                connection = getattr(event, "connection", None)
                if connection is not None and connection.readable_bytes and not connection.is_fin_wanted:
                    connection.read(1000, now)
                    connection.write(b"answer")
                    connection.shutdown_write()
                    b.touch(connection)
            b.flush(now)
            a.receive(b.take_frames(), now)
            a.take_events()
            if client.state == c.ESTABLISHED and not is_written:
                client.write(b"question")
                a.touch(client)
                is_written = True
            if client.is_fin_received:
                client.read(1000, now)
                client.close(now)
                a.touch(client)
                is_over = True
            now += 0.0001
    return count / (time.perf_counter() - start)


async def through_sockets(total: int) -> float:
    """MB/s from a host socket through SOCKS5, both stacks and the forwarder to a host socket, discarded there."""
    done = asyncio.get_running_loop().create_future()

    async def discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while data := await reader.read(1 << 20):
            count += len(data)
        done.set_result(count)
        writer.close()

    async with overlay_pair() as pair, host_server(discard) as port:
        server = ProxyServer(pair, pair.a, frozenset({"socks5"}))
        proxy = server.start("127.0.0.1:0")
        reader, writer = await asyncio.open_connection(str(proxy.ip), proxy.port)
        writer.write(b"\x05\x01\x00\x05\x01\x00\x01" + ip_address(B4).packed + port.to_bytes(2, "big"))
        await reader.readexactly(12)
        start = time.perf_counter()
        for _ in range(total // len(PIECE)):
            writer.write(PIECE)
            await writer.drain()
        writer.write_eof()
        count = await done
        took = time.perf_counter() - start
        writer.close()
        server.close()
        return count / 1e6 / took


async def connections_through_forwarder(count: int, at_once: int) -> float:
    """Overlay connections per second to an echo server on the host, both nodes and the server in this process."""
    async with overlay_pair() as pair, host_server(echo_once) as port:

        async def worker(number: int) -> None:
            for _ in range(number):
                stream = await pair.connect(port)
                await stream.write(b"question")
                await stream.write_eof()
                await read_all(stream)
                await stream.close()

        start = time.perf_counter()
        await asyncio.gather(*(worker(count // at_once) for _ in range(at_once)))
        return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="uvloop")
    args = parser.parse_args()
    total = args.megabytes << 20
    factory = asyncio.new_event_loop
    if args.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    results = {"stack_mb_per_s": one_stream(total, False), "packets_mb_per_s": one_stream(total // 16, True)}
    results["stack_connections_per_s"] = new_connections(5000)
    with asyncio.Runner(loop_factory=factory) as runner:
        results["sockets_mb_per_s"] = runner.run(through_sockets(total))
        results["forwarder_connections_per_s"] = runner.run(connections_through_forwarder(2000, 20))
    results = {name: round(value, 1) for name, value in results.items()}
    print(f"netstack, one process, loop {args.loop}:")
    for name, value in results.items():
        print(f"  {name:32} {value:10.1f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
