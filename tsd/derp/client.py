"""The client's half of a DERP connection, without its socket: login, what the relay says, liveness.

Packets are sent by framing them with `tsd.derp.frames` once `Ready` (or right after `start`) came out; queues,
reconnection and the HTTP upgrade belong to `tsd.transport.derp`.

Liveness goes beyond upstream's 120 s of silence, because relays were seen that keep the stream open and have
forgotten the client (W12): after 30 quiet seconds the relay must answer a ping and must hand back a packet that
we send to ourselves.
"""

from __future__ import annotations

from msgspec import Struct

from tsd.base.entropy import Entropy
from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import NodePrivate, NodePublic
from tsd.base.log import DropCounter
from tsd.base.machine import Deadline
from tsd.derp import frames
from tsd.derp.frames import ClientInfo, FrameSplitter, FrameType

LOGIN_TIMEOUT_S = 10.0
PROBE_AFTER_S = 30.0
PROBE_TIMEOUT_S = 10.0
LINK_PROBE_TIMEOUT_S = 3.0
_LOOPBACK = b"tsd-loop"
_SOURCES_MAX = 4096


class Transmit(Struct, frozen=True):
    data: bytes


class PacketsReceived(Struct, frozen=True):
    """Packets of one source in a row."""

    source: NodePublic
    packets: list[bytes]


class Ready(Struct, frozen=True):
    """The relay accepted the login; rates are zero when it sets none."""

    rate_bytes_per_s: int
    burst_bytes: int
    queue_bytes: int = 0
    """How much the relay holds for a slow receiver; 0 when it does not say (upstream's: 32 packets)."""


class PeerGone(Struct, frozen=True):
    key: NodePublic
    is_not_here: bool


class HealthReported(Struct, frozen=True):
    """The relay's complaint about this connection; "" means it is well again."""

    text: str


class RestartAnnounced(Struct, frozen=True):
    reconnect_in_s: float
    try_for_s: float


class PongReceived(Struct, frozen=True):
    payload: bytes


class Closed(Struct, frozen=True):
    """Give the stream up; nothing more will come out."""

    reason: str


Output = Transmit | PacketsReceived | Ready | PeerGone | HealthReported | RestartAnnounced | PongReceived | Closed


class DerpClientMachine:
    """One connection. A `server_key` known beforehand (fast start) lets the login go out with the request."""

    def __init__(self, private: NodePrivate, *, entropy: Entropy, server_key: NodePublic | None = None) -> None:
        self.drops = DropCounter()
        self.server_key = server_key
        self.is_ready = False
        self.is_closed = False
        self._private = private
        self._own_key = private.public().raw
        self._entropy = entropy
        self._splitter = FrameSplitter()
        self._outputs: list[Output] = []
        self._sources: dict[bytes, NodePublic] = {}
        self._last_heard = 0.0
        self._probe_at = 0.0
        self._prefers = False
        self._ping = b""
        self._loopback = b""

    def start(self, now: float, *, prefers: bool = False) -> None:
        """The stream is open (with fast start: about to be)."""
        self._probe_at = now + LOGIN_TIMEOUT_S
        self._prefers = prefers
        if self.server_key is not None:
            self._log_in(self.server_key)

    def receive(self, data: bytes, now: float) -> None:
        if self.is_closed:
            return
        self._last_heard = now
        try:
            self._receive(data, now)
        except (DecodeError, ProtocolError) as err:
            self._close(str(err))

    def next_deadline(self) -> Deadline | None:
        return None if self.is_closed else Deadline(self._probe_at, "derp probe")

    def on_deadline(self, now: float) -> None:
        if self.is_closed or now < self._probe_at:
            return
        if not self.is_ready:
            self._close("login timeout")
        elif self._ping:
            self._close("relay does not answer pings")
        elif self._loopback:
            self._close("relay has forgotten this connection")
        elif now < self._last_heard + PROBE_AFTER_S:
            self._probe_at = self._last_heard + PROBE_AFTER_S
        else:
            self._probe(now)

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def probe(self, now: float) -> None:
        """Ask the relay now for a sign of life (after a link change)."""
        if not self.is_ready or self.is_closed:
            return
        if self._ping or self._loopback:
            self._probe_at = min(self._probe_at, now + LINK_PROBE_TIMEOUT_S)
        else:
            self._probe(now, LINK_PROBE_TIMEOUT_S)

    def _probe(self, now: float, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._probe_at = now + timeout_s
        self._ping = self._entropy(8)
        self._loopback = _LOOPBACK + self._entropy(8)
        ping = frames.frame(FrameType.PING, self._ping)
        self._outputs.append(Transmit(ping + frames.send_packet(self._own_key, self._loopback)))

    def _receive(self, data: bytes, now: float) -> None:
        group: list[bytes] = []
        group_source: bytes | None = None
        for kind, payload in self._splitter.feed(data):
            if kind != FrameType.RECV_PACKET:
                self._handle(kind, payload, now)
                continue
            source = payload[: frames.KEY_BYTES]
            if source != group_source:
                if len(payload) < frames.KEY_BYTES:
                    self.drops.add("short packet frame")
                    continue
                if source == self._own_key and payload[frames.KEY_BYTES :].startswith(_LOOPBACK):
                    self._loop_back(payload[frames.KEY_BYTES :], now)
                    continue
                group = []
                group_source = source
                self._outputs.append(PacketsReceived(self._source(source), group))
            group.append(payload[frames.KEY_BYTES :])

    def _source(self, raw: bytes) -> NodePublic:
        key = self._sources.get(raw)
        if key is None:
            if len(self._sources) >= _SOURCES_MAX:
                self._sources.clear()
            key = self._sources[raw] = NodePublic(raw)
        return key

    def _loop_back(self, packet: bytes, now: float) -> None:
        if packet == self._loopback:
            self._loopback = b""
            self._probe_answered(now)

    def _probe_answered(self, now: float) -> None:
        if not self._ping and not self._loopback:
            self._probe_at = now + PROBE_AFTER_S

    def _handle(self, kind: int, payload: bytes, now: float) -> None:
        match kind:
            case FrameType.SERVER_KEY if self.server_key is None:
                self.server_key = frames.decode_server_key(payload)
                self._log_in(self.server_key)
            case FrameType.SERVER_INFO if self.server_key is not None and not self.is_ready:
                info = frames.open_server_info(self._private, self.server_key, payload)
                self.is_ready = True
                self._probe_at = now + PROBE_AFTER_S
                rate, burst = info.token_bucket_bytes_per_second, info.token_bucket_bytes_burst
                self._outputs.append(Ready(rate, burst, info.queue_bytes))
            case FrameType.PEER_GONE:
                self._peer_gone(payload)
            case FrameType.PING if len(payload) == 8:
                self._outputs.append(Transmit(frames.frame(FrameType.PONG, payload)))
            case FrameType.PONG if payload == self._ping:
                self._ping = b""
                self._probe_answered(now)
            case FrameType.PONG:
                self._outputs.append(PongReceived(payload))
            case FrameType.HEALTH:
                self._outputs.append(HealthReported(payload[:1024].decode("utf-8", "replace")))
            case FrameType.RESTARTING:
                self._restarting(payload)

    def _peer_gone(self, payload: bytes) -> None:
        try:
            key, reason = frames.decode_peer_gone(payload)
        except DecodeError:
            self.drops.add("short peer-gone frame")
            return
        self._outputs.append(PeerGone(key, reason == frames.GONE_NOT_HERE))

    def _restarting(self, payload: bytes) -> None:
        try:
            reconnect_in_s, try_for_s = frames.decode_restarting(payload)
        except DecodeError:
            self.drops.add("short restarting frame")
            return
        self._outputs.append(RestartAnnounced(reconnect_in_s, try_for_s))

    def _log_in(self, server_key: NodePublic) -> None:
        nonce = self._entropy(frames.NONCE_BYTES)
        raw = frames.seal_client_info(self._private, server_key, ClientInfo(), nonce)
        if self._prefers:
            raw += frames.frame(FrameType.NOTE_PREFERRED, b"\x01")
        self._outputs.append(Transmit(raw))

    def _close(self, reason: str) -> None:
        self.is_closed = True
        self._outputs.append(Closed(reason))
