"""The userspace TCP/IP stack: frames in, frames out, events up. Sans-IO.

Spec: RFC 9293 and RFC 1122 for the host rules; behaviour of the overlay's userspace mode after tailscale:
`wgengine/netstack`. Demultiplexes to `tcp.Connection`s, keeps TIME-WAIT, SYN and timer tables (all bounded), and loops
packets to own addresses back. Connections are driven once per batch: `receive` feeds all frames, then each touched
connection sends once. No routing: whoever owns the stack delivers only what is meant for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from tsd.base.addr import AddrPort, IPAddress, IPPrefix
from tsd.base.entropy import Entropy
from tsd.base.log import DropCounter
from tsd.base.machine import Deadline
from tsd.hull import Frame
from tsd.netstack.datagrams import FIRST_EPHEMERAL, LAST_EPHEMERAL, Datagrams, address_of, is_routed_by
from tsd.netstack.events import (
    DatagramBinding,
    Event,
    Listener,
    StreamAccepted,
    StreamAdvanced,
    SynReceived,
)
from tsd.netstack.flows import Backlog, TimeWaits, initial_sequence
from tsd.netstack.fragments import Reassembler
from tsd.netstack.tcp import constants as c
from tsd.netstack.tcp.connection import Connection
from tsd.netstack.tcp.segment import Header, Segment, ones_sum, parse_segment
from tsd.packet.build import tcp_reset_for
from tsd.packet.constants import IPV6_FRAGMENT, TCP, UNKNOWN
from tsd.packet.parse import parse

MAX_CONNECTIONS = 16384
MAX_LOOPED = 4096
RECEIVE_MEMORY_BYTES = 256 << 20


class Stack:
    """`addresses` are our own; `set_subnets` adds what we forward for others."""

    def __init__(self, addresses: Sequence[IPAddress], mtu_bytes: int, entropy: Entropy) -> None:
        self.mtu_bytes = mtu_bytes
        self.drops = DropCounter()
        self.forwards = False
        """Whether unclaimed flows to our own addresses become events (`SynReceived`) instead of being refused."""
        self._secret = entropy(32)
        self._ts_offset = int.from_bytes(entropy(4), "big")
        self._frames: list[Frame] = []
        self._events: list[Event] = []
        self._connections: dict[bytes, Connection] = {}
        self._dirty: list[Connection] = []
        self._signalled: list[Connection] = []
        self._heap: list[tuple[float, int, Connection]] = []
        self._heap_count = 0
        self._listeners: dict[tuple[bytes, int], Listener] = {}
        self.backlog = Backlog()
        self.time_waits = TimeWaits()
        self._reassembler = Reassembler()
        self._receive_reserved = 0
        self._next_port = FIRST_EPHEMERAL + int.from_bytes(entropy(2), "big") % (LAST_EPHEMERAL - FIRST_EPHEMERAL)
        self._own: dict[bytes, IPAddress] = {}
        self._first_own: dict[int, IPAddress] = {}
        self._subnets: tuple[IPPrefix, ...] = ()
        self._subnet_hits: dict[bytes, bool] = {}
        self.datagrams = Datagrams(mtu_bytes, self._events, self.emit)
        self.datagrams.on_unreachable = self._on_unreachable
        self._now = 0.0
        self.set_addresses(addresses)

    # -- configuration -----------------------------------------------------------------------------------------

    def set_addresses(self, addresses: Sequence[IPAddress]) -> None:
        """Replace our own addresses; connections of addresses that stay are untouched."""
        self._own = {ip.packed: ip for ip in addresses}
        self._first_own = {ip.version: ip for ip in reversed(addresses)}

    def set_subnets(self, subnets: Sequence[IPPrefix]) -> None:
        self._subnets = tuple(subnets)
        self._subnet_hits.clear()

    @property
    def addresses(self) -> list[IPAddress]:
        return list(self._own.values())

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def own_address(self, version: int) -> IPAddress | None:
        """Our first address of a family."""
        return self._first_own.get(version)

    def endpoints(self, connection: Connection) -> tuple[AddrPort, AddrPort]:
        """(local, remote) of a connection."""
        key = connection.key
        half = (len(key) - 4) // 2
        local, remote = address_of(key[half : 2 * half]), address_of(key[:half])
        return AddrPort(local, connection.header.lport), AddrPort(remote, connection.header.rport)

    @property
    def has_work(self) -> bool:
        """Whether a call of `take_events`, `flush` or `take_frames` would do something."""
        return bool(self._signalled or self._events or self._dirty or self._frames)

    # -- what connections need (tcp.Host) ----------------------------------------------------------------------

    def emit(self, packet: bytes, segment_bytes: int) -> None:
        self._frames.append(Frame(packet, segment_bytes))

    def notify(self, connection: Connection, bits: int) -> None:
        if not connection.events:
            self._signalled.append(connection)
        connection.events |= bits

    def reserve_receive(self, size: int) -> bool:
        if self._receive_reserved + size > RECEIVE_MEMORY_BYTES:
            return False
        self._receive_reserved += size
        return True

    def connection_closed(self, connection: Connection, now: float) -> None:
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
            self._receive_reserved -= connection.receive_limit - c.RECEIVE_BUFFER_BYTES
            self.backlog.half_open.pop(connection.key, None)
            if connection.state == c.TIME_WAIT:
                self.time_waits.add(connection, now)

    # -- opening -----------------------------------------------------------------------------------------------

    def connect(self, remote: AddrPort, now: float, owner: Any = None, local: IPAddress | None = None) -> Connection:
        """Active open; CONNECTED or DEAD follows as an event. Raises OSError without an address or a free port."""
        source = local or self.own_address(remote.ip.version)
        if source is None:
            raise OSError(101, f"no overlay address to reach {remote.ip} from")
        if len(self._connections) >= MAX_CONNECTIONS:
            raise OSError(105, "too many connections")
        source_bytes, remote_bytes = source.packed, remote.ip.packed
        port, key = self._pick_port(source_bytes, remote_bytes, remote.port)
        connection = self._new_connection(key, source_bytes, remote_bytes, port, remote.port, now)
        connection.owner = owner
        connection.open(now)
        self.touch(connection)
        return connection

    def _pick_port(self, source: bytes, remote: bytes, rport: int) -> tuple[int, bytes]:
        for _ in range(LAST_EPHEMERAL - FIRST_EPHEMERAL):
            port = self._next_port
            self._next_port = port + 1 if port < LAST_EPHEMERAL else FIRST_EPHEMERAL
            key = remote + source + rport.to_bytes(2, "big") + port.to_bytes(2, "big")
            if key not in self._connections and key not in self.time_waits and not self._is_listening(source, port):
                return port, key
        raise OSError(99, "no free port")

    def _is_listening(self, address: bytes, port: int) -> bool:
        return (address, port) in self._listeners or (b"", port) in self._listeners

    def _new_connection(
        self, key: bytes, local: bytes, remote: bytes, lport: int, rport: int, now: float, newer_than: int | None = None
    ) -> Connection:
        iss = initial_sequence(self._secret, key, now)
        if newer_than is not None and (iss - newer_than - 1) & 0x80000000:
            iss = (newer_than + 64000) & 0xFFFFFFFF
        header = Header(local, remote, lport, rport, iss >> 7)
        connection = Connection(self, header, iss, self.mtu_bytes, self._ts_offset)
        connection.key = key
        self._connections[key] = connection
        return connection

    def listen(self, address: IPAddress | None, port: int, owner: Any) -> Listener:
        """`address` None: every own address. Port 0 picks one. Raises OSError when taken or not ours."""
        packed = b"" if address is None else address.packed
        if address is not None and packed not in self._own:
            raise OSError(99, f"{address} is not an address of this node")
        if not port:
            port = next(p for p in range(self._next_port, 65536) if not self._is_listening(packed, p))
        elif (packed, port) in self._listeners:
            raise OSError(98, f"port {port} is in use")
        listener = self._listeners[packed, port] = Listener(address, port, owner)
        return listener

    def unlisten(self, listener: Listener) -> None:
        packed = b"" if listener.address is None else listener.address.packed
        if self._listeners.get((packed, listener.port)) is listener:
            del self._listeners[packed, listener.port]

    def accept(self, attempt: SynReceived, now: float, owner: Any = None) -> Connection | None:
        """Answer a forwarded SYN; None when it was settled or has expired."""
        if not self.backlog.settle(attempt) or attempt.key in self._connections:
            return None
        local, remote = attempt.local, attempt.remote
        connection = self._new_connection(attempt.key, local.ip.packed, remote.ip.packed, local.port, remote.port, now)
        connection.owner = owner
        connection.accept(attempt.segment, now)
        self.touch(connection)
        return connection

    def refuse(self, attempt: SynReceived) -> None:
        """RST."""
        if self.backlog.settle(attempt):
            segment = attempt.segment
            header = Header(
                attempt.local.ip.packed, attempt.remote.ip.packed, attempt.local.port, attempt.remote.port, 0
            )
            self.emit(header.build(0, segment.seq + 1, c.RST | c.ACK, 0, b"", [], 0, 0), 0)

    def forget(self, attempt: SynReceived) -> None:
        """No answer: the other side will try again or give up."""
        self.backlog.settle(attempt)

    def _on_unreachable(self, key: bytes, is_prohibited: bool) -> None:
        connection = self._connections.get(key)
        if connection is not None and connection.state == c.SYN_SENT:
            connection.fail("prohibited" if is_prohibited else "unreachable", self._now)

    # -- frames in ---------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """Feed packets from the overlay. Frames with `segment_bytes` were verified by the pump."""
        self._now = now
        for packet, piece_bytes in frames:
            self._receive_packet(packet if type(packet) is bytes else bytes(packet), piece_bytes, now)
        self.flush(now)

    def _receive_packet(self, packet: bytes, piece_bytes: int, now: float) -> None:
        size = len(packet)
        if size >= 40 and packet[0] == 0x45 and packet[9] == TCP and not (packet[6] & 0x3F or packet[7]):
            total = packet[2] << 8 | packet[3]
            if total > size or ones_sum(packet[:20]):
                self.drops.add("ip_header")
                return
            self._receive_tcp(packet, packet[12:24], 20, total, piece_bytes, now)
        elif size >= 60 and packet[0] >> 4 == 6 and packet[6] == TCP:
            total = 40 + (packet[4] << 8 | packet[5])
            if total > size:
                self.drops.add("ip_header")
                return
            self._receive_tcp(packet, packet[8:44], 40, total, piece_bytes, now)
        else:
            self._receive_other(packet, piece_bytes, now)

    def _receive_other(self, packet: bytes, piece_bytes: int, now: float) -> None:
        """Everything but plain TCP: options, fragments, UDP, ICMP."""
        parsed = parse(packet)
        if parsed.version == 0 or not parsed.src:
            self.drops.add("ip_header")
            return
        if parsed.version == 4:
            header_bytes = (packet[0] & 15) * 4
            if header_bytes < 20 or ones_sum(packet[:header_bytes]):
                self.drops.add("ip_header")
                return
        elif packet[6] == IPV6_FRAGMENT and len(packet) >= 48 and not (packet[42] or packet[43] & 0xF9):
            parsed = parsed._replace(is_fragment=False)  # an atomic fragment (RFC 6946) is whole
        is_own = parsed.dst in self._own
        if not is_own and not self._is_in_subnets(parsed.dst):
            self.drops.add("not_ours")
            return
        if parsed.is_fragment:
            whole = self._reassembler.add(packet, now)
            if whole is not None:
                self._receive_packet(whole, 0, now)
        elif parsed.proto == TCP:
            key = parsed.src + parsed.dst + packet[parsed.transport_offset : parsed.transport_offset + 4]
            self._receive_tcp(packet, key, parsed.transport_offset, parsed.length_bytes, piece_bytes, now)
        elif parsed.proto == UNKNOWN:
            self.drops.add("unknown")
        else:
            self.datagrams.receive(packet, parsed, is_own, now)

    def _is_in_subnets(self, address: bytes) -> bool:
        if not self._subnets:
            return False
        hit = self._subnet_hits.get(address)
        if hit is None:
            if len(self._subnet_hits) > 8192:
                self._subnet_hits.clear()
            ip = address_of(address)
            hit = any(is_routed_by(prefix, ip) for prefix in self._subnets)
            self._subnet_hits[address] = hit
        return hit

    def _receive_tcp(self, packet: bytes, key: bytes, offset: int, end: int, piece_bytes: int, now: float) -> None:
        segment = parse_segment(packet, offset, end)
        if segment is None:
            self.drops.add("tcp_header")
            return
        if piece_bytes:
            segment.piece_bytes = piece_bytes
        elif (ones_sum(memoryview(packet)[offset:end]) + ones_sum(key[:-4]) + TCP + end - offset) % 65535:
            self.drops.add("tcp_checksum")
            return
        connection = self._connections.get(key)
        if connection is not None:
            connection.receive(segment, now)
            if not connection.is_dirty:
                connection.is_dirty = True
                self._dirty.append(connection)
            return
        self._receive_unmatched(packet, key, segment, now)

    def _receive_unmatched(self, packet: bytes, key: bytes, segment: Segment, now: float) -> None:
        half = (len(key) - 4) // 2
        src, dst = key[:half], key[half : 2 * half]
        newer_than: int | None = None
        if key in self.time_waits:
            answer, newer_than = self.time_waits.receive(key, segment, now)
            if answer:
                self.emit(answer, 0)
            if newer_than is None:
                return
        is_own = dst in self._own
        if not is_own and not self._is_in_subnets(dst):
            self.drops.add("not_ours")
            return
        if segment.flags & (c.SYN | c.ACK | c.RST | c.FIN) != c.SYN:
            self._reset(packet)
            return
        sport, dport = int.from_bytes(key[-4:-2], "big"), int.from_bytes(key[-2:], "big")
        if not sport or not dport or src[0] >= (0xE0 if half == 4 else 0xFF) or (src == dst and sport == dport):
            self.drops.add("tcp_martian")
            return
        listener = (self._listeners.get((dst, dport)) or self._listeners.get((b"", dport))) if is_own else None
        if listener is not None:
            self._answer_syn(listener, key, segment, now, newer_than)
        elif self.forwards or not is_own:
            local, remote = AddrPort(address_of(dst), dport), AddrPort(address_of(src), sport)
            self._offer_syn(SynReceived(key, local, remote, is_own, segment), packet, now)
        else:
            self._reset(packet)

    def _answer_syn(self, listener: Listener, key: bytes, segment: Segment, now: float, newer_than: int | None) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self.drops.add("tcp_connections")
            return
        oldest = self.backlog.make_half_open_room()
        if oldest is not None and oldest in self._connections:
            self.drops.add("tcp_half_open")
            self._connections[oldest].fail("timeout", now)
        half = (len(key) - 4) // 2
        sport, dport = int.from_bytes(key[-4:-2], "big"), int.from_bytes(key[-2:], "big")
        connection = self._new_connection(key, key[half : 2 * half], key[:half], dport, sport, now, newer_than)
        self.backlog.half_open[key] = listener
        connection.accept(segment, now)
        self.touch(connection)

    def _offer_syn(self, attempt: SynReceived, packet: bytes, now: float) -> None:
        verdict = self.backlog.offer(attempt, now)
        if verdict == "new" and len(self._connections) < MAX_CONNECTIONS:
            self._events.append(attempt)
        elif verdict == "refuse":
            self._reset(packet)
        else:
            self.drops.add("tcp_backlog_" + verdict)

    def _reset(self, packet: bytes) -> None:
        reset = tcp_reset_for(parse(packet))
        if reset is not None:
            self.emit(reset, 0)

    # -- out ---------------------------------------------------------------------------------------------------

    def touch(self, connection: Connection) -> None:
        """The owner wrote, read or closed: `flush` will let the connection send."""
        if not connection.is_dirty:
            connection.is_dirty = True
            self._dirty.append(connection)

    def flush(self, now: float) -> None:
        """Let every touched connection send, and note its next deadline."""
        self._now = now
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for connection in dirty:
                connection.is_dirty = False
                connection.output(now)
                at = connection.next_at()
                if at and (not connection.heap_at or at < connection.heap_at):
                    self._schedule(connection, at)

    def _schedule(self, connection: Connection, at: float) -> None:
        connection.heap_at = at
        self._heap_count += 1
        heappush(self._heap, (at, self._heap_count, connection))

    def take_frames(self) -> list[Frame]:
        """What to send into the overlay. Packets to our own addresses never appear: they are looped back."""
        out: list[Frame] = []
        budget = MAX_LOOPED
        while self._frames:
            frames = self._frames[:]
            self._frames.clear()
            looped = [frame for frame in frames if self._is_looped(frame.packet)]
            if not looped:
                out += frames
                break
            out += [frame for frame in frames if not self._is_looped(frame.packet)]
            budget -= len(looped)
            if budget < 0:
                self.drops.add("loop")
                break
            self.receive(looped, self._now)
        return out

    def _is_looped(self, packet: bytes | bytearray | memoryview) -> bool:
        return packet[16:20] in self._own if packet[0] >> 4 == 4 else packet[24:40] in self._own

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        while self._signalled:
            connection = self._signalled.pop()
            bits, connection.events = connection.events, 0
            if bits & c.CONNECTED and connection.owner is None:
                listener = self.backlog.half_open.pop(connection.key, None)
                if listener is not None:
                    self._events.append(StreamAccepted(listener, connection))
            self._events.append(StreamAdvanced(connection, bits))
        events = self._events[:]
        self._events.clear()
        return events

    # -- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> Deadline | None:
        heap = self._heap
        while heap:
            at, _, connection = heap[0]
            if at != connection.heap_at:
                heappop(heap)  # a newer, earlier entry exists
                continue
            wanted = connection.next_at()
            if wanted and wanted <= at:
                return Deadline(at, "tcp")
            heappop(heap)
            connection.heap_at = 0.0
            if wanted:
                self._schedule(connection, wanted)
        return None

    def on_deadline(self, now: float) -> None:
        self._now = now
        while True:
            deadline = self.next_deadline()
            if deadline is None or deadline.at > now:
                break
            connection = heappop(self._heap)[2]
            connection.heap_at = 0.0
            connection.on_deadline(now)
            self.touch(connection)
            self.flush(now)

    # -- UDP ---------------------------------------------------------------------------------------------------

    def bind_datagram(self, address: IPAddress | None, port: int, owner: Any) -> DatagramBinding:
        """Raises OSError when taken or not ours."""
        if address is not None and address.packed not in self._own:
            raise OSError(99, f"{address} is not an address of this node")
        return self.datagrams.bind(address, port, owner)
