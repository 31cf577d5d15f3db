"""Addresses, routes and rules of the kernel, read and changed through pyroute2.

Standard: RFC 3549, linux/rtnetlink.h, linux/fib_rules.h. pyroute2 is imported when the socket is opened, because it
takes 0.2 s that a daemon without a network device need not spend. Of its sockets only `IPRSocket` needs no event loop
and tells which request of a batch failed. What changes is heard by `tsplatform.linux.watch`.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from tsd.base.addr import IPAddress, IPPrefix
from tsd.base.errors import HullError

FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
MAIN_TABLE, DEFAULT_TABLE = 254, 253

_RTN_UNICAST, _RTN_UNREACHABLE, _RTN_THROW = 1, 7, 9
_LAST_METRIC = 0xFFFF0000
_RTPROT_STATIC, _SCOPE_LINK, _SCOPE_UNIVERSE = 4, 253, 0
_ACTION_LOOKUP, _ACTION_UNREACHABLE = 1, 7
_IFF_UP, _IFA_F_NODAD = 0x1, 0x02
_RTM_F_LOOKUP_TABLE = 0x1000
_REQUEST, _ACK, _DUMP, _REPLACE, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x300, 0x100, 0x200, 0x400
_ERROR, _DONE = 2, 3
_BATCH = 100
_TIMEOUT_S = 5.0
_KINDS = frozenset({_RTN_UNICAST, _RTN_UNREACHABLE, _RTN_THROW})


class Route(NamedTuple):
    """`is_throw`: the look-up goes on with the next rule. `is_bar`: "unreachable", where no better route to the same
    prefix is left; it needs no device. Else: out of our device."""

    prefix: IPPrefix
    is_throw: bool = False
    is_bar: bool = False

    @property
    def through_device(self) -> bool:
        return not (self.is_throw or self.is_bar)


class Rule(NamedTuple):
    """`table` 0: unreachable. `mark` 0: for every packet."""

    family: int
    priority: int
    table: int
    mark: int = 0
    mask: int = 0


class Way(NamedTuple):
    """Where the kernel would send a packet; `oif` 0: nowhere."""

    oif: int
    device: str = ""
    table: int = 0


class Body(NamedTuple):
    """Fixed fields and attributes of a message, by pyroute2's names."""

    fields: Mapping[str, int]
    attributes: Sequence[tuple[str, object]] = ()


class Change(NamedTuple):
    """One request and what it is called in an error; `tolerated` errors count as done.

    `subject` is what comes or goes: a `Route`, a `Rule`, an (address, prefix length), or whether the interface is up.
    """

    what: str
    request: str
    flags: int
    body: Body
    tolerated: frozenset[int]
    subject: object = None


_EXISTS = frozenset({errno.EEXIST})
_GONE = frozenset({errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL, errno.ENODEV})
_ABSENT = frozenset({errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP})


class RtNetlink:
    """A socket of the current network namespace; one thread at a time. Raises `HullError`."""

    def __init__(self) -> None:
        self._sequence = 0
        try:
            from pyroute2.netlink.rtnl import RTM_NAMES
        except ImportError as err:
            raise HullError("open netlink", str(err), "install the package pyroute2") from None
        self._numbers: Mapping[str, int] = RTM_NAMES
        self._sock = _open()

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
        """(interface, address, prefix length); of one interface, or of all that are up: the others lead nowhere."""
        found = []
        wanted = {index} if index else self._up()
        for message in self._dump("RTM_GETADDR", Body({"family": socket.AF_UNSPEC})):
            number = int(message["index"])
            ip = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
            if ip and number in wanted:
                found.append((number, ip_address(ip), int(message["prefixlen"])))
        return found

    def _up(self) -> set[int]:
        links = self._dump("RTM_GETLINK", Body({"family": socket.AF_UNSPEC}))
        return {int(message["index"]) for message in links if message["flags"] & _IFF_UP}

    def routes(self, version: int, table: int) -> list[tuple[Route, int]]:
        """(route, outgoing interface) of one table; plain, throw and unreachable routes only."""
        found = []
        # Kernels before 4.20 do not filter by table.
        for message in self._dump("RTM_GETROUTE", Body({"family": FAMILY[version]}, [("RTA_TABLE", table)])):
            kind = message["type"]
            if kind in _KINDS and message.get_attr("RTA_TABLE", message["table"]) == table:
                address = message.get_attr("RTA_DST", "0.0.0.0" if version == 4 else "::")
                prefix = ip_network((address, message["dst_len"]))
                route = Route(prefix, kind == _RTN_THROW, kind == _RTN_UNREACHABLE)
                found.append((route, int(message.get_attr("RTA_OIF", 0))))
        return found

    def rules(self, version: int, first: int, end: int) -> list[Rule]:
        """Those with first <= priority < end."""
        found = []
        for message in self._dump("RTM_GETRULE", Body({"family": FAMILY[version]})):
            priority = message.get_attr("FRA_PRIORITY", 0)
            if first <= priority < end:
                is_lookup = message["action"] == _ACTION_LOOKUP
                table = message.get_attr("FRA_TABLE", message["table"]) if is_lookup else 0
                mark = message.get_attr("FRA_FWMARK", 0)
                found.append(Rule(version, priority, table, mark, message.get_attr("FRA_FWMASK", 0) if mark else 0))
        return found

    def way(self, ip: IPAddress, mark: int = 0) -> Way:
        """As a packet to that address would be sent, without sending one."""
        flags = _RTM_F_LOOKUP_TABLE if ip.version == 4 else 0  # IPv6 names the table in any case
        fields = {"family": FAMILY[ip.version], "dst_len": ip.max_prefixlen, "flags": flags}
        body = Body(fields, [("RTA_DST", str(ip)), *([("RTA_MARK", mark)] if mark else [])])
        try:
            self._sock.send(self._message("RTM_GETROUTE", 0, body))
            message = next(self._answers(self._sequence))
        except OSError as err:
            raise _error("read routing over netlink", err) from None
        index = 0 if message["header"]["type"] == _ERROR else int(message.get_attr("RTA_OIF", 0))
        if not index or message["type"] != _RTN_UNICAST:
            return Way(0)
        return Way(index, _name_of(index), int(message.get_attr("RTA_TABLE", message["table"])))

    # --- changing

    def apply(self, changes: Sequence[Change]) -> list[str]:
        """Carry out all of them, in order; texts of those that failed."""
        failures: list[str] = []
        for at in range(0, len(changes), _BATCH):
            failures += self._apply_batch(changes[at : at + _BATCH])
        return failures

    def _apply_batch(self, changes: Sequence[Change]) -> list[str]:
        first, last = self._sequence + 1, self._sequence + len(changes)
        wire = b"".join(
            # The kernel answers in order and reports every failure; so the last acknowledgement ends the batch.
            self._message(change.request, change.flags | (_ACK if first + at == last else 0), change.body)
            for at, change in enumerate(changes)
        )
        failures = []
        try:
            self._sock.send(wire)
            for message in self._answers(first):
                sequence, code = message["header"]["sequence_number"], -int(message["error"])
                change = changes[sequence - first]
                if code and code not in change.tolerated:
                    failures.append(f"{change.what}: {os.strerror(code)}")
                if sequence == last:
                    break
        except OSError as err:
            raise _error("change routing over netlink", err) from None
        return failures

    # --- messages

    def _message(self, request: str, flags: int, body: Body) -> bytes:
        self._sequence += 1
        number = self._numbers[request]
        message = self._sock.marshal.msg_map[number]()
        message.update(body.fields)
        message["attrs"] = list(body.attributes)
        message["header"].update(type=number, flags=_REQUEST | flags, sequence_number=self._sequence)
        message.encode()
        return bytes(message.data)

    def _answers(self, first: int) -> Iterator[Any]:
        """Decoded messages to the requests from `first` on, without end."""
        while True:
            for message in self._sock.get():
                if first <= message["header"]["sequence_number"] <= self._sequence:
                    yield message

    def _dump(self, request: str, body: Body) -> Iterator[Any]:
        try:
            self._sock.send(self._message(request, _DUMP, body))
            for message in self._answers(self._sequence):
                kind = message["header"]["type"]
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -int(message["error"])
                    if code in _ABSENT:
                        return  # no such table, or no such family: nothing is there
                    raise OSError(code, os.strerror(code))
                yield message
        except OSError as err:
            raise _error("read routing over netlink", err) from None


def _open() -> Any:
    from pyroute2 import IPRSocket

    try:
        try:
            sock = IPRSocket(groups=0, strict_check=True)
            sock.socket.settimeout(_TIMEOUT_S)
        except OSError:  # kernels before 4.20
            sock = IPRSocket(groups=0)
            sock.socket.settimeout(_TIMEOUT_S)
    except OSError as err:
        raise _error("open netlink", err) from None
    return sock


def _name_of(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:
        return str(index)


def _error(operation: str, err: OSError) -> HullError:
    code = err.errno or 0
    hint = "CAP_NET_ADMIN is missing" if code == errno.EPERM else ""
    return HullError(operation, os.strerror(code) if code else str(err) or type(err).__name__, hint, code)


# --- the changes


def set_link(index: int, *, is_up: bool, mtu_bytes: int = 0) -> Change:
    fields = {"index": index, "flags": _IFF_UP if is_up else 0, "change": _IFF_UP}
    body = Body(fields, [("IFLA_MTU", mtu_bytes)] if mtu_bytes else [])
    return Change(f"set the interface {'up' if is_up else 'down'}", "RTM_NEWLINK", 0, body, frozenset(), is_up)


def limit_gso(index: int, most_bytes: int) -> Change:
    """Largest super-segment that the kernel hands to the device; old kernels cannot."""
    body = Body({"index": index}, [("IFLA_GSO_MAX_SIZE", most_bytes)])
    return Change("limit super-segments", "RTM_NEWLINK", 0, body, frozenset(range(1, 134)))


def _address(index: int, ip: IPAddress, length: int, flags: int) -> Body:
    fields = {"family": FAMILY[ip.version], "prefixlen": length, "flags": flags, "index": index}
    return Body(fields | {"scope": _SCOPE_UNIVERSE}, [("IFA_LOCAL", str(ip)), ("IFA_ADDRESS", str(ip))])


def add_address(index: int, ip: IPAddress, length: int) -> Change:
    body = _address(index, ip, length, _IFA_F_NODAD if ip.version == 6 else 0)
    return Change(f"add the address {ip}", "RTM_NEWADDR", _CREATE | _EXCLUSIVE, body, _EXISTS, (ip, length))


def delete_address(index: int, ip: IPAddress, length: int) -> Change:
    return Change(f"delete the address {ip}", "RTM_DELADDR", 0, _address(index, ip, length, 0), _GONE, (ip, length))


def _route(route: Route, table: int, index: int) -> Body:
    prefix = route.prefix
    fields = {
        "family": FAMILY[prefix.version],
        "dst_len": prefix.prefixlen,
        "proto": _RTPROT_STATIC,
        "scope": _SCOPE_LINK if route.through_device and prefix.version == 4 else _SCOPE_UNIVERSE,
        "type": _RTN_THROW if route.is_throw else _RTN_UNREACHABLE if route.is_bar else _RTN_UNICAST,
    }
    attributes: list[tuple[str, object]] = [("RTA_TABLE", table)]
    if prefix.prefixlen:
        attributes.append(("RTA_DST", str(prefix.network_address)))
    if route.is_bar:
        attributes.append(("RTA_PRIORITY", _LAST_METRIC))
    if route.through_device:
        attributes.append(("RTA_OIF", index))
    return Body(fields, attributes)


def add_route(route: Route, table: int, index: int) -> Change:
    what = f"add the {'throw ' if route.is_throw else 'unreachable ' if route.is_bar else ''}route {route.prefix}"
    return Change(what, "RTM_NEWROUTE", _CREATE | _REPLACE, _route(route, table, index), _EXISTS, route)


def delete_route(route: Route, table: int, index: int) -> Change:
    what = f"delete the route {route.prefix}"
    return Change(what, "RTM_DELROUTE", 0, _route(route, table, index), _GONE, route)


def _rule(rule: Rule) -> Body:
    fields = {"family": FAMILY[rule.family], "action": _ACTION_LOOKUP if rule.table else _ACTION_UNREACHABLE}
    attributes: list[tuple[str, object]] = [("FRA_PRIORITY", rule.priority)]
    if rule.table:
        attributes.append(("FRA_TABLE", rule.table))
    if rule.mark:
        attributes += [("FRA_FWMARK", rule.mark), ("FRA_FWMASK", rule.mask)]
    return Body(fields, attributes)


def add_rule(rule: Rule) -> Change:
    body = _rule(rule)
    body = body._replace(attributes=[*body.attributes, ("FRA_PROTOCOL", _RTPROT_STATIC)])
    what = f"add the IPv{rule.family} rule {rule.priority}"
    return Change(what, "RTM_NEWRULE", _CREATE | _EXCLUSIVE, body, _EXISTS, rule)


def delete_rule(rule: Rule) -> Change:
    return Change(f"delete the IPv{rule.family} rule {rule.priority}", "RTM_DELRULE", 0, _rule(rule), _GONE, rule)
