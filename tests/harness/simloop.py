"""The loop of simulations: connections run over a `SimNet`, timers belong to hosts, real I/O is refused.

Hosts that are frozen or asleep run no timers; those of a sleeper go on where they stood.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Any

from harness.jumploop import JumpLoop
from harness.simnet import RESOLUTION_S, Host, SimNet, current_host
from tsd.base.addr import AddrPort

FIRST_RETRY_S = 0.2
MAX_RETRY_S = 120.0
GIVE_UP_S = 900.0
"""As Linux does after 15 retransmissions."""
SYN_RETRIES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class SimStream(asyncio.Transport):
    """One end of a TCP connection."""

    def __init__(self, net: SimNet, local: AddrPort, remote: AddrPort, host: Host, seen_as: AddrPort) -> None:
        super().__init__({"sockname": (str(local.ip), local.port), "peername": (str(remote.ip), remote.port)})
        self.net = net
        self.host = host
        self.local = local
        self.seen_as = seen_as
        self.peer: SimStream
        self._nat = host.nat
        self._nat_epoch = host.nat.epoch if host.nat is not None else 0
        self._protocol: Any = None
        self._out: deque[tuple[float, str, bytes]] = deque()
        self._stalled_since: float | None = None
        self._retry_s = FIRST_RETRY_S
        self._closing = False
        self._is_lost = False
        self._paused = False
        self._held: list[tuple[str, bytes]] = []
        host.streams.append(self)

    # -- asyncio.Transport -------------------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol  # type: ignore[no-any-return]

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        if not self._closing and data:
            self._send("data", bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing:
            self._send("fin", b"")

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return None

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        held, self._held = self._held, []
        for kind, data in held:
            self._take(kind, data)

    def is_reading(self) -> bool:
        return not self._paused

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._send("fin", b"")
            self.net.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._is_lost:
            self._closing = True
            self._out.clear()
            self._send("rst", b"")
            self.net.loop.call_soon(self._lose, None)

    # -- on the way --------------------------------------------------------------------------------------------

    def _send(self, kind: str, data: bytes) -> None:
        delay_s = self.host.link.latency_s + self.peer.host.link.latency_s
        self._out.append((self.net.loop.time() + delay_s, kind, data))
        self.net.after(delay_s, self._push)

    def _push(self) -> None:
        now = self.net.loop.time()
        while self._out and self._out[0][0] <= now + RESOLUTION_S:
            if self._is_cut():
                self._stall(now)
                return
            if self._stalled_since is not None:
                self._stalled_since, self._retry_s = None, FIRST_RETRY_S
            if self._is_forgotten_by_nat():
                self._lose(ConnectionResetError(errno.ECONNRESET, "reset by a NAT that forgot the connection"))
                return
            _, kind, data = self._out.popleft()
            if self.peer._is_lost:
                if kind == "data":
                    self._lose(ConnectionResetError(errno.ECONNRESET, "connection reset by peer"))
                continue
            self.peer._arrive(kind, data)

    def _stall(self, now: float) -> None:
        """Retransmit later; a reset is sent once only."""
        if self._out[0][1] == "rst":
            self._out.clear()
            return
        if self._stalled_since is None:
            self._stalled_since = now
        if now - self._stalled_since > GIVE_UP_S:
            self._out.clear()
            self._lose(TimeoutError(errno.ETIMEDOUT, "connection timed out"))
            return
        self.net.after(self._retry_s, self._push)
        self._retry_s = min(MAX_RETRY_S, self._retry_s * 2)

    def _is_cut(self) -> bool:
        for end, other in ((self, self.peer), (self.peer, self)):
            host = end.host
            if not host.is_reachable or end.local.ip not in host.addresses or host.nat is not end._nat:
                return True
            if ("tcp", end.local.port) in host.blocked:
                return True
            if end._nat is not None and end._nat.epoch != end._nat_epoch and other is self:
                return True
        return False

    def _is_forgotten_by_nat(self) -> bool:
        """Our NAT rebooted: what we send now comes from a stranger."""
        return self._nat is not None and self._nat.epoch != self._nat_epoch

    def _arrive(self, kind: str, data: bytes) -> None:
        if self.host.is_frozen:
            self.host.parked.append(lambda: self._take(kind, data))
        else:
            self._take(kind, data)

    def _take(self, kind: str, data: bytes) -> None:
        if self._is_lost:
            return
        if self._paused and kind != "rst":
            self._held.append((kind, data))
            return
        with self.net.on(self.host):
            self.host.ran(self.net.loop.time())
            if kind == "rst":
                self._closing = True
                self._lose(ConnectionResetError(errno.ECONNRESET, "connection reset by peer"))
            elif kind == "fin":
                if not self._closing and not self._protocol.eof_received():
                    self.close()
            elif not self._closing:
                self._deliver(data)

    def _deliver(self, data: bytes) -> None:
        if not isinstance(self._protocol, asyncio.BufferedProtocol):
            self._protocol.data_received(data)
            return
        view = memoryview(data)
        while view:
            buffer = self._protocol.get_buffer(len(view))
            size = min(len(buffer), len(view))
            memoryview(buffer)[:size] = view[:size]
            self._protocol.buffer_updated(size)
            view = view[size:]

    def _lose(self, exc: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._closing = True
        if self in self.host.streams:
            self.host.streams.remove(self)
        if self._protocol is not None:
            with self.net.on(self.host):
                self._protocol.connection_lost(exc)


class SimServer(asyncio.AbstractServer):
    def __init__(self, host: Host, port: int) -> None:
        self._host = host
        self.port = port

    def close(self) -> None:
        self._host.listeners.pop(self.port, None)

    async def wait_closed(self) -> None:
        return None

    def is_serving(self) -> bool:
        return self.port in self._host.listeners

    async def start_serving(self) -> None:
        return None

    @property
    def sockets(self) -> tuple[Any, ...]:
        return (self,)

    def getsockname(self) -> tuple[str, int]:
        """What a listening socket would say."""
        return str(self._host.ip), self.port


class _HostTimer:
    """A timer that knows whether its host runs, and how long it slept meanwhile."""

    __slots__ = ("_args", "_callback", "_host", "_loop", "_slept_s", "_when", "handle")

    def __init__(self, loop: SimLoop, host: Host, when: float, callback: Callable[..., Any], args: Any) -> None:
        self._loop = loop
        self._host = host
        self._when = when
        self._callback = callback
        self._args = args
        self._slept_s = host.slept_s
        self.handle: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        host, handle = self._host, self.handle
        if handle is not None and handle.cancelled():
            return
        if not host.is_running:
            host.parked.append(lambda: self._again(0.0))
            return
        late_s = host.slept_s - self._slept_s
        if late_s > 0:
            self._slept_s = host.slept_s
            self._when += late_s
            if self._when > self._loop.time():
                self._again(self._when)
                return
        host.timers_fired += 1
        host.ran(self._loop.time())
        self._callback(*self._args)

    def _again(self, when: float) -> None:
        with self._loop.net.on(self._host):
            self._loop.call_at_for_nobody(max(when, self._loop.time()), self)


class SimLoop(JumpLoop):
    """A jump loop whose connections run over a `SimNet`."""

    net: SimNet

    # -- timers ------------------------------------------------------------------------------------------------

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        host = current_host.get() if context is None else context.get(current_host)
        if host is None:
            return super().call_at(when, callback, *args, context=context)
        timer = _HostTimer(self, host, when, callback, args)
        timer.handle = super().call_at(when, timer, context=context)
        return timer.handle

    def call_at_for_nobody(self, when: float, callback: Callable[..., Any]) -> asyncio.TimerHandle:
        return super().call_at(when, callback)

    # -- connections -------------------------------------------------------------------------------------------

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **kw: Any) -> Any:  # type: ignore[override]
        here = current_host.get()
        assert here is not None, "connections are made on a host: `with net.on(host)`"
        remote = AddrPort(self.net.resolve(host), port)
        there = await self._find(here, remote)
        if kw.get("ssl") or kw.get("sock") is not None:
            raise NotImplementedError("simulations speak neither TLS nor over sockets of the machine")
        local_ip = here.address(remote.ip.version)
        assert local_ip is not None
        local = AddrPort(local_ip, here.free_port())
        is_hidden = here.nat is not None and local_ip.version == 4 and there.nat is not here.nat
        seen_as = AddrPort(here.nat.external, local.port) if is_hidden and here.nat is not None else local
        near = SimStream(self.net, local, remote, here, seen_as)
        far = SimStream(self.net, remote, seen_as, there, remote)
        near.peer, far.peer = far, near
        accept = there.listeners[port]
        with self.net.on(there):
            there.ran(self.time())
            server_protocol = accept()
            far.set_protocol(server_protocol)
            server_protocol.connection_made(far)
        protocol = protocol_factory()
        near.set_protocol(protocol)
        protocol.connection_made(near)
        return near, protocol

    async def _find(self, here: Host, remote: AddrPort) -> Host:
        """The listening host, after a handshake's round trip. Raises OSError."""
        for wait_s in SYN_RETRIES_S:
            if not here.is_plugged or here.address(remote.ip.version) is None:
                raise OSError(errno.ENETUNREACH, "network is unreachable")
            there: Any = self.net.public.get(remote.ip)
            if here.nat is not None and remote.ip in here.nat.inside:
                there = here.nat.inside[remote.ip]
            is_open = isinstance(there, Host) and there.is_reachable and ("tcp", remote.port) not in there.blocked
            if is_open and here.link.is_up:
                await asyncio.sleep(2 * (here.link.latency_s + there.link.latency_s))
                if remote.port not in there.listeners:
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
                assert isinstance(there, Host)
                return there
            await asyncio.sleep(wait_s)
        raise TimeoutError(errno.ETIMEDOUT, "connection timed out")

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **kw: Any) -> Any:  # type: ignore[override]
        here = current_host.get()
        assert here is not None, "servers run on a host: `with net.on(host)`"
        chosen = port or here.free_port()
        if chosen in here.listeners:
            raise OSError(errno.EADDRINUSE, "address already in use")
        here.listeners[chosen] = protocol_factory
        return SimServer(here, chosen)

    async def getaddrinfo(self, host: Any, port: Any, **kw: Any) -> Any:  # type: ignore[override]
        try:
            ip = self.net.resolve(host)
        except ValueError:
            raise OSError(f"{host}: no such name") from None
        return [(2 if ip.version == 4 else 10, 1, 6, "", (str(ip), port or 0))]

    # -- what a simulation must not do -------------------------------------------------------------------------

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        raise AssertionError("a simulation waits for a file descriptor")

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:
        raise AssertionError("a simulation waits for a file descriptor")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise AssertionError("a simulation uses a thread")

    async def create_datagram_endpoint(self, *args: Any, **kw: Any) -> Any:
        raise AssertionError("a simulation opens a real UDP socket")

    async def sock_connect(self, sock: Any, address: Any) -> None:
        raise AssertionError("a simulation opens a real TCP connection")
