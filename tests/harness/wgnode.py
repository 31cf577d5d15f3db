"""A WireGuard node without sockets: a core and a device, driven by hand or joined by a pretend wire."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_network

from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import NodePrivate
from tsd.dataplane.pump import Core, Other
from tsd.dataplane.reference import ReferenceCore
from tsd.hull import Frame
from tsd.packet.build import udp_packet
from tsd.wireguard.device import WireGuard
from tsd.wireguard.events import Reply, SealedReady, Transmit
from tsd.wireguard.tai64n import Tai64nSource


@dataclass
class Flight:
    """One datagram on its way; `kind` is the message type."""

    datagram: bytes
    sender: WgNode
    peer: int

    @property
    def kind(self) -> int:
        return self.datagram[0]

    @property
    def is_keepalive(self) -> bool:
        return self.kind == 4 and len(self.datagram) == 32


class WgNode:
    """Peers are handles; `send` takes inner packets, `received` collects them, outgoing datagrams go to `out`."""

    def __init__(
        self, name: str, address: str, clock: ManualClock, core: Core | None = None, **options: object
    ) -> None:
        self.name = name
        self.address = IPv4Address(address).packed
        self.clock = clock
        self.entropy = SeededEntropy(name)
        self.private = NodePrivate.generate(self.entropy)
        self.core = core or ReferenceCore()
        self.tai64n = Tai64nSource()
        self.wg = WireGuard(self.private, self.core, entropy=self.entropy, tai64n=self.tai64n, **options)  # type: ignore[arg-type]
        self.out: list[Flight] = []
        self.replies: list[tuple[Hashable, bytes]] = []
        self.events: list[object] = []
        self.received: list[tuple[int, bytes]] = []

    def add_peer(self, handle: int, other: WgNode) -> None:
        self.wg.add_peer(handle, other.private.public())
        self.core.set_allowed_ips(handle, [ip_network(f"{IPv4Address(other.address)}/32")])

    def send(self, *packets: bytes) -> None:
        now, wall_ns = self.clock.now(), self.clock.wall_ns()
        result = self.core.seal([Frame(packet) for packet in packets], now)
        self._put(result.sealed)
        for handle, frame in result.no_session:
            self.wg.stage(handle, frame, now, wall_ns)
        self.wg.note(result.attention, [], [], now, wall_ns)
        self.drain()

    def udp_to(self, other: WgNode, payload: bytes = b"data") -> bytes:
        return udp_packet(self.address, 1000, other.address, 2000, payload)

    def take(self, datagram: bytes, source: Hashable | None = None) -> None:
        """One datagram from the underlay."""
        now, wall_ns = self.clock.now(), self.clock.wall_ns()
        result = self.core.open(datagram, 0, now)
        self.received += [(item.peer, bytes(item.frame.packet)) for item in result.opened]
        self.wg.note(result.attention, result.confirmed, result.authenticated, now, wall_ns)
        for kind, message in result.others:
            if kind == Other.HANDSHAKE:
                self.wg.receive(message, source, now, wall_ns)
        self.drain()

    def wake(self, at: float) -> None:
        """Run what is due at `at`, which the clock may miss by a rounding error."""
        deadline = self.wg.next_deadline()
        if deadline is not None and deadline.at <= at:
            self.wg.on_deadline(max(at, self.clock.now()), self.clock.wall_ns())
            self.drain()

    def drain(self) -> None:
        for output in self.wg.take_outputs():
            if isinstance(output, Transmit):
                self.out.append(Flight(output.datagram, self, output.peer))
            elif isinstance(output, Reply):
                self.replies.append((output.source, output.datagram))
            elif isinstance(output, SealedReady):
                self._put(output.sealed)
            else:
                self.events.append(output)

    def _put(self, sealed: list) -> None:  # type: ignore[type-arg]
        for item in sealed:
            for start in range(0, len(item.datagrams), item.datagram_bytes):
                self.out.append(Flight(item.datagrams[start : start + item.datagram_bytes], self, item.peer))


@dataclass
class Wire:
    """Joins two nodes. `drop` decides the fate of each flight; `log` keeps (time, sender, type) of all of them."""

    a: WgNode
    b: WgNode
    clock: ManualClock
    drop: Callable[[Flight], bool] = lambda flight: False
    log: list[tuple[float, str, int]] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)

    def run(self) -> None:
        """Deliver until nothing moves."""
        while self.a.out or self.b.out:
            for node, other in ((self.a, self.b), (self.b, self.a)):
                flights, node.out = node.out, []
                for flight in flights:
                    self.log.append((self.clock.now(), node.name, flight.kind))
                    self.flights.append(flight)
                    if not self.drop(flight):
                        other.take(flight.datagram, node.name)

    def advance(self, seconds: float) -> None:
        """Let time pass, waking both nodes exactly when they ask to be woken."""
        end = self.clock.now() + seconds
        for _ in range(100_000):
            self.run()
            deadlines = [d.at for node in (self.a, self.b) if (d := node.wg.next_deadline()) is not None]
            at = min(deadlines, default=math.inf)
            if at > end:
                break
            self.clock.advance(max(0.0, at - self.clock.now()))
            self.a.wake(at)
            self.b.wake(at)
        else:
            raise AssertionError("timers spin")
        self.clock.advance(max(0.0, end - self.clock.now()))
        self.run()

    def count(self, kind: int, name: str | None = None, since: float = 0.0) -> int:
        return sum(1 for at, who, what in self.log if what == kind and at >= since and name in (None, who))


def pair(**options: object) -> Wire:
    """Two nodes that know each other: a (100.64.0.1) has b as peer 1, b (100.64.0.2) has a as peer 2."""
    clock = ManualClock()
    a, b = WgNode("a", "100.64.0.1", clock, **options), WgNode("b", "100.64.0.2", clock, **options)  # type: ignore[arg-type]
    a.add_peer(1, b)
    b.add_peer(2, a)
    return Wire(a, b, clock)
