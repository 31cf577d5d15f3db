"""TLS as a client over any `hull.Stream`, so that HTTPS also goes through the overlay or a protected socket."""

from __future__ import annotations

import asyncio
import ssl

from tsd.hull import Stream

_CHUNK_BYTES = 64 << 10


class TlsStream:
    """A `tsd.transport.noise_stream.ByteStream`. Call `handshake` first."""

    def __init__(self, stream: Stream, context: ssl.SSLContext, host: str) -> None:
        self._stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._writing = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @property
    def protocol(self) -> str:
        """What was agreed on by ALPN; "" for nothing."""
        return self._tls.selected_alpn_protocol() or ""

    async def handshake(self) -> None:
        """Raises OSError (ssl.SSLError is one)."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self.drain()
                await self._feed()
                continue
            finally:
                await self.drain()
            return

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(_CHUNK_BYTES)
            except ssl.SSLWantReadError:
                await self.drain()
                await self._feed()
            except ssl.SSLZeroReturnError:
                return b""

    def write(self, data: bytes) -> None:
        if self._closing is None and data:
            self._tls.write(data)
            self._flushing = asyncio.ensure_future(self._flush_quietly())

    async def drain(self) -> None:
        async with self._writing:
            pending = self._outgoing.read()
            if pending:
                await self._stream.write(pending)

    def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._stream.close())

    async def _feed(self) -> None:
        chunk = await self._stream.read(_CHUNK_BYTES)
        if chunk:
            self._incoming.write(chunk)
        else:
            self._incoming.write_eof()
            raise ConnectionError("connection closed")

    async def _flush_quietly(self) -> None:
        """A failed write is seen by the reader."""
        try:
            await self.drain()
        except OSError:
            self.close()
