"""Noise IK as ts2021 frames it: both roles (tailscale: control/controlbase/handshake.go).

The client knows the server's static key; the prologue carries the protocol version, which is the client's capability
version and is never negotiated. Payloads are empty. Key material comes from `entropy`, so a handshake can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsd.base.entropy import Entropy
from tsd.base.errors import ProtocolError
from tsd.base.keys import MachinePrivate, MachinePublic, clamp, x25519, x25519_public
from tsd.noise.symmetric import SymmetricState
from tsd.ts2021.constants import (
    HEADER_BYTES,
    INITIATION_BYTES,
    PROLOGUE_PREFIX,
    PROTOCOL_NAME,
    RESPONSE_BYTES,
    TYPE_ERROR,
    TYPE_INITIATION,
    TYPE_RESPONSE,
)


@dataclass(frozen=True, slots=True)
class TransportKeys:
    """Result of a handshake. `send` and `receive` are from the holder's point of view."""

    send: bytes
    receive: bytes
    handshake_hash: bytes
    peer: MachinePublic
    protocol_version: int

    def __repr__(self) -> str:
        return f"TransportKeys(peer={self.peer!r}, protocol_version={self.protocol_version})"


def _start(protocol_version: int, server_public: bytes) -> SymmetricState:
    state = SymmetricState.initialize(PROTOCOL_NAME)
    state.mix_hash(f"{PROLOGUE_PREFIX}{protocol_version}".encode())
    state.mix_hash(server_public)
    return state


class ClientHandshake:
    """Write `initiation`, then give the response to `finish`."""

    def __init__(
        self, machine: MachinePrivate, server: MachinePublic, *, protocol_version: int, entropy: Entropy
    ) -> None:
        self._machine = machine
        self._server = server
        self._version = protocol_version
        self._ephemeral = clamp(entropy(32))
        self._state = _start(protocol_version, server.raw)
        self.initiation = self._initiate()

    def _initiate(self) -> bytes:
        ephemeral_public = x25519_public(self._ephemeral)
        self._state.mix_hash(ephemeral_public)
        self._state.mix_key(x25519(self._ephemeral, self._server.raw))
        machine_box = self._state.encrypt_and_hash(self._machine.public().raw)
        self._state.mix_key(self._machine.exchange(self._server.raw))
        tag = self._state.encrypt_and_hash(b"")
        body = ephemeral_public + machine_box + tag
        head = self._version.to_bytes(2, "big") + bytes([TYPE_INITIATION]) + len(body).to_bytes(2, "big")
        return head + body

    def finish(self, response: bytes) -> TransportKeys:
        """`response` is one whole frame. Raises `ProtocolError`, with the server's text if it sent an error frame."""
        if len(response) >= HEADER_BYTES and response[0] == TYPE_ERROR:
            text = response[HEADER_BYTES:].decode("utf-8", "replace")
            raise ProtocolError(f"ts2021: the server refused the Noise handshake: {text[:1024]!r}")
        if len(response) != RESPONSE_BYTES or response[0] != TYPE_RESPONSE or response[1:3] != b"\x00\x30":
            raise ProtocolError("ts2021: malformed handshake response")
        server_ephemeral, tag = response[3:35], response[35:]
        self._state.mix_hash(server_ephemeral)
        self._state.mix_key(x25519(self._ephemeral, server_ephemeral))
        self._state.mix_key(self._machine.exchange(server_ephemeral))
        self._state.decrypt_and_hash(tag)
        send, receive = self._state.split()
        return TransportKeys(send, receive, self._state.handshake_hash, self._server, self._version)


def accept_initiation(static: MachinePrivate, initiation: bytes, *, entropy: Entropy) -> tuple[bytes, TransportKeys]:
    """Server role in one step: the response frame and the keys. Raises `ProtocolError`."""
    if len(initiation) != INITIATION_BYTES:
        raise ProtocolError(f"ts2021: initiation of {len(initiation)} bytes, want {INITIATION_BYTES}")
    if initiation[2] != TYPE_INITIATION or initiation[3:5] != b"\x00\x60":
        raise ProtocolError("ts2021: malformed initiation")
    version = int.from_bytes(initiation[:2], "big")
    client_ephemeral, machine_box, tag = initiation[5:37], initiation[37:85], initiation[85:]
    state = _start(version, static.public().raw)
    state.mix_hash(client_ephemeral)
    state.mix_key(static.exchange(client_ephemeral))
    machine = MachinePublic(state.decrypt_and_hash(machine_box))
    state.mix_key(static.exchange(machine.raw))
    state.decrypt_and_hash(tag)

    ephemeral = clamp(entropy(32))
    ephemeral_public = x25519_public(ephemeral)
    state.mix_hash(ephemeral_public)
    state.mix_key(x25519(ephemeral, client_ephemeral))
    state.mix_key(x25519(ephemeral, machine.raw))
    response = bytes([TYPE_RESPONSE]) + b"\x00\x30" + ephemeral_public + state.encrypt_and_hash(b"")
    receive, send = state.split()
    return response, TransportKeys(send, receive, state.handshake_hash, machine, version)


def error_frame(text: str) -> bytes:
    body = text.encode()[:1024]
    return bytes([TYPE_ERROR]) + len(body).to_bytes(2, "big") + body
