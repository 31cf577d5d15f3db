"""DERP frames: u8 type, u32 length, payload (tailscale: derp/derp.go). Codec and stream splitter, no state machine.

The login boxes are NaCl crypto_box between node key pairs: nonce, then tag and ciphertext.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from msgspec import Struct
from nacl.bindings import crypto_box_beforenm, crypto_box_easy_afternm, crypto_box_open_easy_afternm
from nacl.exceptions import CryptoError

from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import NodePrivate, NodePublic

MAGIC = b"DERP\xf0\x9f\x94\x91"
PROTOCOL_VERSION = 2
HEADER_BYTES = 5
KEY_BYTES = 32
NONCE_BYTES = 24
MAX_PACKET_BYTES = 64 << 10
MAX_FRAME_BYTES = 1 << 20
MAX_CLIENT_INFO_BYTES = 256 << 10
KEEP_ALIVE_S = 60.0
_DISCO_MAGIC = b"TS\xf0\x9f\x92\xac"
_DISCO_MIN_BYTES = 62


class FrameType(IntEnum):
    SERVER_KEY = 0x01
    CLIENT_INFO = 0x02
    SERVER_INFO = 0x03
    SEND_PACKET = 0x04
    RECV_PACKET = 0x05
    KEEP_ALIVE = 0x06
    NOTE_PREFERRED = 0x07
    PEER_GONE = 0x08
    PEER_PRESENT = 0x09
    FORWARD_PACKET = 0x0A
    WATCH_CONNS = 0x10
    CLOSE_PEER = 0x11
    PING = 0x12
    PONG = 0x13
    HEALTH = 0x14
    RESTARTING = 0x15


GONE_DISCONNECTED = 0
GONE_NOT_HERE = 1


class RawFrame(NamedTuple):
    kind: int
    payload: bytes


def looks_like_disco(packet: bytes) -> bool:
    """Path discovery goes into a queue of its own (the rule is upstream's: magic and least length)."""
    return packet[:6] == _DISCO_MAGIC and len(packet) >= _DISCO_MIN_BYTES


def frame(kind: int, payload: bytes = b"") -> bytes:
    return bytes((kind,)) + len(payload).to_bytes(4, "big") + payload


def send_packet(dst: bytes, packet: bytes) -> bytes:
    return b"".join((b"\x04", (KEY_BYTES + len(packet)).to_bytes(4, "big"), dst, packet))


def recv_packet(src: bytes, packet: bytes) -> bytes:
    return b"".join((b"\x05", (KEY_BYTES + len(packet)).to_bytes(4, "big"), src, packet))


def send_packets(dst: bytes, datagrams: bytes, datagram_bytes: int) -> bytes:
    """One stretch of send-packet frames for datagrams that lie back to back; only the last may be shorter."""
    size = len(datagrams)
    if not 0 < datagram_bytes < size:
        return send_packet(dst, datagrams)
    head = b"\x04" + (KEY_BYTES + datagram_bytes).to_bytes(4, "big") + dst
    view = memoryview(datagrams)
    whole = size - size % datagram_bytes
    pieces: list[bytes | memoryview] = []
    for at in range(0, whole, datagram_bytes):
        pieces.append(head)
        pieces.append(view[at : at + datagram_bytes])
    if whole < size:
        pieces.append(b"\x04" + (KEY_BYTES + size - whole).to_bytes(4, "big") + dst)
        pieces.append(view[whole:])
    return b"".join(pieces)


class FrameSplitter:
    """Cuts a byte stream into frames; holds at most one incomplete frame.

    Raises `ProtocolError` from `feed` for a frame above `max_frame_bytes`: the connection must be closed.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = HEADER_BYTES

    def feed(self, data: bytes) -> list[RawFrame]:
        """The frames completed by `data`, payloads copied once."""
        if self._have + len(data) < self._need:
            self._chunks.append(data)
            self._have += len(data)
            return []
        if self._chunks:
            self._chunks.append(data)
            data = b"".join(self._chunks)
            self._chunks.clear()
        return self._split(data)

    def _split(self, data: bytes) -> list[RawFrame]:
        found: list[RawFrame] = []
        at, size, limit = 0, len(data), self.max_frame_bytes
        self._need = HEADER_BYTES
        while size - at >= HEADER_BYTES:
            length = int.from_bytes(data[at + 1 : at + 5], "big")
            if length > limit:
                raise ProtocolError(f"derp: frame of {length} bytes")
            end = at + HEADER_BYTES + length
            if end > size:
                self._need = HEADER_BYTES + length
                break
            found.append(RawFrame(data[at], data[at + HEADER_BYTES : end]))
            at = end
        if at < size:
            self._chunks.append(data[at:])
        self._have = size - at
        return found


class ClientInfo(Struct, frozen=True):
    """What a client says about itself at login."""

    version: int = PROTOCOL_VERSION
    can_ack_pings: bool = True
    mesh_key: str = ""
    is_prober: bool = False
    app_name: str = ""

    def encode(self) -> bytes:
        fields: dict[str, Any] = {"meshKey": self.mesh_key} if self.mesh_key else {}
        fields |= {"version": self.version, "CanAckPings": self.can_ack_pings}
        if self.is_prober:
            fields["IsProber"] = True
        if self.app_name:
            fields["AppName"] = self.app_name
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> ClientInfo:
        fields = {name.lower(): value for name, value in _decode_object(raw).items()}
        return cls(
            _int(fields.get("version")),
            fields.get("canackpings") is True,
            str(fields.get("meshkey") or ""),
            fields.get("isprober") is True,
            str(fields.get("appname") or ""),
        )


class ServerInfo(Struct, frozen=True):
    """What the server asks of a client; zero rates mean no limit. `queue_bytes` is our own addition."""

    version: int = PROTOCOL_VERSION
    token_bucket_bytes_per_second: int = 0
    token_bucket_bytes_burst: int = 0
    queue_bytes: int = 0

    def encode(self) -> bytes:
        fields = {"version": self.version}
        if self.token_bucket_bytes_per_second:
            fields["TokenBucketBytesPerSecond"] = self.token_bucket_bytes_per_second
        if self.token_bucket_bytes_burst:
            fields["TokenBucketBytesBurst"] = self.token_bucket_bytes_burst
        if self.queue_bytes:
            fields["QueueBytes"] = self.queue_bytes
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> ServerInfo:
        fields = {name.lower(): value for name, value in _decode_object(raw).items()}
        rate, burst = fields.get("tokenbucketbytespersecond"), fields.get("tokenbucketbytesburst")
        queue = max(0, _int(fields.get("queuebytes")))
        return cls(_int(fields.get("version")), max(0, _int(rate)), max(0, _int(burst)), queue)


def encode_server_key(key: NodePublic) -> bytes:
    return frame(FrameType.SERVER_KEY, MAGIC + key.raw)


def decode_server_key(payload: bytes) -> NodePublic:
    if len(payload) < len(MAGIC) + KEY_BYTES or payload[:8] != MAGIC:
        raise DecodeError("derp", "bad server key frame")
    return NodePublic(payload[8:40])


def seal_client_info(private: NodePrivate, server: NodePublic, info: ClientInfo, nonce: bytes) -> bytes:
    return frame(FrameType.CLIENT_INFO, private.public().raw + _seal(private, server, info.encode(), nonce))


def open_client_info(private: NodePrivate, payload: bytes) -> tuple[NodePublic, ClientInfo]:
    if len(payload) < KEY_BYTES + NONCE_BYTES:
        raise DecodeError("derp", "client info is cut")
    client = NodePublic(payload[:KEY_BYTES])
    return client, ClientInfo.decode(_open(private, client, payload[KEY_BYTES:]))


def seal_server_info(private: NodePrivate, client: NodePublic, info: ServerInfo, nonce: bytes) -> bytes:
    return frame(FrameType.SERVER_INFO, _seal(private, client, info.encode(), nonce))


def open_server_info(private: NodePrivate, server: NodePublic, payload: bytes) -> ServerInfo:
    if len(payload) < NONCE_BYTES:
        raise DecodeError("derp", "server info is cut")
    return ServerInfo.decode(_open(private, server, payload))


def encode_peer_gone(key: bytes, reason: int) -> bytes:
    return frame(FrameType.PEER_GONE, key + bytes((reason,)))


def decode_peer_gone(payload: bytes) -> tuple[NodePublic, int]:
    if len(payload) < KEY_BYTES:
        raise DecodeError("derp", "peer gone is cut")
    return NodePublic(payload[:KEY_BYTES]), payload[KEY_BYTES] if len(payload) > KEY_BYTES else GONE_DISCONNECTED


def decode_restarting(payload: bytes) -> tuple[float, float]:
    if len(payload) < 8:
        raise DecodeError("derp", "restarting is cut")
    return int.from_bytes(payload[:4], "big") / 1000, int.from_bytes(payload[4:8], "big") / 1000


def _seal(private: NodePrivate, peer: NodePublic, plaintext: bytes, nonce: bytes) -> bytes:
    return nonce + bytes(_boxed(lambda: crypto_box_easy_afternm(plaintext, nonce, _secret(private, peer))))


def _open(private: NodePrivate, peer: NodePublic, sealed: bytes) -> bytes:
    nonce, box = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
    return _boxed(lambda: bytes(crypto_box_open_easy_afternm(box, nonce, _secret(private, peer))))


def _secret(private: NodePrivate, peer: NodePublic) -> bytes:
    return bytes(crypto_box_beforenm(peer.raw, private.raw))


def _boxed(operation: Callable[[], bytes]) -> bytes:
    try:
        return operation()
    except (CryptoError, ValueError, TypeError, RuntimeError):
        raise DecodeError("derp", "login box does not open") from None


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _decode_object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        raise DecodeError("derp", "login is not JSON") from None
    if not isinstance(fields, dict):
        raise DecodeError("derp", "login is not a JSON object")
    return fields
