"""Which peer owns an address: longest prefix match over raw addresses, one dict per prefix length.

A tailnet has two or three distinct lengths (/32, /128, a few subnets), so a lookup is two or three dict probes; the
last answers are cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from tsd.base.addr import IPPrefix

_CACHE_LIMIT = 8192


class _Level:
    """All prefixes of one family and one length."""

    __slots__ = ("bits", "length", "peers", "shift")

    def __init__(self, bits: int, length: int) -> None:
        self.bits = bits
        self.length = length
        self.shift = bits - length
        self.peers: dict[int, int] = {}


class AllowedIps:
    """Prefix to peer; a prefix has one owner, the last one that asked for it."""

    def __init__(self) -> None:
        self._levels: dict[int, list[_Level]] = {4: [], 16: []}
        self._owned: dict[int, dict[tuple[int, int, int], None]] = {}
        self._cache: dict[bytes, int | None] = {}

    def replace(self, peer: int, prefixes: Sequence[IPPrefix | bytes]) -> None:
        """Give `peer` exactly these prefixes; those that others held move."""
        self.remove(peer)
        owned = self._owned.setdefault(peer, {})
        for prefix in prefixes:
            if isinstance(prefix, bytes):
                size, length = len(prefix), 8 * len(prefix)
                number = int.from_bytes(prefix, "big")
                level = self._level(size, length)
            else:
                size, length = prefix.max_prefixlen // 8, prefix.prefixlen
                level = self._level(size, length)
                number = int(prefix.network_address) >> level.shift
            entry = (size, length, number)
            former = level.peers.get(number)
            if former is not None and former != peer:
                del self._owned[former][entry]
            level.peers[number] = peer
            owned[entry] = None
        self._cache.clear()

    def remove(self, peer: int) -> None:
        for size, length, number in self._owned.pop(peer, {}):
            levels = self._levels[size]
            level = next(level for level in levels if level.length == length)
            del level.peers[number]
            if not level.peers:
                levels.remove(level)
        self._cache.clear()

    def lookup(self, address: bytes) -> int | None:
        """`address` has 4 or 16 bytes; anything else has no owner."""
        try:
            return self._cache[address]
        except KeyError:
            return self._lookup_slow(address)

    def _lookup_slow(self, address: bytes) -> int | None:
        number = int.from_bytes(address, "big")
        found = None
        for level in self._levels.get(len(address), ()):
            found = level.peers.get(number >> level.shift)
            if found is not None:
                break
        if len(self._cache) >= _CACHE_LIMIT:
            self._cache.clear()
        self._cache[address] = found
        return found

    def _level(self, size: int, length: int) -> _Level:
        """The level of that length, made in its place: longest first."""
        levels = self._levels[size]
        for level in levels:
            if level.length == length:
                return level
        level = _Level(size * 8, length)
        levels.append(level)
        levels.sort(key=lambda item: -item.length)
        return level
