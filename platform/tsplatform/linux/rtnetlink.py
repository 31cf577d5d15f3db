"""Addresses, routes and rules of the kernel, read and changed over one raw netlink socket.

Standard: RFC 3549, linux/rtnetlink.h, linux/fib_rules.h. Requests go in batches with one acknowledgement each, so that
ten thousand routes take a fraction of a second and no thread. Only what the router needs; what the link monitor needs
is `tsplatform.netlink`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from tsd.base.addr import IPAddress, IPPrefix
from tsd.base.errors import HullError
from tsplatform.netlink import NLMSG_DONE, NLMSG_ERROR, attributes, messages

FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
MAIN_TABLE, DEFAULT_TABLE = 254, 253

_NEWLINK, _GETLINK, _NEWADDR, _DELADDR, _GETADDR = 16, 18, 20, 21, 22
_NEWROUTE, _DELROUTE, _GETROUTE, _NEWRULE, _DELRULE, _GETRULE = 24, 25, 26, 32, 33, 34
_REQUEST, _ACK, _DUMP, _REPLACE, _EXCL, _CREATE = 0x1, 0x4, 0x300, 0x100, 0x200, 0x400
_IFLA_IFNAME, _IFLA_MTU, _IFLA_GSO_MAX_SIZE = 3, 4, 41
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_F_NODAD = 0x02
_RTA_DST, _RTA_OIF, _RTA_TABLE = 1, 4, 15
_RTN_UNICAST, _RTN_THROW = 1, 9
_RTPROT_STATIC, _SCOPE_LINK, _SCOPE_UNIVERSE = 4, 253, 0
_FRA_PRIORITY, _FRA_FWMARK, _FRA_TABLE, _FRA_FWMASK, _FRA_PROTOCOL = 6, 10, 15, 16, 21
_ACTION_LOOKUP, _ACTION_UNREACHABLE = 1, 7
_IFF_UP = 0x1
_SOL_NETLINK, _CAP_ACK, _STRICT_CHECK = 270, 10, 12
_HEADER = struct.Struct("=IHHII")
_BATCH = 100
_RECEIVE_BYTES = 1 << 18
_TIMEOUT_S = 5.0


class Route(NamedTuple):
    """`is_throw`: the look-up goes on with the next rule; else out of our device."""

    prefix: IPPrefix
    is_throw: bool = False


class Rule(NamedTuple):
    """`table` 0: unreachable. `mark` 0: for every packet."""

    family: int
    priority: int
    table: int
    mark: int = 0
    mask: int = 0


class Change(NamedTuple):
    """One request and what it is called in an error; `tolerated` errors count as done.

    `subject` is what comes or goes: a `Route`, a `Rule`, an (address, prefix length), or whether the interface is up.
    """

    what: str
    kind: int
    flags: int
    body: bytes
    tolerated: frozenset[int]
    subject: object = None

    @property
    def is_deletion(self) -> bool:
        return self.kind in (_DELADDR, _DELROUTE, _DELRULE)


_EXISTS = frozenset({errno.EEXIST})
_GONE = frozenset({errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL, errno.ENODEV})


class RtNetlink:
    """A socket of the current network namespace. Raises `HullError`."""

    def __init__(self) -> None:
        self._sequence = 0
        try:
            self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        except OSError as err:
            raise _error("open netlink", err) from None
        self._sock.settimeout(_TIMEOUT_S)
        for option in (_CAP_ACK, _STRICT_CHECK):
            with contextlib.suppress(OSError):
                self._sock.setsockopt(_SOL_NETLINK, option, 1)
        self._sock.bind((0, 0))

    def close(self) -> None:
        self._sock.close()

    # --- reading

    def index_of(self, device: str) -> int:
        """0 when there is no such interface."""
        try:
            return socket.if_nametoindex(device)
        except OSError:
            return 0

    def addresses(self, index: int = 0) -> list[tuple[int, IPAddress, int]]:
        """(interface, address, prefix length); of one interface, or of all."""
        found = []
        for kind, body in self._dump(_GETADDR, struct.pack("=BBBBI", socket.AF_UNSPEC, 0, 0, 0, 0)):
            if kind != _NEWADDR or len(body) < 8:
                continue
            _, length, _, _, number = struct.unpack_from("=BBBBI", body)
            values = attributes(body, 8)
            raw = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS))
            if raw is not None and len(raw) in (4, 16) and number == (index or number):
                found.append((number, ip_address(bytes(raw)), length))
        return found

    def routes(self, version: int, table: int) -> list[tuple[Route, int]]:
        """(route, outgoing interface) of one table; throw routes and plain ones only."""
        return [(route, index) for route, index, in_table in self._routes(version, table) if in_table == table]

    def _routes(self, version: int, table: int) -> Iterator[tuple[Route, int, int]]:
        request = struct.pack("=BBBBBBBBI", FAMILY[version], 0, 0, 0, 0, 0, 0, 0, 0) + _u32(_RTA_TABLE, table)
        for kind, body in self._dump(_GETROUTE, request):
            if kind != _NEWROUTE or len(body) < 12:
                continue
            _, length, _, _, small_table, _, _, route_type, _ = struct.unpack_from("=BBBBBBBBI", body)
            values = attributes(body, 12)
            if route_type not in (_RTN_UNICAST, _RTN_THROW):
                continue
            raw = bytes(values.get(_RTA_DST, b"\0" * (4 if version == 4 else 16)))
            prefix = ip_network((raw, length))
            yield (
                Route(prefix, route_type == _RTN_THROW),
                _number(values, _RTA_OIF),
                _number(values, _RTA_TABLE, small_table),
            )

    def rules(self, version: int, first: int, end: int) -> list[Rule]:
        """Those with first <= priority < end."""
        found = []
        for kind, body in self._dump(_GETRULE, struct.pack("=BBBBBBBBI", FAMILY[version], 0, 0, 0, 0, 0, 0, 0, 0)):
            if kind != _NEWRULE or len(body) < 12:
                continue
            _, _, _, _, small_table, _, _, action, _ = struct.unpack_from("=BBBBBBBBI", body)
            values = attributes(body, 12)
            priority = _number(values, _FRA_PRIORITY)
            if first <= priority < end:
                table = _number(values, _FRA_TABLE, small_table) if action == _ACTION_LOOKUP else 0
                mark, mask = _number(values, _FRA_FWMARK), _number(values, _FRA_FWMASK)
                found.append(Rule(version, priority, table, mark, mask if mark else 0))
        return found

    # --- changing

    def apply(self, changes: Sequence[Change]) -> list[str]:
        """Carry out all of them, in order; texts of those that failed."""
        failures: list[str] = []
        for at in range(0, len(changes), _BATCH):
            failures += self._apply_batch(changes[at : at + _BATCH])
        return failures

    def _apply_batch(self, changes: Sequence[Change]) -> list[str]:
        first = self._sequence + 1
        self._sequence += len(changes)
        wire = b"".join(
            _message(change.kind, change.flags | _REQUEST | _ACK, first + at, change.body)
            for at, change in enumerate(changes)
        )
        failures = []
        try:
            self._sock.send(wire)
            waiting = len(changes)
            while waiting:
                for sequence, code in _acknowledgements(self._sock.recv(_RECEIVE_BYTES)):
                    if not first <= sequence <= self._sequence:
                        continue
                    waiting -= 1
                    change = changes[sequence - first]
                    if code and code not in change.tolerated:
                        failures.append(f"{change.what}: {os.strerror(code)}")
        except OSError as err:
            raise _error("change routing over netlink", err) from None
        return failures

    def _dump(self, kind: int, body: bytes) -> Iterator[tuple[int, memoryview]]:
        self._sequence += 1
        try:
            self._sock.send(_message(kind, _REQUEST | _DUMP, self._sequence, body))
            while True:
                for found, content in messages(self._sock.recv(_RECEIVE_BYTES)):
                    if found == NLMSG_DONE:
                        return
                    if found == NLMSG_ERROR:
                        code = -int(struct.unpack_from("=i", content)[0])
                        if code in (errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
                            return  # no such table, or no such family: nothing is there
                        raise OSError(code, os.strerror(code))
                    yield found, content
        except OSError as err:
            raise _error("read routing over netlink", err) from None


def _error(operation: str, err: OSError) -> HullError:
    code = err.errno or 0
    hint = "CAP_NET_ADMIN is missing" if code == errno.EPERM else ""
    return HullError(operation, os.strerror(code) if code else str(err) or type(err).__name__, hint, code)


def _message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    message = _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body
    return message + bytes(-len(message) % 4)


def _acknowledgements(raw: bytes) -> Iterator[tuple[int, int]]:
    """(sequence of the request, errno)."""
    at = 0
    while at + _HEADER.size + 4 <= len(raw):
        length, kind, _, sequence, _ = _HEADER.unpack_from(raw, at)
        if length < _HEADER.size:
            return
        if kind == NLMSG_ERROR:
            yield sequence, -struct.unpack_from("=i", raw, at + _HEADER.size)[0]
        at += (length + 3) & ~3


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _u32(kind: int, number: int) -> bytes:
    return _attribute(kind, struct.pack("=I", number))


def _number(values: dict[int, memoryview], kind: int, default: int = 0) -> int:
    raw = values.get(kind)
    return int(struct.unpack_from("=I", raw)[0]) if raw is not None and len(raw) >= 4 else default


# --- the changes


def set_link(index: int, *, is_up: bool, mtu_bytes: int = 0) -> Change:
    body = struct.pack("=BBHiII", socket.AF_UNSPEC, 0, 0, index, _IFF_UP if is_up else 0, _IFF_UP)
    if mtu_bytes:
        body += _u32(_IFLA_MTU, mtu_bytes)
    return Change(f"set the interface {'up' if is_up else 'down'}", _NEWLINK, 0, body, frozenset(), is_up)


def limit_gso(index: int, most_bytes: int) -> Change:
    """Largest super-segment that the kernel hands to the device; old kernels cannot."""
    body = struct.pack("=BBHiII", socket.AF_UNSPEC, 0, 0, index, 0, 0) + _u32(_IFLA_GSO_MAX_SIZE, most_bytes)
    return Change("limit super-segments", _NEWLINK, 0, body, frozenset(range(1, 134)))


def _address(index: int, ip: IPAddress, length: int, flags: int) -> bytes:
    head = struct.pack("=BBBBI", FAMILY[ip.version], length, flags, _SCOPE_UNIVERSE, index)
    return head + _attribute(_IFA_LOCAL, ip.packed) + _attribute(_IFA_ADDRESS, ip.packed)


def add_address(index: int, ip: IPAddress, length: int) -> Change:
    flags = _IFA_F_NODAD if ip.version == 6 else 0
    body = _address(index, ip, length, flags)
    return Change(f"add the address {ip}", _NEWADDR, _CREATE | _EXCL, body, _EXISTS, (ip, length))


def delete_address(index: int, ip: IPAddress, length: int) -> Change:
    return Change(f"delete the address {ip}", _DELADDR, 0, _address(index, ip, length, 0), _GONE, (ip, length))


def _route(route: Route, table: int, index: int) -> bytes:
    prefix = route.prefix
    kind = _RTN_THROW if route.is_throw else _RTN_UNICAST
    scope = _SCOPE_UNIVERSE if route.is_throw or prefix.version == 6 else _SCOPE_LINK
    family = FAMILY[prefix.version]
    body = struct.pack("=BBBBBBBBI", family, prefix.prefixlen, 0, 0, 0, _RTPROT_STATIC, scope, kind, 0)
    body += _attribute(_RTA_DST, prefix.network_address.packed) if prefix.prefixlen else b""
    return body + _u32(_RTA_TABLE, table) + (b"" if route.is_throw else _u32(_RTA_OIF, index))


def add_route(route: Route, table: int, index: int) -> Change:
    what = f"add the {'throw ' if route.is_throw else ''}route {route.prefix}"
    return Change(what, _NEWROUTE, _CREATE | _REPLACE, _route(route, table, index), _EXISTS, route)


def delete_route(route: Route, table: int, index: int) -> Change:
    return Change(f"delete the route {route.prefix}", _DELROUTE, 0, _route(route, table, index), _GONE, route)


def _rule(rule: Rule) -> bytes:
    action = _ACTION_LOOKUP if rule.table else _ACTION_UNREACHABLE
    small_table = rule.table if rule.table < 256 else 0
    body = struct.pack("=BBBBBBBBI", FAMILY[rule.family], 0, 0, 0, small_table, 0, 0, action, 0)
    body += _u32(_FRA_PRIORITY, rule.priority)
    if rule.table:
        body += _u32(_FRA_TABLE, rule.table)
    if rule.mark:
        body += _u32(_FRA_FWMARK, rule.mark) + _u32(_FRA_FWMASK, rule.mask)
    return body


def add_rule(rule: Rule) -> Change:
    body = _rule(rule) + _attribute(_FRA_PROTOCOL, bytes((_RTPROT_STATIC,)))
    return Change(f"add the IPv{rule.family} rule {rule.priority}", _NEWRULE, _CREATE | _EXCL, body, _EXISTS, rule)


def delete_rule(rule: Rule) -> Change:
    return Change(f"delete the IPv{rule.family} rule {rule.priority}", _DELRULE, 0, _rule(rule), _GONE, rule)
