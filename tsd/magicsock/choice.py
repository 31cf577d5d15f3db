"""Which of two UDP addresses is the better path (tailscale: wgengine/magicsock/endpoint.go, betterAddr)."""

from __future__ import annotations

from typing import NamedTuple

from tsd.base.addr import AddrPort


class Quality(NamedTuple):
    """A measured address; `address` None is "no path". Latency in nanoseconds, as upstream's integer rule needs."""

    address: AddrPort | None = None
    latency_ns: int = 0
    is_relayed: bool = False
    wire_mtu_bytes: int = 0


NO_PATH = Quality()

_LOOPBACK, _LINK_LOCAL, _PRIVATE, _IPV6 = 50, 30, 20, 10


def is_better(a: Quality, b: Quality) -> bool:
    """Whether to leave `b` for `a`."""
    if a.address == b.address and a.is_relayed == b.is_relayed:
        return a.address is not None and a.wire_mtu_bytes > b.wire_mtu_bytes
    if a.address is None or b.address is None:
        return b.address is None
    if a.is_relayed != b.is_relayed:
        return b.is_relayed
    a_points, b_points = _bonus(a.address), _bonus(b.address)
    if a.latency_ns > b.latency_ns:
        b_points += 100 - b.latency_ns * 100 // a.latency_ns
    elif b.latency_ns > 0:
        a_points += 100 - a.latency_ns * 100 // b.latency_ns
    if a_points <= 1 and b_points == 0:
        return False
    return a_points > b_points


def _bonus(address: AddrPort) -> int:
    ip = address.ip
    points = _IPV6 if ip.version == 6 else 0
    if ip.is_loopback:
        return points + _LOOPBACK
    if ip.is_link_local:
        return points + _LINK_LOCAL
    return points + (_PRIVATE if _is_private(address) else 0)


def _is_private(address: AddrPort) -> bool:
    """RFC 1918 and unique local addresses; the standard library counts far more as private."""
    packed = address.ip.packed
    if len(packed) == 16:
        return packed[0] & 0xFE == 0xFC
    return packed[0] == 10 or packed[:2] == b"\xc0\xa8" or (packed[0] == 172 and packed[1] & 0xF0 == 16)
