"""4via6: an IPv4 network of a numbered site as an IPv6 route of the tailnet (tailscale: net/tsaddr, `MapVia`)."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network

from tsctl.goflags import UsageError

VIA = IPv6Network("fd7a:115c:a1e0:b1a::/64")
MAX_SITE = 0xFFFF


def to_route(site: str, network: str) -> str:
    """Raises UsageError."""
    try:
        number = int(site, 0)
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_SITE:
        raise UsageError(f"site ID {site!r}: want a number from 0 to {MAX_SITE}, such as 7 or 0x7")
    try:
        inner = IPv4Network(network)
    except ValueError as error:
        raise UsageError(f"{network!r} is no IPv4 network: {error}") from None
    address = int(VIA.network_address) | number << 32 | int(inner.network_address)
    return str(IPv6Network((address, 96 + inner.prefixlen)))


def to_ipv4(route: str) -> str:
    """Raises UsageError."""
    try:
        found = IPv6Network(route)
    except ValueError as error:
        raise UsageError(f"{route!r} is no IPv6 route: {error}") from None
    if not found.subnet_of(VIA) or found.prefixlen < 96:
        raise UsageError(f"{route} is not a 4via6 route: those are in {VIA}, with /96 to /128")
    address = int(found.network_address)
    site = address >> 32 & 0xFFFFFFFF
    inner = IPv4Network((address & 0xFFFFFFFF, found.prefixlen - 96))
    return f"site {site} ({site:#x}), {inner}"
