"""A resolver on loopback whose every answer a test decides: UDP and TCP on one port, HTTP/2 over TLS beside it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import dns.message
import dns.rcode
import dns.rrset

from tsd.transport.h2 import Http2Request, Http2Server

Answering = Callable[[dns.message.Message, str], bytes | None]
"""(query, "udp", "tcp" or "https") to a reply in wire form, or silence."""


def reply_with(*records: str, rcode: int = 0) -> Answering:
    """Records in zone-file form: "name type value"."""

    def answer(query: dns.message.Message, over: str) -> bytes:
        made = dns.message.make_response(query)
        made.set_rcode(dns.rcode.Rcode.make(rcode))
        for text in records:
            owner, kind, value = text.split(" ", 2)
            made.answer.append(dns.rrset.from_text(owner, 60, "IN", kind, value))
        wire = made.to_wire(max_size=65535)
        if over == "udp" and len(wire) > 512:
            cut = dns.message.make_response(query)
            cut.flags |= 0x0200
            return cut.to_wire()
        return wire

    return answer


class DnsDouble:
    """`text` is how it is named as an upstream; `asked` has what came: (transport, name)."""

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.asked: list[tuple[str, str]] = []
        self.has_tcp = True
        self.https_connections = 0
        self.text = ""
        self.port = 0
        self.https_port = 0
        self._closing: list[Any] = []

    async def start(self, host: str = "127.0.0.1") -> DnsDouble:
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve_tcp, host, 0)
        self.port = server.sockets[0].getsockname()[1]
        self.text = f"{host}:{self.port}"
        transport, _ = await loop.create_datagram_endpoint(lambda: _Udp(self), local_addr=(host, self.port))
        if not self.has_tcp:
            server.close()
        self._closing += [server, transport]
        return self

    async def start_https(self, context: ssl.SSLContext, host: str = "127.0.0.1") -> None:
        server = await asyncio.start_server(self._serve_https, host, 0, ssl=context)
        self.https_port = server.sockets[0].getsockname()[1]
        self._closing.append(server)

    def close(self) -> None:
        for one in self._closing:
            one.close()

    def answer(self, wire: bytes, over: str) -> bytes | None:
        query = dns.message.from_wire(wire)
        self.asked.append((over, query.question[0].name.to_text(omit_final_dot=True)))
        return self.answering(query, over)

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                reply = self.answer(await reader.readexactly(size), "tcp")
                if reply is not None:
                    writer.write(len(reply).to_bytes(2, "big") + reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _serve_https(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.https_connections += 1
        await Http2Server(_Bytes(reader, writer), self._https).serve()

    async def _https(self, request: Http2Request) -> None:
        assert request.method == "POST" and request.headers["content-type"] == "application/dns-message"
        reply = self.answer(await request.body(), "https")
        if reply is None:
            await asyncio.sleep(3600)
        await request.respond(200, reply or b"", "application/dns-message")


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, owner: DnsDouble) -> None:
        self._owner = owner

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        reply = self._owner.answer(data, "udp")
        if reply is not None:
            self._transport.sendto(reply, addr)


class _Bytes:
    """Asyncio's pair as a byte stream of `tsd.transport.h2`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        return await self._reader.read(65536)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
