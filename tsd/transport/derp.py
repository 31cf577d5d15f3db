"""One DERP connection: dial, TLS, HTTP upgrade (or fast start), then `tsd.derp.client` over the stream.

Spec: tailscale: derp/derphttp. Writes happen in one synchronous step that hands whole frames to the transport, so
no cancelled task can cut a frame (W25). Queues are bounded in bytes and drop their oldest packets (W26). Upstream's
relay holds 32 packets per receiver and drops the rest, so data leaves in small paced chunks unless the relay says
that its queues are deep; receivers that can take them get bundles (`tsd.derp.bundle`). Which regions are open, and
when to dial again, is decided by `tsd.transport.derp_pool`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Protocol

from tsd.base.addr import IPAddress
from tsd.base.errors import ProtocolError
from tsd.base.keys import NodePublic
from tsd.base.log import fields
from tsd.derp import client as machine
from tsd.derp import frames
from tsd.derp.bundle import bundles
from tsd.derp.client import DerpClientMachine
from tsd.derp.frames import FrameType
from tsd.derp.queue import FrameQueue
from tsd.disco.box import is_disco
from tsd.tailcfg.derpmap import DERPNode, DERPRegion
from tsd.transport import tls
from tsd.transport.derp_dial import DerpError as DerpError
from tsd.transport.derp_dial import DerpOptions as DerpOptions
from tsd.transport.derp_dial import dial as dial
from tsd.transport.derp_dial import literal_ip, text_of

_log = logging.getLogger("tsd.transport.derp")

CONNECT_TIMEOUT_S = 10.0
_HEAD_MAX_BYTES = 16 << 10
_WRITE_HIGH_BYTES = 256 << 10
_CHUNK_PACKETS = 8
_PACE_PACKETS_PER_S = 38_000
_PACE_BURST_PACKETS = 18
_PACE_TICK_S = 0.0002
_DEEP_QUEUE_BYTES = 256 << 10


class Owner(Protocol):
    """What a connection tells its pool; calls come in order, on the loop."""

    def on_ready(self, connection: DerpConnection) -> None: ...

    def on_packets(self, connection: DerpConnection, source: NodePublic, packets: list[bytes]) -> None: ...

    def on_peer_gone(self, connection: DerpConnection, key: NodePublic, is_not_here: bool) -> None: ...

    def on_health(self, connection: DerpConnection, text: str) -> None: ...

    def on_closed(self, connection: DerpConnection, reason: str) -> None: ...


class DerpConnection(asyncio.Protocol):
    """A client connection to one region, from dialling to its end; never reused."""

    def __init__(self, region: DERPRegion, options: DerpOptions, owner: Owner) -> None:
        self.region = region
        self.is_ready = False
        self.is_closed = False
        self.last_write = options.clock.now()
        self.node_name = ""
        self.local_ip: IPAddress | None = None
        self.received_packets = 0
        self._options = options
        self._owner = owner
        self._machine = DerpClientMachine(options.private, entropy=options.entropy)
        self._transport: asyncio.Transport | None = None
        self._head: bytearray | None = bytearray()
        self._data = FrameQueue(options.queue_bytes)
        self._urgent = FrameQueue(options.queue_bytes // 8)
        self._is_paused = False
        self._flush_due = False
        self._bucket: _Bucket | None = None
        self._pace: _Bucket | None = _Bucket(_PACE_PACKETS_PER_S, _PACE_BURST_PACKETS)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._pacer = options.new_timer(self._flush)
        self._loop = asyncio.get_running_loop()

    @property
    def dropped(self) -> int:
        return self._data.dropped + self._urgent.dropped

    async def open(self, *, prefers: bool) -> None:
        """Dial the region's nodes in order and start the login. Raises `DerpError` (the first node's failure)."""
        failure: DerpError | None = None
        nodes = self.region.derp_nodes
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                for node in nodes:
                    try:
                        await self._open_node(node, is_ideal=node is nodes[0], prefers=prefers)
                        return
                    except DerpError as err:
                        failure = failure or err
        except TimeoutError:
            failure = failure or DerpError(f"region {self.region.region_id}: connecting took too long")
        raise failure or DerpError(f"region {self.region.region_id} has no relay nodes")

    def send(self, dst: NodePublic, packet: bytes) -> None:
        """Queue one packet; disco overtakes data."""
        queue = self._urgent if is_disco(packet) else self._data
        queue.push(frames.send_packet(dst.raw, packet))
        self._wake()

    def send_many(self, dst: NodePublic, datagrams: bytes, datagram_bytes: int, *, bundled: bool = False) -> None:
        """Queue datagrams that lie back to back (as in `Sealed`), framed a few at a time."""
        if bundled:
            for packet in bundles(datagrams, datagram_bytes):
                self._data.push(frames.send_packet(dst.raw, packet))
            self._wake()
            return
        size = datagram_bytes or len(datagrams) or 1
        step = size * _CHUNK_PACKETS
        for at in range(0, len(datagrams), step):
            piece = datagrams[at : at + step]
            self._data.push(frames.send_packets(dst.raw, piece, size), -(-len(piece) // size))
        self._wake()

    def note_preferred(self, prefers: bool) -> None:
        self._urgent.push(frames.frame(FrameType.NOTE_PREFERRED, b"\x01" if prefers else b"\x00"))
        self._wake()

    def probe(self) -> None:
        """Make sure within seconds that the relay still hears us."""
        self._machine.probe(self._options.clock.now())
        self._drain()

    def close(self, reason: str = "closed") -> None:
        """Idempotent; `on_closed` is called once."""
        if self.is_closed:
            return
        self.is_closed = True
        self.is_ready = False
        if self._timer is not None:
            self._timer.cancel()
        self._pacer.close()
        if self._transport is not None:
            self._transport.abort()
        self._data.clear()
        self._urgent.clear()
        self._owner.on_closed(self, reason)

    # -- opening ------------------------------------------------------------------------------------------------

    async def _open_node(self, node: DERPNode, *, is_ideal: bool, prefers: bool) -> None:
        transport = await self._stream_to(node)
        if self.is_closed:
            transport.abort()
            raise DerpError("closed while connecting")
        self.node_name = node.name
        self.local_ip = _local_ip(transport)
        try:
            server_key = self._trusted_key(node, transport)
        except ProtocolError as err:
            self._transport = None
            transport.abort()
            raise DerpError(f"{node.host_name}: {err}") from None
        self._begin(node, transport, server_key, is_ideal=is_ideal, prefers=prefers)

    async def _stream_to(self, node: DERPNode) -> asyncio.Transport:
        if self._options.connect is not None:
            return await self._options.connect(node, lambda: self)
        sock = await dial(node, self._options)
        try:
            return await self._secure(node, sock)
        except (OSError, ssl.SSLError, TimeoutError, ValueError) as err:
            sock.close()
            raise DerpError(f"{node.host_name}: TLS: {text_of(err)}") from None
        except BaseException:
            sock.close()
            raise

    async def _secure(self, node: DERPNode, sock: socket.socket) -> asyncio.Transport:
        if self._options.plain_http:
            transport, _ = await self._loop.create_connection(lambda: self, sock=sock)
        else:
            verify = tls.needs_chain_check(node.cert_name, node.insecure_for_tests)
            transport, _ = await self._loop.create_connection(
                lambda: self, sock=sock, ssl=tls.client_context(verify=verify), server_hostname=node.host_name
            )
        return transport

    def _trusted_key(self, node: DERPNode, transport: asyncio.Transport) -> NodePublic | None:
        """Checks the certificate; the relay's key when its chain names it (then the login needs no answer)."""
        tls_object = transport.get_extra_info("ssl_object")
        if tls_object is None:
            return None
        chain = tls.peer_chain(tls_object)
        wall_s = self._options.clock.wall_ns() / 1e9
        tls.verify_peer(chain, node.host_name, node.cert_name, node.insecure_for_tests, wall_s)
        return tls.meta_key(chain) if tls_object.version() == "TLSv1.3" else None

    def _begin(
        self, node: DERPNode, transport: asyncio.Transport, key: NodePublic | None, *, is_ideal: bool, prefers: bool
    ) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        lines = [f"Host: {node.host_name}", "Upgrade: DERP", "Connection: Upgrade", "User-Agent: tsd"]
        if not is_ideal:
            lines.append(f"Ideal-Node: {self.region.derp_nodes[0].name}")
        if key is not None:
            lines.append("Derp-Fast-Start: 1")
        request = "\r\n".join(["GET /derp HTTP/1.1", *lines, "", ""]).encode()
        self._machine = DerpClientMachine(self._options.private, entropy=self._options.entropy, server_key=key)
        self._machine.start(self._options.clock.now(), prefers=prefers)
        self._head = None if key is not None else bytearray()
        logins = [o.data for o in self._machine.take_outputs() if isinstance(o, machine.Transmit)]
        transport.write(request + b"".join(logins))
        self._rearm()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.is_closed:
            return
        if self._head is not None:
            rest = self._upgraded(data)
            if not rest:
                return
            data = rest
        self._machine.receive(data, self._options.clock.now())
        self._drain()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self.close(text_of(exc) if exc is not None else "relay closed the connection")

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._wake()

    # -- inside -------------------------------------------------------------------------------------------------

    def _upgraded(self, data: bytes) -> bytes:
        """What follows the response head; b"" while it is incomplete or after a refusal."""
        head = self._head
        assert head is not None
        head += data
        end = head.find(b"\r\n\r\n")
        if end < 0:
            if len(head) > _HEAD_MAX_BYTES:
                self.close("upgrade response is too long")
            return b""
        status = bytes(head[: head.find(b"\r\n")]).decode("latin-1")
        if status.split(" ")[1:2] != ["101"]:
            self.close(f"relay refused the upgrade: {status[:80]}")
            return b""
        self._head = None
        return bytes(head[end + 4 :])

    def _drain(self) -> None:
        for output in self._machine.take_outputs():
            match output:
                case machine.PacketsReceived(source, packets):
                    self.received_packets += len(packets)
                    self._owner.on_packets(self, source, packets)
                case machine.Transmit(data):
                    if self._transport is not None:
                        self._transport.write(data)
                case machine.Ready():
                    self._ready(output)
                case machine.PeerGone(key, is_not_here):
                    self._owner.on_peer_gone(self, key, is_not_here)
                case machine.HealthReported(text):
                    self._owner.on_health(self, text)
                case machine.RestartAnnounced(reconnect_in_s):
                    _log.info(fields("relay restarts", derp_region=self.region.region_id, wait_s=reconnect_in_s))
                case machine.Closed(reason):
                    self.close(reason)
            if self.is_closed:
                return
        self._rearm()

    def _ready(self, ready: machine.Ready) -> None:
        self.is_ready = True
        if ready.queue_bytes >= _DEEP_QUEUE_BYTES:
            self._pace = None
        if ready.rate_bytes_per_s:
            burst_bytes = max(ready.burst_bytes, frames.KEY_BYTES + frames.MAX_PACKET_BYTES)
            self._bucket = _Bucket(ready.rate_bytes_per_s, burst_bytes)
        self._owner.on_ready(self)
        self._wake()

    def _rearm(self) -> None:
        deadline = self._machine.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._timer.when() <= self._loop.time() + 1:
                return
            self._timer.cancel()
        self._timer = None
        if deadline is not None and not self.is_closed:
            self._timer_at = deadline.at
            delay = max(0.0, deadline.at - self._options.clock.now())
            self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # As in the engine's driver: a timer that fires a little early has still reached its deadline.
        self._machine.on_deadline(max(self._timer_at, self._options.clock.now()))
        self._drain()

    def _wake(self) -> None:
        if not self._flush_due and self.is_ready:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        transport = self._transport
        if transport is None or self.is_closed or not self.is_ready or self._is_paused:
            return
        now = self._options.clock.now()
        pieces = self._urgent.take(_WRITE_HIGH_BYTES)
        if self._pace is None:
            pieces += self._data.take(_WRITE_HIGH_BYTES)
        elif self._pace.has_tokens(now):
            before = self._data.packets
            pieces += self._data.take(_WRITE_HIGH_BYTES, _CHUNK_PACKETS)
            self._pace.take(before - self._data.packets)
        if pieces:
            self._write(transport, b"".join(pieces), now)
        if (self._data or self._urgent) and not self._is_paused:
            self._flush_due = True
            if self._pace is None or self._pace.has_tokens(now, _CHUNK_PACKETS):
                self._loop.call_soon(self._flush)
            else:
                self._pacer.start(_PACE_TICK_S)

    def _write(self, transport: asyncio.Transport, raw: bytes, now: float) -> None:
        self.last_write = now
        if self._bucket is not None:
            if not self._bucket.has_tokens(now, len(raw)):
                return
            self._bucket.take(len(raw))
        transport.write(raw)


class _Bucket:
    """A token bucket in bytes or packets; `take` may overdraw it."""

    def __init__(self, rate_per_s: int, burst: int) -> None:
        self._rate, self._burst = rate_per_s, burst
        self._tokens = float(burst)
        self._at = 0.0

    def has_tokens(self, now: float, wanted: int = 1) -> bool:
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return self._tokens >= wanted

    def take(self, count: int) -> None:
        self._tokens -= count


def _local_ip(transport: asyncio.Transport) -> IPAddress | None:
    name = transport.get_extra_info("sockname")
    return literal_ip(str(name[0])) if isinstance(name, tuple) else None
