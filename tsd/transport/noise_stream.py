"""An asyncio byte stream inside ts2021 records: what HTTP/2 of the control protocol runs on, for both roles."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tsd.base.addr import IPAddress, parse_ip
from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import MachinePublic
from tsd.ts2021.handshake import TransportKeys
from tsd.ts2021.records import EarlyPayloadReader, RecordReader, RecordWriter

READ_BYTES = 64 << 10


class ByteStream(Protocol):
    """What `tsd.transport.h2` needs."""

    async def read(self) -> bytes:
        """Some bytes; b"" at the end. Raises ConnectionError or `ProtocolError`."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


class NoiseStream:
    """Owns the socket after the handshake. `leftover` is what was read from the socket but not consumed by it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: TransportKeys,
        *,
        leftover: bytes = b"",
        expects_early_payload: bool = False,
    ) -> None:
        self.peer: MachinePublic = keys.peer
        self.protocol_version = keys.protocol_version
        self._reader = reader
        self._writer = writer
        self._records_in = RecordReader(keys.receive)
        self._records_out = RecordWriter(keys.send)
        self._early = EarlyPayloadReader() if expects_early_payload else None
        self._pending = leftover

    @property
    def early_payload(self) -> bytes | None:
        """The server's early payload, once it has arrived."""
        return self._early.payload if self._early is not None else None

    @property
    def local_ip(self) -> IPAddress | None:
        """Our own address of the connection, None when the transport does not tell."""
        name = self._writer.get_extra_info("sockname")
        try:
            return parse_ip(str(name[0]).partition("%")[0]) if isinstance(name, tuple) else None
        except DecodeError:
            return None

    async def read(self) -> bytes:
        """Skips empty records. Raises `ProtocolError` for a stream cut within a record."""
        while True:
            chunk, self._pending = self._pending, b""
            chunk = chunk or await self._reader.read(READ_BYTES)
            if not chunk:
                if self._records_in.is_mid_record:
                    raise ProtocolError("ts2021: connection ended within a record")
                return b""
            plaintext = self._records_in.receive(chunk)
            if self._early is not None:
                plaintext = self._early.receive(plaintext)
            if plaintext:
                return plaintext

    def write(self, data: bytes) -> None:
        """Nothing happens after the end, which `read` tells (uvloop would raise RuntimeError)."""
        if data and not self._writer.is_closing():
            self._writer.write(self._records_out.seal(data))

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
