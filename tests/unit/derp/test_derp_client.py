"""The DERP client machine joined to the router by a pretend wire."""

from ipaddress import IPv4Address

from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import NodePrivate
from tsd.derp import client as c
from tsd.derp import frames
from tsd.derp.client import DerpClientMachine
from tsd.derp.server import DerpRouter

REMOTE = AddrPort(IPv4Address("192.0.2.1"), 1234)


class Pair:
    """One client connected to a router; `pump` carries bytes until both are quiet."""

    def __init__(self, fast_start: bool = False) -> None:
        self.entropy = SeededEntropy(2)
        server = NodePrivate.generate(self.entropy)
        self.private = NodePrivate.generate(self.entropy)
        self.router = DerpRouter(server, entropy=self.entropy)
        self.now = 50.0
        self.connection = self.router.connect(REMOTE, self.now)
        key = server.public() if fast_start else None
        self.client = DerpClientMachine(self.private, entropy=self.entropy, server_key=key)
        self.client.start(self.now, prefers=True)
        self.events: list[object] = []

    def pump(self) -> list[object]:
        events = []
        while True:
            outputs = self.client.take_outputs()
            events += [o for o in outputs if not isinstance(o, c.Transmit)]
            for output in outputs:
                if isinstance(output, c.Transmit):
                    self.router.receive(self.connection, output.data, self.now)
            raw = self.router.take(self.connection, self.now)
            if not raw and not outputs:
                return events
            if raw:
                self.client.receive(raw, self.now)


def test_login_with_and_without_fast_start():
    for fast_start in (False, True):
        pair = Pair(fast_start)
        assert pair.pump() == [c.Ready(0, 0, 512 << 10)]
        assert pair.router.keys() == [pair.private.public()]


def test_packets_are_grouped_by_source():
    pair = Pair()
    pair.pump()
    a, b = bytes(range(32)), bytes(range(1, 33))
    raw = b"".join(frames.recv_packet(s, p) for s, p in ((a, b"1"), (a, b"2"), (b, b"3"), (a, b"4")))
    pair.client.receive(raw[:50], pair.now)
    pair.client.receive(raw[50:], pair.now)
    got = [(o.source.raw, o.packets) for o in pair.client.take_outputs() if isinstance(o, c.PacketsReceived)]
    assert [(s, p) for s, ps in got for p in ps] == [(a, b"1"), (a, b"2"), (b, b"3"), (a, b"4")]


def test_quiet_connection_is_probed_and_lives():
    pair = Pair()
    pair.pump()
    for _ in range(5):
        pair.now = pair.client.next_deadline().at
        pair.client.on_deadline(pair.now)
        assert pair.pump() == []
        pair.router.on_deadline(pair.now)
        pair.pump()
    assert pair.now > 50 + 100 and not pair.client.is_closed


def test_w12_zombie_relay_is_left():
    pair = Pair()
    pair.pump()
    pair.now += 30
    pair.client.on_deadline(pair.now)
    probe = [o.data for o in pair.client.take_outputs() if isinstance(o, c.Transmit)]
    pings = [f for f in frames.FrameSplitter().feed(probe[0]) if f.kind == 0x12]
    pair.client.receive(frames.frame(0x13, pings[0].payload) + frames.frame(6), pair.now)
    pair.now += 10
    pair.client.on_deadline(pair.now)
    assert pair.client.take_outputs() == [c.Closed("relay has forgotten this connection")]
    assert pair.client.next_deadline() is None


def test_silent_relay_is_left_and_login_times_out():
    pair = Pair()
    pair.client.on_deadline(pair.now + 10)
    assert pair.client.take_outputs()[-1] == c.Closed("login timeout")
    pair = Pair()
    pair.pump()
    pair.client.on_deadline(pair.now + 30)
    pair.client.on_deadline(pair.now + 40)
    assert pair.client.take_outputs()[-1] == c.Closed("relay does not answer pings")


def test_notices_and_hostile_frames():
    pair = Pair()
    pair.pump()
    key = NodePrivate.generate(pair.entropy).public()
    raw = (
        frames.encode_peer_gone(key.raw, 1)
        + frames.frame(0x14, b"duplicate")
        + frames.frame(0x15, bytes.fromhex("000005dc00001388"))
        + frames.frame(0x12, b"12345678")
        + frames.frame(5)
        + frames.frame(5, bytes(31))
        + frames.frame(8, b"short")
        + frames.frame(0x15)
        + frames.frame(0xEE, b"12345")
        + frames.frame(3, b"again")
    )
    pair.client.receive(raw, pair.now)
    assert pair.client.take_outputs() == [
        c.PeerGone(key, True),
        c.HealthReported("duplicate"),
        c.RestartAnnounced(1.5, 5.0),
        c.Transmit(frames.frame(0x13, b"12345678")),
    ]
    assert sum(pair.client.drops.values()) == 4
    pair.client.receive(b"\x05\xff\xff\xff\xff", pair.now)
    assert isinstance(pair.client.take_outputs()[0], c.Closed)


def test_a_deadline_that_came_is_not_asked_for_again():
    """Floating point: 1000.37 + 30 - 1000.37 is less than 30."""
    pair = Pair()
    pair.now = 1000.37
    pair.pump()
    for _ in range(3):
        deadline = pair.client.next_deadline()
        pair.now = deadline.at
        pair.client.on_deadline(pair.now)
        pair.pump()
        assert pair.client.next_deadline().at > pair.now
