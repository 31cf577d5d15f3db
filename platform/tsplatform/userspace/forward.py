"""Inbound flows that no overlay listener claims: to the host's loopback for our own addresses, to the real address for
advertised subnets.

Spec: tailscale `wgengine/netstack`. TCP: the host is dialled first and the SYN answered only when that worked;
where 127.0.0.1 refuses, ::1 is tried. UDP: one host socket per flow, idle 2 minutes, 30 s for port 53. Both tables are
bounded; `origins` serves WhoIs.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

from tsd.base.addr import AddrPort, behind_via
from tsd.base.log import DropCounter
from tsd.netstack.events import DatagramReceived, EchoRequested, SynReceived
from tsd.netstack.stack import Stack
from tsd.netstack.tcp.connection import Connection
from tsplatform.userspace.bridge import Bridge
from tsplatform.userspace.echo import EchoForwarder
from tsplatform.userspace.hostsock import address_of
from tsplatform.userspace.readiness import WRITABLE, Readiness, readiness
from tsplatform.userspace.streams import OverlayStream

log = logging.getLogger(__name__)

Protect = Callable[[socket.socket], None]

DIAL_TIMEOUT_S = 10.0
UDP_IDLE_S = 120.0
UDP_IDLE_DNS_S = 30.0
MAX_UDP_FLOWS = 4096
_SWEEP_S = 5.0
_DATAGRAMS_PER_WAKE = 64
_STILL_CONNECTING = (errno.EINPROGRESS, errno.EALREADY)
LOOPBACK, LOOPBACK_V6 = IPv4Address("127.0.0.1"), IPv6Address("::1")


class Driver(Protocol):
    """The TUN, as the forwarder sees it."""

    stack: Stack

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def now(self) -> float: ...

    def touch(self, connection: Connection) -> None: ...

    def kick(self) -> None: ...


class _UdpFlow:
    __slots__ = ("expires_at", "idle_s", "local", "origin", "remote", "sock")

    def __init__(self, sock: socket.socket, local: AddrPort, remote: AddrPort, idle_s: float) -> None:
        self.sock = sock
        self.local = local
        self.remote = remote
        self.idle_s = idle_s
        self.expires_at = 0.0
        self.origin = AddrPort(LOOPBACK, 0)


class _Dial:
    """A host connection in the making for one SYN."""

    __slots__ = ("attempt", "sock", "timer")

    def __init__(self, attempt: SynReceived, sock: socket.socket) -> None:
        self.attempt = attempt
        self.sock = sock
        self.timer: asyncio.TimerHandle | None = None


class Forwarder:
    def __init__(self, driver: Driver, protect: Protect | None = None) -> None:
        self._driver = driver
        self._protect = protect
        self._dials: dict[SynReceived, _Dial] = {}
        self._bridges: dict[Bridge, AddrPort] = {}
        self._flows: OrderedDict[tuple[AddrPort, AddrPort], _UdpFlow] = OrderedDict()
        self._readiness: Readiness | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._echo = EchoForwarder(driver, protect)
        self.origins: dict[tuple[str, AddrPort], AddrPort] = {}
        self.drops = DropCounter()
        self.only_ports: frozenset[int] | None = None
        """Only flows to these ports go to the host, to the loopback address of their family; all others are refused."""

    @property
    def health(self) -> str:
        """Text of a lasting limitation, or ""."""
        return self._echo.health

    @property
    def connection_count(self) -> int:
        return len(self._bridges)

    @property
    def readiness(self) -> Readiness:
        if self._readiness is None:
            self._readiness = readiness(self._driver.loop)
        return self._readiness

    def close(self) -> None:
        for dial in list(self._dials.values()):
            self._end_dial(dial)
            dial.sock.close()
        for bridge in list(self._bridges):
            bridge.close()
        for key in list(self._flows):
            self._drop_flow(key)
        if self._readiness is not None:
            self._readiness.close()
            self._readiness = None
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._echo.close()

    def _is_wanted(self, port: int) -> bool:
        return self.only_ports is None or port in self.only_ports

    def _host_target(self, local: AddrPort, is_own: bool) -> AddrPort:
        """Both families of our own addresses go to IPv4 loopback, except when only some ports are wanted."""
        if not is_own:
            return AddrPort(behind_via(local.ip), local.port)
        return AddrPort(LOOPBACK_V6 if self.only_ports and local.ip.version == 6 else LOOPBACK, local.port)

    # -- TCP ---------------------------------------------------------------------------------------------------

    def on_syn(self, attempt: SynReceived) -> None:
        """Dial the host side of a connection attempt."""
        if not self._is_wanted(attempt.local.port):
            self._driver.stack.refuse(attempt)
            return
        self._dial(attempt, self._host_target(attempt.local, attempt.is_own))

    def _dial(self, attempt: SynReceived, target: AddrPort) -> None:
        try:
            ready = self.readiness
            sock = socket.socket(socket.AF_INET if target.ip.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
        except OSError as err:
            self._note("no_socket", err)
            if target.ip == LOOPBACK_V6:
                self._driver.stack.refuse(attempt)
            else:
                self._driver.stack.forget(attempt)
            return
        dial = _Dial(attempt, sock)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._protect is not None and not attempt.is_own:
                self._protect(sock)
            code = _connect(sock, (str(target.ip), target.port))
            if code in _STILL_CONNECTING:
                ready.watch(sock.fileno(), partial(self._on_dialled, dial))
                self._dials[attempt] = dial
                dial.timer = self._driver.loop.call_later(DIAL_TIMEOUT_S, self._on_dial_timeout, dial)
                return
        except OSError as err:
            code = err.errno or errno.EIO
        self._settle(dial, code)

    def _on_dialled(self, dial: _Dial, bits: int) -> None:
        if not bits & WRITABLE:
            return
        self._end_dial(dial)
        self._settle(dial, dial.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self._driver.kick()

    def _on_dial_timeout(self, dial: _Dial) -> None:
        self._end_dial(dial)
        dial.sock.close()
        self._driver.stack.forget(dial.attempt)

    def _end_dial(self, dial: _Dial) -> None:
        self._dials.pop(dial.attempt, None)
        if dial.timer is not None:
            dial.timer.cancel()
            self.readiness.forget(dial.sock.fileno())

    def _settle(self, dial: _Dial, code: int) -> None:
        """The dial ended: accept the overlay connection, or refuse it."""
        attempt, sock = dial.attempt, dial.sock
        driver = self._driver
        if code:
            is_v4 = sock.family == socket.AF_INET
            sock.close()
            if code == errno.ECONNREFUSED and is_v4 and attempt.is_own and self.only_ports is None and socket.has_ipv6:
                # Many development servers listen on what "localhost" means first, which is ::1 alone.
                self._dial(attempt, AddrPort(LOOPBACK_V6, attempt.local.port))
            else:
                driver.stack.refuse(attempt)
            return
        connection = driver.stack.accept(attempt, driver.now())
        if connection is None:
            sock.close()
            return
        stream = OverlayStream(driver, connection, attempt.local, attempt.remote)
        origin = address_of(sock.getsockname())
        bridge = Bridge(
            driver.loop,
            self.readiness,
            stream,
            sock,
            lambda: driver.touch(connection),
            driver.now,
            self._on_bridge_done,
        )
        self._bridges[bridge] = origin
        self.origins["tcp", origin] = attempt.remote
        bridge.start()

    def _on_bridge_done(self, bridge: Bridge) -> None:
        origin = self._bridges.pop(bridge, None)
        if origin is not None:
            self.origins.pop(("tcp", origin), None)

    # -- UDP ---------------------------------------------------------------------------------------------------

    def on_datagram(self, event: DatagramReceived) -> bool:
        """Send to the host on the flow's socket. False when it cannot be forwarded."""
        if not self._is_wanted(event.local.port):
            return False
        key = (event.local, event.remote)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._open_flow(event)
            if flow is None:
                return False
        self._refresh(key, flow)
        try:
            flow.sock.send(event.payload)
        except (BlockingIOError, InterruptedError):
            self.drops.add("udp_host_full")
        except ConnectionRefusedError:
            self._drop_flow(key)
            return False
        except OSError as err:
            self._note("udp_send", err)
        return True

    def _open_flow(self, event: DatagramReceived) -> _UdpFlow | None:
        is_own = event.local.ip in self._driver.stack.addresses
        target = self._host_target(event.local, is_own)
        if len(self._flows) >= MAX_UDP_FLOWS:
            self._drop_flow(next(iter(self._flows)))
        try:
            sock = self._flow_socket(target, event.remote.port, is_own)
        except OSError as err:
            self._note("udp_socket", err)
            return None
        idle_s = UDP_IDLE_DNS_S if event.local.port == 53 else UDP_IDLE_S
        flow = _UdpFlow(sock, event.local, event.remote, idle_s)
        flow.origin = address_of(sock.getsockname())
        key = (event.local, event.remote)
        self._flows[key] = flow
        self.origins["udp", flow.origin] = event.remote
        self._driver.loop.add_reader(sock.fileno(), self._on_host_datagram, key, flow)
        if self._sweeper is None:
            self._sweeper = self._driver.loop.call_later(_SWEEP_S, self._sweep)
        return flow

    def _flow_socket(self, target: AddrPort, wanted_port: int, is_own: bool) -> socket.socket:
        """Bound to the client's own port when that is free, as tailscale does."""
        sock = socket.socket(socket.AF_INET if target.ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            if self._protect is not None and not is_own:
                self._protect(sock)
            host = str(target.ip) if is_own else "0.0.0.0" if target.ip.version == 4 else "::"
            try:
                sock.bind((host, wanted_port))
            except OSError:
                sock.bind((host, 0))
            sock.connect((str(target.ip), target.port))
        except OSError:
            sock.close()
            raise
        return sock

    def _on_host_datagram(self, key: tuple[AddrPort, AddrPort], flow: _UdpFlow) -> None:
        for _ in range(_DATAGRAMS_PER_WAKE):
            try:
                payload = flow.sock.recv(65535)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._drop_flow(key)  # port unreachable
                return
            self._driver.stack.datagrams.send(flow.local, flow.remote, payload)
            self._driver.kick()
        self._refresh(key, flow)

    def _refresh(self, key: tuple[AddrPort, AddrPort], flow: _UdpFlow) -> None:
        flow.expires_at = self._driver.now() + flow.idle_s
        self._flows.move_to_end(key)

    def _sweep(self) -> None:
        now = self._driver.now()
        for key in [key for key, flow in self._flows.items() if flow.expires_at <= now]:
            self._drop_flow(key)
        self._sweeper = self._driver.loop.call_later(_SWEEP_S, self._sweep) if self._flows else None

    def _drop_flow(self, key: tuple[AddrPort, AddrPort]) -> None:
        flow = self._flows.pop(key, None)
        if flow is not None:
            self._driver.loop.remove_reader(flow.sock.fileno())
            flow.sock.close()
            self.origins.pop(("udp", flow.origin), None)

    # -- ICMP --------------------------------------------------------------------------------------------------

    def on_echo(self, event: EchoRequested) -> None:
        if self.only_ports is None:
            self._echo.forward(event)

    def _note(self, reason: str, err: OSError) -> None:
        """Count, and log only powers of two, so that a full table is not a full log."""
        self.drops.add(reason)
        count = self.drops[reason]
        if count & (count - 1) == 0:
            log.warning("cannot forward to the host: %s (%d times): %s", reason, count, err)


def _connect(sock: socket.socket, target: tuple[str, int]) -> int:
    """The error number, 0 when connected: on the loopback that is so at once, but only a second call says it."""
    code = sock.connect_ex(target)
    if code == errno.EINPROGRESS:
        code = sock.connect_ex(target)
    return 0 if code == errno.EISCONN else code
