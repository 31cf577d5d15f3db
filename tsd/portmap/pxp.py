"""NAT-PMP and PCP messages: two small protocols that share port 5351 of the gateway.

Standards: RFC 6886 (NAT-PMP, version 0), RFC 6887 (PCP, version 2). Only what maps one UDP port over IPv4. Decoders
return None for anything that is not a whole answer of ours.
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final, NamedTuple

PORT: Final = 5351
LIFETIME_S: Final = 7200
NONCE_BYTES: Final = 12
OK: Final = 0

_PMP, _PCP = 0, 2
_REPLY = 0x80
_PMP_ADDRESS, _PMP_MAP_UDP = 0, 1
_PCP_ANNOUNCE, _PCP_MAP = 0, 1
_PCP_MAP_BYTES = 60
_UDP = 17
_ANY = IPv4Address(0)

PMP_ADDRESS_REQUEST: Final = bytes((_PMP, _PMP_ADDRESS))


class PmpAddress(NamedTuple):
    """The gateway's external address; None: it has none."""

    result: int
    epoch_s: int
    address: IPv4Address | None


class PmpMapping(NamedTuple):
    result: int
    epoch_s: int
    internal_port: int
    external_port: int
    lifetime_s: int


class PcpAnnounce(NamedTuple):
    """Any PCP answer without a mapping: it tells whether the server is there and willing."""

    result: int
    epoch_s: int


class PcpMapping(NamedTuple):
    result: int
    epoch_s: int
    nonce: bytes
    internal_port: int
    external_port: int
    external_ip: IPv4Address | None
    lifetime_s: int


Answer = PmpAddress | PmpMapping | PcpAnnounce | PcpMapping


def pmp_map_request(internal_port: int, external_port: int, lifetime_s: int) -> bytes:
    """`external_port` is a wish; `lifetime_s` 0 deletes."""
    return struct.pack("!BBHHHI", _PMP, _PMP_MAP_UDP, 0, internal_port, external_port, lifetime_s)


def pcp_announce_request(own: IPv4Address) -> bytes:
    return struct.pack("!BBHI", _PCP, _PCP_ANNOUNCE, 0, 0) + _mapped(own)


def pcp_map_request(
    own: IPv4Address, nonce: bytes, internal_port: int, external_port: int, external_ip: IPv4Address, lifetime_s: int
) -> bytes:
    """The same nonce renews or (`lifetime_s` 0) deletes what it made; external port and address are wishes."""
    head = struct.pack("!BBHI", _PCP, _PCP_MAP, 0, lifetime_s) + _mapped(own)
    return head + nonce + struct.pack("!B3xHH", _UDP, internal_port, external_port) + _mapped(external_ip)


def decode(datagram: bytes) -> Answer | None:
    """An answer of either protocol."""
    if len(datagram) < 4 or not datagram[1] & _REPLY:
        return None
    operation = datagram[1] & ~_REPLY
    if datagram[0] == _PMP:
        return _decode_pmp(datagram, operation)
    return _decode_pcp(datagram, operation) if datagram[0] == _PCP else None


def _decode_pmp(datagram: bytes, operation: int) -> Answer | None:
    result = int.from_bytes(datagram[2:4])
    if operation == _PMP_ADDRESS and len(datagram) == 12:
        epoch_s, raw = struct.unpack_from("!I4s", datagram, 4)
        address = IPv4Address(raw)
        return PmpAddress(result, epoch_s, None if address == _ANY else address)
    if operation == _PMP_MAP_UDP and len(datagram) == 16:
        return PmpMapping(result, *struct.unpack_from("!IHHI", datagram, 4))
    return None


def _decode_pcp(datagram: bytes, operation: int) -> Answer | None:
    if len(datagram) < 24:
        return None
    result = datagram[3]
    lifetime_s, epoch_s = struct.unpack_from("!II", datagram, 4)
    if operation == _PCP_ANNOUNCE or (operation == _PCP_MAP and result != OK and len(datagram) < _PCP_MAP_BYTES):
        return PcpAnnounce(result, epoch_s)
    if operation != _PCP_MAP or len(datagram) < _PCP_MAP_BYTES:
        return None
    protocol, internal_port, external_port = struct.unpack_from("!B3xHH", datagram, 36)
    if protocol != _UDP:
        return None
    external = IPv6Address(datagram[44:60]).ipv4_mapped
    return PcpMapping(
        result,
        epoch_s,
        datagram[24:36],
        internal_port,
        external_port,
        external if external != _ANY else None,
        lifetime_s,
    )


def _mapped(ip: IPv4Address) -> bytes:
    return bytes(10) + b"\xff\xff" + ip.packed
