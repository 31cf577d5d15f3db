"""Addresses as values: `AddrPort`, and the 16+2 byte form that disco, DERP and PCP share."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import AF_INET, AF_INET6, inet_pton
from typing import NamedTuple

from tsd.base.errors import DecodeError

IPAddress = IPv4Address | IPv6Address
IPPrefix = IPv4Network | IPv6Network

_V4_IN_6 = bytes(10) + b"\xff\xff"

CGNAT = IPv4Network("100.64.0.0/10")
CHROMEOS_VM = IPv4Network("100.115.92.0/23")
"""Inside `CGNAT`, but ChromeOS uses it for its own machines."""
TAILSCALE_ULA = IPv6Network("fd7a:115c:a1e0::/48")
_ULA_START = TAILSCALE_ULA.network_address.packed[:6]
VIA_RANGE = IPv6Network("fd7a:115c:a1e0:b1a::/64")
"""IPv4 networks of numbered sites, so that equal ones stay apart (4via6; tailscale: net/tsaddr/tsaddr.go, MapVia)."""
QUAD_100 = IPv4Address("100.100.100.100")
QUAD_100_V6 = IPv6Address("fd7a:115c:a1e0::53")


def behind_via(ip: IPAddress) -> IPAddress:
    """The IPv4 address that a 4via6 address stands for at its site; any other address itself."""
    return IPv4Address(int(ip) & 0xFFFFFFFF) if isinstance(ip, IPv6Address) and ip in VIA_RANGE else ip


def is_via_route(prefix: IPPrefix) -> bool:
    """Whether a route leads to IPv4 hosts of one or more numbered sites, and to nothing else."""
    return isinstance(prefix, IPv6Network) and prefix.subnet_of(VIA_RANGE)


class AddrPort(NamedTuple):
    """An IP address and a UDP or TCP port; text form `1.2.3.4:5` or `[2001:db8::1]:5`."""

    ip: IPAddress
    port: int

    @classmethod
    def parse(cls, text: str) -> AddrPort:
        """Raises `DecodeError` when `text` is not an address with a port; zones are refused."""
        host, colon, digits = text.rpartition(":")
        port = parse_number(digits, 65535)
        if not colon or port is None:
            raise DecodeError("addr", f"not ip:port: {text[:100]!r}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise DecodeError("addr", f"IPv6 needs brackets: {text!r}")
        return cls(parse_ip(host), port)

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.ip.version == 6 else f"{self.ip}:{self.port}"

    def encode(self) -> bytes:
        """18 bytes: the address as 16 bytes (IPv4 mapped) and a big-endian port."""
        return encode_ip16(self.ip) + self.port.to_bytes(2, "big")

    @classmethod
    def decode(cls, raw: bytes) -> AddrPort:
        """The reverse of `encode`; mapped IPv4 comes back as IPv4."""
        if len(raw) != 18:
            raise DecodeError("addr", f"{len(raw)} bytes, want 18")
        return cls(decode_ip16(raw[:16]), int.from_bytes(raw[16:18], "big"))


def parse_number(text: str, limit: int) -> int | None:
    """0 to `limit` from ASCII digits; None for anything else, however long (int() takes foreign digits and raises)."""
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(limit)):
        return None
    number = int(text)
    return number if number <= limit else None


def parse_ip(text: str) -> IPAddress:
    """Raises `DecodeError` instead of ValueError; scoped IPv6 is refused, mapped IPv4 is unmapped."""
    if "%" in text:
        raise DecodeError("addr", f"zone not allowed: {text!r}")
    packed = _packed(text)
    if packed is not None:
        return IPv4Address(packed) if len(packed) == 4 else unmap(IPv6Address(packed))
    try:
        return unmap(ip_address(text))
    except ValueError as err:
        raise DecodeError("addr", str(err)) from None


def packed_single(text: str) -> bytes | None:
    """The packed address of `a.b.c.d/32` or `x::y/128`; None for every other text. Much faster than a prefix."""
    try:
        if text[-3:] == "/32":
            return inet_pton(AF_INET, text[:-3])
        if text[-4:] == "/128":
            return inet_pton(AF_INET6, text[:-4])
    except (OSError, ValueError):
        pass
    return None


def _packed(text: str) -> bytes | None:
    try:
        return inet_pton(AF_INET6 if ":" in text else AF_INET, text)
    except (OSError, ValueError):
        return None


def parse_prefix(text: str) -> IPPrefix:
    """An address or CIDR without host bits. Raises `DecodeError`."""
    try:
        return ip_network(text, strict=True)
    except ValueError as err:
        raise DecodeError("addr", str(err)) from None


def unmap(ip: IPAddress) -> IPAddress:
    """`::ffff:a.b.c.d` becomes `a.b.c.d`; anything else is returned as it is."""
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip


def encode_ip16(ip: IPAddress) -> bytes:
    return _V4_IN_6 + ip.packed if ip.version == 4 else ip.packed


def decode_ip16(raw: bytes) -> IPAddress:
    if len(raw) != 16:
        raise DecodeError("addr", f"{len(raw)} address bytes, want 16")
    return IPv4Address(raw[12:]) if raw[:12] == _V4_IN_6 else IPv6Address(raw)


def is_tailnet_ip(ip: IPAddress) -> bool:
    """Whether an address lies in the ranges that overlays of this kind hand out by default."""
    return (ip in CGNAT and ip not in CHROMEOS_VM) if ip.version == 4 else ip in TAILSCALE_ULA


def is_tailnet_packed(raw: bytes) -> bool:
    """As `is_tailnet_ip`, for 4 or 16 bytes."""
    if len(raw) == 4:
        return raw[0] == 100 and raw[1] & 0xC0 == 64 and not (raw[1] == 115 and raw[2] & 0xFE == 92)
    return raw.startswith(_ULA_START)
