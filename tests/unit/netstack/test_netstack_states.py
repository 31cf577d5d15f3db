"""The TCP state machine and its defences, two stacks or hand-made segments."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from harness.netwire import A4, B4, Pair, Wire
from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.hull import Frame
from tsd.netstack import flows
from tsd.netstack.events import StreamAdvanced
from tsd.netstack.stack import Stack
from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.segment import Header, parse_segment, syn_options, timestamp_option


def send(pair: Pair, data: bytes, *, is_from_a: bool = True) -> None:
    client = next(iter((pair.a if is_from_a else pair.b)._connections.values()))
    client.write(data)
    (pair.a if is_from_a else pair.b).touch(client)
    pair.flush()


def test_refused_port_and_no_listener() -> None:
    pair = Pair()
    client = pair.connect(81)
    assert pair.run(5.0, until=lambda: client.state == c.CLOSED)
    assert client.error == "refused"


def test_syn_is_repeated_and_gives_up() -> None:
    pair = Pair()
    pair.there.is_cut = True
    client = pair.connect()
    pair.run(300.0, until=lambda: client.state == c.CLOSED)
    assert client.error == "timeout"
    assert pair.now - 1000.0 > 60


def test_lost_handshake_segments() -> None:
    for direction in ("there", "back"):
        pair = Pair()
        pair.listen()
        lost = []

        def drop_first(packet: bytes, lost: list[bytes] = lost) -> bytes | None:
            lost.append(packet)
            return None if len(lost) == 1 else packet

        getattr(pair, direction).filter = drop_first
        client = pair.connect()
        assert pair.run(5.0, until=lambda pair=pair: bool(pair.accepted))  # type: ignore[misc]
        assert client.state == c.ESTABLISHED


def test_zero_window_for_a_minute_then_resume() -> None:
    pair = Pair()
    client, server = pair.establish()
    total = 0
    while client.send_room > 0:
        client.write(bytes(50_000))
        total += 50_000
    pair.a.touch(client)
    pair.flush()
    pair.run(60.0)
    held = server.readable_bytes
    assert 0 < held <= server.receive_limit and client.window_end <= client.snd_nxt
    assert pair.there.carried < 400
    got = 0

    def drain() -> None:
        nonlocal got
        got += len(server.read(1 << 20, pair.now))
        pair.b.touch(server)

    pair.on_step = drain
    drain()
    pair.flush()
    assert pair.run(5.0, until=lambda: got == total)


def test_lost_window_update_is_found_by_probes() -> None:
    pair = Pair()
    client, server = pair.establish()
    client.write(bytes(400_000))
    pair.a.touch(client)
    pair.flush()
    pair.run(10.0)
    pair.back.is_cut = True
    got = len(server.read(1 << 20, pair.now))
    pair.b.touch(server)
    pair.flush()
    pair.run(1.0)
    pair.back.is_cut = False
    assert pair.run(60.0, until=lambda: server.readable_bytes > 0)
    assert got > 0


def test_half_close_carries_an_answer() -> None:
    pair = Pair()
    client, server = pair.establish()
    client.write(b"question")
    client.shutdown_write()
    pair.a.touch(client)
    pair.flush()
    assert pair.run(5.0, until=lambda: server.is_fin_received)
    assert server.read(100, pair.now) == b"question" and server.is_at_eof
    pair.run(0.1)
    assert client.state == c.FIN_WAIT_2 and server.state == c.CLOSE_WAIT
    answer = bytes(range(256)) * 400
    server.write(answer)
    server.shutdown_write()
    pair.b.touch(server)
    pair.flush()
    assert pair.run(5.0, until=lambda: client.is_fin_received)
    assert client.read(1 << 20, pair.now) == answer and client.is_at_eof
    pair.run(5.0)
    assert server.state == c.CLOSED and client.state == c.TIME_WAIT and not server.error


def test_simultaneous_close() -> None:
    pair = Pair()
    client, server = pair.establish()
    client.close(pair.now)
    server.close(pair.now)
    pair.a.touch(client)
    pair.b.touch(server)
    pair.flush()
    pair.run(5.0)
    assert client.state == server.state == c.TIME_WAIT
    assert not client.error and not server.error
    assert len(pair.a.time_waits) == len(pair.b.time_waits) == 1


def test_simultaneous_open() -> None:
    pair = Pair()
    a = pair.a.connect(AddrPort(ip_address(B4), 40000), pair.now)
    key = a.header.lport
    pair.b._next_port = 40000
    b = pair.b.connect(AddrPort(ip_address(A4), key), pair.now)
    pair.flush()
    assert pair.run(5.0, until=lambda: a.state == b.state == c.ESTABLISHED)


def test_reset_midway_reaches_the_other_side() -> None:
    pair = Pair()
    client, server = pair.establish()
    client.write(bytes(100_000))
    pair.a.touch(client)
    pair.flush()
    pair.run(0.015)
    server.abort(pair.now)
    pair.flush()
    assert pair.run(1.0, until=lambda: client.state == c.CLOSED)
    assert client.error == "reset"
    assert pair.a.connection_count == pair.b.connection_count == 0


def test_close_with_unread_data_resets() -> None:
    pair = Pair()
    client, server = pair.establish()
    client.write(b"never read")
    pair.a.touch(client)
    pair.flush()
    pair.run(0.1)
    server.close(pair.now)
    pair.flush()
    pair.run(0.1)
    assert client.error == "reset"


def test_data_after_close_is_reset() -> None:
    pair = Pair()
    client, server = pair.establish()
    server.close(pair.now)
    pair.b.touch(server)
    pair.flush()
    pair.run(0.1)
    client.write(b"too late")
    pair.a.touch(client)
    pair.flush()
    pair.run(0.1)
    assert client.error == "reset"


def test_orphan_in_fin_wait_2_goes_away() -> None:
    pair = Pair()
    client, _ = pair.establish()
    client.close(pair.now)
    pair.a.touch(client)
    pair.flush()
    pair.run(70.0)
    assert client.state == c.CLOSED and pair.a.connection_count == 0


def test_keepalive_finds_a_dead_peer() -> None:
    pair = Pair()
    client, _ = pair.establish()
    pair.run(3 * c.KEEPALIVE_IDLE_S)
    assert client.state == c.ESTABLISHED
    pair.there.is_cut = pair.back.is_cut = True
    pair.run(c.KEEPALIVE_IDLE_S + 12 * c.KEEPALIVE_INTERVAL_S)
    assert client.state == c.CLOSED and client.error == "timeout"


def test_dead_peer_with_data_in_flight() -> None:
    pair = Pair()
    client, _ = pair.establish()
    pair.there.is_cut = True
    client.write(b"x")
    pair.a.touch(client)
    pair.flush()
    pair.run(3600.0)
    assert client.error == "timeout"


def test_tiny_reads_and_small_window_peer() -> None:
    pair = Pair()
    client, server = pair.establish()
    server.receive_limit = 2000
    data = bytes(range(256)) * 200
    client.write(data)
    client.shutdown_write()
    pair.a.touch(client)
    pair.flush()
    got = bytearray()

    def nibble() -> None:
        got.extend(server.read(137, pair.now))
        pair.b.touch(server)

    for _ in range(3000):
        pair.run(0.05)
        nibble()
        pair.flush()
        if server.is_at_eof:
            break
    assert bytes(got) == data


def test_many_connections_at_once() -> None:
    pair = Pair(Wire(1, loss=0.01), Wire(2, loss=0.01))
    pair.listen()
    clients = [pair.connect() for _ in range(500)]
    assert pair.run(60.0, until=lambda: len(pair.accepted) == 500)
    for number, client in enumerate(clients):
        client.write(number.to_bytes(4, "big") * 500)
        client.shutdown_write()
        pair.a.touch(client)
    pair.flush()
    assert pair.run(60.0, until=lambda: all(s.is_fin_received for s in pair.accepted))
    numbers = {s.read(4, pair.now) for s in pair.accepted}
    assert numbers == {n.to_bytes(4, "big") for n in range(500)}


class HandPeer:
    """A peer written by hand, against one stack."""

    def __init__(self, timestamp: bool = True) -> None:
        self.now = 1000.0
        self.stack = Stack([ip_address(B4)], 1280, SeededEntropy(9))
        self.stack.listen(None, 80, None)
        self.header = Header(ip_address(A4).packed, ip_address(B4).packed, 5000, 80, 0)
        self.seq = 0xFFFFFFF0
        self.ts = 0xFFFFFFF0
        self.echo = 0
        self.ack = 0
        self.has_timestamp = timestamp

    def send(self, flags: int, payload: bytes = b"", *, seq: int | None = None, options: bytes | None = None) -> None:
        if options is None:
            options = timestamp_option(self.ts & 0xFFFFFFFF, self.echo) if self.has_timestamp else b""
        views = [memoryview(payload)] if payload else []
        at = self.seq if seq is None else seq
        packet = self.header.build(at, self.ack, flags, 0xFFFF, options, views, len(payload), 0)
        self.stack.receive([Frame(packet)], self.now)

    def take(self) -> list[object]:
        segments = [parse_segment(f.packet, 20, len(f.packet)) for f in self.stack.take_frames()]
        return list(segments)

    def handshake(self) -> None:
        stamp = (self.ts & 0xFFFFFFFF, 0) if self.has_timestamp else None
        self.send(c.SYN, options=syn_options(1240, 7, True, stamp))
        answer = self.take()[0]
        assert answer.flags == c.SYN | c.ACK  # type: ignore[attr-defined]
        self.seq += 1
        self.ack = answer.seq + 1  # type: ignore[attr-defined]
        self.echo = answer.ts_value  # type: ignore[attr-defined]
        self.send(c.ACK)

    @property
    def connection(self):  # type: ignore[no-untyped-def]
        return next(iter(self.stack._connections.values()))


def test_paws_drops_old_timestamps_and_wraps() -> None:
    peer = HandPeer()
    peer.handshake()
    connection = peer.connection
    peer.ts += 100  # wraps
    peer.send(c.ACK | c.PSH, b"new")
    assert connection.read(10, peer.now) == b"new"
    peer.take()
    peer.seq += 3
    peer.ts -= 50
    peer.send(c.ACK | c.PSH, b"old")
    assert connection.readable_bytes == 0
    assert len(peer.take()) == 1  # answered with an ACK
    peer.ts += 60
    peer.send(c.ACK | c.PSH, b"yes")
    assert connection.read(10, peer.now) == b"yes"
    peer.seq += 3
    peer.ts -= 50
    peer.send(c.RST | c.ACK)
    assert connection.state == c.CLOSED  # no PAWS for a RST


def test_blind_reset_and_syn_get_a_challenge() -> None:
    peer = HandPeer()
    peer.handshake()
    connection = peer.connection
    peer.take()
    peer.send(c.RST, seq=peer.seq + 100)
    assert connection.state == c.ESTABLISHED and len(peer.take()) == 1
    peer.send(c.SYN, seq=peer.seq + 100)
    assert connection.state == c.ESTABLISHED
    peer.now += 1
    peer.send(c.RST, seq=peer.seq + 1_000_000)
    assert connection.state == c.ESTABLISHED
    peer.send(c.RST)
    assert connection.state == c.CLOSED


def test_sequence_wrap_and_sack_blocks() -> None:
    peer = HandPeer()
    peer.handshake()
    connection = peer.connection
    peer.take()
    peer.send(c.ACK, b"B" * 20, seq=peer.seq + 20)
    answer = peer.take()[-1]
    assert answer.sacks == [((peer.seq + 20) & 0xFFFFFFFF, (peer.seq + 40) & 0xFFFFFFFF)]  # type: ignore[attr-defined]
    peer.send(c.ACK, b"A" * 20)
    assert connection.read(100, peer.now) == b"A" * 20 + b"B" * 20
    peer.send(c.ACK, b"A" * 20)
    assert peer.take()[-1].sacks[0] == (peer.seq & 0xFFFFFFFF, (peer.seq + 20) & 0xFFFFFFFF)  # type: ignore[attr-defined]


def test_peer_without_options() -> None:
    peer = HandPeer(timestamp=False)
    peer.send(c.SYN, options=b"")
    answer = peer.take()[0]
    assert answer.window_shift == -1 and not answer.has_timestamp and not answer.sack_permitted  # type: ignore[attr-defined]
    peer.seq += 1
    peer.ack = answer.seq + 1  # type: ignore[attr-defined]
    peer.send(c.ACK)
    connection = peer.connection
    assert connection.mss == 536
    connection.write(bytes(5000))
    peer.stack.touch(connection)
    peer.stack.flush(peer.now)
    assert all(f.segment_bytes <= 536 for f in peer.stack.take_frames())


def test_ack_of_unsent_data_is_ignored() -> None:
    peer = HandPeer()
    peer.handshake()
    peer.ack += 1_000_000
    peer.send(c.ACK, b"x")
    assert peer.connection.readable_bytes == 0


def test_syn_flood_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "MAX_HALF_OPEN", 100)
    stack = Stack([ip_address(B4)], 1280, SeededEntropy(1))
    stack.listen(None, 80, None)
    for n in range(3 * flows.MAX_HALF_OPEN):
        header = Header((0x0A000000 + n).to_bytes(4, "big"), ip_address(B4).packed, 1024, 80, 0)
        syn = header.build(n, 0, c.SYN, 1000, syn_options(1240, 7, True, None), [], 0, 0)
        stack.receive([Frame(syn)], 1000.0)
    assert stack.connection_count <= flows.MAX_HALF_OPEN
    stack.take_frames()
    stack.take_events()
    assert stack.connection_count == len(stack.backlog.half_open)


def test_forwarded_attempts_are_bounded_per_client_and_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "MAX_ATTEMPTS", 90)
    monkeypatch.setattr(flows, "MAX_ATTEMPTS_PER_CLIENT", 60)
    stack = Stack([ip_address(B4)], 1280, SeededEntropy(1))
    stack.forwards = True

    def syn(client: int, port: int) -> None:
        header = Header((0x0A000000 + client).to_bytes(4, "big"), ip_address(B4).packed, port, 80, 0)
        packet = header.build(1, 0, c.SYN, 1000, syn_options(1240, 7, True, None), [], 0, 0)
        stack.receive([Frame(packet)], 1000.0)

    for n in range(flows.MAX_ATTEMPTS_PER_CLIENT):
        syn(1, 1024 + n)
    assert not stack.take_frames()
    syn(1, 60000)
    resets = stack.take_frames()
    assert len(resets) == 1 and parse_segment(resets[0].packet, 20, 40).flags & c.RST  # type: ignore[union-attr]
    for n in range(flows.MAX_ATTEMPTS):
        syn(2 + n % 4, 1024 + n)
    assert len(stack.backlog) == flows.MAX_ATTEMPTS and not stack.take_frames()


def test_deferred_accept_refuse_and_forget() -> None:
    pair = Pair()
    pair.b.forwards = True
    client = pair.connect(8080)
    pair.run(2.5)
    assert len(pair.attempts) == 1  # repeated SYNs are absorbed
    server = pair.b.accept(pair.attempts[0], pair.now)
    assert server is not None
    pair.flush()
    assert pair.run(5.0, until=lambda: client.state == c.ESTABLISHED)
    second = pair.connect(8081)
    pair.run(0.5)
    pair.b.refuse(pair.attempts[1])
    pair.flush()
    assert pair.run(0.5, until=lambda: second.error == "refused")
    third = pair.connect(8082)
    pair.run(0.5)
    pair.b.forget(pair.attempts[2])
    pair.run(1.2)
    assert third.state == c.SYN_SENT and len(pair.attempts) == 4


def test_time_wait_answers_and_can_be_reused() -> None:
    pair = Pair()
    listener = pair.listen()
    client, server = pair.establish()
    pair.b.unlisten(listener)
    client.close(pair.now)
    pair.a.touch(client)
    pair.flush()
    pair.run(0.1)
    server.close(pair.now)
    pair.b.touch(server)
    pair.flush()
    pair.run(1.0)
    assert client.state == c.TIME_WAIT and server.state == c.CLOSED
    assert client.key in pair.a.time_waits
    pair.run(1.0)
    port = client.header.lport
    pair.a.listen(None, port, None)
    pair.b._next_port = 80
    again = pair.b.connect(AddrPort(ip_address(A4), port), pair.now)
    pair.flush()
    assert pair.run(5.0, until=lambda: again.state == c.ESTABLISHED)
    assert client.key not in pair.a.time_waits


def test_loopback_to_own_address() -> None:
    stack = Stack([ip_address(A4)], 1280, SeededEntropy(1))
    stack.listen(None, 80, None)
    client = stack.connect(AddrPort(ip_address(A4), 80), 1.0)
    stack.flush(1.0)
    assert stack.take_frames() == []
    assert client.state == c.ESTABLISHED
    assert any(isinstance(e, StreamAdvanced) for e in stack.take_events())


def test_listen_errors() -> None:
    stack = Stack([ip_address(A4)], 1280, SeededEntropy(1))
    listener = stack.listen(None, 80, None)
    with pytest.raises(OSError):
        stack.listen(None, 80, None)
    with pytest.raises(OSError):
        stack.listen(ip_address("100.64.9.9"), 81, None)
    assert stack.listen(ip_address(A4), 0, None).port
    stack.unlisten(listener)
    stack.listen(None, 80, None)
    with pytest.raises(OSError):
        stack.connect(AddrPort(ip_address("fd7a::1"), 1), 1.0)
