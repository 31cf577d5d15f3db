"""One magicsock with a peer that a test plays by hand."""

from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import DiscoPrivate, NodePrivate
from tsd.disco import messages
from tsd.disco.box import DiscoKeyring
from tsd.magicsock.magicsock import Magicsock
from tsd.magicsock.types import (
    DerpSource,
    EndpointKind,
    OwnEndpoint,
    PeerPaths,
    Route,
    SendDerp,
    SendUdp,
)

A4 = AddrPort.parse("192.0.2.9:41641")
B4 = AddrPort.parse("192.0.2.9:63335")
A6 = AddrPort.parse("[2001:db8::5]:41641")
OWN = [OwnEndpoint(AddrPort.parse("198.51.100.1:41641"), EndpointKind.STUN)]


class Bench:
    """One magicsock and a peer played by hand."""

    def __init__(self, endpoints=(A4,), home: int = 5, **options) -> None:
        self.entropy = SeededEntropy(7)
        self.now = 100.0
        self.node, self.disco = NodePrivate.generate(self.entropy), DiscoPrivate.generate(self.entropy)
        self.peer_node, self.peer = NodePrivate.generate(self.entropy), DiscoPrivate.generate(self.entropy)
        self.ring = DiscoKeyring(self.peer)
        self.sock = Magicsock(self.node, self.disco, entropy=self.entropy, **options)
        self.paths = PeerPaths(self.peer_node.public(), self.peer.public(), tuple(endpoints), home)
        self.sock.set_peer(0, self.paths, self.now)
        self.sock.set_endpoints(OWN, self.now)

    def out(self):
        return self.sock.take_outputs()

    def opened(self):
        """Disco we sent: (where, message)."""
        return [
            (o.address if isinstance(o, SendUdp) else o.region, self.read(o.datagram))
            for o in self.out()
            if isinstance(o, SendUdp | SendDerp)
        ]

    def read(self, datagram: bytes, ring: DiscoKeyring | None = None):
        return messages.decode((ring or self.ring).open_from(self.disco.public().raw, datagram))

    def say(self, message, source, ring: DiscoKeyring | None = None) -> None:
        raw = (ring or self.ring).seal_to(self.disco.public().raw, self.entropy(24), message.encode())
        self.sock.receive_disco(raw, source, self.now)

    def relay(self, region: int = 5) -> DerpSource:
        return DerpSource(region, self.peer_node.public())

    def make_direct(self) -> None:
        self.sock.route(0, self.now)
        for where, message in self.opened():
            if where == A4 and isinstance(message, messages.Ping):
                self.now += 0.01
                self.say(messages.Pong(message.txid, OWN[0].address), A4)
        assert self.sock.route(0, self.now) == Route(A4, 0)
        self.out()

    def tick(self, seconds: float) -> None:
        end = self.now + seconds
        while (deadline := self.sock.next_deadline()) and deadline.at <= end:
            self.now = max(self.now, deadline.at)
            self.sock.on_deadline(self.now)
        self.now = end
