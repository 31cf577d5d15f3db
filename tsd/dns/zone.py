"""What our own resolver answers by itself: MagicDNS names, extra records and reverse zones.

Rules: tailscale: net/dns/resolver/tsdns.go. Wire format by dnspython (RFC 1035, EDNS RFC 6891). It does not forward:
`answer` returns None for a name that belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.reversename
import dns.rrset
from dns.rdtypes.ANY.PTR import PTR
from dns.rdtypes.ANY.SOA import SOA

from tsd.base.addr import CGNAT, QUAD_100, QUAD_100_V6, TAILSCALE_ULA, IPAddress, is_tailnet_ip, parse_ip
from tsd.base.errors import DecodeError

TTL_S = 5
SOA_TTL_S = 10
MAX_UDP_BYTES = 4095
SERVICE_NAME = "magicdns.localhost-tailscale-daemon"
_NOT_IMPLEMENTED_TYPES = frozenset({dns.rdatatype.NS, dns.rdatatype.SOA, dns.rdatatype.AXFR, dns.rdatatype.HINFO})


class Zone:
    """An immutable set of names that we answer for.

    `hosts` maps lower-case FQDNs without trailing dot to addresses; `local_suffixes` are the zones in which an unknown
    name is NXDOMAIN rather than somebody else's.
    """

    def __init__(self, hosts: Mapping[str, tuple[IPAddress, ...]], local_suffixes: tuple[str, ...] = ()) -> None:
        self._hosts = {name.rstrip(".").lower(): tuple(ips) for name, ips in hosts.items()}
        self._hosts[SERVICE_NAME] = (QUAD_100, QUAD_100_V6)
        self._suffixes = tuple(s.strip(".").lower() for s in local_suffixes if s.strip("."))
        self._reverse: dict[IPAddress, str] = {}
        for name, ips in self._hosts.items():
            for ip in ips:
                self._reverse.setdefault(ip, name)

    def lookup(self, name: str) -> tuple[IPAddress, ...]:
        """Addresses of a name we own (any letter case, trailing dot allowed); empty when unknown."""
        return self._hosts.get(name.rstrip(".").lower(), ())

    def reverse(self, ip: IPAddress) -> str | None:
        return self._reverse.get(ip)

    def owns(self, name: str) -> bool:
        """Whether nobody else may be asked for this name."""
        plain = name.rstrip(".").lower()
        return (
            plain in self._hosts
            or plain.endswith(".onion")
            or any(plain == suffix or plain.endswith("." + suffix) for suffix in self._suffixes)
        )

    def answer(self, wire: bytes, serial: int = 1, max_bytes: int | None = None) -> bytes | None:
        """The reply to one query, or None when it must be forwarded. Unparsable bytes give FORMERR or None.

        `max_bytes` None means UDP rules (512 or the client's EDNS size); give 65535 for TCP.
        """
        try:
            query = dns.message.from_wire(wire, ignore_trailing=True)
        except (dns.exception.DNSException, ValueError):
            return _format_error(wire)
        if query.flags & dns.flags.QR:
            return None
        if query.opcode() != dns.opcode.QUERY or len(query.question) != 1:
            return _finish(_reply(query, dns.rcode.NOTIMP), query, max_bytes)
        question = query.question[0]
        if question.rdclass != dns.rdataclass.IN:
            return None
        reply = self._resolve(query, question.name, question.rdtype, serial)
        return None if reply is None else _finish(reply, query, max_bytes)

    def _resolve(
        self, query: dns.message.Message, name: dns.name.Name, rdtype: dns.rdatatype.RdataType, serial: int
    ) -> dns.message.Message | None:
        plain = name.to_text(omit_final_dot=True).lower()
        if rdtype == dns.rdatatype.PTR and name.is_subdomain(dns.reversename.ipv4_reverse_domain):
            return self._resolve_reverse(query, name, serial)
        if rdtype == dns.rdatatype.PTR and name.is_subdomain(dns.reversename.ipv6_reverse_domain):
            return self._resolve_reverse(query, name, serial)
        ips = self._hosts.get(plain)
        if ips is None:
            return self._negative(query, name, dns.rcode.NXDOMAIN, serial) if self.owns(plain) else None
        if rdtype in _NOT_IMPLEMENTED_TYPES:
            return _reply(query, dns.rcode.NOTIMP)
        chosen = _choose(ips, rdtype)
        if chosen is None:
            return self._negative(query, name, dns.rcode.NOERROR, serial)
        reply = _reply(query, dns.rcode.NOERROR)
        kind = "A" if chosen.version == 4 else "AAAA"
        reply.answer.append(dns.rrset.from_text(name, TTL_S, "IN", kind, str(chosen)))
        return reply

    def _resolve_reverse(
        self, query: dns.message.Message, name: dns.name.Name, serial: int
    ) -> dns.message.Message | None:
        try:
            ip = parse_ip(dns.reversename.to_address(name))
        except (dns.exception.DNSException, DecodeError):
            return None
        host = _domain(self._reverse.get(ip, ""))
        if host is None:
            ours = is_tailnet_ip(ip) and bool(self._suffixes)
            return self._negative(query, name, dns.rcode.NXDOMAIN, serial) if ours else None
        reply = _reply(query, dns.rcode.NOERROR)
        pointer = PTR(dns.rdataclass.IN, dns.rdatatype.PTR, host)  # type: ignore[no-untyped-call]
        reply.answer.append(dns.rrset.from_rdata(name, TTL_S, pointer))
        return reply

    def _negative(
        self, query: dns.message.Message, name: dns.name.Name, rcode: dns.rcode.Rcode, serial: int
    ) -> dns.message.Message:
        reply = _reply(query, rcode)
        zone = self._zone_of(name)
        timers = (serial & 0xFFFFFFFF, SOA_TTL_S, SOA_TTL_S, SOA_TTL_S, SOA_TTL_S)
        authority = SOA(dns.rdataclass.IN, dns.rdatatype.SOA, zone, zone, *timers)  # type: ignore[no-untyped-call]
        reply.authority.append(dns.rrset.from_rdata(zone, SOA_TTL_S, authority))
        return reply

    def _zone_of(self, name: dns.name.Name) -> dns.name.Name:
        """The zone of ours that holds `name`, cut out of the name itself; the name when there is none."""
        plain = name.to_text(omit_final_dot=True).lower()
        fitting = [s for s in self._suffixes if plain == s or plain.endswith("." + s)]
        if not fitting:
            return name
        labels = max(suffix.count(".") for suffix in fitting) + 2
        return name.split(labels)[1] if labels < len(name) else name


def _domain(host: str) -> dns.name.Name | None:
    """None for no name, or for one that cannot be written in DNS (control may call a node anything)."""
    try:
        return dns.name.from_text(host + ".") if host else None
    except (dns.exception.DNSException, ValueError):
        return None


def _choose(ips: tuple[IPAddress, ...], rdtype: dns.rdatatype.RdataType) -> IPAddress | None:
    """One address per query, as upstream does."""
    if rdtype == dns.rdatatype.A:
        return next((ip for ip in ips if ip.version == 4), None)
    if rdtype == dns.rdatatype.AAAA:
        return next((ip for ip in ips if ip.version == 6), None)
    return ips[0] if rdtype == dns.rdatatype.ANY and ips else None


def _reply(query: dns.message.Message, rcode: dns.rcode.Rcode) -> dns.message.Message:
    reply = dns.message.make_response(query, recursion_available=bool(query.flags & dns.flags.RD))
    reply.flags |= dns.flags.AA
    reply.set_rcode(rcode)
    return reply


def _finish(reply: dns.message.Message, query: dns.message.Message, max_bytes: int | None) -> bytes:
    if max_bytes is None:
        max_bytes = min(max(query.payload, 512), MAX_UDP_BYTES) if query.edns >= 0 else 512
    try:
        return reply.to_wire(max_size=max_bytes)
    except dns.exception.TooBig:
        reply.answer.clear()
        reply.authority.clear()
        reply.flags |= dns.flags.TC
        return reply.to_wire(max_size=max(max_bytes, 512))


def _format_error(wire: bytes) -> bytes | None:
    """FORMERR with the query's id, or silence when there is no header to answer to (or it is a reply)."""
    if len(wire) < 12 or wire[2] & 0x80:
        return None
    return wire[:2] + bytes([0x80 | (wire[2] & 0x79), dns.rcode.FORMERR]) + bytes(8)


def magic_suffixes(magic_suffix: str) -> tuple[str, ...]:
    """The zones that MagicDNS claims: the tailnet's own and the reverse zones of its address ranges."""
    octets = range(int(CGNAT.network_address) >> 16 & 0xFF, (int(CGNAT.broadcast_address) >> 16 & 0xFF) + 1)
    reverse_v4 = tuple(f"{octet}.100.in-addr.arpa" for octet in octets)
    nibbles = TAILSCALE_ULA.network_address.exploded.replace(":", "")[: TAILSCALE_ULA.prefixlen // 4]
    reverse_v6 = ".".join(reversed(nibbles)) + ".ip6.arpa"
    return (magic_suffix, *reverse_v4, reverse_v6) if magic_suffix else ()
