"""Sets of prefixes of one family, asked by address: one set per prefix length."""

from __future__ import annotations

from collections.abc import Iterable

from tsd.base.addr import IPPrefix


class PrefixSet:
    __slots__ = ("_levels",)

    def __init__(self, prefixes: Iterable[IPPrefix]) -> None:
        levels: dict[int, set[int]] = {}
        for prefix in prefixes:
            shift = prefix.max_prefixlen - prefix.prefixlen
            levels.setdefault(shift, set()).add(int(prefix.network_address) >> shift)
        self._levels = sorted(levels.items(), reverse=True)

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __contains__(self, number: int) -> bool:
        """`number` is the address as an integer of the set's family."""
        return any(number >> shift in members for shift, members in self._levels)
