"""Where a connection goes: tailnet names and routed addresses into the overlay, all else from the host.

Used by the SOCKS5 and HTTP proxies, by `tsctl nc` and by our own clients (tailscale: net/tsdial/tsdial.go).
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Protocol

from tsd.base.addr import QUAD_100, QUAD_100_V6, AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.hull import DatagramPort, OverlayNet, Stream
from tsd.transport.dial import Protect
from tsd.transport.host import connect_host

LOOPBACK, LOOPBACK_V6 = parse_ip("127.0.0.1"), parse_ip("::1")
LEAST_SHARE_S = 2.0
_SERVICES = frozenset((QUAD_100, QUAD_100_V6))


class NameSource(Protocol):
    """The engine's view of names and routes."""

    def tailnet_addresses(self, name: str) -> list[IPAddress]:
        """Addresses of a MagicDNS name, long or short; empty when it is none."""

    def is_overlay(self, ip: IPAddress) -> bool:
        """Whether a peer is the way to this address."""

    def is_own(self, ip: IPAddress) -> bool: ...

    def held_back(self, ip: IPAddress) -> str:
        """Why an address must not be reached from the host itself: its traffic belongs to an exit node. Else ""."""

    async def resolve_upstream(self, name: str) -> list[IPAddress]:
        """Addresses of a foreign name by the resolvers in force. Raises OSError."""


def _no_service(remote: AddrPort) -> Stream:
    raise ConnectionRefusedError(errno.ECONNREFUSED, f"nothing answers on {remote}")


def _no_service_port(ip: IPAddress) -> DatagramPort:
    raise ConnectionRefusedError(errno.ECONNREFUSED, f"nothing answers on {ip}")


def _literal(host: str) -> IPAddress | None:
    try:
        return parse_ip(host.strip("[]"))
    except DecodeError:
        return None


class Dialer:
    """One per engine; keeps nothing between calls."""

    def __init__(
        self, net: OverlayNet, names: NameSource, protect: Protect | None = None, *, has_device: bool = False
    ) -> None:
        """`protect` keeps sockets of the host out of our own tunnel; `has_device`: our addresses are the host's."""
        self._net = net
        self._names = names
        self._protect = protect
        self._has_device = has_device
        self.open_service: Callable[[AddrPort], Stream] = _no_service
        """A connection to one of the overlay's service addresses, which no packet leaves for; the daemon sets it."""
        self.open_service_port: Callable[[IPAddress], DatagramPort] = _no_service_port

    async def addresses(self, host: str) -> list[IPAddress]:
        """Literal, tailnet name, or the host's resolver, in this order. Raises OSError."""
        literal = _literal(host)
        if literal is not None:
            return [literal]
        return self._names.tailnet_addresses(host) or await self._names.resolve_upstream(host)

    async def dial(self, host: str, port: int, timeout_s: float = 10.0) -> Stream:
        """The first address that answers, IPv4 and IPv6 alike, within `timeout_s` in all.

        Raises OSError (the last refusal) or TimeoutError.
        """
        literal = _literal(host)
        if literal is not None:
            return await self.dial_ip(AddrPort(literal, port), timeout_s)
        async with asyncio.timeout(timeout_s):
            return await self._dial_any(await self.addresses(host), host, port, timeout_s)

    async def _dial_any(self, addresses: list[IPAddress], host: str, port: int, timeout_s: float) -> Stream:
        """Each address gets its share of the time that is left, so that a dead one leaves some for the next."""
        failure: Exception = OSError(f"no address for {host}")
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        for tried, ip in enumerate(addresses):
            left_s = ends_at - loop.time()
            share_s = max(left_s / (len(addresses) - tried), min(left_s, LEAST_SHARE_S))
            try:
                return await self.dial_ip(AddrPort(ip, port), share_s)
            except (OSError, TimeoutError) as err:
                failure = err
        raise failure

    async def dial_ip(self, remote: AddrPort, timeout_s: float = 10.0) -> Stream:
        if remote.ip in _SERVICES:
            return self.open_service(remote)
        if self._names.is_own(remote.ip):
            return await self._dial_self(remote, timeout_s)
        if self._names.is_overlay(remote.ip):
            return await self._net.connect(remote, timeout_s)
        reason = self._names.held_back(remote.ip)
        if reason:
            raise OSError(errno.ENETUNREACH, reason)
        return await connect_host(remote, timeout_s, self._protect)

    async def _dial_self(self, remote: AddrPort, timeout_s: float) -> Stream:
        """Our own overlay address: without a device, what peers reach there is the host's loopback of either family."""
        if self._has_device:
            return await connect_host(remote, timeout_s)
        try:
            return await connect_host(AddrPort(LOOPBACK, remote.port), timeout_s)
        except ConnectionRefusedError as refusal:
            try:
                return await connect_host(AddrPort(LOOPBACK_V6, remote.port), timeout_s)
            except OSError:
                raise refusal from None

    async def open_datagram(self, ip: IPAddress) -> DatagramPort | None:
        """A UDP port for talking to `ip`: on the overlay, or None when the host's own socket should be used."""
        if ip in _SERVICES:
            return self.open_service_port(ip)
        if self._names.is_overlay(ip):
            return await self._net.open_datagram(None, ip.version)
        reason = self._names.held_back(ip)
        if reason:
            raise OSError(errno.ENETUNREACH, reason)
        return None
