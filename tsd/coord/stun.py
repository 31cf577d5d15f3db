"""STUN on a UDP port: the socket around `tsd.stun.responder`."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tsd.base.addr import AddrPort, parse_ip
from tsd.base.errors import DecodeError
from tsd.stun.responder import StunResponder


class StunServer(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.responder = StunResponder()
        self._transport: asyncio.DatagramTransport | None = None

    async def listen(self, host: str, port: int) -> AddrPort:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, local_addr=(host, port))
        assert self._transport is not None
        bound = self._transport.get_extra_info("sockname")
        return AddrPort(parse_ip(bound[0].partition("%")[0]), bound[1])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        try:
            source = AddrPort(parse_ip(str(addr[0]).partition("%")[0]), addr[1])
        except DecodeError:
            return
        reply = self.responder.respond(data, source)
        if reply is not None and self._transport is not None:
            self._transport.sendto(reply, addr)

    def error_received(self, exc: Exception) -> None:
        """A client that is gone (ICMP) is no concern of ours."""

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
