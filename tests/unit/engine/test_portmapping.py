"""The port mapper on real sockets, with a router on loopback that speaks NAT-PMP or UPnP."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address, ip_network
from typing import Any

import pytest

from tsd.base.addr import AddrPort
from tsd.base.clock import SystemClock
from tsd.base.entropy import SeededEntropy
from tsd.engine.path.portmapping import PortMapping
from tsd.engine.path.sockets import OnBatch, OnError, Udp, host_udp
from tsd.hull import LinkState
from tsd.portmap import pxp
from tsd.portmap.igd import SSDP_PORT
from tsd.transport.dial import HostDial

LOOPBACK = IPv4Address("127.0.0.1")
LINKS = LinkState({"lo": (ip_network("127.0.0.1/32"),)}, "lo", gateway_v4=LOOPBACK)
DESCRIPTION = (
    "<root><device><serviceList><service><serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>"
    "<controlURL>/ctl</controlURL></service></serviceList></device></root>"
)
ADDRESS = (
    '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
    "<NewExternalIPAddress>203.0.113.5</NewExternalIPAddress></s:Body></s:Envelope>"
)


class Loopback:
    """A router; `heard` is what it was asked for."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.given_back = asyncio.Event()
        self._open: list[Any] = []

    async def udp(self, port: int, answer: Callable[[bytes], bytes | None]) -> None:
        class Server(asyncio.DatagramProtocol):
            def connection_made(self, transport: Any) -> None:
                self.transport = transport

            def datagram_received(self, data: bytes, addr: Any) -> None:
                reply = answer(data)
                if reply is not None:
                    self.transport.sendto(reply, addr)

        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_datagram_endpoint(Server, ("127.0.0.1", port))
        except OSError as err:
            pytest.skip(f"port {port} is taken here: {err}")
        self._open.append(transport)

    async def http(self) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heard.append(head.split("\r\n")[0])
            self.heard += [line.rpartition("#")[2][:-1] for line in head.split("\r\n") if "soapaction" in line.lower()]
            body = DESCRIPTION if head.startswith("GET") else ADDRESS
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._open.append(server)
        return int(server.sockets[0].getsockname()[1])

    def nat_pmp(self, data: bytes) -> bytes | None:
        if data[0] != 0:
            return None
        self.heard.append(f"pmp {data[1]} {int.from_bytes(data[8:12])}")
        if data[1] == 0:
            return struct.pack("!BBHI", 0, 0x80, 0, 5) + IPv4Address("203.0.113.5").packed
        if data[8:12] == bytes(4):
            self.given_back.set()
        return struct.pack("!BBHI", 0, 0x81, 0, 5) + data[4:6] + (6000).to_bytes(2) + data[8:12]

    def close(self) -> None:
        for each in self._open:
            each.close()


def open_udp(family: int, port: int, on_batch: OnBatch, on_error: OnError) -> Udp:
    """A socket that never leaves the machine: nothing is sent to the multicast group."""
    opened = host_udp(lambda sock: None)(family, port, on_batch, on_error)

    class Kept:
        port = opened.port

        def send(self, datagrams: bytes, datagram_bytes: int, to: AddrPort) -> bool:
            return to.ip == LOOPBACK and opened.send(datagrams, datagram_bytes, to)

        def close(self) -> None:
            opened.close()

    return Kept()


@pytest.fixture
async def router() -> AsyncIterator[Loopback]:
    made = Loopback()
    yield made
    made.close()


async def _mapped(mapping: PortMapping) -> AddrPort:
    changed = asyncio.Event()
    mapping.on_changed = changed.set
    mapping.look(LINKS, 41641)
    async with asyncio.timeout(20):
        await changed.wait()
    assert mapping.external is not None
    return mapping.external


def _mapping() -> PortMapping:
    return PortMapping(open_udp=open_udp, dial=HostDial(), clock=SystemClock(), entropy=SeededEntropy(2))


async def test_nat_pmp_maps_and_gives_back(router: Loopback) -> None:
    await router.udp(pxp.PORT, router.nat_pmp)
    mapping = _mapping()
    assert str(await _mapped(mapping)) == "203.0.113.5:6000"
    assert mapping.seen.pmp and mapping.seen.upnp is False
    await mapping.close()
    async with asyncio.timeout(20):
        await router.given_back.wait()


async def test_upnp_maps_and_gives_back(router: Loopback) -> None:
    port = await router.http()
    found = f"HTTP/1.1 200 OK\r\nST: x:InternetGatewayDevice:1\r\nLocation: http://127.0.0.1:{port}/d.xml\r\n\r\n"
    await router.udp(SSDP_PORT, lambda data: found.encode())
    mapping = _mapping()
    assert (await _mapped(mapping)).ip == IPv4Address("203.0.113.5")
    await mapping.close()
    assert router.heard[0] == "GET /d.xml HTTP/1.1"
    assert [text for text in router.heard if " " not in text] == [
        "AddPortMapping", "GetExternalIPAddress", "DeletePortMapping",
    ]  # fmt: skip


async def test_a_router_that_does_not_answer_costs_nothing_at_stop() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        mapping = _mapping()
        mapping.look(LINKS, 41641)
        await mapping.close()
        assert mapping.external is None
