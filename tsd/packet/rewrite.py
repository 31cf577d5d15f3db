"""Another source or destination address in an IP packet, with the checksums that cover it (RFC 1624).

Later fragments hold no transport checksum, and SCTP's does not cover addresses. Addresses quoted inside ICMP errors
stay as they are.
"""

from __future__ import annotations

from tsd.packet.checksum import Buffer, adjust, ones_sum
from tsd.packet.constants import ICMPV6, TCP, UDP
from tsd.packet.parse import Packet, parse

_IPV4_CHECKSUM_AT = 10
_SOURCE_AT = {4: 12, 6: 8}
_CHECKSUM_AT = {(4, TCP): 16, (6, TCP): 16, (4, UDP): 6, (6, UDP): 6, (6, ICMPV6): 2}


def with_source(packet: Buffer, address: bytes, *, is_partial: bool = False) -> bytes:
    """`is_partial`: the transport checksum field holds the folded pseudo-header sum, as offloads have it.

    What is not IP of the address's family comes back unchanged.
    """
    return _with_address(parse(packet), address, is_source=True, is_partial=is_partial)


def with_destination(packet: Buffer, address: bytes, *, is_partial: bool = False) -> bytes:
    return _with_address(parse(packet), address, is_source=False, is_partial=is_partial)


def _with_address(packet: Packet, address: bytes, *, is_source: bool, is_partial: bool) -> bytes:
    old = packet.src if is_source else packet.dst
    if len(old) != len(address):
        return bytes(packet.packet)
    out = bytearray(packet.packet)
    at = _SOURCE_AT[packet.version] + (0 if is_source else len(address))
    out[at : at + len(address)] = address
    old_sum, new_sum = ones_sum(old), ones_sum(address)
    if packet.version == 4:
        _put(out, _IPV4_CHECKSUM_AT, adjust(_get(out, _IPV4_CHECKSUM_AT), old_sum, new_sum))
    field_at = _CHECKSUM_AT.get((packet.version, packet.proto))
    if field_at is not None:
        _fix_transport(out, packet.transport_offset + field_at, packet.proto, old_sum, new_sum, is_partial)
    return bytes(out)


def _fix_transport(out: bytearray, at: int, proto: int, old_sum: int, new_sum: int, is_partial: bool) -> None:
    checksum = _get(out, at)
    if is_partial:
        _put(out, at, 0xFFFF - adjust(0xFFFF - checksum, old_sum, new_sum))
    elif proto != UDP:
        _put(out, at, adjust(checksum, old_sum, new_sum))
    elif checksum:
        _put(out, at, adjust(checksum, old_sum, new_sum) or 0xFFFF)


def _get(out: bytearray, at: int) -> int:
    return out[at] << 8 | out[at + 1]


def _put(out: bytearray, at: int, value: int) -> None:
    out[at : at + 2] = value.to_bytes(2, "big")
