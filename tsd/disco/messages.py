"""Disco messages inside the envelope (tailscale: disco/disco.go): type, version 0, payload.

Trailing bytes are ignored except where a message says otherwise; unknown types decode to `Unknown`.
"""

from __future__ import annotations

from msgspec import Struct

from tsd.base.addr import AddrPort
from tsd.base.errors import DecodeError

TXID_BYTES = 12
_ENDPOINT_BYTES = 18
_RELAY_FIXED_BYTES = 124
_BIND_BYTES = 72


class Ping(Struct, frozen=True):
    """`node_key` is 32 raw bytes or b"" (very old senders); `padding` zero bytes follow for path MTU probes."""

    txid: bytes
    node_key: bytes = b""
    padding: int = 0

    def encode(self) -> bytes:
        return b"\x01\x00" + self.txid + self.node_key + bytes(self.padding)


class Pong(Struct, frozen=True):
    """`source` is where the ping came from, as its receiver saw it."""

    txid: bytes
    source: AddrPort

    def encode(self) -> bytes:
        return b"\x02\x00" + self.txid + self.source.encode()


class CallMeMaybe(Struct, frozen=True):
    """All endpoints of the sender; travels over DERP only."""

    endpoints: tuple[AddrPort, ...] = ()

    def encode(self) -> bytes:
        return b"\x03\x00" + b"".join(e.encode() for e in self.endpoints)


class RelayBind(Struct, frozen=True):
    """The three bind messages of a peer relay: stage 4 bind, 5 challenge, 6 answer."""

    stage: int
    vni: int
    generation: int
    remote_disco: bytes
    challenge: bytes = bytes(32)

    def encode(self) -> bytes:
        head = bytes([self.stage, 0]) + self.vni.to_bytes(4, "big") + self.generation.to_bytes(4, "big")
        return head + self.remote_disco + self.challenge


class RelayEndpoint(Struct, frozen=True):
    """Where a peer relay serves a pair of clients."""

    server_disco: bytes
    client_discos: tuple[bytes, bytes]
    lamport: int
    vni: int
    bind_lifetime_ns: int
    steady_lifetime_ns: int
    addresses: tuple[AddrPort, ...]

    def encode(self) -> bytes:
        fixed = self.server_disco + self.client_discos[0] + self.client_discos[1] + self.lamport.to_bytes(8, "big")
        fixed += self.vni.to_bytes(4, "big") + self.bind_lifetime_ns.to_bytes(8, "big")
        fixed += self.steady_lifetime_ns.to_bytes(8, "big")
        return fixed + b"".join(a.encode() for a in self.addresses)


class CallMeMaybeVia(Struct, frozen=True):
    endpoint: RelayEndpoint

    def encode(self) -> bytes:
        return b"\x07\x00" + self.endpoint.encode()


class AllocateRequest(Struct, frozen=True):
    client_discos: tuple[bytes, bytes]
    generation: int

    def encode(self) -> bytes:
        return b"\x08\x00" + self.client_discos[0] + self.client_discos[1] + self.generation.to_bytes(4, "big")


class AllocateResponse(Struct, frozen=True):
    generation: int
    endpoint: RelayEndpoint

    def encode(self) -> bytes:
        return b"\x09\x00" + self.generation.to_bytes(4, "big") + self.endpoint.encode()


class Unknown(Struct, frozen=True):
    kind: int


Message = Ping | Pong | CallMeMaybe | RelayBind | CallMeMaybeVia | AllocateRequest | AllocateResponse | Unknown


def decode(plaintext: bytes) -> Message:
    """Raises `DecodeError` for messages that are too short for their type."""
    if len(plaintext) < 2:
        raise DecodeError("disco", "no message type")
    kind, version, payload = plaintext[0], plaintext[1], plaintext[2:]
    match kind:
        case 1:
            return _decode_ping(payload)
        case 2:
            return Pong(_take(payload, 0, TXID_BYTES), AddrPort.decode(_take(payload, 12, _ENDPOINT_BYTES)))
        case 3:
            return _decode_call_me_maybe(version, payload)
        case 4 | 5 | 6:
            return _decode_bind(kind, payload)
        case 7:
            return CallMeMaybeVia(_decode_relay_endpoint(payload))
        case 8:
            generation = int.from_bytes(_take(payload, 64, 4), "big")
            return AllocateRequest((payload[:32], payload[32:64]), generation)
        case 9:
            return AllocateResponse(int.from_bytes(_take(payload, 0, 4), "big"), _decode_relay_endpoint(payload[4:]))
        case _:
            return Unknown(kind)


def _decode_ping(payload: bytes) -> Ping:
    txid = _take(payload, 0, TXID_BYTES)
    has_key = len(payload) >= TXID_BYTES + 32
    node_key = payload[TXID_BYTES : TXID_BYTES + 32] if has_key else b""
    return Ping(txid, node_key, max(0, len(payload) - TXID_BYTES - 32) if has_key else 0)


def _decode_call_me_maybe(version: int, payload: bytes) -> CallMeMaybe:
    if version != 0 or len(payload) % _ENDPOINT_BYTES:
        return CallMeMaybe()
    return CallMeMaybe(_decode_endpoints(payload))


def _decode_bind(stage: int, payload: bytes) -> RelayBind:
    _take(payload, 0, _BIND_BYTES)
    vni, generation = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
    return RelayBind(stage, vni, generation, payload[8:40], payload[40:72])


def _decode_relay_endpoint(payload: bytes) -> RelayEndpoint:
    tail = len(payload) - _RELAY_FIXED_BYTES
    if tail < _ENDPOINT_BYTES or tail % _ENDPOINT_BYTES:
        raise DecodeError("disco", "bad relay endpoint length")
    return RelayEndpoint(
        payload[:32],
        (payload[32:64], payload[64:96]),
        int.from_bytes(payload[96:104], "big"),
        int.from_bytes(payload[104:108], "big"),
        int.from_bytes(payload[108:116], "big"),
        int.from_bytes(payload[116:124], "big"),
        _decode_endpoints(payload[_RELAY_FIXED_BYTES:]),
    )


def _decode_endpoints(payload: bytes) -> tuple[AddrPort, ...]:
    count = len(payload) // _ENDPOINT_BYTES
    return tuple(AddrPort.decode(payload[i * 18 : i * 18 + 18]) for i in range(count))


def _take(payload: bytes, at: int, size: int) -> bytes:
    if len(payload) < at + size:
        raise DecodeError("disco", "message is cut")
    return payload[at : at + size]
