"""The engine's UDP sockets, one per family, bound to the same port where possible, and bound anew when they fail.

Port order: the configured one, the one in use, any (tailscale: wgengine/magicsock/magicsock.go, bindSocket).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tsd.base.addr import AddrPort
from tsd.base.errors import HullError
from tsd.base.log import fields
from tsd.transport.udp import UdpSocket

log = logging.getLogger(__name__)

OnBatch = Callable[[memoryview, int, AddrPort], None]
OnError = Callable[[AddrPort, int], None]

DEFAULT_PORT = 41641


class Udp(Protocol):
    """What the engine needs of a UDP socket; simulations bring their own."""

    port: int

    def send(self, datagrams: bytes, datagram_bytes: int, to: AddrPort) -> bool: ...

    def close(self) -> None: ...


OpenUdp = Callable[[int, int, OnBatch, OnError], Udp]
"""(family 4 or 6, port, on_batch, on_error). Raises HullError."""


def host_udp(protect: Callable[[socket.socket], None]) -> OpenUdp:
    """Sockets of this host."""

    def open_udp(family: int, port: int, on_batch: OnBatch, on_error: OnError) -> Udp:
        return UdpSocket(family, port, protect, on_batch, on_error=on_error)

    return open_udp


class Borrower(Protocol):
    """Who reads and writes the sockets itself for a while."""

    def sockets_closing(self) -> None:
        """Use them no more."""

    def sockets_opened(self) -> None:
        """There are others: ask `UdpSockets.lent`."""


class Lent(NamedTuple):
    """Descriptors of both families, and what they can."""

    v4: int | None
    v6: int | None
    has_gso: bool
    has_gro: bool


class UdpSockets:
    """Both families. IPv6 is optional; IPv4 failing to bind is reported by `problem`."""

    def __init__(self, open_udp: OpenUdp, wanted_port: int, on_batch: OnBatch, on_error: OnError) -> None:
        self._open_udp = open_udp
        self._wanted_port = wanted_port
        self._on_batch = on_batch
        self._on_error = on_error
        self._v4: Udp | None = None
        self._v6: Udp | None = None
        self.problem = ""
        self._borrower: Borrower | None = None

    @property
    def port_v4(self) -> int:
        return self._v4.port if self._v4 is not None else 0

    @property
    def port_v6(self) -> int:
        return self._v6.port if self._v6 is not None else 0

    def bind(self) -> None:
        """Bind both families; existing sockets are closed first, their port is tried again."""
        current = self.port_v4
        if self._borrower is not None:
            self._borrower.sockets_closing()
        self.close()
        self.problem = ""
        try:
            self._v4 = self._first_free(4, [self._wanted_port or DEFAULT_PORT, current, 0])
        except HullError as err:
            self.problem = str(err)
            log.warning(fields("no IPv4 UDP socket", reason=err))
        try:
            self._v6 = self._first_free(6, [self.port_v4, 0])
        except HullError as err:
            log.info(fields("no IPv6 UDP socket", reason=err))
        if self._borrower is not None:
            self._borrower.sockets_opened()

    def _first_free(self, family: int, ports: list[int]) -> Udp:
        failure: HullError | None = None
        for port in dict.fromkeys(ports):
            try:
                return self._open_udp(family, port, self._on_batch, self._on_error)
            except HullError as err:
                failure = err
        assert failure is not None
        raise failure

    # --- for a pump that works on the sockets itself; sending from here goes on meanwhile

    def lend(self, borrower: Borrower) -> Lent:
        """The loop reads them no more, nor those that are bound later."""
        self._borrower = borrower
        return self.lent()

    def lent(self) -> Lent:
        ours = {4: self._v4, 6: self._v6}
        found = {family: sock for family, sock in ours.items() if isinstance(sock, UdpSocket) and not sock.is_closed}
        for sock in found.values():
            sock.pause()
        fds = {family: sock.fileno() for family, sock in found.items()}
        has_gso, has_gro = (all(getattr(s, name) for s in found.values()) for name in ("has_gso", "has_gro"))
        return Lent(fds.get(4), fds.get(6), has_gso, has_gro)

    def take_back(self) -> None:
        self._borrower = None
        for sock in (self._v4, self._v6):
            if isinstance(sock, UdpSocket) and not sock.is_closed:
                sock.resume()

    def send(self, to: AddrPort, datagrams: bytes, datagram_bytes: int) -> bool:
        sock = self._v4 if to.ip.version == 4 else self._v6
        return sock is not None and sock.send(datagrams, datagram_bytes, to)

    def close(self) -> None:
        for sock in (self._v4, self._v6):
            if sock is not None:
                sock.close()
        self._v4 = self._v6 = None
