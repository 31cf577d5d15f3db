"""The stack over both packet pumps: super-segments are cut, sealed, opened and coalesced on the way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from ipaddress import ip_address, ip_network

import pytest

import tsnative
from harness.netwire import A4, A6, B4, B6
from tsd.base.addr import AddrPort
from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.dataplane.pump import Core
from tsd.dataplane.reference import ReferenceCore
from tsd.hull import Frame
from tsd.netstack.events import StreamAccepted
from tsd.netstack.stack import Stack
from tsd.netstack.tcp.connection import Connection
from tsplatform.userspace.tun import NetstackTun


def keyed(core: Core, prefixes: list[str], is_initiator: bool) -> Core:
    core.add_peer(1)
    core.set_allowed_ips(1, [ip_network(p) for p in prefixes])
    keys = (b"a" * 32, b"b" * 32)
    send, receive = keys if is_initiator else keys[::-1]
    core.install_session(1, 7, 7, send, receive, is_initiator, 1000.0)
    return core


def carry(source: Core, sink: Core, frames: list[Frame], now: float) -> list[Frame]:
    out: list[Frame] = []
    for sealed in source.seal(frames, now).sealed:
        out += [opened.frame for opened in sink.open(sealed.datagrams, sealed.datagram_bytes, now).opened]
    return out


@pytest.mark.parametrize("make", [ReferenceCore, tsnative.load])
@pytest.mark.parametrize(("here", "there"), [(A4, B4), (A6, B6)])
def test_transfer_through_the_pump(make: Callable[[], Core], here: str, there: str) -> None:
    size = 1_000_000 if make is ReferenceCore else 8_000_000
    near = keyed(make(), [f"{B4}/32", f"{B6}/128"], True)
    far = keyed(make(), [f"{A4}/32", f"{A6}/128"], False)
    a = Stack([ip_address(here)], 1280, SeededEntropy(1))
    b = Stack([ip_address(there)], 1280, SeededEntropy(2))
    b.listen(None, 80, None)
    now = 1000.0
    client = a.connect(AddrPort(ip_address(there), 80), now)
    data = os.urandom(size)
    client.write(data)
    client.shutdown_write()
    server: Connection | None = None
    digest = hashlib.sha256()
    coalesced = 0
    for _ in range(5000):
        a.flush(now)
        frames = carry(near, far, a.take_frames(), now)
        coalesced += sum(1 for frame in frames if frame.segment_bytes)
        b.receive(frames, now)
        for event in b.take_events():
            if isinstance(event, StreamAccepted):
                server = event.connection
        if server is not None:
            while (chunk := server.read_chunk(now)) is not None:
                digest.update(chunk)
            b.touch(server)
            b.flush(now)
            if server.is_at_eof:
                break
        a.receive(carry(far, near, b.take_frames(), now), now)
        a.take_events()
        now += 0.001
        a.on_deadline(now)
        b.on_deadline(now)
    assert server is not None and server.is_at_eof
    assert digest.digest() == hashlib.sha256(data).digest()
    assert coalesced and not b.drops and not a.drops


async def test_time_does_not_go_back_after_a_timer_that_fired_early() -> None:
    """An event loop may fire up to a clock tick early; the stack sees the time of the deadline, and goes on from it."""
    clock = ManualClock()
    tun = NetstackTun([ip_address(A4)], clock=clock)
    tun.attach(lambda frames: None)
    with pytest.raises(TimeoutError):
        await tun.connect(AddrPort(ip_address(B4), 80), timeout_s=0.01)
    due = clock.now() + 0.001
    tun._timer_at = due
    tun._on_timer()
    assert tun.now() == due
    clock.advance(0.5)
    assert tun.now() == clock.now()
    tun.close()
