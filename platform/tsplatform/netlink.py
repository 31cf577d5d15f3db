"""Reading interfaces and addresses over a raw netlink socket, and hearing when they change.

Standard: RFC 3549 and linux/rtnetlink.h. Only what the link monitor needs, from the standard library alone, because
every daemon pays for it at start; changing routes and rules is the Linux router's business.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import NamedTuple

from tsd.base.addr import IPAddress

RTM_NEWLINK, RTM_GETLINK, RTM_NEWADDR, RTM_GETADDR = 16, 18, 20, 22
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST_DUMP = 0x1 | 0x100 | 0x200
IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS, IFLA_IFNAME = 1, 2, 8, 3
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
IFA_F_TEMPORARY, IFA_F_DADFAILED, IFA_F_DEPRECATED, IFA_F_TENTATIVE = 0x01, 0x08, 0x20, 0x40
# RTMGRP_*: link, v4 and v6 addresses, v4 and v6 routes.
CHANGE_GROUPS = 0x1 | 0x10 | 0x100 | 0x40 | 0x400

_HEADER = struct.Struct("=IHHII")


class Interface(NamedTuple):
    number: int
    name: str
    flags: int


class Address(NamedTuple):
    number: int
    ip: IPAddress
    prefix_length: int
    is_usable: bool


def open_changes(groups: int = CHANGE_GROUPS) -> socket.socket:
    """A non-blocking socket that becomes readable when something changed. Raises OSError."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    try:
        sock.setblocking(False)
        sock.bind((0, groups))
    except OSError:
        sock.close()
        raise
    return sock


def watch(loop: asyncio.AbstractEventLoop, sock: socket.socket, on_change: Callable[[], None]) -> None:
    """Call `on_change` when messages came; `loop.remove_reader(sock)` ends it.

    libuv (under uvloop) silently stops to watch a socket that has an error, and a queue that ran over is one.
    """

    def on_readable() -> None:
        try:
            heard, has_run_over = drain(sock)
        except OSError:
            heard, has_run_over = True, True
        if has_run_over:
            loop.remove_reader(sock)
            loop.add_reader(sock, on_readable)
        if heard:
            on_change()

    loop.add_reader(sock, on_readable)


def drain(sock: socket.socket) -> tuple[bool, bool]:
    """Read what is there: (whether anything was, whether messages were lost, which counts as something)."""
    heard = has_run_over = False
    while True:
        try:
            if not sock.recv(65536):
                return heard, has_run_over
            heard = True
        except BlockingIOError:
            return heard, has_run_over
        except OSError as err:
            if err.errno != errno.ENOBUFS:
                raise
            heard = has_run_over = True


def interfaces() -> list[Interface]:
    """Raises OSError."""
    return [
        link
        for kind, body in _dump(RTM_GETLINK, socket.AF_UNSPEC)
        if kind == RTM_NEWLINK and (link := parse_link(body)) is not None
    ]


def addresses() -> list[Address]:
    """Raises OSError."""
    found = [parse_address(body) for kind, body in _dump(RTM_GETADDR, socket.AF_UNSPEC) if kind == RTM_NEWADDR]
    return [address for address in found if address is not None]


def _dump(request: int, family: int) -> Iterator[tuple[int, memoryview]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(2.0)
        sock.bind((0, 0))
        sock.send(_HEADER.pack(_HEADER.size + 16, request, NLM_F_REQUEST_DUMP, 1, 0) + bytes([family]) + bytes(15))
        while True:
            for kind, body in messages(sock.recv(131072)):
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    code = -int(struct.unpack_from("=i", body)[0])
                    raise OSError(code, os.strerror(code))
                yield kind, body


def messages(raw: bytes) -> Iterator[tuple[int, memoryview]]:
    """The netlink messages of one datagram: type and body."""
    view, offset = memoryview(raw), 0
    while offset + _HEADER.size <= len(view):
        length, kind = struct.unpack_from("=IH", view, offset)
        if length < _HEADER.size:
            return
        yield kind, view[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def attributes(body: memoryview, offset: int) -> dict[int, memoryview]:
    out: dict[int, memoryview] = {}
    while offset + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, offset)
        if length < 4:
            break
        out[kind & 0x3FFF] = body[offset + 4 : offset + length]
        offset += (length + 3) & ~3
    return out


def parse_link(body: memoryview) -> Interface | None:
    """None when the message is too short."""
    if len(body) < 16:
        return None
    index, flags = struct.unpack_from("=iI", body, 4)
    name = attributes(body, 16).get(IFLA_IFNAME, memoryview(b""))
    return Interface(index, bytes(name).rstrip(b"\0").decode("utf-8", "replace"), flags)


def parse_address(body: memoryview) -> Address | None:
    """None when the message is too short or holds no address."""
    if len(body) < 8:
        return None
    _family, prefix_length, flags, _scope, index = struct.unpack_from("=BBBBI", body)
    found = attributes(body, 8)
    raw = found.get(IFA_LOCAL, found.get(IFA_ADDRESS))
    if raw is None or len(raw) not in (4, 16):
        return None
    if len(found.get(IFA_FLAGS, b"")) >= 4:
        flags = struct.unpack("=I", found[IFA_FLAGS][:4])[0]
    is_usable = not flags & (IFA_F_DADFAILED | IFA_F_TENTATIVE | IFA_F_DEPRECATED)
    return Address(index, ip_address(bytes(raw)), prefix_length, is_usable)
