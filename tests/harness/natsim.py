"""Magicsocks joined by a simulated internet in virtual time: NAT kinds, a relay, loss by rule. No sockets.

Mapping: EIM, ADM or APDM. Filtering: EIF, ADF or APDF; None is a host without NAT or firewall. `Lab.run` moves
time; every step is replayable.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import DiscoPrivate, NodePrivate
from tsd.disco.box import is_disco
from tsd.magicsock.magicsock import Magicsock
from tsd.magicsock.types import (
    CliPong,
    DataProbeWanted,
    DerpSource,
    EndpointKind,
    EndpointsWanted,
    OwnEndpoint,
    PathChanged,
    PeerPaths,
    SendDerp,
    SendUdp,
)

PROBE = b"\x04\0\0\0probe"
STUN = AddrPort(IPv4Address("192.0.2.250"), 3478)
CLASSES = {
    "P": (None, None),
    "A": ("EIM", "ADF"),
    "E": ("EIM", "APDF"),
    "H": ("APDM", "APDF"),
    "X": ("APDM", "EIF"),
    "B": ("blocked", None),
}


@dataclass
class Nat:
    """One NAT with one host behind it (a firewall is a NAT that maps to itself)."""

    external: IPAddress
    mapping: str | None
    filtering: str | None
    next_port: int = 20000
    mappings: dict[object, int] = field(default_factory=dict)
    owners: dict[int, AddrPort] = field(default_factory=dict)
    sent_to: set[tuple[int, object]] = field(default_factory=set)

    def outbound(self, source: AddrPort, to: AddrPort) -> AddrPort | None:
        if self.mapping == "blocked":
            return None
        if self.mapping is None:
            return source
        key = {"EIM": source, "ADM": (source, to.ip), "APDM": (source, to)}[self.mapping]
        port = self.mappings.get(key)
        if port is None:
            self.next_port += 7
            port = self.mappings[key] = self.next_port
            self.owners[port] = source
        self.sent_to |= {(port, to), (port, to.ip)}
        return AddrPort(self.external, port)

    def inbound(self, to: AddrPort, source: AddrPort) -> AddrPort | None:
        if self.mapping == "blocked":
            return None
        if self.mapping is None:
            return to
        owner = self.owners.get(to.port)
        if owner is None or self.filtering == "EIF":
            return owner
        seen = source if self.filtering == "APDF" else source.ip
        return owner if (to.port, seen) in self.sent_to else None

    def forget(self) -> None:
        """The NAT rebooted."""
        self.mappings.clear()
        self.owners.clear()
        self.sent_to.clear()
        self.next_port += 1000


@dataclass(eq=False)
class Node:
    name: str
    nat: Nat
    local: AddrPort
    magicsock: Magicsock
    node_private: NodePrivate
    disco_private: DiscoPrivate
    latency_s: float
    sent_pings: int = 0
    wakes: int = 0
    received: list[tuple[str, bytes]] = field(default_factory=list)
    events: list[object] = field(default_factory=list)
    unanswered: dict[int, float] = field(default_factory=dict)
    armed: float = 1e18


class Lab:
    """`add` nodes, `introduce` them, then `send` and `run`."""

    def __init__(self, seed: int = 1) -> None:
        self.now = 1000.0
        self.entropy = SeededEntropy(seed)
        self.nodes: list[Node] = []
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.passes: Callable[[Node, Node, bytes], bool] = lambda a, b, datagram: True
        self.relay_passes = True
        self.probes: dict[tuple[str, str], tuple[int, AddrPort]] = {}
        self.relayed = 0
        self.direct = 0

    def add(self, kind: str, latency_s: float = 0.01, **options) -> Node:
        number = len(self.nodes) + 1
        mapping, filtering = CLASSES[kind]
        public = IPv4Address(f"203.0.113.{number}")
        ip = public if mapping is None else IPv4Address(f"10.{number}.0.2")
        node_private, disco = NodePrivate.generate(self.entropy), DiscoPrivate.generate(self.entropy)
        magicsock = Magicsock(node_private, disco, entropy=self.entropy, **options)
        nat = Nat(public, mapping, filtering)
        node = Node(f"{kind}{number}", nat, AddrPort(ip, 41641), magicsock, node_private, disco, latency_s)
        magicsock.unanswered_since = lambda handle: node.unanswered.get(handle, 0.0)
        self.nodes.append(node)
        self.stun(node)
        return node

    def stun(self, node: Node) -> None:
        seen = node.nat.outbound(node.local, STUN)
        found = [OwnEndpoint(node.local, EndpointKind.LOCAL)]
        if seen is not None and seen != node.local:
            found.insert(0, OwnEndpoint(seen, EndpointKind.STUN))
        node.endpoints = tuple(e.address for e in found)
        node.magicsock.set_endpoints(found, self.now)

    def paths(self, node: Node, **changes) -> PeerPaths:
        fields = {
            "node_key": node.node_private.public(),
            "disco_key": node.disco_private.public(),
            "endpoints": node.endpoints,
            "home_derp": 1,
        }
        return PeerPaths(**(fields | changes))

    def introduce(self) -> None:
        """Everybody learns everybody; handles are positions in `nodes`."""
        for node in self.nodes:
            for handle, other in enumerate(self.nodes):
                if other is not node:
                    node.magicsock.set_peer(handle, self.paths(other), self.now)
            self.drain(node)

    def send(self, source: Node, to: Node, data: bytes = b"\x04\0\0\0data") -> None:
        source.unanswered.setdefault(self.nodes.index(to), self.now)
        route = source.magicsock.route(self.nodes.index(to), self.now)
        self.drain(source)
        if route.udp is not None:
            self.udp(source, route.udp, data)
        if route.derp_region:
            self.derp(source, to, data)

    def talk(self, a: Node, b: Node, seconds: float, every_s: float = 1.0) -> None:
        """Both send at a steady pace."""
        end = self.now + seconds
        while self.now < end:
            self.send(a, b)
            self.send(b, a)
            self.run(every_s)

    def is_direct(self, a: Node, b: Node) -> bool:
        return a.magicsock.path(self.nodes.index(b), self.now).cur_addr is not None

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.queue and self.queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        self.now = end

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.count, action))

    def udp(self, source: Node, to: AddrPort, datagram: bytes) -> None:
        seen = source.nat.outbound(source.local, to)
        if seen is None:
            return
        for other in self.nodes:
            if to.ip == other.nat.external and other is not source:
                delay = source.latency_s + other.latency_s
                self.after(delay, lambda other=other: self.arrive(source, other, seen, to, datagram))

    def arrive(self, source: Node, other: Node, seen: AddrPort, to: AddrPort, datagram: bytes) -> None:
        if other.nat.inbound(to, seen) == other.local and self.passes(source, other, datagram):
            self.direct += not is_disco(datagram)
            self.deliver(source, other, datagram, seen)

    def derp(self, source: Node, to: Node, datagram: bytes) -> None:
        if self.relay_passes:
            self.relayed += not is_disco(datagram)
            via = DerpSource(1, source.node_private.public())
            self.after(0.04 + source.latency_s, lambda: self.deliver(source, to, datagram, via))

    def deliver(self, source: Node, to: Node, datagram: bytes, via: AddrPort | DerpSource) -> None:
        if is_disco(datagram):
            to.magicsock.receive_disco(datagram, via, self.now)
        else:
            if datagram == PROBE:
                self.after(0.05, lambda: source.magicsock.data_passed(*self.probes[source.name, to.name]))
            to.received.append((source.name, datagram))
            to.unanswered.pop(self.nodes.index(source), None)
            to.magicsock.note_received([self.nodes.index(source)], via, self.now)
        self.drain(to)

    def drain(self, node: Node) -> None:
        for output in node.magicsock.take_outputs():
            match output:
                case SendUdp(address, datagram):
                    node.sent_pings += 1
                    self.udp(node, address, datagram)
                case SendDerp(_, node_key, datagram):
                    for other in self.nodes:
                        if other.node_private.public() == node_key:
                            self.derp(node, other, datagram)
                case DataProbeWanted(handle, address):
                    self.probes[node.name, self.nodes[handle].name] = (handle, address)
                    self.udp(node, address, PROBE)
                case EndpointsWanted():
                    node.events.append(output)
                    self.after(0.1, lambda: (self.stun(node), self.drain(node)))
                case PathChanged() | CliPong():
                    node.events.append(output)
                case _:
                    node.events.append(output)
        self.arm(node)

    def arm(self, node: Node) -> None:
        deadline = node.magicsock.next_deadline()
        if deadline is not None and deadline.at < node.armed:
            node.armed = deadline.at
            self.after(max(0.0, deadline.at - self.now), lambda: self.wake(node))

    def wake(self, node: Node) -> None:
        node.armed = 1e18
        node.wakes += 1
        node.magicsock.on_deadline(self.now)
        self.drain(node)
