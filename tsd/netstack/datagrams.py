"""UDP ports and ICMP of the stack (RFC 768, RFC 792, RFC 4443): delivery, echo, unreachables, fragmenting what is sent.

Rates: ICMP errors are limited by a token bucket. Path MTU messages are not used: the overlay's MTU is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from tsd.base.addr import VIA_RANGE, AddrPort, IPAddress, IPPrefix, behind_via, is_tailnet_ip, is_via_route
from tsd.base.log import DropCounter
from tsd.netstack.events import DatagramBinding, DatagramReceived, EchoRequested, Event
from tsd.netstack.fragments import cut
from tsd.packet.build import icmp_echo_reply_to, icmp_unreachable, udp_packet
from tsd.packet.checksum import is_transport_checksum_valid, ones_sum
from tsd.packet.constants import (
    ICMP,
    ICMP_ECHO_REQUEST,
    ICMP_UNREACHABLE,
    ICMPV6,
    ICMPV6_ECHO_REQUEST,
    ICMPV6_UNREACHABLE,
    TCP,
    UDP,
)
from tsd.packet.parse import Packet, parse

_ERRORS_PER_S = 100.0
_ERROR_BURST = 50.0
MAX_DATAGRAM_BYTES = 65507
FIRST_EPHEMERAL = 32768
LAST_EPHEMERAL = 60999
_PROHIBITED_V4, _PROHIBITED_V6 = frozenset((9, 10, 13)), frozenset((1, 5, 6))


class Datagrams:
    def __init__(self, mtu_bytes: int, events: list[Event], emit: Callable[[bytes, int], None]) -> None:
        self._mtu_bytes = mtu_bytes
        self._events = events
        self._emit = emit
        self._bindings: dict[tuple[bytes, int], DatagramBinding] = {}
        self._identification = 1
        self._tokens = _ERROR_BURST
        self._tokens_at = 0.0
        self._next_port = FIRST_EPHEMERAL
        self.drops = DropCounter()
        self.on_unreachable: Callable[[bytes, bool], None] = lambda key, is_prohibited: None

    # -- ports -------------------------------------------------------------------------------------------------

    def bind(self, address: IPAddress | None, port: int, owner: Any) -> DatagramBinding:
        """Raises OSError when the port is taken; 0 picks a free one."""
        packed = b"" if address is None else address.packed
        if not port:
            port = self._free_port(packed)
        elif (packed, port) in self._bindings:
            raise OSError(98, f"UDP port {port} is in use")
        binding = self._bindings[packed, port] = DatagramBinding(address, port, owner)
        return binding

    def _free_port(self, packed: bytes) -> int:
        for _ in range(LAST_EPHEMERAL - FIRST_EPHEMERAL + 1):
            port = self._next_port
            self._next_port = port + 1 if port < LAST_EPHEMERAL else FIRST_EPHEMERAL
            if (packed, port) not in self._bindings and (b"", port) not in self._bindings:
                return port
        raise OSError(98, "no free UDP port")

    def unbind(self, binding: DatagramBinding) -> None:
        packed = b"" if binding.address is None else binding.address.packed
        if self._bindings.get((packed, binding.port)) is binding:
            del self._bindings[packed, binding.port]

    def send(self, local: AddrPort, remote: AddrPort, payload: bytes) -> None:
        """Raises OSError when the datagram is too long for IP."""
        if len(payload) > MAX_DATAGRAM_BYTES:
            raise OSError(90, "datagram too long")
        packet = udp_packet(local.ip.packed, local.port, remote.ip.packed, remote.port, payload)
        self.emit_packet(packet)

    def emit_packet(self, packet: bytes) -> None:
        """Emit, cut into fragments when it is longer than the MTU."""
        if len(packet) <= self._mtu_bytes:
            self._emit(packet, 0)
            return
        self._identification += 1
        for fragment in cut(packet, self._mtu_bytes, self._identification):
            self._emit(fragment, 0)

    # -- packets -----------------------------------------------------------------------------------------------

    def receive(self, packet: bytes, parsed: Packet, is_own: bool, now: float) -> None:
        """A whole packet that is not TCP and is for us or one of our subnets."""
        if parsed.proto == UDP:
            self._receive_udp(packet, parsed)
        elif parsed.proto in (ICMP, ICMPV6):
            self._receive_icmp(packet, parsed, is_own)
        else:
            self.drops.add("protocol")

    def _receive_udp(self, packet: bytes, parsed: Packet) -> None:
        transport = parsed.transport
        size = transport[4] << 8 | transport[5]
        if not 8 <= size <= len(transport):
            self.drops.add("udp_length")
            return
        transport = transport[:size]
        has_checksum = transport[6] or transport[7]
        if has_checksum:
            if not is_transport_checksum_valid(parsed.src, parsed.dst, UDP, transport):
                self.drops.add("udp_checksum")
                return
        elif parsed.version == 6:
            self.drops.add("udp_checksum")  # RFC 8200 section 8.1: never zero
            return
        if not parsed.sport or not parsed.dport:
            self.drops.add("udp_port_zero")
            return
        binding = self._bindings.get((parsed.dst, parsed.dport)) or self._bindings.get((b"", parsed.dport))
        payload = bytes(transport[8:])
        self._events.append(DatagramReceived(binding, payload, parsed.destination, parsed.source, packet))

    def _receive_icmp(self, packet: bytes, parsed: Packet, is_own: bool) -> None:
        transport = parsed.transport
        if len(transport) < 8:
            self.drops.add("icmp_length")
            return
        if parsed.version == 4:
            is_good = parsed.proto == ICMP and ones_sum(transport) == 0xFFFF
        else:
            is_good = parsed.proto == ICMPV6 and is_transport_checksum_valid(parsed.src, parsed.dst, ICMPV6, transport)
        if not is_good:
            self.drops.add("icmp_checksum")
            return
        if transport[0] == (ICMP_ECHO_REQUEST if parsed.version == 4 else ICMPV6_ECHO_REQUEST):
            if is_own:
                self.answer_echo(packet)
            else:
                self._events.append(EchoRequested(parsed.dst_ip, packet))
        elif transport[0] == (ICMP_UNREACHABLE if parsed.version == 4 else ICMPV6_UNREACHABLE):
            prohibited = _PROHIBITED_V4 if parsed.version == 4 else _PROHIBITED_V6
            self._quoted_flow(bytes(transport[8:]), transport[1] in prohibited)

    def _quoted_flow(self, quoted: bytes, is_prohibited: bool) -> None:
        """Tell the TCP side which of its flows an unreachable message speaks of: the inbound key."""
        if len(quoted) >= 28 and quoted[0] == 0x45 and quoted[9] == TCP:
            src, dst, ports = quoted[12:16], quoted[16:20], quoted[20:24]
        elif len(quoted) >= 48 and quoted[0] >> 4 == 6 and quoted[6] == TCP:
            src, dst, ports = quoted[8:24], quoted[24:40], quoted[40:44]
        else:
            return
        self.on_unreachable(dst + src + ports[2:] + ports[:2], is_prohibited)

    def answer_echo(self, packet: bytes) -> None:
        reply = icmp_echo_reply_to(parse(packet))
        if reply is not None:
            self.emit_packet(reply)

    def send_unreachable(self, packet: bytes, code: int, now: float) -> None:
        """Destination unreachable (IPv4 codes: 3 is port), within the rate limit."""
        self._tokens = min(_ERROR_BURST, self._tokens + (now - self._tokens_at) * _ERRORS_PER_S)
        self._tokens_at = now
        if self._tokens < 1:
            self.drops.add("icmp_rate")
            return
        error = icmp_unreachable(parse(packet), code)
        if error is not None:
            self._tokens -= 1
            self._emit(error, 0)


def address_of(packed: bytes) -> IPAddress:
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


def is_host_local(ip: IPAddress) -> bool:
    """Addresses that mean something only on one host or link: an exit node's default route does not cover them."""
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        return True
    return ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip.is_link_local or ip.is_reserved


def is_routed_by(prefix: IPPrefix, ip: IPAddress) -> bool:
    """Whether a subnet route of ours covers an address of somebody else.

    A 4via6 address only by a 4via6 route, and only when it stands for a host of the site: a packet filter sees no more
    than the outer address (tailscale: ipn/ipnlocal/via.go).
    """
    if ip.version != prefix.version or ip not in prefix:
        return False
    if isinstance(ip, IPv6Address) and ip in VIA_RANGE:
        host = behind_via(ip)
        return is_via_route(prefix) and not is_host_local(host) and not is_tailnet_ip(host)
    return prefix.prefixlen > 0 or not is_host_local(ip)
