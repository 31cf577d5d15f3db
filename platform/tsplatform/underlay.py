"""The host's own network seen from the engine: addresses worth offering to peers, and sockets kept off the overlay.

tailscale: net/netmon/state.go (which addresses count). Without a TUN nothing can loop back into the overlay, so
`protect` does nothing here; the Linux hull marks its sockets.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network

from tsd.base.addr import CGNAT, TAILSCALE_ULA, IPAddress
from tsd.hull import LinkMonitor, LinkState

_FOREIGN_OVERLAYS = ("zt", "wt0", "tsd", "tailscale")
_CHROMEOS = IPv4Network("100.115.92.0/23")
_ULA = IPv6Network("fc00::/7")
_MAX_V6_PER_SUBNET = 2


class HostUnderlay:
    """Implements `tsd.hull.Underlay` over a link monitor."""

    def __init__(self, links: LinkMonitor) -> None:
        self._links = links

    def protect(self, sock: socket.socket) -> None:
        """Userspace networking: host sockets never enter the tunnel."""

    def addresses(self) -> list[IPAddress]:
        return endpoint_addresses(self._links.state())


def endpoint_addresses(state: LinkState) -> list[IPAddress]:
    """Local addresses to offer, best first; second-rate ones only when there is nothing better."""
    regular: list[IPAddress] = []
    second_rate: list[IPAddress] = []
    loopback: list[IPAddress] = []
    v6_per_subnet: Counter[int] = Counter()
    for ip in _candidates(state):
        if ip.is_loopback:
            loopback.append(ip)
        elif _is_excluded(ip):
            continue
        elif ip.is_link_local or (ip.version == 6 and ip in _ULA):
            second_rate.append(ip)
        else:
            if ip.version == 6:
                v6_per_subnet[int(ip) >> 64] += 1
                if v6_per_subnet[int(ip) >> 64] > _MAX_V6_PER_SUBNET:
                    continue
            regular.append(ip)
    return regular or second_rate or loopback


def _candidates(state: LinkState) -> Iterator[IPAddress]:
    """Addresses of the default route's interface first, then by name of the interface."""
    defaults = (state.default_interface_v4, state.default_interface_v6)
    for name in sorted(state.interface_addresses, key=lambda name: (name not in defaults, name)):
        if not name.startswith(_FOREIGN_OVERLAYS):
            for prefix in state.interface_addresses[name]:
                yield prefix.network_address


def _is_excluded(ip: IPAddress) -> bool:
    if ip.version == 4:
        return (ip in CGNAT and ip not in _CHROMEOS) or ip.is_multicast or ip.is_unspecified
    return ip in TAILSCALE_ULA or ip.is_link_local or ip.is_multicast or ip.is_unspecified
