"""Hears when somebody changes the firewall: netlink's events of nftables, and the counters of iptables-legacy.

Standard: linux/netfilter/nf_tables.h (NFNLGRP_NFTABLES; each transaction ends with NEWGEN, which names the program) and
linux/netfilter_ipv4/ip_tables.h (IPT_SO_GET_INFO). The tables of iptables-legacy have no events.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
from collections.abc import Callable

from tsplatform import netlink

log = logging.getLogger(__name__)

_NETLINK_NETFILTER, _GROUP_NFTABLES = 12, 1 << 6
_SUBSYSTEM, _NEWGEN = 10, 15
_NAME, _GEN_PID, _GEN_NAME = 1, 2, 3
_NFGENMSG_BYTES = 4
_GET_INFO = 64
_INFO_BYTES = 84
_NAME_BYTES = 32


class NftWatch:
    """`on_change(tables, program)` for each batch of events; no tables: events were lost."""

    def __init__(self, on_change: Callable[[frozenset[str], str], None]) -> None:
        self._on_change = on_change
        self._sock: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """On the running loop; without such events nothing is watched."""
        self._loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        try:
            sock.setblocking(False)
            sock.bind((0, _GROUP_NFTABLES))
        except OSError as err:
            sock.close()
            log.info("changes of the firewall are not watched: netlink: %s", err.strerror)
            return
        self._sock = sock
        self._loop.add_reader(sock, self._on_readable)

    def stop(self) -> None:
        if self._sock is not None and self._loop is not None:
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None

    def _on_readable(self) -> None:
        tables: set[str] = set()
        program = ""
        sock, loop = self._sock, self._loop
        while sock is not None and loop is not None:
            try:
                raw = sock.recv(1 << 17)
            except BlockingIOError:
                break
            except OSError as err:
                if err.errno != errno.ENOBUFS:
                    return self.stop()
                loop.remove_reader(sock)  # libuv watches no socket that had an error
                loop.add_reader(sock, self._on_readable)
                self._on_change(frozenset(), program)
                return None
            touched, by = parse_events(raw)
            tables |= touched
            program = by or program
        if tables:
            self._on_change(frozenset(tables), program)
        return None


def parse_events(raw: bytes) -> tuple[set[str], str]:
    """(tables that were changed, the program that did it)."""
    tables: set[str] = set()
    program = ""
    for kind, body in netlink.messages(raw):
        if kind >> 8 != _SUBSYSTEM or len(body) < _NFGENMSG_BYTES:
            continue
        found = netlink.attributes(body, _NFGENMSG_BYTES)
        if kind & 0xFF == _NEWGEN:
            pid = int.from_bytes(found.get(_GEN_PID, b""), "big")
            name = _text(found.get(_GEN_NAME))
            program = f"{name} (process {pid})" if name else ""
        elif _text(found.get(_NAME)):
            tables.add(_text(found.get(_NAME)))
    return tables, program


def _text(raw: memoryview | None) -> str:
    return bytes(raw).rstrip(b"\0").decode("ascii", "replace") if raw is not None else ""


class LegacyCounters:
    """Number and size of the rules in the tables of iptables-legacy; cheap enough to be asked twice a second."""

    def __init__(self, tables: tuple[str, ...]) -> None:
        self._tables = tables
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._sockets: list[tuple[socket.socket, int]] = []
        for family, level in ((socket.AF_INET, socket.IPPROTO_IP), (socket.AF_INET6, socket.IPPROTO_IPV6)):
            with contextlib.suppress(OSError):
                self._sockets.append((socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW), level))

    def close(self) -> None:
        for sock, _ in self._sockets:
            sock.close()

    def read(self) -> tuple[bytes, ...]:
        """Equal as long as nothing was added or deleted."""
        return tuple(self._info(sock, level, table) for sock, level in self._sockets for table in self._tables)

    def _info(self, sock: socket.socket, level: int, table: str) -> bytes:
        buffer = ctypes.create_string_buffer(table.encode(), _INFO_BYTES)
        length = ctypes.c_uint32(_INFO_BYTES)
        done = self._libc.getsockopt(sock.fileno(), level, _GET_INFO, buffer, ctypes.byref(length))
        return bytes(buffer.raw[_NAME_BYTES:]) if done == 0 else b""
