"""The way of packets: host -> filter -> core -> path, and back. Batches only; decisions are made elsewhere.

Out: `from_host` gets frames of the TUN or netstack, notes flows, seals, and sends each batch on the path that
magicsock holds for the peer. In: `from_underlay` gets datagrams of a UDP socket or of a DERP connection, opens them,
and hands what the filter accepts to the host. Handshakes, disco and STUN go up to their machines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tsd.base.addr import AddrPort
from tsd.base.clock import Clock
from tsd.base.keys import NodePublic
from tsd.base.log import TRACE, DropCounter, fields
from tsd.dataplane.pump import Core, Opened, Other, Sealed
from tsd.derp.bundle import unbundle
from tsd.engine.driver import Driver
from tsd.filter.filter import PacketFilter
from tsd.hull import Frame, Tun
from tsd.magicsock.magicsock import Magicsock
from tsd.magicsock.types import DerpSource
from tsd.packet.constants import TSMP
from tsd.packet.parse import Packet, parse, running_tcp_destination
from tsd.wireguard.device import WireGuard

log = logging.getLogger(__name__)

Source = AddrPort | DerpSource

_RUN_PACKETS = 48


class Underlay(Protocol):
    """Where sealed batches leave the machine."""

    def send_udp(self, remote: AddrPort, datagrams: bytes, datagram_bytes: int) -> None: ...

    def send_derp(self, region: int, peer: NodePublic, datagrams: bytes, datagram_bytes: int) -> None: ...


@dataclass(slots=True)
class PathTraffic:
    """Counters of one kind of path, as usermetrics names them."""

    rx_packets: int = 0
    rx_bytes: int = 0
    tx_packets: int = 0
    tx_bytes: int = 0


@dataclass(slots=True)
class Traffic:
    direct_ipv4: PathTraffic = field(default_factory=PathTraffic)
    direct_ipv6: PathTraffic = field(default_factory=PathTraffic)
    derp: PathTraffic = field(default_factory=PathTraffic)
    inbound_drops: DropCounter = field(default_factory=DropCounter)
    outbound_drops: DropCounter = field(default_factory=DropCounter)

    def of(self, source: Source) -> PathTraffic:
        if isinstance(source, DerpSource):
            return self.derp
        return self.direct_ipv4 if source.ip.version == 4 else self.direct_ipv6


class DataPath:
    """Joins core, WireGuard, magicsock, filter and host. Not a machine: it only passes batches on."""

    def __init__(
        self,
        core: Core,
        wireguard: WireGuard,
        magicsock: Magicsock,
        clock: Clock,
        underlay: Underlay,
        driver: Driver,
    ) -> None:
        self._core = core
        self._wireguard = wireguard
        self._magicsock = magicsock
        self._clock = clock
        self._underlay = underlay
        self._driver = driver
        self._tun: Tun | None = None
        self._inbox: list[Frame] = []
        self._is_flush_due = False
        self.filter = PacketFilter((), ())
        self.jailed_filter = PacketFilter((), ())
        self.jailed: frozenset[int] = frozenset()
        self.traffic = Traffic()
        self.unreached: dict[int, None] = {}
        """Peers that something could not be sent to, since when they had no path at all."""
        self.on_stun: Callable[[bytes, AddrPort], None] = lambda datagram, source: None
        self.intercept: Callable[[int, Packet], bool] = lambda handle, packet: False
        self.answer_locally: Callable[[Packet], list[Frame] | None] = lambda packet: None
        self.node_key_of: Callable[[int], NodePublic | None] = lambda handle: None
        self.ensure_peer: Callable[[int], bool] = lambda handle: True
        self.on_allowed: Callable[[bytes | bytearray | memoryview], None] = lambda packet: None
        """A rule let an inbound packet in, and would let its like in."""

    def attach(self, tun: Tun, *, reads: bool = True) -> None:
        """`reads` False: somebody else hands over what the host sends."""
        self._tun = tun
        if reads:
            tun.attach(self.from_host)

    # --- host to overlay

    def from_host(self, frames: list[Frame]) -> None:
        """Frames that the host sends into the overlay."""
        self.send([frame for frame in frames if self._may_leave(frame)])

    def send(self, frames: Sequence[Frame]) -> None:
        """Route, seal and send; what has no session yet is staged and starts a handshake."""
        if not frames:
            return
        now = self._clock.now()
        result = self._core.seal(frames, now)
        self.send_sealed(result.sealed, now)
        self.stage(result.no_session)
        self.note(result.attention, ())
        if result.no_session:
            self._driver.kick()
        elif not self._is_flush_due:
            self._driver.kick_soon()

    def stage(self, waiting: Sequence[tuple[int, Frame]]) -> None:
        """(peer, frame) without a session. Drain the machines afterwards."""
        if not waiting:
            return
        now, wall_ns = self._clock.now(), self._clock.wall_ns()
        for handle, frame in waiting:
            if self.ensure_peer(handle):
                self._wireguard.stage(handle, frame, now, wall_ns)

    def note(self, attention: Sequence[int], confirmed: Sequence[int], authenticated: Sequence[int] = ()) -> None:
        """What the core says about timers and handshakes. Drain the machines afterwards."""
        if attention or confirmed:
            now, wall_ns = self._clock.now(), self._clock.wall_ns()
            self._wireguard.note(attention, confirmed, authenticated, now, wall_ns)

    def _may_leave(self, frame: Frame) -> bool:
        if frame.segment_bytes or running_tcp_destination(frame.packet) is not None:
            return True
        packet = parse(frame.packet)
        answer = self.answer_locally(packet)
        if answer is not None:
            if self._tun is not None and answer:
                self._tun.deliver(answer)
            return False
        if packet.proto == TSMP:
            self.traffic.outbound_drops.add("acl")
            return False
        verdict = self._filter_towards(packet).outbound(packet)
        if not verdict.accept:
            self.traffic.outbound_drops.add(verdict.reason)
        return verdict.accept

    def _filter_towards(self, packet: Packet) -> PacketFilter:
        """The one that will judge the answer, so that it knows of the question."""
        is_jailed = bool(self.jailed) and self._core.route(packet.dst) in self.jailed
        return self.jailed_filter if is_jailed else self.filter

    def send_sealed(self, sealed: Sequence[Sealed], now: float) -> None:
        for batch in sealed:
            route = self._magicsock.route(batch.peer, now)
            if route.udp is not None:
                self._count_sent(self.traffic.of(route.udp), batch)
                self._underlay.send_udp(route.udp, batch.datagrams, batch.datagram_bytes)
            if route.derp_region:
                self._send_by_derp(batch, route.derp_region)
            elif route.udp is None:
                self.traffic.outbound_drops.add("no_path", batch.count)
                self.unreached[batch.peer] = None

    def _send_by_derp(self, batch: Sealed, region: int) -> None:
        node_key = self.node_key_of(batch.peer)
        if node_key is not None:
            self._count_sent(self.traffic.derp, batch)
            self._underlay.send_derp(region, node_key, batch.datagrams, batch.datagram_bytes)

    def send_datagram(self, handle: int, datagram: bytes, now: float) -> None:
        """One handshake message, on the peer's path."""
        self.send_sealed([Sealed(handle, datagram, len(datagram), 1)], now)

    @staticmethod
    def _count_sent(traffic: PathTraffic, batch: Sealed) -> None:
        traffic.tx_packets += batch.count
        traffic.tx_bytes += len(batch.datagrams)

    # --- underlay to host

    def from_underlay(self, datagrams: bytes | memoryview, datagram_bytes: int, source: Source) -> None:
        """Datagrams back to back, as they came from one source. What is in them reaches the host with `_flush`."""
        now = self._clock.now()
        result = self._core.open(datagrams, datagram_bytes, now)
        for kind, datagram in result.others:
            self.take_other(kind, datagram, source)
        if result.authenticated:
            traffic = self.traffic.of(source)
            traffic.rx_bytes += len(datagrams)
            traffic.rx_packets += -(-len(datagrams) // datagram_bytes) if datagram_bytes else 1
            self._magicsock.note_received(result.authenticated, source, now)
        self.note(result.attention, result.confirmed, result.authenticated)
        if result.others or result.confirmed:
            self._driver.kick()
        self.take_opened(result.opened)

    def take_opened(self, opened: Sequence[Opened]) -> None:
        """What was opened, and not judged yet."""
        for item in opened:
            if self._may_enter(item):
                self._inbox.append(item.frame)
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Everything that arrived in this loop iteration goes to the host at once: TCP answers it with one ACK."""
        try:
            while self._inbox:
                frames, self._inbox = self._inbox, []
                if self._tun is not None:
                    self._tun.deliver(frames)
        finally:
            self._is_flush_due = False
        self._driver.kick()

    def from_derp(self, packets: list[bytes], source: DerpSource) -> None:
        """Packets of one peer by relay; what fits together is opened together."""
        for run, size in _runs(packets):
            self.from_underlay(run[0] if len(run) == 1 else b"".join(run), size, source)

    def take_other(self, kind: Other, datagram: bytes, source: Source) -> None:
        """A datagram that is not transport data. Drain the machines afterwards."""
        now = self._clock.now()
        if kind is Other.HANDSHAKE:
            self._wireguard.receive(datagram, source, now, self._clock.wall_ns())
        elif kind is Other.DISCO:
            self._magicsock.receive_disco(datagram, source, now)
        elif kind is Other.STUN and isinstance(source, AddrPort):
            self.on_stun(datagram, source)

    def _may_enter(self, item: Opened) -> bool:
        chosen = self.jailed_filter if item.peer in self.jailed else self.filter
        destination = running_tcp_destination(item.frame.packet)
        if destination is not None and chosen.lets_running_tcp_to(destination):
            return True
        packet = parse(item.frame.packet)
        if destination is None and self.intercept(item.peer, packet):
            return False
        verdict = chosen.inbound(packet)
        if verdict.accept:
            if verdict.is_for_all_like:
                self.on_allowed(packet.packet)
            return True
        self.traffic.inbound_drops.add(verdict.reason)
        if log.isEnabledFor(TRACE):
            log.log(TRACE, fields("dropped inbound packet", peer=item.peer, reason=verdict.reason))
        if verdict.reject_tsmp is not None:
            self.send([Frame(verdict.reject_tsmp)])
        return False


def _runs(packets: list[bytes]) -> Iterator[tuple[list[bytes | memoryview], int]]:
    """(pieces, bytes of one datagram): datagrams of one length that follow each other, only the last may be shorter."""
    run: list[bytes | memoryview] = []
    size = room = 0
    for packet in packets:
        piece, unit = unbundle(packet) or (packet, len(packet))
        count = -(-len(piece) // unit) if unit else 1
        if run and count <= room and (unit == size or (count == 1 and len(piece) < size)):
            run.append(piece)
            room -= count
        else:
            if run:
                yield run, size
            run, size, room = [piece], unit, _RUN_PACKETS - count
        if len(piece) % size if size else True:
            yield run, size
            run = []
    if run:
        yield run, size
