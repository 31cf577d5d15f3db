"""Two machines joined by a pretend wire: windows, limits, resets, GOAWAY."""

from typing import Any

import pytest

from tsd.base.errors import ProtocolError
from tsd.http2 import machine as room
from tsd.http2.machine import (
    ConnectionFinished,
    DataReceived,
    HeadersReceived,
    Http2Machine,
    PingAnswered,
    StreamFinished,
    WindowsChanged,
)

GET = [(":method", "POST"), (":scheme", "https"), (":authority", "h"), (":path", "/machine/map")]


class Wire:
    def __init__(self) -> None:
        self.client, self.server = Http2Machine(is_client=True), Http2Machine(is_client=False)
        self.heard: dict[Http2Machine, list[Any]] = {self.client: [], self.server: []}

    def run(self, *, acknowledges: bool = True) -> None:
        while True:
            to_server, to_client = self.client.take_bytes(), self.server.take_bytes()
            if not to_server and not to_client:
                return
            for machine, chunk in ((self.server, to_server), (self.client, to_client)):
                machine.receive(chunk)
                for event in machine.take_events():
                    self.heard[machine].append(event)
                    if acknowledges and isinstance(event, DataReceived):
                        machine.acknowledge(event.stream_id, event.flow_bytes)

    def body(self, machine: Http2Machine) -> bytes:
        return b"".join(event.data for event in self.heard[machine] if isinstance(event, DataReceived))

    def of(self, machine: Http2Machine, kind: type) -> list[Any]:
        return [event for event in self.heard[machine] if isinstance(event, kind)]


def test_request_and_answer() -> None:
    wire = Wire()
    stream = wire.client.open_stream([*GET, ("X-Up", "1")], b"question")
    wire.run()
    (head,) = wire.of(wire.server, HeadersReceived)
    assert (head.get(":path"), head.get("x-up")) == ("/machine/map", "1")
    assert wire.body(wire.server) == b"question"
    assert wire.of(wire.server, StreamFinished) == [StreamFinished(stream, "")]
    wire.server.send_headers(stream, [(":status", "200")])
    wire.server.send_data(stream, b"answer")
    wire.server.send_data(stream, b"", is_last=True)
    wire.run()
    assert wire.body(wire.client) == b"answer"
    assert wire.of(wire.client, StreamFinished) == [StreamFinished(stream, "")]


def test_large_bodies_pass_windows_in_both_directions() -> None:
    wire = Wire()
    size = 3 * room.CONNECTION_WINDOW_BYTES // 2
    stream = wire.client.open_stream(GET, b"q" * size)
    wire.run()
    wire.server.send_headers(stream, [(":status", "200")])
    wire.server.send_data(stream, b"a" * size, is_last=True)
    wire.run()
    assert len(wire.body(wire.server)) == len(wire.body(wire.client)) == size


def test_unread_data_stops_the_sender() -> None:
    wire = Wire()
    stream = wire.client.open_stream(GET)
    wire.run()
    wire.server.send_headers(stream, [(":status", "200")])
    wire.server.send_data(stream, bytes(2 * room.STREAM_WINDOW_BYTES))
    wire.run(acknowledges=False)
    assert wire.server.queued_bytes(stream) == room.STREAM_WINDOW_BYTES
    for event in wire.of(wire.client, DataReceived):
        wire.client.acknowledge(stream, event.flow_bytes)
    wire.run(acknowledges=False)
    assert wire.server.queued_bytes(stream) < room.STREAM_WINDOW_BYTES // 2
    assert wire.of(wire.server, WindowsChanged)


def test_stream_limit_is_asked_before_it_is_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_STREAMS", 2)
    wire = Wire()
    wire.run()
    wire.client.open_stream(GET)
    first = wire.client.open_stream(GET)
    wire.run()
    assert not wire.client.can_open_stream
    with pytest.raises(ProtocolError):
        wire.client.open_stream(GET)
    wire.server.send_headers(first, [(":status", "204")], is_last=True)
    wire.run()
    assert wire.client.can_open_stream


def test_reset_reaches_the_other_side_and_late_sends_are_ignored() -> None:
    wire = Wire()
    stream = wire.client.open_stream(GET)
    wire.run()
    wire.client.reset_stream(stream)
    wire.run()
    (end,) = [event for event in wire.of(wire.server, StreamFinished) if event.error]
    assert "CANCEL" in end.error
    wire.server.send_headers(stream, [(":status", "200")])
    wire.server.send_data(stream, b"late", is_last=True)
    wire.client.acknowledge(stream, 10)
    wire.run()
    assert not wire.client.is_closed
    assert wire.client.open_stream(GET)


def test_goaway_and_garbage_finish_the_connection() -> None:
    wire = Wire()
    wire.client.open_stream(GET)
    wire.run()
    wire.server.close()
    wire.run()
    (end,) = wire.of(wire.client, ConnectionFinished)
    assert "GOAWAY (NO_ERROR)" in end.reason
    assert not wire.client.can_open_stream
    other = Wire()
    other.run()
    other.server.receive(b"\xff" * (room.MAX_FRAME_BYTES + 10))
    assert isinstance(other.server.take_events()[-1], ConnectionFinished)
    other.server.receive(b"more")
    assert other.server.take_events() == []


def test_a_ping_comes_back() -> None:
    wire = Wire()
    wire.client.ping(b"12345678")
    wire.run()
    assert PingAnswered(b"12345678") in wire.heard[wire.client]
    wire.client.close()
    wire.client.ping(b"12345678")
