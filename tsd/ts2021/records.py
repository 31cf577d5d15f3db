"""Transport records after the handshake: a byte stream cut into sealed frames (tailscale: control/controlbase/conn.go).

Nonces are big-endian, unlike WireGuard's, and the header is not authenticated. Every fault is fatal for the stream:
`RecordReader.receive` raises `ProtocolError` once and for ever.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from tsd.base.errors import ProtocolError
from tsd.ts2021.constants import (
    EARLY_HEADER_BYTES,
    EARLY_MAGIC,
    HEADER_BYTES,
    INVALID_COUNTER,
    MAX_CIPHERTEXT_BYTES,
    MAX_EARLY_BYTES,
    MAX_PLAINTEXT_BYTES,
    TYPE_RECORD,
)


class RecordWriter:
    """Seals one direction."""

    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)
        self._counter = 0

    def seal(self, plaintext: bytes | memoryview) -> bytes:
        """One or more records; nothing for empty input."""
        view = memoryview(plaintext)
        return b"".join(
            self.seal_record(view[start : start + MAX_PLAINTEXT_BYTES])
            for start in range(0, len(view), MAX_PLAINTEXT_BYTES)
        )

    def seal_record(self, plaintext: bytes | memoryview) -> bytes:
        """Exactly one record, possibly empty."""
        if self._counter >= INVALID_COUNTER:
            raise ProtocolError("ts2021: send counter exhausted")
        ciphertext = self._aead.encrypt(b"\0\0\0\0" + self._counter.to_bytes(8, "big"), bytes(plaintext), None)
        self._counter += 1
        return bytes([TYPE_RECORD]) + len(ciphertext).to_bytes(2, "big") + ciphertext


class RecordReader:
    """Opens one direction; feed it whatever the socket gave."""

    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)
        self._counter = 0
        self._buffer = bytearray()
        self._failure = ""

    def receive(self, chunk: bytes | bytearray | memoryview) -> bytes:
        """Plaintext that became complete, possibly none. Raises `ProtocolError`; the stream is then dead."""
        if self._failure:
            raise ProtocolError(self._failure)
        self._buffer += chunk
        opened: list[bytes] = []
        position = 0
        while len(self._buffer) - position >= HEADER_BYTES:
            length = self._frame_length(position)
            end = position + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            opened.append(self._open(bytes(self._buffer[position + HEADER_BYTES : end])))
            position = end
        del self._buffer[:position]
        return b"".join(opened)

    @property
    def is_mid_record(self) -> bool:
        """True when an end of stream now would cut a record."""
        return bool(self._buffer)

    def _frame_length(self, position: int) -> int:
        kind, length = self._buffer[position], int.from_bytes(self._buffer[position + 1 : position + 3], "big")
        if kind != TYPE_RECORD:
            raise self._fail(f"ts2021: frame of type {kind} after the handshake")
        if length > MAX_CIPHERTEXT_BYTES:
            raise self._fail(f"ts2021: record of {length} bytes, limit is {MAX_CIPHERTEXT_BYTES}")
        return length

    def _open(self, ciphertext: bytes) -> bytes:
        if self._counter >= INVALID_COUNTER:
            raise self._fail("ts2021: receive counter exhausted")
        try:
            plaintext = self._aead.decrypt(b"\0\0\0\0" + self._counter.to_bytes(8, "big"), ciphertext, None)
        except (InvalidTag, ValueError):
            raise self._fail("ts2021: record failed authentication") from None
        self._counter += 1
        return plaintext

    def _fail(self, reason: str) -> ProtocolError:
        self._failure = reason
        return ProtocolError(reason)


class EarlyPayloadReader:
    """Splits the optional early payload off the server's plaintext, wherever records cut it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.payload: bytes | None = None
        self.is_done = False

    def receive(self, plaintext: bytes) -> bytes:
        """What belongs to HTTP/2, possibly nothing yet. Raises `ProtocolError` for an absurd length."""
        if self.is_done:
            return plaintext
        self._buffer += plaintext
        magic_bytes = min(len(self._buffer), len(EARLY_MAGIC))
        if self._buffer[:magic_bytes] != EARLY_MAGIC[:magic_bytes]:
            return self._finish(0)
        if len(self._buffer) < EARLY_HEADER_BYTES:
            return b""
        length = int.from_bytes(self._buffer[5:9], "big")
        if length > MAX_EARLY_BYTES:
            raise ProtocolError(f"ts2021: early payload of {length} bytes")
        end = EARLY_HEADER_BYTES + length
        if len(self._buffer) < end:
            return b""
        self.payload = bytes(self._buffer[EARLY_HEADER_BYTES:end])
        return self._finish(end)

    def _finish(self, start: int) -> bytes:
        self.is_done = True
        rest = bytes(self._buffer[start:])
        self._buffer.clear()
        return rest


def early_frame(payload: bytes) -> bytes:
    """Server side: the plaintext to write before HTTP/2."""
    return EARLY_MAGIC + len(payload).to_bytes(4, "big") + payload
