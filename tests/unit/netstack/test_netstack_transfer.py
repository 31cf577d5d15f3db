"""Bulk transfers over impaired wires, in virtual time: intact, and never stuck."""

from __future__ import annotations

import hashlib
from random import Random

import pytest

from harness.netwire import Pair, Wire
from tsd.hull import Frame
from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.connection import Connection

PIECE = 100_000


class Transfer:
    """Random bytes from one end to the other, read as they come."""

    def __init__(self, pair: Pair, source: Connection, sink: Connection, size: int, seed: int = 5) -> None:
        self.pair, self.source, self.sink, self.left = pair, source, sink, size
        self.random = Random(seed)
        self.sent = hashlib.sha256()
        self.got = hashlib.sha256()
        self.received = 0

    def pump(self) -> None:
        while self.left > 0 and self.source.send_room > 0:
            data = self.random.randbytes(min(self.left, PIECE))
            self.sent.update(data)
            self.source.write(data)
            self.left -= len(data)
            if not self.left:
                self.source.shutdown_write()
        while (chunk := self.sink.read_chunk(self.pair.now)) is not None:
            self.got.update(chunk)
            self.received += len(chunk)
        for stack, end in ((self.pair.a, self.source), (self.pair.b, self.sink)):
            (stack if end is self.source or stack is self.pair.b else self.pair.b).touch(end)

    @property
    def is_done(self) -> bool:
        return self.sink.is_at_eof or bool(self.sink.error)


def run_transfer(pair: Pair, size: int, *, is_v6: bool = False, limit_s: float = 3000.0) -> float:
    client, server = pair.establish(is_v6)
    transfer = Transfer(pair, client, server, size)
    pair.on_step = transfer.pump
    transfer.pump()
    pair.flush()
    start = pair.now
    assert pair.run(limit_s, until=lambda: transfer.is_done), (
        f"stuck at {transfer.received} of {size}, state {client.state}, flight {client.in_flight}"
    )
    assert not server.error and transfer.received == size
    assert transfer.sent.digest() == transfer.got.digest()
    took = pair.now - start
    server.shutdown_write()
    pair.b.touch(server)
    pair.flush()
    assert pair.run(300.0, until=lambda: client.state in (c.CLOSED, c.TIME_WAIT) and server.state == c.CLOSED)
    assert pair.a.connection_count == pair.b.connection_count == 0
    return took


@pytest.mark.parametrize("is_v6", [False, True])
def test_clean_wire_fills_the_pipe(is_v6: bool) -> None:
    pair = Pair(Wire(1, delay_s=0.02, rate_bytes_s=12.5e6), Wire(2, delay_s=0.02))
    took = run_transfer(pair, 4_000_000, is_v6=is_v6)
    assert took < 0.9  # 0.32 s of wire time and a slow start


@pytest.mark.parametrize(
    ("loss", "reorder", "duplicate", "corrupt"),
    [
        (0.01, 0.0, 0.0, 0.0),
        (0.05, 0.0, 0.0, 0.0),
        (0.0, 0.05, 0.0, 0.0),
        (0.0, 0.0, 0.05, 0.0),
        (0.0, 0.0, 0.0, 0.03),
        (0.05, 0.05, 0.05, 0.02),
        (0.15, 0.3, 0.2, 0.05),
    ],
)
def test_impaired_wire_is_survived(loss: float, reorder: float, duplicate: float, corrupt: float) -> None:
    def wire(seed: int) -> Wire:
        return Wire(seed, delay_s=0.01, loss=loss, reorder=reorder, duplicate=duplicate, corrupt=corrupt)

    pair = Pair(wire(3), wire(4))
    run_transfer(pair, 1_500_000)
    assert pair.there.largest_bytes <= 1280


def test_reordering_alone_costs_no_timeouts() -> None:
    pair = Pair(Wire(7, delay_s=0.01, reorder=0.1), Wire(8, delay_s=0.01))
    assert run_transfer(pair, 2_000_000) < 2.0


def test_one_percent_loss_keeps_a_useful_rate() -> None:
    pair = Pair(Wire(7, delay_s=0.01, loss=0.01), Wire(8, delay_s=0.01))
    assert run_transfer(pair, 4_000_000) < 20.0


def test_a_stamp_from_the_future_is_no_round_trip() -> None:
    """The clock may step back a little between a retransmission and its acknowledgement."""
    pair = Pair()
    client, server = pair.establish()
    acknowledgements: list[bytes] = []

    def keep(packet: bytes) -> None:
        acknowledgements.append(packet)

    pair.there.is_cut = True
    pair.back.filter = keep
    client.write(b"x")
    pair.a.touch(client)
    pair.flush()
    pair.run(0.1)
    pair.there.is_cut = False
    assert pair.run(3.0, until=lambda: bool(acknowledgements))
    pair.a.receive([Frame(acknowledgements[-1])], client.last_send_at - 0.01)
    assert client.snd_una == client.snd_nxt and server.readable_bytes == 1
    assert client.rto_s < 2


def test_a_window_update_that_was_overtaken_changes_nothing() -> None:
    pair = Pair()
    client, server = pair.establish()
    updates: list[bytes] = []
    pair.back.filter = lambda packet: updates.append(packet)
    for shrunk in (1, 0):
        server.receive_edge = server.incoming.next + 5000 - 1000 * shrunk
        server.receive_limit = 5000 - 1000 * shrunk
        server.send_ack(pair.now)
        pair.flush()
    small, large = updates
    client.window_end = client.snd_nxt
    pair.a.receive([Frame(large)], pair.now)
    wide = client.window_end
    pair.a.receive([Frame(small)], pair.now)
    assert client.window_end == wide > client.snd_nxt


def test_tiny_mtu() -> None:
    pair = Pair(Wire(1, loss=0.02), Wire(2, loss=0.02), mtu_bytes=576)
    run_transfer(pair, 300_000)
    assert pair.there.largest_bytes <= 576


def test_whole_super_segments() -> None:
    pair = Pair(Wire(1, delay_s=0.001, is_whole=True), Wire(2, delay_s=0.001, is_whole=True))
    run_transfer(pair, 30_000_000)


def test_outage_of_a_minute() -> None:
    pair = Pair(Wire(1), Wire(2))
    client, server = pair.establish()
    transfer = Transfer(pair, client, server, 3_000_000)
    pair.on_step = transfer.pump
    transfer.pump()
    pair.flush()
    pair.run(0.1)
    pair.there.is_cut = pair.back.is_cut = True
    pair.run(60.0)
    pair.there.is_cut = pair.back.is_cut = False
    assert pair.run(130.0, until=lambda: transfer.is_done)
    assert transfer.sent.digest() == transfer.got.digest()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_one_gibibyte(loss: float) -> None:
    is_whole = not loss
    pair = Pair(Wire(1, delay_s=0.002, loss=loss, is_whole=is_whole), Wire(2, delay_s=0.002, loss=loss))
    run_transfer(pair, (1 << 30) if is_whole else (1 << 27))
