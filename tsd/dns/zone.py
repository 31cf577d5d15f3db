"""The names that we answer for ourselves: MagicDNS, extra records and reverse zones, as plain values.

Rules: tailscale: net/dns/resolver/tsdns.go. Answers in wire form are made by `tsd.dns.wire`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tsd.base.addr import CGNAT, QUAD_100, QUAD_100_V6, TAILSCALE_ULA, IPAddress

SERVICE_NAME = "magicdns.localhost-tailscale-daemon"
_SERVICE: tuple[IPAddress, ...] = (QUAD_100, QUAD_100_V6)


class Zone:
    """An immutable set of names that we answer for.

    `hosts` maps lower-case FQDNs without trailing dot to addresses; `local_suffixes` are the zones in which an unknown
    name is NXDOMAIN rather than somebody else's.
    """

    def __init__(self, hosts: Mapping[str, tuple[IPAddress, ...]], local_suffixes: tuple[str, ...] = ()) -> None:
        self._hosts = hosts
        self._suffixes = tuple(s.strip(".").lower() for s in local_suffixes if s.strip("."))
        self._reverse: dict[IPAddress, str] | None = None

    def lookup(self, name: str) -> tuple[IPAddress, ...]:
        """Addresses of a name we own (any letter case, trailing dot allowed); empty when unknown."""
        return self.addresses(name.rstrip(".").lower()) or ()

    def addresses(self, name: str) -> tuple[IPAddress, ...] | None:
        """As `lookup`, but None for a name that we do not have; `name` is lower case without a dot at its end."""
        return _SERVICE if name == SERVICE_NAME else self._hosts.get(name)

    def reverse(self, ip: IPAddress) -> str | None:
        """The first name of an address. A large tailnet changes often and is asked this rarely."""
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
            or any(plain == suffix or plain.endswith("." + suffix) for suffix in self._suffixes)
        )

    def suffixes_of(self, name: str) -> list[str]:
        """Our zones that hold a name (lower case, no dot at its end)."""
        return [s for s in self._suffixes if name == s or name.endswith("." + s)]

    @property
    def claims_reverse(self) -> bool:
        """Whether unknown addresses of the overlay's ranges are ours to deny."""
        return bool(self._suffixes)


def magic_suffixes(magic_suffix: str) -> tuple[str, ...]:
    """The zones that MagicDNS claims: the tailnet's own and the reverse zones of its address ranges."""
    octets = range(int(CGNAT.network_address) >> 16 & 0xFF, (int(CGNAT.broadcast_address) >> 16 & 0xFF) + 1)
    reverse_v4 = tuple(f"{octet}.100.in-addr.arpa" for octet in octets)
    nibbles = TAILSCALE_ULA.network_address.exploded.replace(":", "")[: TAILSCALE_ULA.prefixlen // 4]
    reverse_v6 = ".".join(reversed(nibbles)) + ".ip6.arpa"
    return (magic_suffix, *reverse_v4, reverse_v6) if magic_suffix else ()
