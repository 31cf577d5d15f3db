"""A small DERP server on the running loop, made of the product's router: for tests of clients."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
import time

from tsd.base.addr import AddrPort, parse_ip
from tsd.base.entropy import system_entropy
from tsd.base.keys import NodePrivate
from tsd.derp.server import Closed, DerpRouter, Writable
from tsd.tailcfg.derpmap import DERPMap, DERPNode, DERPRegion
from tsd.transport import certificates


class DerpServer:
    """`await start()`; `map()` gives clients a region that pins this server's certificate."""

    def __init__(self, *, with_meta: bool = True, plain: bool = False, router: DerpRouter | None = None) -> None:
        self.private = NodePrivate.generate(system_entropy)
        self.router = router or DerpRouter(self.private, entropy=system_entropy)
        self.with_meta, self.plain = with_meta, plain
        self.transports: dict[int, asyncio.Transport] = {}
        self.paused: set[int] = set()
        self.requests: list[bytes] = []
        self.status = b"101 Switching Protocols"
        self.port = 0
        self.pin = ""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        context = None if self.plain else self._context()
        self.server = await loop.create_server(lambda: _Stream(self), "127.0.0.1", self.port, ssl=context)
        self.port = self.server.sockets[0].getsockname()[1]

    def _context(self) -> ssl.SSLContext:
        cert, key = certificates.self_signed(["relay.test"], time.time())
        self.pin = certificates.pin_of(cert)
        if self.with_meta:
            cert += certificates.meta_certificate(self.private.public(), time.time())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:
            file.write(cert + key)
            file.flush()
            context.load_cert_chain(file.name)
        return context

    def map(self, region_id: int = 900, **node_fields: object) -> DERPMap:
        fields: dict = {
            "name": "900a",
            "region_id": region_id,
            "host_name": "relay.test",
            "cert_name": self.pin,
            "ipv4": "127.0.0.1",
            "ipv6": "none",
            "derp_port": self.port,
            "stun_port": -1,
        }
        node = DERPNode(**(fields | node_fields))
        region = DERPRegion(region_id=region_id, region_code="test", region_name="Test", nodes=(node,))
        return DERPMap(regions={region_id: region})

    def flush(self) -> None:
        for output in self.router.take_outputs():
            match output:
                case Writable(connection):
                    self.write(connection)
                case Closed(connection):
                    if connection in self.transports:
                        self.transports.pop(connection).abort()

    def write(self, connection: int) -> None:
        transport = self.transports.get(connection)
        while transport is not None and connection not in self.paused:
            data = self.router.take(connection, time.monotonic())
            if not data:
                return
            transport.write(data)

    def drop_all(self) -> None:
        for transport in list(self.transports.values()):
            transport.abort()

    async def stop(self) -> None:
        self.server.close()
        self.drop_all()
        await asyncio.sleep(0)


class _Stream(asyncio.Protocol):
    def __init__(self, owner: DerpServer) -> None:
        self.owner, self.head, self.connection = owner, bytearray(), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        owner, now = self.owner, time.monotonic()
        if not self.connection:
            self.head += data
            head, blank, data = bytes(self.head).partition(b"\r\n\r\n")
            if not blank:
                return
            owner.requests.append(head)
            if b"Fast-Start" not in head:
                self.transport.write(b"HTTP/1.1 " + owner.status + b"\r\nUpgrade: DERP\r\nConnection: Upgrade\r\n\r\n")
            peer = self.transport.get_extra_info("peername")
            self.connection = owner.router.connect(AddrPort(parse_ip(peer[0]), peer[1]), now)
            owner.transports[self.connection] = self.transport
        owner.router.receive(self.connection, data, now)
        owner.flush()

    def pause_writing(self) -> None:
        self.owner.paused.add(self.connection)

    def resume_writing(self) -> None:
        self.owner.paused.discard(self.connection)
        self.owner.write(self.connection)

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.transports.pop(self.connection, None)
        self.owner.router.disconnect(self.connection, time.monotonic())
        self.owner.flush()
