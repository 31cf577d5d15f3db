"""Tailnet addresses: the next free one of each prefix, the same host number in both families where that is possible.

A freed address is handed out again only after the prefix has been gone through once, so that peers' caches die first.
"""

from __future__ import annotations

from collections.abc import Container
from ipaddress import IPv4Network, IPv6Network, ip_address

from tsd.base.addr import QUAD_100, QUAD_100_V6, IPAddress, IPPrefix
from tsd.base.errors import ConfigError

DEFAULT_V4 = IPv4Network("100.64.0.0/10")
DEFAULT_V6 = IPv6Network("fd7a:115c:a1e0::/48")

_RESERVED = (
    IPv4Network("100.100.0.0/24"),
    IPv4Network("100.100.100.0/24"),
    IPv4Network("100.115.92.0/23"),  # used inside ChromeOS
)


class AddressPool:
    def __init__(self, v4: IPv4Network | None = DEFAULT_V4, v6: IPv6Network | None = DEFAULT_V6) -> None:
        if v4 is None and v6 is None:
            raise ConfigError("a tailnet needs an IPv4 or an IPv6 prefix")
        for prefix in (v4, v6):
            if prefix is not None and prefix.max_prefixlen - prefix.prefixlen < 2:
                raise ConfigError(f"prefix {prefix} is too small for a tailnet")
        self.v4 = v4
        self.v6 = v6
        self._next = 1

    @property
    def prefixes(self) -> list[IPPrefix]:
        return [prefix for prefix in (self.v4, self.v6) if prefix is not None]

    def note_used(self, address: IPAddress) -> None:
        """Start later allocations behind `address`."""
        for prefix in self.prefixes:
            if address.version == prefix.version and address in prefix:
                number = int(address) - int(prefix.network_address)
                if number < self._size:
                    self._next = max(self._next, number + 1)

    def allocate(self, taken: Container[IPAddress]) -> tuple[IPAddress, ...]:
        """Raises `ConfigError` when the prefix is full."""
        for step in range(min(self._size, 1 << 20)):
            number = (self._next - 1 + step) % (self._size - 1) + 1
            chosen = tuple(ip_address(int(prefix.network_address) + number) for prefix in self.prefixes)
            if not any(address in taken or self._is_reserved(address) for address in chosen):
                self._next = number + 1
                return chosen
        raise ConfigError("no free address is left in " + " and ".join(map(str, self.prefixes)))

    @property
    def _size(self) -> int:
        return min(1 << (prefix.max_prefixlen - prefix.prefixlen) for prefix in self.prefixes)

    def _is_reserved(self, address: IPAddress) -> bool:
        if address in (QUAD_100, QUAD_100_V6):
            return True
        if self.v4 is not None and address == self.v4.broadcast_address:
            return True
        return address.version == 4 and any(address in prefix for prefix in _RESERVED)
