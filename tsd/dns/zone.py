"""The names that we answer for ourselves: MagicDNS, extra records and reverse zones, as plain values.

Rules: tailscale: net/dns/resolver/tsdns.go. Answers in wire form are made by `tsd.dns.wire`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network

from tsd.base.addr import CGNAT, QUAD_100, QUAD_100_V6, TAILSCALE_ULA, VIA_RANGE, IPAddress

_VIA_ZONES = ("ts.net", "tailscale.net")
_IPV4_IN_6 = IPv6Network("fd7a:115c:a1e0:ab12:4843:cd96:6200::/104")
"""IPv6 addresses of nodes that end in those of their 100.x address (tsaddr.go, Tailscale6to4)."""

SERVICE_NAME = "magicdns.localhost-tailscale-daemon"
_SERVICE: tuple[IPAddress, ...] = (QUAD_100, QUAD_100_V6)


class Zone:
    """An immutable set of names that we answer for.

    `hosts` maps lower-case FQDNs without trailing dot to addresses; `local_suffixes` are the zones in which an unknown
    name is NXDOMAIN rather than somebody else's, but for `foreign_suffixes` inside of them. Names below
    `subdomain_hosts` have the addresses of that host.
    """

    def __init__(
        self,
        hosts: Mapping[str, tuple[IPAddress, ...]],
        local_suffixes: tuple[str, ...] = (),
        subdomain_hosts: Iterable[str] = (),
        foreign_suffixes: Iterable[str] = (),
    ) -> None:
        self._hosts = hosts
        self._suffixes = tuple(s.strip(".").lower() for s in local_suffixes if s.strip("."))
        self._parents = frozenset(subdomain_hosts)
        self._foreign = tuple(foreign_suffixes)
        self._reverse: dict[IPAddress, str] | None = None

    def lookup(self, name: str) -> tuple[IPAddress, ...]:
        """Addresses of a name we own (any letter case, trailing dot allowed); empty when unknown."""
        return self.addresses(name.rstrip(".").lower()) or ()

    def addresses(self, name: str) -> tuple[IPAddress, ...] | None:
        """As `lookup`, but None for a name that we do not have; `name` is lower case without a dot at its end."""
        if name == SERVICE_NAME:
            return _SERVICE
        found = self._hosts.get(name)
        if found is None and self._parents:
            found = next((self._hosts.get(parent) for parent in _parents_of(name) if parent in self._parents), None)
        if found is None and "-via-" in name:
            via = self._via(name)
            return None if via is None else (via,)
        return found

    def _via(self, name: str) -> IPv6Address | None:
        """10-1-2-3-via-7, alone or in a tailnet's zone: 10.1.2.3 of site 7."""
        label, _, zone = name.partition(".")
        if zone and not any(zone == suffix or zone.endswith("." + suffix) for suffix in (*_VIA_ZONES, *self._suffixes)):
            return None
        host, _, site = label.partition("-via-")
        try:
            number = int(site, 16 if site.startswith("0x") else 10)
            v4 = IPv4Address(host.replace("-", "."))
        except ValueError:
            return None
        if not site.isalnum() or not 0 <= number < 1 << 32:
            return None
        return IPv6Address(int(VIA_RANGE.network_address) | number << 32 | int(v4))

    def reverse(self, ip: IPAddress) -> str | None:
        """The first name of an address. A large tailnet changes often and is asked this rarely."""
        if isinstance(ip, IPv6Address) and ip in _IPV4_IN_6:
            v4 = self.reverse(IPv4Address(b"\x64" + ip.packed[13:]))
            if v4 is not None:
                return v4
        if isinstance(ip, IPv6Address) and ip in VIA_RANGE and self._suffixes:
            v4_text = str(IPv4Address(ip.packed[12:])).replace(".", "-")
            return f"{v4_text}-via-{int.from_bytes(ip.packed[8:12], 'big')}.{self._suffixes[0]}"
        if self._reverse is None:
            self._reverse = {}
            for name, ips in (*self._hosts.items(), (SERVICE_NAME, _SERVICE)):
                for known in ips:
                    self._reverse.setdefault(known, name)
        return self._reverse.get(ip)

    def owns(self, name: str) -> bool:
        """Whether nobody else may be asked for this name."""
        plain = name.rstrip(".").lower()
        return (
            self.addresses(plain) is not None
            or plain.endswith(".onion")
            or _longest_of(self._suffixes, plain) > _longest_of(self._foreign, plain)
        )

    def suffixes_of(self, name: str) -> list[str]:
        """Our zones that hold a name (lower case, no dot at its end)."""
        return [s for s in self._suffixes if name == s or name.endswith("." + s)]


def _longest_of(suffixes: Iterable[str], name: str) -> int:
    """The length of the longest zone that holds a name; 0 for none."""
    return max((len(suffix) for suffix in suffixes if name == suffix or name.endswith("." + suffix)), default=0)


def _parents_of(name: str) -> Iterable[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def magic_suffixes(magic_suffix: str) -> tuple[str, ...]:
    """The zones that MagicDNS claims: the tailnet's own and the reverse zones of its address ranges."""
    octets = range(int(CGNAT.network_address) >> 16 & 0xFF, (int(CGNAT.broadcast_address) >> 16 & 0xFF) + 1)
    reverse_v4 = tuple(f"{octet}.100.in-addr.arpa" for octet in octets)
    nibbles = TAILSCALE_ULA.network_address.exploded.replace(":", "")[: TAILSCALE_ULA.prefixlen // 4]
    reverse_v6 = ".".join(reversed(nibbles)) + ".ip6.arpa"
    return (magic_suffix, *reverse_v4, reverse_v6) if magic_suffix else ()
