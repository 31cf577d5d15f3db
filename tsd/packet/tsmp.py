"""TSMP: small messages between overlay nodes inside the tunnel, IP protocol 99 (tailscale: `net/packet/tsmp.go`).

The first payload byte is the kind. Trailing bytes are ignored; absent ones make the message void. Answering and
applying them is the engine's business.
"""

from __future__ import annotations

from struct import pack

from msgspec import Struct

from tsd.base.keys import DiscoPublic
from tsd.packet.build import UNREACHABLE_ADMIN, icmp_unreachable, ip_header, ip_packet, tcp_packet
from tsd.packet.constants import TCP, TCP_SYN, TSMP
from tsd.packet.parse import Packet, parse

PING_BYTES = 8

REASON_ACL = ord("A")
REASON_SHIELDS_UP = ord("S")
REASON_IP_FORWARDING = ord("F")
REASON_HOST_FIREWALL = ord("W")
REASON_UNKNOWN_TRANSIT_IP = ord("T")

REASON_TEXTS = {
    REASON_ACL: "acl",
    REASON_SHIELDS_UP: "shields",
    REASON_IP_FORWARDING: "host-ip-forwarding-unavailable",
    REASON_HOST_FIREWALL: "host-firewall",
    REASON_UNKNOWN_TRANSIT_IP: "app-connector-transit-ip-unknown",
}

_PING = ord("p")
_PONG = ord("o")
_REJECTED = ord("!")
_DISCO_ADVERTISEMENT = ord("a")


class Ping(Struct, frozen=True):
    token: bytes


class Pong(Struct, frozen=True):
    token: bytes
    peerapi_port: int
    """0 when the peer has none or did not say."""


class Rejected(Struct, frozen=True):
    """A flow that the sender of this message refused; ports are those of the refused packet."""

    proto: int
    reason: int
    sport: int
    dport: int
    maybe_broken: bool = False
    """Only a suspicion: the connection may still come up."""


class DiscoAdvertisement(Struct, frozen=True):
    disco_key: DiscoPublic


Message = Ping | Pong | Rejected | DiscoAdvertisement


def read(packet: Packet) -> Message | None:
    """The message in a TSMP packet, or None when it is not TSMP or not understood."""
    if packet.proto != TSMP:
        return None
    body = bytes(packet.payload)
    kind = body[0]
    if kind == _PING and len(body) >= 9:
        return Ping(body[1:9])
    if kind == _PONG and len(body) >= 9:
        return Pong(body[1:9], int.from_bytes(body[9:11], "big") if len(body) >= 11 else 0)
    if kind == _REJECTED and len(body) >= 7:
        ports = int.from_bytes(body[3:5], "big"), int.from_bytes(body[5:7], "big")
        return Rejected(body[1], body[2], *ports, maybe_broken=len(body) > 7 and bool(body[7] & 1))
    if kind == _DISCO_ADVERTISEMENT and len(body) >= 33:
        return DiscoAdvertisement(DiscoPublic(body[1:33]))
    return None


def ping(src: bytes, dst: bytes, token: bytes) -> bytes:
    """`token` has 8 bytes."""
    return ip_packet(src, dst, TSMP, b"p" + token)


def pong_to(request: Packet, peerapi_port: int) -> bytes | None:
    """The answer to a ping; its IPv4 identification (IPv6: flow label) is the complement of the ping's."""
    message = read(request)
    if not isinstance(message, Ping):
        return None
    head = memoryview(request.packet)
    if request.version == 4:
        identification = int.from_bytes(head[4:6], "big") ^ 0xFFFF
    else:
        identification = int.from_bytes(head[1:4], "big") & 0xFFFFF ^ 0xFFFFF
    body = b"o" + message.token + peerapi_port.to_bytes(2, "big")
    return ip_header(request.dst, request.src, TSMP, len(body), identification=identification) + body


def rejection_of(refused: Packet, reason: int, *, maybe_broken: bool = False) -> bytes:
    """Tell the sender of `refused` that it was dropped on purpose."""
    body = pack("!BBBHH", _REJECTED, refused.proto, reason, refused.sport, refused.dport)
    return ip_packet(refused.dst, refused.src, TSMP, body + (b"\x01" if maybe_broken else b""))


def unreachable_for(packet: Packet, rejected: Rejected) -> bytes | None:
    """A refusal in `packet` as the ICMP error that an IP stack understands; None when TCP is not concerned or may live.

    The sequence number of the refused SYN is not known here: stacks that check it in the quotation will ignore this.
    """
    if rejected.proto != TCP or rejected.maybe_broken:
        return None
    syn = tcp_packet(packet.dst, rejected.sport, packet.src, rejected.dport, sequence=0, flags=TCP_SYN)
    return icmp_unreachable(parse(syn), UNREACHABLE_ADMIN)


def disco_advertisement(src: bytes, dst: bytes, disco_key: DiscoPublic) -> bytes:
    return ip_packet(src, dst, TSMP, b"a" + disco_key.raw)
