"""The DERP router: clients joined to it by hand."""

from ipaddress import IPv4Address

from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import NodePrivate
from tsd.derp import frames
from tsd.derp.frames import ClientInfo, FrameSplitter, FrameType
from tsd.derp.server import ClientJoined, ClientLeft, Closed, DerpRouter, Writable

REMOTE = AddrPort(IPv4Address("192.0.2.1"), 1234)
DISCO = b"TS\xf0\x9f\x92\xac" + bytes(60)


class Region:
    def __init__(self, **options) -> None:
        self.entropy = SeededEntropy(1)
        self.server = NodePrivate.generate(self.entropy)
        self.router = DerpRouter(self.server, entropy=self.entropy, **options)
        self.now = 100.0

    def login(self) -> tuple[int, NodePrivate]:
        return self.login_as(NodePrivate.generate(self.entropy))

    def login_as(self, private: NodePrivate) -> tuple[int, NodePrivate]:
        connection = self.router.connect(REMOTE, self.now)
        raw = frames.seal_client_info(private, self.server.public(), ClientInfo(), self.entropy(24))
        self.router.receive(connection, raw, self.now)
        got = self.read(connection)
        assert [f.kind for f in got] == [1, 3]
        frames.open_server_info(private, self.server.public(), got[1].payload)
        return connection, private

    def send(self, connection: int, to: NodePrivate, packet: bytes) -> None:
        self.router.receive(connection, frames.send_packet(to.public().raw, packet), self.now)

    def read(self, connection: int):
        return FrameSplitter().feed(self.router.take(connection, self.now))


def test_packets_travel_both_ways():
    region = Region()
    a, a_key = region.login()
    b, b_key = region.login()
    joined = [o for o in region.router.take_outputs() if isinstance(o, ClientJoined)]
    assert [j.key for j in joined] == [a_key.public(), b_key.public()]
    region.send(a, b_key, b"hi")
    assert region.router.take_outputs() == [Writable(b)]
    region.send(a, b_key, b"again")
    assert region.router.take_outputs() == []
    got = region.read(b)
    assert [(f.kind, f.payload) for f in got] == [(5, a_key.public().raw + b"hi"), (5, a_key.public().raw + b"again")]
    region.send(b, a_key, b"back")
    assert region.read(a)[0].payload[32:] == b"back"


def test_peer_gone_goes_to_those_who_received():
    region = Region()
    a, a_key = region.login()
    b, b_key = region.login()
    c, _ = region.login()
    region.send(a, b_key, b"hi")
    region.read(b)
    region.router.take_outputs()
    region.router.disconnect(a, region.now)
    assert ClientLeft(a_key.public()) in region.router.take_outputs()
    assert frames.decode_peer_gone(region.read(b)[0].payload) == (a_key.public(), 0)
    assert region.read(c) == []


def test_not_here_is_for_disco_only_and_limited():
    region = Region()
    a, _ = region.login()
    nobody = NodePrivate.generate(region.entropy)
    region.send(a, nobody, b"data")
    assert region.read(a) == []
    for _ in range(9):
        region.send(a, nobody, DISCO)
    assert [f.kind for f in region.read(a)] == [FrameType.PEER_GONE] * 3
    region.now += 1
    region.send(a, nobody, DISCO)
    assert len(region.read(a)) == 1


def test_w13_duplicates_most_recent_writer_is_active():
    region = Region()
    a, a_key = region.login()
    b, b_key = region.login()
    twin, _ = region.login_as(a_key)
    region.send(b, a_key, b"1")
    assert region.read(twin) and not region.read(a)
    region.send(a, b_key, b"mine")
    region.send(b, a_key, b"2")
    told, packet = region.read(a)
    assert told.kind == FrameType.HEALTH and b"same node key" in told.payload and packet.payload[32:] == b"2"
    assert region.read(twin) == [told]
    region.router.disconnect(a, region.now)
    region.read(b)
    region.send(b, a_key, b"3")
    well, packet = region.read(twin)
    assert (well.kind, well.payload) == (FrameType.HEALTH, b"")
    assert packet.payload[32:] == b"3" and region.read(b) == []
    region.router.disconnect(twin, region.now)
    assert frames.decode_peer_gone(region.read(b)[0].payload) == (a_key.public(), 0)


def test_w13_a_reconnection_is_no_twin():
    region = Region()
    a, a_key = region.login()
    _, b_key = region.login()
    region.send(a, b_key, b"1")
    again, _ = region.login_as(a_key)
    region.send(again, b_key, b"2")
    assert region.read(a) == region.read(again) == []
    region.router.disconnect(a, region.now)
    assert region.read(again) == []


def test_w26_queue_is_bounded_and_drops_the_oldest():
    region = Region(queue_bytes=10_000)
    a, _ = region.login()
    b, b_key = region.login()
    for i in range(100):
        region.send(a, b_key, bytes([i]) * 1000)
    region.send(a, b_key, DISCO)
    got = region.read(b)
    assert got[0].payload[32:] == DISCO
    assert [f.payload[32] for f in got[1:]] == list(range(91, 100))
    assert region.router.drops["queue full"] == 91


def test_stalled_reader_is_closed():
    region = Region(queue_bytes=2_000)
    a, _ = region.login()
    b, b_key = region.login()
    region.router.take_outputs()
    region.now += 11
    for _ in range(5):
        region.send(a, b_key, bytes(1000))
    assert Closed(b, "write timeout") in region.router.take_outputs()


def test_login_deadline_keep_alive_ping_and_admission():
    region = Region(admit=lambda key, remote: remote == REMOTE)
    silent = region.router.connect(REMOTE, region.now)
    a, _ = region.login()
    region.router.take_outputs()
    region.router.on_deadline(region.now + 10)
    assert region.router.take_outputs() == [Closed(silent, "login timeout")]
    region.router.receive(a, frames.frame(FrameType.PING, b"12345678extra") * 3, region.now)
    assert [(f.kind, f.payload) for f in region.read(a)] == [(FrameType.PONG, b"12345678")]
    region.router.on_deadline(region.now + 65)
    assert [f.kind for f in region.read(a)] == [FrameType.KEEP_ALIVE]
    stranger = region.router.connect(AddrPort(IPv4Address("192.0.2.9"), 1), region.now)
    raw = frames.seal_client_info(
        NodePrivate.generate(region.entropy), region.server.public(), ClientInfo(), region.entropy(24)
    )
    region.router.receive(stranger, raw, region.now)
    assert region.router.take_outputs()[-1] == Closed(stranger, "derp: client not admitted")


def test_w14_hostile_clients_are_closed_and_unknown_frames_skipped():
    region = Region()
    a, _ = region.login()
    region.router.take_outputs()
    region.router.receive(a, frames.frame(0xEE, b"12345"), region.now)
    assert region.router.take_outputs() == []
    for raw in (
        frames.frame(4, bytes(31)),
        frames.frame(4, bytes(32 + 65537)),
        b"\x05\xff\xff\xff\xff",
        frames.frame(7, b""),
        frames.frame(0x10),
        frames.frame(0x12, b"short"),
    ):
        victim, _ = region.login()
        region.router.take_outputs()
        region.router.receive(victim, raw, region.now)
        assert any(isinstance(o, Closed) for o in region.router.take_outputs())
