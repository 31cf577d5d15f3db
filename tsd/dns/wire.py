"""DNS messages in wire form: answers from our own zone, questions, and what is in a reply.

Wire format by dnspython (RFC 1035, EDNS RFC 6891); rules of the answers: tailscale: net/dns/resolver/tsdns.go. Import
it with the first query: dnspython costs more time than all other rooms of the engine need to start.
"""

from __future__ import annotations

from collections.abc import Iterable

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

from tsd.base.addr import IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.dns import message as raw
from tsd.dns.zone import Zone

TTL_S = 5
SOA_TTL_S = 10
_MAX_BYTES = 65535
_NOT_IMPLEMENTED_TYPES = frozenset({dns.rdatatype.NS, dns.rdatatype.SOA, dns.rdatatype.AXFR, dns.rdatatype.HINFO})


def answer(zone: Zone, wire: bytes, serial: int = 1, max_bytes: int | None = None) -> bytes | None:
    """The reply to one query, or None when it must be forwarded. Unparsable bytes give FORMERR or None.

    `max_bytes` None means UDP rules (512 or the client's EDNS size); give 65535 for TCP.
    """
    try:
        query = dns.message.from_wire(wire, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError):
        return _format_error(wire)
    if query.flags & dns.flags.QR:
        return None
    if query.edns > 0:
        return _finish(_reply(query, dns.rcode.BADVERS), query, max_bytes)
    if query.opcode() != dns.opcode.QUERY or len(query.question) != 1:
        return _finish(_reply(query, dns.rcode.NOTIMP), query, max_bytes)
    question = query.question[0]
    if question.rdclass != dns.rdataclass.IN:
        return None
    reply = _resolve(zone, query, question.name, question.rdtype, serial)
    return None if reply is None else _finish(reply, query, max_bytes)


def _resolve(
    zone: Zone, query: dns.message.Message, name: dns.name.Name, rdtype: dns.rdatatype.RdataType, serial: int
) -> dns.message.Message | None:
    plain = name.to_text(omit_final_dot=True).lower()
    if rdtype == dns.rdatatype.PTR and name.is_subdomain(dns.reversename.ipv4_reverse_domain):
        return _resolve_reverse(zone, query, name, serial)
    if rdtype == dns.rdatatype.PTR and name.is_subdomain(dns.reversename.ipv6_reverse_domain):
        return _resolve_reverse(zone, query, name, serial)
    ips = zone.addresses(plain)
    if ips is None:
        return _negative(zone, query, name, dns.rcode.NXDOMAIN, serial) if zone.owns(plain) else None
    if rdtype in _NOT_IMPLEMENTED_TYPES:
        return _reply(query, dns.rcode.NOTIMP)
    chosen = _choose(ips, rdtype)
    if chosen is None:
        return _negative(zone, query, name, dns.rcode.NOERROR, serial)
    reply = _reply(query, dns.rcode.NOERROR)
    kind = "A" if chosen.version == 4 else "AAAA"
    reply.answer.append(dns.rrset.from_text(name, TTL_S, "IN", kind, str(chosen)))
    return reply


def _resolve_reverse(
    zone: Zone, query: dns.message.Message, name: dns.name.Name, serial: int
) -> dns.message.Message | None:
    try:
        ip = parse_ip(dns.reversename.to_address(name))
    except (dns.exception.DNSException, DecodeError):
        return None
    host = _domain(zone.reverse(ip) or "")
    if host is None:
        ours = zone.owns(name.to_text(omit_final_dot=True))
        return _negative(zone, query, name, dns.rcode.NXDOMAIN, serial) if ours else None
    reply = _reply(query, dns.rcode.NOERROR)
    pointer = PTR(dns.rdataclass.IN, dns.rdatatype.PTR, host)  # type: ignore[no-untyped-call]
    reply.answer.append(dns.rrset.from_rdata(name, TTL_S, pointer))
    return reply


def _negative(
    zone: Zone, query: dns.message.Message, name: dns.name.Name, rcode: dns.rcode.Rcode, serial: int
) -> dns.message.Message:
    reply = _reply(query, rcode)
    apex = _zone_of(zone, name)
    timers = (serial & 0xFFFFFFFF, SOA_TTL_S, SOA_TTL_S, SOA_TTL_S, SOA_TTL_S)
    authority = SOA(dns.rdataclass.IN, dns.rdatatype.SOA, apex, apex, *timers)  # type: ignore[no-untyped-call]
    reply.authority.append(dns.rrset.from_rdata(apex, SOA_TTL_S, authority))
    return reply


def _zone_of(zone: Zone, name: dns.name.Name) -> dns.name.Name:
    """The zone of ours that holds `name`, cut out of the name itself; the name when there is none."""
    plain = name.to_text(omit_final_dot=True).lower()
    fitting = zone.suffixes_of(plain)
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
    """Cut at a record's border when it is larger than the asker takes."""
    if max_bytes is None:
        max_bytes = min(max(query.payload, raw.PLAIN_UDP_BYTES), raw.MAX_UDP_BYTES) if query.edns >= 0 else 512
    return raw.fitted(reply.to_wire(max_size=_MAX_BYTES), max_bytes)


def _format_error(wire: bytes) -> bytes | None:
    """FORMERR with the query's id, or silence when there is no header to answer to (or it is a reply)."""
    if len(wire) < 12 or wire[2] & 0x80:
        return None
    return wire[:2] + bytes([0x80 | (wire[2] & 0x79), dns.rcode.FORMERR]) + bytes(8)


def question(name: str, rdtype: str, query_id: int | None = None) -> bytes:
    """A query. Raises `DecodeError` for a name or type that cannot be written."""
    try:
        return dns.message.make_query(name, dns.rdatatype.from_text(rdtype), id=query_id).to_wire()
    except (dns.exception.DNSException, ValueError, UnicodeError) as err:
        raise DecodeError("dns", f"cannot ask for {name!r} {rdtype}: {err}") from None


def name_in(wire: bytes) -> str | None:
    """The name that a query asks for, "." when it asks for none; None for garbage."""
    message = _parsed(wire)
    if message is None:
        return None
    return message.question[0].name.to_text() if message.question else "."


def addresses_in(reply: bytes) -> list[IPAddress]:
    """A and AAAA records of a reply; empty for garbage."""
    message = _parsed(reply)
    if message is None:
        return []
    wanted = (dns.rdatatype.A, dns.rdatatype.AAAA)
    return [parse_ip(rdata.address) for rrset in _internet(message) if rrset.rdtype in wanted for rdata in rrset]


def open_alias(reply: bytes) -> tuple[str, str] | None:
    """(target, "A" or "AAAA") of a reply that ends in an alias without the addresses that were asked for.

    None for every other reply; `DecodeError` for aliases that lead in a circle.
    """
    message = _parsed(reply)
    if message is None or message.rcode() != dns.rcode.NOERROR or not message.answer or not message.question:
        return None
    wanted = message.question[0].rdtype
    if wanted not in (dns.rdatatype.A, dns.rdatatype.AAAA):
        return None
    records = _internet(message)
    aliases = {rrset.name: rrset[0].target for rrset in records if rrset.rdtype == dns.rdatatype.CNAME}
    name, seen = message.question[0].name, set()
    while name in aliases:
        if name in seen:
            raise DecodeError("dns", "aliases lead in a circle")
        seen.add(name)
        name = aliases[name]
    if not seen or any(rrset.name == name and rrset.rdtype == wanted for rrset in records):
        return None
    return name.to_text(omit_final_dot=True).lower(), dns.rdatatype.to_text(wanted)


def with_addresses(reply: bytes, target: str, rdtype: str, ips: Iterable[IPAddress]) -> bytes:
    """The reply with our own records for the alias's target."""
    message = _parsed(reply)
    texts = [str(ip) for ip in ips if ip.version == (4 if rdtype == "A" else 6)]
    if message is None or not texts:
        return reply
    message.answer.append(dns.rrset.from_text(target + ".", TTL_S, "IN", rdtype, *texts))
    return _written(message, reply)


def joined(reply: bytes, more: bytes) -> bytes:
    """The answers of both; the first one's question stays."""
    message, other = _parsed(reply), _parsed(more)
    if message is None or other is None:
        return reply
    message.answer += [rrset for rrset in other.answer if rrset not in message.answer]
    return _written(message, reply)


def _written(message: dns.message.Message, before: bytes) -> bytes:
    """`before` when what was added makes it larger than a message can be."""
    try:
        return message.to_wire(max_size=_MAX_BYTES)
    except dns.exception.TooBig:
        return before


def _internet(message: dns.message.Message) -> list[dns.rrset.RRset]:
    """Answers of the class that gives types their meaning."""
    return [rrset for rrset in message.answer if rrset.rdclass == dns.rdataclass.IN]


def _parsed(wire: bytes) -> dns.message.Message | None:
    try:
        return dns.message.from_wire(wire, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError):
        return None
