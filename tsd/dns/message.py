"""DNS messages as bytes: what a forwarder must see and change without taking a message apart (RFC 1035, RFC 6891).

A forwarded message stays as its sender wrote it, except for its number, the size its sender can take, and what must go
so that it fits. Everything here takes hostile bytes; what cannot be read gives None or comes back unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

HEADER_BYTES = 12
MAX_UDP_BYTES = 4095
PLAIN_UDP_BYTES = 512
"""What every asker can take."""

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
_QR, _TC = 0x80, 0x02
_OPT = 41
_EDE = 15
_RECORD_BYTES = 10
_OPT_BYTES = 1 + _RECORD_BYTES

EDE_OTHER, EDE_PROHIBITED, EDE_NO_REACHABLE, EDE_NETWORK_ERROR = 0, 18, 22, 23
"""Extended DNS errors (RFC 8914)."""


class Record(NamedTuple):
    """Where a resource record lies in a message."""

    start: int
    kind: int
    end: int


class Opt(NamedTuple):
    """The OPT record of a message and what it says."""

    start: int
    end: int
    payload_bytes: int
    version: int
    wants_dnssec: bool


def is_reply(wire: bytes) -> bool:
    return len(wire) > 2 and bool(wire[2] & _QR)


def is_cut(wire: bytes) -> bool:
    """Whether the sender had more to say than fitted."""
    return len(wire) > 2 and bool(wire[2] & _TC)


def rcode_of(wire: bytes) -> int:
    """Without the extension in OPT; what is too short to have one refuses."""
    return wire[3] & 15 if len(wire) >= HEADER_BYTES else REFUSED


def with_id(wire: bytes, number: bytes) -> bytes:
    return number + wire[2:]


def skip_name(wire: bytes, position: int) -> int | None:
    """Where a name ends in the bytes, pointers not followed."""
    while position < len(wire):
        length = wire[position]
        if length >= 0xC0:
            return position + 2 if position + 2 <= len(wire) else None
        if length >= 0x40:
            return None
        position += 1 + length
        if not length:
            return position if position <= len(wire) else None
    return None


def question_end(wire: bytes) -> int | None:
    """Where the records begin; None when the questions cannot be read."""
    position: int | None = HEADER_BYTES
    if len(wire) < HEADER_BYTES:
        return None
    for _ in range(int.from_bytes(wire[4:6], "big")):
        position = skip_name(wire, position) if position is not None else None
        if position is None or position + 4 > len(wire):
            return None
        position += 4
    return position


def question_of(wire: bytes) -> bytes | None:
    """Name in lower case, type and class, for comparing; None when there is not exactly one question."""
    end = question_end(wire)
    return wire[HEADER_BYTES:end].lower() if end is not None and wire[4:6] == b"\0\1" else None


def records(wire: bytes) -> Iterator[Record]:
    """All records in order; ends early where the message cannot be read."""
    position = question_end(wire)
    for _ in range(sum(int.from_bytes(wire[at : at + 2], "big") for at in (6, 8, 10))):
        start = position
        position = skip_name(wire, position) if position is not None else None
        if start is None or position is None or position + _RECORD_BYTES > len(wire):
            return
        kind = int.from_bytes(wire[position : position + 2], "big")
        position += _RECORD_BYTES + int.from_bytes(wire[position + 8 : position + 10], "big")
        if position > len(wire):
            return
        yield Record(start, kind, position)


def opt_of(wire: bytes) -> Opt | None:
    if wire[10:12] == b"\0\0" or len(wire) < HEADER_BYTES + _OPT_BYTES:
        return None
    for record in records(wire):
        if record.kind == _OPT and wire[record.start] == 0:
            at = record.start + 1
            payload = int.from_bytes(wire[at + 2 : at + 4], "big")
            return Opt(record.start, record.end, payload, wire[at + 5], bool(wire[at + 6] & 0x80))
    return None


def udp_limit(query: bytes) -> int:
    """How large a datagram the asker takes."""
    opt = opt_of(query)
    return PLAIN_UDP_BYTES if opt is None else min(max(opt.payload_bytes, PLAIN_UDP_BYTES), MAX_UDP_BYTES)


def with_payload_limit(query: bytes, limit: int = MAX_UDP_BYTES) -> bytes:
    """The query, allowing no larger replies than we take ourselves."""
    opt = opt_of(query)
    if opt is None or opt.payload_bytes <= limit:
        return query
    at = opt.start + 3
    return query[:at] + limit.to_bytes(2, "big") + query[at + 2 :]


def fitted(reply: bytes, limit: int) -> bytes:
    """The reply cut at a record's border with TC set, OPT kept; as it is when it fits."""
    if len(reply) <= limit:
        return reply
    end = question_end(reply)
    if end is None or end > limit:
        return reply[:2] + bytes([reply[2] | _TC, reply[3]]) + bytes(HEADER_BYTES - 4)
    opt = opt_of(reply)
    tail = reply[opt.start : opt.end] if opt is not None else b""
    if end + len(tail) > limit:
        tail = tail[:9] + b"\0\0" if tail and end + _OPT_BYTES <= limit else b""
    left = [int.from_bytes(reply[at : at + 2], "big") for at in (6, 8, 10)]
    kept = [0, 0, 0]
    for number, record in enumerate(records(reply)):
        if record.end + len(tail) > limit or record.kind == _OPT:
            break
        kept[0 if number < left[0] else 1 if number < left[0] + left[1] else 2] += 1
        end = record.end
    kept[2] += 1 if tail else 0
    counts = b"".join(count.to_bytes(2, "big") for count in kept)
    return reply[:2] + bytes([reply[2] | _TC, reply[3]]) + reply[4:6] + counts + reply[HEADER_BYTES:end] + tail


def answers(reply: bytes, query: bytes) -> bool:
    """Whether a reply is one to this query: its number, and the question itself when it is repeated."""
    if len(reply) < HEADER_BYTES or reply[:2] != query[:2] or not is_reply(reply):
        return False
    end = question_end(query)
    return reply[4:6] == b"\0\0" or reply[HEADER_BYTES:end].lower() == query[HEADER_BYTES:end].lower()


def refusal(query: bytes, rcode: int, ede: int | None = None, reason: str = "", *, is_ours: bool = False) -> bytes:
    """A reply without records; says why to those who understand it. The query has a header."""
    end = question_end(query)
    flags = _QR | (query[2] & 0x79) | (0x04 if is_ours else 0)
    recursion = 0x80 if query[2] & 1 else 0
    head = query[:2] + bytes([flags, recursion | rcode])
    if end is None:
        return head + bytes(8)
    opt = opt_of(query)
    body = query[4:6] + bytes(4) + (b"\0\1" if opt else b"\0\0") + query[HEADER_BYTES:end]
    if opt is None:
        return head + body
    text = reason.encode()[:200]
    option = b""
    if ede is not None:
        option = _EDE.to_bytes(2, "big") + (2 + len(text)).to_bytes(2, "big") + ede.to_bytes(2, "big") + text
    dnssec = b"\x80\0" if opt.wants_dnssec else b"\0\0"
    fixed = b"\0" + _OPT.to_bytes(2, "big") + MAX_UDP_BYTES.to_bytes(2, "big") + b"\0\0" + dnssec
    return head + body + fixed + len(option).to_bytes(2, "big") + option
