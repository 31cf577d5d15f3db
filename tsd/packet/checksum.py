"""The Internet checksum (RFC 1071), fast enough for Python: one big-integer remainder instead of a loop.

A one's-complement sum of 16-bit words is the whole buffer, read as one number, modulo 65535.
"""

from __future__ import annotations

Buffer = bytes | bytearray | memoryview


def ones_sum(data: Buffer, initial: int = 0) -> int:
    """Folded one's-complement sum of `data` (odd length is padded) plus `initial`; 0 only when everything is zero."""
    number = int.from_bytes(data, "big")
    if len(data) & 1:
        number <<= 8
    number += initial
    return number % 0xFFFF or (0xFFFF if number else 0)


def internet_checksum(data: Buffer, initial: int = 0) -> int:
    """What goes into a checksum field that is zero in `data`; `initial` is a sum as `ones_sum` gives it."""
    return 0xFFFF - ones_sum(data, initial)


def pseudo_header_sum(src: Buffer, dst: Buffer, proto: int, length_bytes: int) -> int:
    """Folded, not inverted: also what a NEEDS_CSUM packet carries in its checksum field."""
    return ones_sum(src, ones_sum(dst, proto + length_bytes))


def transport_checksum(src: Buffer, dst: Buffer, proto: int, segment: Buffer) -> int:
    """TCP, UDP or ICMPv6 checksum of `segment` whose checksum field is zero."""
    return internet_checksum(segment, pseudo_header_sum(src, dst, proto, len(segment)))


def is_transport_checksum_valid(src: Buffer, dst: Buffer, proto: int, segment: Buffer) -> bool:
    """Whether `segment` with its checksum field filled in sums up."""
    return ones_sum(segment, pseudo_header_sum(src, dst, proto, len(segment))) == 0xFFFF


def adjust(checksum: int, old_word: int, new_word: int) -> int:
    """A checksum after one 16-bit word changed (RFC 1624, equation 3)."""
    total = (0xFFFF - checksum) + (0xFFFF - old_word) + new_word
    return 0xFFFF - (total % 0xFFFF or 0xFFFF)
