"""STUN binding codec (RFC 8489), in the narrow dialect of the field (tailscale: net/stun/stun.go).

Requests are always 40 bytes: SOFTWARE "tailnode" and a FINGERPRINT. Replies carry one XOR-MAPPED-ADDRESS. There is
no authentication, no retransmission (see `tsd.netcheck`) and no attribute beyond what finding an address needs.
"""

from __future__ import annotations

import zlib
from ipaddress import IPv4Address, IPv6Address

from tsd.base.addr import AddrPort, IPAddress, unmap
from tsd.base.errors import DecodeError

MAGIC_COOKIE = b"\x21\x12\xa4\x42"
HEADER_BYTES = 20
TXID_BYTES = 12
DEFAULT_PORT = 3478

_BINDING_REQUEST = b"\x00\x01"
_BINDING_SUCCESS = b"\x01\x01"
_FINGERPRINT_XOR = 0x5354554E
_MAPPED_ADDRESS = 0x0001
_XOR_MAPPED_ADDRESS = 0x0020
_XOR_MAPPED_ADDRESS_LEGACY = 0x8020
_SOFTWARE = 0x8022
_FINGERPRINT = 0x8028
_SOFTWARE_NAME = b"tailnode"
_FAMILY_V4, _FAMILY_V6 = 1, 2


def is_stun(datagram: bytes | memoryview) -> bool:
    """Whether a datagram is a binding request or reply, by its fixed header alone."""
    return (
        len(datagram) >= HEADER_BYTES and datagram[0] & 0xC0 == 0 and datagram[1] == 1 and datagram[4:8] == MAGIC_COOKIE
    )


def encode_request(txid: bytes) -> bytes:
    head = _BINDING_REQUEST + b"\x00\x14" + MAGIC_COOKIE + txid + b"\x80\x22\x00\x08" + _SOFTWARE_NAME
    return head + b"\x80\x28\x00\x04" + _fingerprint(head).to_bytes(4, "big")


def decode_request(datagram: bytes) -> bytes:
    """The transaction id of a request of the field's dialect. Raises `DecodeError` for all others."""
    if not is_stun(datagram) or datagram[:2] != _BINDING_REQUEST:
        raise DecodeError("stun", "not a binding request")
    attributes = _attributes(datagram)
    if not attributes or attributes[-1][0] != _FINGERPRINT:
        raise DecodeError("stun", "last attribute is not a fingerprint")
    if not any(kind == _SOFTWARE and value == _SOFTWARE_NAME for kind, value, _ in attributes):
        raise DecodeError("stun", "software is not ours")
    _, value, offset = attributes[-1]
    if value != _fingerprint(datagram[:offset]).to_bytes(4, "big"):
        raise DecodeError("stun", "fingerprint mismatch")
    return datagram[8:20]


def encode_reply(txid: bytes, address: AddrPort) -> bytes:
    """A success reply; mapped IPv4 is sent as IPv4, unlike upstream's server, so that every client understands it."""
    ip = unmap(address.ip)
    family = _FAMILY_V4 if ip.version == 4 else _FAMILY_V6
    value = bytes([0, family]) + _xor(address.port.to_bytes(2, "big"), MAGIC_COOKIE)
    value += _xor(ip.packed, MAGIC_COOKIE + txid)
    attribute = _XOR_MAPPED_ADDRESS.to_bytes(2, "big") + len(value).to_bytes(2, "big") + value
    return _BINDING_SUCCESS + len(attribute).to_bytes(2, "big") + MAGIC_COOKIE + txid + attribute


def decode_reply(datagram: bytes) -> tuple[bytes, AddrPort]:
    """(transaction id, mapped address). An XOR-ed address of either kind wins over a plain one."""
    if not is_stun(datagram) or datagram[:2] != _BINDING_SUCCESS:
        raise DecodeError("stun", "not a binding success")
    txid = datagram[8:20]
    plain: AddrPort | None = None
    for kind, value, _ in _attributes(datagram):
        if kind in (_XOR_MAPPED_ADDRESS, _XOR_MAPPED_ADDRESS_LEGACY):
            return txid, _decode_address(value, MAGIC_COOKIE + txid)
        if kind == _MAPPED_ADDRESS:
            plain = _decode_address(value, bytes(16))
    if plain is None:
        raise DecodeError("stun", "no mapped address")
    return txid, plain


def _decode_address(value: bytes, mask: bytes) -> AddrPort:
    if len(value) < 4:
        raise DecodeError("stun", "short address attribute")
    size = {_FAMILY_V4: 4, _FAMILY_V6: 16}.get(value[1])
    if size is None or len(value) < 4 + size:
        raise DecodeError("stun", "bad address attribute")
    raw = _xor(value[4 : 4 + size], mask)
    ip: IPAddress = IPv4Address(raw) if size == 4 else unmap(IPv6Address(raw))
    return AddrPort(ip, int.from_bytes(_xor(value[2:4], mask), "big"))


def _attributes(datagram: bytes) -> list[tuple[int, bytes, int]]:
    """(type, value, offset of the attribute); bytes past the header's length are ignored."""
    end = HEADER_BYTES + int.from_bytes(datagram[2:4], "big")
    if end > len(datagram):
        raise DecodeError("stun", "message is cut")
    found: list[tuple[int, bytes, int]] = []
    at = HEADER_BYTES
    while at < end:
        length = int.from_bytes(datagram[at + 2 : at + 4], "big")
        if at + 4 > end or at + 4 + length > end:
            raise DecodeError("stun", "attribute is cut")
        found.append((int.from_bytes(datagram[at : at + 2], "big"), datagram[at + 4 : at + 4 + length], at))
        at += 4 + (length + 3 & ~3)
    return found


def _fingerprint(head: bytes) -> int:
    return zlib.crc32(head) ^ _FINGERPRINT_XOR


def _xor(value: bytes, mask: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(value, mask, strict=False))
