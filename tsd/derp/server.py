"""A DERP region in one process, without sockets: login, routing between clients, bounded queues, notices.

Behaviour follows tailscale: derp/derpserver (admission, two queues per client, duplicates, peer-gone). Meshing,
rate limits per client and metrics over HTTP are not here. The owner moves bytes: it feeds `receive`, and on each
`Writable` calls `take` whenever its socket accepts data.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from tsd.base.addr import AddrPort
from tsd.base.entropy import Entropy, uniform
from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import NodePrivate, NodePublic
from tsd.base.log import DropCounter
from tsd.base.machine import Deadline
from tsd.derp import frames
from tsd.derp.frames import FrameSplitter, FrameType
from tsd.derp.queue import FrameQueue

LOGIN_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
KEEP_ALIVE_JITTER_S = 5.0
NOT_HERE_BURST = 3
PING_MAX_BYTES = 1000
_REACHED_MAX = 4096
_TWINS = b"another machine uses the same node key; was its state copied? Log one of them in anew"

Admit = Callable[[NodePublic, AddrPort], bool]


@dataclass(frozen=True, slots=True)
class Writable:
    """The connection has bytes to send: call `take` until it returns nothing or the socket is full."""

    connection: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The router gave the connection up: close its socket; `disconnect` is not needed."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class ClientJoined:
    connection: int
    key: NodePublic


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The last connection of a key is gone."""

    key: NodePublic


Output = Writable | Closed | ClientJoined | ClientLeft


@dataclass(slots=True, eq=False)
class _Client:
    connection: int
    remote: AddrPort
    data: FrameQueue
    disco: FrameQueue
    splitter: FrameSplitter = field(default_factory=lambda: FrameSplitter(frames.MAX_CLIENT_INFO_BYTES))
    key: bytes = b""
    control: list[bytes] = field(default_factory=list)
    reached: dict[int, None] = field(default_factory=dict)
    announced: bool = False
    preferred: bool = False
    has_pong: bool = False
    is_twin: bool = False
    """It was told that another connection of its key is in use."""
    not_here_tokens: float = NOT_HERE_BURST
    not_here_at: float = 0.0
    last_take: float = 0.0

    @property
    def has_bytes(self) -> bool:
        return bool(self.control or self.disco or self.data)


class DerpRouter:
    """All clients of this server. `admit` decides by node key and remote address at login."""

    def __init__(
        self, private: NodePrivate, *, entropy: Entropy, admit: Admit | None = None, queue_bytes: int = 512 << 10
    ) -> None:
        self.public = private.public()
        self.drops = DropCounter()
        self.packets = 0
        self._private = private
        self._entropy = entropy
        self._admit = admit
        self._queue_bytes = queue_bytes
        self._clients: dict[int, _Client] = {}
        self._by_key: dict[bytes, list[_Client]] = {}
        self._outputs: list[Output] = []
        self._timers: list[tuple[float, int, bool]] = []
        self._next_connection = 1

    def connect(self, remote: AddrPort, now: float) -> int:
        """A stream reached the DERP protocol (after the upgrade): greets with the server key."""
        connection = self._next_connection
        self._next_connection += 1
        client = _Client(connection, remote, FrameQueue(self._queue_bytes), FrameQueue(self._queue_bytes // 8))
        client.last_take = now
        self._clients[connection] = client
        heapq.heappush(self._timers, (now + LOGIN_TIMEOUT_S, connection, False))
        self._control(client, frames.encode_server_key(self.public))
        return connection

    def receive(self, connection: int, data: bytes, now: float) -> None:
        client = self._clients.get(connection)
        if client is None:
            return
        try:
            for kind, payload in client.splitter.feed(data):
                if kind == FrameType.SEND_PACKET and client.key:
                    self._forward(client, payload, now)
                else:
                    self._handle(client, kind, payload, now)
        except (DecodeError, ProtocolError) as err:
            self._close(client, str(err), now)

    def disconnect(self, connection: int, now: float) -> None:
        """The socket is gone."""
        client = self._clients.pop(connection, None)
        if client is not None and client.key:
            self._unregister(client, now)

    def take(self, connection: int, now: float, budget_bytes: int = 256 << 10) -> bytes:
        """The next bytes for the socket, notices first, then disco, then data; b"" when all is sent."""
        client = self._clients.get(connection)
        if client is None:
            return b""
        client.last_take = now
        pieces, client.control, client.has_pong = client.control, [], False
        left = budget_bytes - sum(map(len, pieces))
        for queue in (client.disco, client.data):
            if queue and left > 0:
                taken = queue.take(left)
                left -= sum(map(len, taken))
                pieces += taken
        client.announced = client.has_bytes
        return b"".join(pieces)

    def next_deadline(self) -> Deadline | None:
        return Deadline(self._timers[0][0], "derp clients") if self._timers else None

    def on_deadline(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, connection, is_keep_alive = heapq.heappop(self._timers)
            client = self._clients.get(connection)
            if client is None:
                continue
            if not is_keep_alive:
                if not client.key:
                    self._close(client, "login timeout", now)
            elif client.announced and now - client.last_take > WRITE_TIMEOUT_S:
                self._close(client, "write timeout", now)
            else:
                self._control(client, frames.frame(FrameType.KEEP_ALIVE))
                self._arm_keep_alive(client, now)

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def keys(self) -> list[NodePublic]:
        """Keys of the clients logged in, in order of arrival."""
        return [NodePublic(key) for key in self._by_key]

    def revoke(self, key: NodePublic, now: float) -> None:
        """Close every connection of a key that lost its admission."""
        for client in list(self._by_key.get(key.raw, ())):
            self._close(client, "admission revoked", now)

    def _forward(self, client: _Client, payload: bytes, now: float) -> None:
        size = len(payload) - frames.KEY_BYTES
        if size < 0 or size > frames.MAX_PACKET_BYTES:
            raise ProtocolError(f"derp: packet frame of {len(payload)} bytes")
        holders = self._by_key.get(client.key)
        if holders is not None and holders[-1] is not client and client in holders:
            holders.remove(client)
            holders.append(client)
            self._tell_twins(holders)
        destinations = self._by_key.get(payload[: frames.KEY_BYTES])
        packet = payload[frames.KEY_BYTES :]
        if destinations is None:
            self._not_here(client, payload, packet, now)
            return
        target = destinations[-1]
        if target.connection not in client.reached:
            self._note_reached(client, target.connection)
        queue = target.disco if frames.looks_like_disco(packet) else target.data
        dropped = queue.dropped
        queue.push(frames.recv_packet(client.key, packet))
        self.packets += 1
        if queue.dropped != dropped:
            self._overflowed(target, queue.dropped - dropped, now)
        if not target.announced:
            target.announced = True
            self._outputs.append(Writable(target.connection))

    def _tell_twins(self, holders: list[_Client]) -> None:
        """Two connections of one key were both used: that is no reconnection but a copied state (W13)."""
        for holder in holders:
            if not holder.is_twin:
                holder.is_twin = True
                self._control(holder, frames.frame(FrameType.HEALTH, _TWINS))

    def _note_reached(self, client: _Client, connection: int) -> None:
        if len(client.reached) >= _REACHED_MAX:
            client.reached = {c: None for c in client.reached if c in self._clients}
        client.reached[connection] = None

    def _overflowed(self, target: _Client, count: int, now: float) -> None:
        self.drops.add("queue full", count)
        if now - target.last_take > WRITE_TIMEOUT_S:
            self._close(target, "write timeout", now)

    def _not_here(self, client: _Client, payload: bytes, packet: bytes, now: float) -> None:
        self.drops.add("unknown destination")
        elapsed = now - client.not_here_at
        client.not_here_at = now
        client.not_here_tokens = min(NOT_HERE_BURST, client.not_here_tokens + elapsed)
        if client.not_here_tokens >= 1 and frames.looks_like_disco(packet):
            client.not_here_tokens -= 1
            self._control(client, frames.encode_peer_gone(payload[: frames.KEY_BYTES], frames.GONE_NOT_HERE))

    def _handle(self, client: _Client, kind: int, payload: bytes, now: float) -> None:
        if not client.key:
            self._login(client, kind, payload, now)
        elif kind == FrameType.PING:
            self._ping(client, payload)
        elif kind == FrameType.NOTE_PREFERRED:
            if len(payload) != 1:
                raise ProtocolError("derp: note-preferred of a wrong size")
            client.preferred = payload[0] != 0
        elif kind in (FrameType.WATCH_CONNS, FrameType.CLOSE_PEER, FrameType.FORWARD_PACKET):
            raise ProtocolError("derp: mesh frame without a mesh key")

    def _ping(self, client: _Client, payload: bytes) -> None:
        if not 8 <= len(payload) <= PING_MAX_BYTES:
            raise ProtocolError("derp: ping of a wrong size")
        if not client.has_pong:
            client.has_pong = True
            self._control(client, frames.frame(FrameType.PONG, payload[:8]))

    def _login(self, client: _Client, kind: int, payload: bytes, now: float) -> None:
        if kind != FrameType.CLIENT_INFO:
            raise ProtocolError("derp: first frame is not client info")
        key, _ = frames.open_client_info(self._private, payload)
        if self._admit is not None and not self._admit(key, client.remote):
            raise ProtocolError("derp: client not admitted")
        client.key = key.raw
        client.splitter.max_frame_bytes = frames.KEY_BYTES + frames.MAX_PACKET_BYTES
        if key.raw in self._by_key:
            self.drops.add("duplicate login")
        self._by_key.setdefault(key.raw, []).append(client)
        info = frames.ServerInfo(queue_bytes=self._queue_bytes)
        self._control(client, frames.seal_server_info(self._private, key, info, self._entropy(frames.NONCE_BYTES)))
        self._arm_keep_alive(client, now)
        self._outputs.append(ClientJoined(client.connection, key))

    def _arm_keep_alive(self, client: _Client, now: float) -> None:
        delay = frames.KEEP_ALIVE_S + uniform(self._entropy, 0, KEEP_ALIVE_JITTER_S)
        heapq.heappush(self._timers, (now + delay, client.connection, True))

    def _control(self, client: _Client, raw: bytes) -> None:
        client.control.append(raw)
        if not client.announced:
            client.announced = True
            self._outputs.append(Writable(client.connection))

    def _close(self, client: _Client, reason: str, now: float) -> None:
        self.drops.add(reason)
        self._outputs.append(Closed(client.connection, reason))
        self.disconnect(client.connection, now)

    def _unregister(self, client: _Client, now: float) -> None:
        holders = self._by_key[client.key]
        holders.remove(client)
        if holders:
            holders[-1].reached.update(client.reached)
            if len(holders) == 1 and holders[0].is_twin:
                holders[0].is_twin = False
                self._control(holders[0], frames.frame(FrameType.HEALTH))
            return
        del self._by_key[client.key]
        notice = frames.encode_peer_gone(client.key, frames.GONE_DISCONNECTED)
        for connection in client.reached:
            receiver = self._clients.get(connection)
            if receiver is not None:
                self._control(receiver, notice)
        self._outputs.append(ClientLeft(NodePublic(client.key)))
