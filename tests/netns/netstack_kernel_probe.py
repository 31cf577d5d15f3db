"""Runs inside a network namespace: the userspace stack against the kernel's TCP over a TUN; prints one JSON object.

Usage: netstack_kernel_probe.py LOSS REORDER DUPLICATE MEGABYTES
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

from harness.netwire import split
from tsd.base.addr import AddrPort
from tsd.hull import Frame, Stream
from tsplatform.userspace.tun import NetstackTun

KERNEL = {4: "10.77.0.1", 6: "fd77::1"}
STACK = {4: "10.77.0.2", 6: "fd77::2"}
LOSS, REORDER, DUPLICATE = (float(value) for value in sys.argv[1:4])
SIZE = int(float(sys.argv[4]) * 1_000_000)


class Link:
    """TUN ↔ stack with the impairments applied to every packet in both directions."""

    def __init__(self, tun: NetstackTun) -> None:
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.fd, 0x400454CA, struct.pack("16sH", b"tsdC0", 0x1001))
        for command in (
            "ip link set lo up",
            "ip addr add 10.77.0.1/24 dev tsdC0",
            "ip -6 addr add fd77::1/64 dev tsdC0 nodad",
            "ip link set tsdC0 mtu 1280 txqueuelen 5000 up",
        ):
            subprocess.run(command.split(), check=True)
        self.tun = tun
        self.random = random.Random(3)
        self.loop = asyncio.get_running_loop()
        self.largest = 0
        self.loop.add_reader(self.fd, self.on_readable)
        tun.attach(self.on_frames)

    def impair(self, packet: bytes, deliver: Callable[[bytes], None]) -> None:
        if self.random.random() < LOSS:
            return
        if self.random.random() < DUPLICATE:
            deliver(packet)
        if self.random.random() < REORDER:
            self.loop.call_later(self.random.random() * 0.004, deliver, packet)
        else:
            deliver(packet)

    def on_frames(self, frames: list[Frame]) -> None:
        for frame in frames:
            for packet in split(frame):
                self.largest = max(self.largest, len(packet))
                self.impair(packet, self.write)

    def write(self, packet: bytes) -> None:
        try:
            os.write(self.fd, packet)
        except (BlockingIOError, OSError):
            pass

    def deliver(self, packet: bytes) -> None:
        self.tun.deliver([Frame(packet)])

    def on_readable(self) -> None:
        batch: list[Frame] = []
        for _ in range(64):
            try:
                packet = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            self.impair(packet, self.deliver if REORDER else lambda kept: batch.append(Frame(kept)))
        if batch:
            self.tun.deliver(batch)


class KernelStream:
    """The same calls on a kernel socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self.loop = asyncio.get_running_loop()

    async def read(self, limit: int) -> bytes:
        return await self.loop.sock_recv(self.sock, limit)

    async def write(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def write_eof(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        self.sock.close()

    def abort(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


async def connected(tun: NetstackTun, version: int, is_from_stack: bool) -> tuple[Stream, KernelStream]:
    """(stack's end, kernel's end) of a connection opened by either side."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    loop = asyncio.get_running_loop()
    if is_from_stack:
        listener = socket.create_server((KERNEL[version], 0), family=family)
        listener.setblocking(False)
        target = AddrPort(ip_address(KERNEL[version]), listener.getsockname()[1])
        stream, (sock, _) = await asyncio.gather(tun.connect(target, 30.0), loop.sock_accept(listener))
        listener.close()
        return stream, KernelStream(sock)
    got: asyncio.Future[Stream] = loop.create_future()
    done = asyncio.Event()

    async def handler(stream: Stream) -> None:
        got.set_result(stream)
        await done.wait()

    port = await tun.listen(AddrPort(ip_address(STACK[version]), 0), handler)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    await loop.sock_connect(sock, (STACK[version], port))
    stream = await got
    tun.unlisten(AddrPort(ip_address(STACK[version]), port))
    return stream, KernelStream(sock)


async def send(stream: Stream | KernelStream, size: int, seed: int) -> str:
    rng = random.Random(seed)
    digest = hashlib.sha256()
    while size > 0:
        data = rng.randbytes(min(size, 65536))
        digest.update(data)
        await stream.write(data)
        size -= len(data)
    await stream.write_eof()
    return digest.hexdigest()


async def receive(stream: Stream | KernelStream) -> str:
    digest = hashlib.sha256()
    while data := await stream.read(262144):
        digest.update(data)
    return digest.hexdigest()


async def bulk(tun: NetstackTun, version: int, is_from_stack: bool, is_upload: bool) -> dict[str, object]:
    ours, theirs = await connected(tun, version, is_from_stack)
    source, sink = (ours, theirs) if is_upload else (theirs, ours)
    start = time.perf_counter()
    sent, got = await asyncio.gather(send(source, SIZE, 1), receive(sink))
    took = time.perf_counter() - start
    back, echoed = await asyncio.gather(send(sink, 300_000, 2), receive(source))  # the half that is still open
    await ours.close()
    await theirs.close()
    return {"ok": sent == got and back == echoed, "mb_per_s": round(SIZE / 1e6 / took, 1)}


async def both_ways(tun: NetstackTun, version: int) -> dict[str, object]:
    ours, theirs = await connected(tun, version, True)
    a, b, got_b, got_a = await asyncio.gather(
        send(ours, SIZE, 3), send(theirs, SIZE, 4), receive(theirs), receive(ours)
    )
    await ours.close()
    await theirs.close()
    return {"ok": a == got_b and b == got_a}


async def resets(tun: NetstackTun) -> dict[str, object]:
    ours, theirs = await connected(tun, 4, True)
    await ours.write(b"x" * 5000)
    theirs.abort()
    try:
        while await ours.read(1000):
            pass
        by_kernel = "eof"
    except ConnectionResetError:
        by_kernel = "reset"
    ours, theirs = await connected(tun, 4, False)
    ours.abort()
    try:
        while await theirs.read(1000):
            pass
        by_stack = "eof"
    except ConnectionResetError:
        by_stack = "reset"
    return {"ok": by_kernel == by_stack == "reset", "by_kernel": by_kernel, "by_stack": by_stack}


async def refusals(tun: NetstackTun) -> dict[str, object]:
    result = []
    for attempt in (tun.connect(AddrPort(ip_address(KERNEL[4]), 9), 20.0), _kernel_connect(STACK[4], 9)):
        try:
            await attempt
            result.append("connected")
        except ConnectionRefusedError:
            result.append("refused")
    return {"ok": result == ["refused"] * 2, "result": result}


async def _kernel_connect(host: str, port: int) -> None:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (host, port)), 20)


async def zero_window(tun: NetstackTun) -> dict[str, object]:
    """Each side stops reading for two seconds."""
    ok = True
    for is_upload in (True, False):
        ours, theirs = await connected(tun, 4, True)
        source, sink = (ours, theirs) if is_upload else (theirs, ours)
        sending = asyncio.ensure_future(send(source, 12_000_000, 5))
        await asyncio.sleep(2.0)
        got, sent = await asyncio.gather(receive(sink), sending)
        ok = ok and got == sent
        await ours.close()
        await theirs.close()
    return {"ok": ok}


async def datagrams(tun: NetstackTun) -> dict[str, object]:
    ok = True
    for version, family in ((4, socket.AF_INET), (6, socket.AF_INET6)):
        sock = socket.socket(family, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.bind((KERNEL[version], 0))
        port = await tun.open_datagram(None, version)
        payload = os.urandom(4000)
        port.send(payload, AddrPort(ip_address(KERNEL[version]), sock.getsockname()[1]))
        loop = asyncio.get_running_loop()
        data, source = await asyncio.wait_for(loop.sock_recvfrom(sock, 65535), 5)
        ok = ok and data == payload
        await loop.sock_sendto(sock, payload[::-1], source[:2])
        data, _ = await asyncio.wait_for(port.receive(), 5)
        ok = ok and data == payload[::-1]
    return {"ok": ok}


async def main() -> None:
    tun = NetstackTun([ip_address(text) for text in STACK.values()])
    link = Link(tun)
    results: dict[str, dict[str, object]] = {}

    async def run(name: str, work: Awaitable[dict[str, object]]) -> None:
        try:
            results[name] = await asyncio.wait_for(work, 120)
        except Exception as err:
            results[name] = {"ok": False, "error": repr(err)}

    for version in (4, 6):
        for is_from_stack in (True, False):
            for is_upload in (True, False):
                name = f"v{version}-{'stack' if is_from_stack else 'kernel'}-opens-{'up' if is_upload else 'down'}"
                await run(name, bulk(tun, version, is_from_stack, is_upload))
        await run(f"v{version}-both-ways", both_ways(tun, version))
    await run("zero-window", zero_window(tun))
    await run("refusals", refusals(tun))
    await run("resets", resets(tun))
    if not LOSS:
        await run("datagrams", datagrams(tun))
    results["packets"] = {"ok": link.largest <= 1280, "largest": link.largest, "drops": dict(tun.stack.drops)}
    tun.close()
    print(json.dumps(results))


asyncio.run(main())
