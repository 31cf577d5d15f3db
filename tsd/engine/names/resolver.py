"""Our resolver: own names from the zone, everything else to the upstream that fits.

Longest suffix wins; an upstream inside the overlay is asked through the overlay (also without a TUN). Own look-ups
never go through ourselves: our service addresses are never used as upstream. Rules: tailscale:
net/dns/resolver/forwarder.go. DoH and TLS upstreams are not asked here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tsd.base.addr import QUAD_100, QUAD_100_V6, AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.base.log import fields
from tsd.dns.zone import Zone, magic_suffixes
from tsd.engine.names.dialer import Dialer
from tsd.hull import DnsConfig

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
RACE_DELAY_S = 0.2
MAX_CONCURRENT = 256
MAX_ALIASES = 8
_OWN = frozenset({QUAD_100, QUAD_100_V6})


_SERVFAIL, _REFUSED = 2, 5


class Resolver:
    """One per engine; `configure` swaps names and upstreams at once."""

    def __init__(self, dialer: Dialer, base_resolvers: Callable[[], Sequence[str]] = tuple) -> None:
        """`base_resolvers` tells the host's own upstreams; asked each time, for they change with its networks."""
        self._dialer = dialer
        self._base = base_resolvers
        self._zone = Zone({})
        self._routes: dict[str, tuple[str, ...]] = {}
        self._default: tuple[str, ...] = ()
        self._search: tuple[str, ...] = ()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self.own_addresses: frozenset[IPAddress] = frozenset()

    def configure(self, config: DnsConfig) -> None:
        own_zones = tuple(suffix for suffix, upstreams in config.routes.items() if not upstreams)
        self._zone = Zone(config.hosts, (*magic_suffixes(config.magic_suffix), *own_zones))
        self._routes = {s.strip(".").lower(): tuple(ups) for s, ups in config.routes.items() if ups}
        self._default = config.resolvers
        self._search = config.search_domains

    def lookup(self, name: str) -> list[IPAddress]:
        """Addresses of a tailnet name, long or short."""
        found = self._zone.lookup(name)
        if not found and "." not in name.rstrip("."):
            for domain in self._search:
                found = self._zone.lookup(f"{name.rstrip('.')}.{domain}")
                if found:
                    break
        return list(found)

    def upstreams_for(self, name: str) -> tuple[str, ...]:
        return self.configured_for(name) or tuple(self._base())

    def configured_for(self, name: str) -> tuple[str, ...]:
        """Upstreams that control chose for a name; empty when the host's own are to be asked."""
        plain = name.rstrip(".").lower()
        fitting = [s for s in self._routes if plain == s or plain.endswith("." + s)]
        if fitting:
            return self._routes[max(fitting, key=lambda s: s.count("."))]
        return self._default

    async def query(self, wire: bytes, over_tcp: bool = False) -> bytes:
        """The reply to a query in wire form; SERVFAIL when nobody answers, FORMERR for what is no query."""
        from tsd.dns import wire as codec  # here, because dnspython takes longer to import than the whole engine

        if len(wire) > 2 and wire[2] & 0x80:
            return wire[:2] + b"\x81\x01" + bytes(8)
        own = codec.answer(self._zone, wire, max_bytes=65535 if over_tcp else None)
        if own is not None:
            return own
        name = codec.name_in(wire)
        if name is None:
            return wire[:2].ljust(2, b"\0") + b"\x81\x01" + bytes(8)
        if self._slots.locked():
            return codec.failure(wire)
        async with self._slots:
            upstreams = self.upstreams_for(name)
            reply = await self._race(wire, upstreams, over_tcp)
            if reply is not None:
                reply = await self._follow(reply, wire, upstreams, over_tcp)
        return reply if reply is not None else codec.failure(wire)

    async def _follow(self, reply: bytes, wire: bytes, upstreams: tuple[str, ...], over_tcp: bool) -> bytes | None:
        """Follow an alias to a name of ours, or into a zone of other upstreams. None when there is no end to it."""
        from tsd.dns import wire as codec

        for _ in range(MAX_ALIASES):
            try:
                alias = codec.open_alias(reply)
            except DecodeError:
                return None
            if alias is None:
                return reply
            target, rdtype = alias
            if self._zone.owns(target):
                return codec.with_addresses(reply, target, rdtype, self._zone.lookup(target))
            others = self.configured_for(target)
            if not others or others == upstreams:
                return reply
            more = await self._race(codec.question(target, rdtype, int.from_bytes(wire[:2], "big")), others, over_tcp)
            if more is None or codec.answer_count(more) == 0:
                return reply
            reply, upstreams = codec.joined(reply, more), others
        return None

    def resolvers_json(self, name: str) -> list[dict[str, Any]]:
        """Who would be asked for a name, as `dns query` shows it."""
        if self._zone.owns(name):
            return []
        return [{"Addr": upstream} for upstream in self.upstreams_for(name)]

    async def addresses(self, name: str) -> list[IPAddress]:
        """Addresses of any name by the resolvers in force. Raises OSError."""
        found = self.lookup(name)
        if found:
            return found
        if self._zone.owns(name):
            raise OSError(f"no such name: {name}")
        from tsd.dns import wire as codec

        for rdtype in ("A", "AAAA"):
            try:
                question = codec.question(name, rdtype)
            except DecodeError as err:
                raise OSError(str(err)) from None
            reply = await self.query(question, over_tcp=True)
            found += [ip for ip in codec.addresses_in(reply) if ip not in found]
        if not found:
            raise OSError(f"no address for {name}")
        return found

    async def _race(self, wire: bytes, upstreams: tuple[str, ...], over_tcp: bool) -> bytes | None:
        """The first useful answer of several upstreams, each started a little later than the one before."""
        targets = [t for t in (self._target(u) for u in upstreams) if t is not None]
        if not targets:
            return None
        tasks = [asyncio.create_task(self._ask(t, wire, over_tcp, i * RACE_DELAY_S)) for i, t in enumerate(targets)]
        worst: bytes | None = None
        try:
            for finished in asyncio.as_completed(tasks, timeout=TIMEOUT_S):
                try:
                    reply = await finished
                except (OSError, TimeoutError) as err:
                    log.debug(fields("upstream failed", reason=err))
                    continue
                if reply[3] & 15 in (_SERVFAIL, _REFUSED):
                    worst = reply
                else:
                    return reply
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
        return worst

    def _target(self, upstream: str) -> AddrPort | None:
        """Only plain resolvers that are not ourselves."""
        try:
            target = AddrPort.parse(upstream)
        except DecodeError:
            try:
                target = AddrPort(parse_ip(upstream), 53)
            except DecodeError:
                return None
        return None if target.ip in _OWN or target.ip in self.own_addresses else target

    async def _ask(self, target: AddrPort, wire: bytes, over_tcp: bool, delay_s: float) -> bytes:
        if delay_s:
            await asyncio.sleep(delay_s)
        reply = await asyncio.wait_for(self._ask_udp(target, wire), TIMEOUT_S / 2)
        if over_tcp and reply[2] & 0x02:
            reply = await asyncio.wait_for(self._ask_tcp(target, wire), TIMEOUT_S / 2)
            if not _answers(reply, wire):
                raise ConnectionError("upstream answered something else")
        return reply

    async def _ask_udp(self, target: AddrPort, wire: bytes) -> bytes:
        port = await self._dialer.open_datagram(target.ip)
        if port is None:
            return await _ask_host_udp(target, wire)
        try:
            port.send(wire, target)
            while True:
                reply, source = await port.receive()
                if source == target and _answers(reply, wire):
                    return reply
        finally:
            port.close()

    async def _ask_tcp(self, target: AddrPort, wire: bytes) -> bytes:
        stream = await self._dialer.dial_ip(target, TIMEOUT_S / 2)
        try:
            await stream.write(len(wire).to_bytes(2, "big") + wire)
            buffer = b""
            while len(buffer) < 2 or len(buffer) < 2 + int.from_bytes(buffer[:2], "big"):
                chunk = await stream.read(65536)
                if not chunk:
                    raise ConnectionError("upstream closed")
                buffer += chunk
            return buffer[2 : 2 + int.from_bytes(buffer[:2], "big")]
        finally:
            await stream.close()


def _answers(reply: bytes, wire: bytes) -> bool:
    """Whether a reply is one to this query: its number, and the question itself when it is repeated."""
    if len(reply) < 12 or reply[:2] != wire[:2] or not reply[2] & 0x80:
        return False
    end = 12
    while end < len(wire) and wire[end]:
        end += wire[end] + 1
    return reply[4:6] == b"\0\0" or reply[12 : end + 5].lower() == wire[12 : end + 5].lower()


class _UdpQuestion(asyncio.DatagramProtocol):
    def __init__(self, wire: bytes) -> None:
        self._wire = wire
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        if _answers(data, self._wire) and not self.reply.done():
            self.reply.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(exc)


async def _ask_host_udp(target: AddrPort, wire: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(
        lambda: _UdpQuestion(wire), remote_addr=(str(target.ip), target.port)
    )
    try:
        transport.sendto(wire)
        return await protocol.reply
    finally:
        transport.close()
