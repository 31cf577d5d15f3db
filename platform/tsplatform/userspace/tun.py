"""The userspace TUN: drives `tsd.netstack.Stack` on the running loop, and is the host's `OverlayNet` at the same time.

Spec of the inbound rules: tailscale `wgengine/netstack`. Everything runs on one loop with one timer handle; work that
the application causes is gathered and flushed once per loop iteration. Works on asyncio and on uvloop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tsd.base.addr import AddrPort, IPAddress, IPPrefix
from tsd.base.clock import Clock, SystemClock
from tsd.base.entropy import Entropy, system_entropy
from tsd.base.tasks import Tasks
from tsd.hull import Frame, StreamHandler
from tsd.netstack.events import (
    DatagramReceived,
    EchoRequested,
    Event,
    Listener,
    StreamAccepted,
    StreamAdvanced,
    SynReceived,
)
from tsd.netstack.stack import Stack
from tsd.netstack.tcp.connection import Connection
from tsplatform.userspace.forward import Forwarder, Protect
from tsplatform.userspace.hostsock import serve_stream
from tsplatform.userspace.streams import OverlayDatagrams, OverlayStream

log = logging.getLogger(__name__)

UNREACHABLE_PORT = 3
_MAX_ROUNDS = 64


class NetstackTun:
    """hull.Tun and hull.OverlayNet in one."""

    name = "userspace-networking"
    is_userspace = True

    def __init__(
        self,
        addresses: Sequence[IPAddress] = (),
        mtu_bytes: int = 1280,
        *,
        entropy: Entropy = system_entropy,
        clock: Clock | None = None,
        protect: Protect | None = None,
    ) -> None:
        self.mtu_bytes = mtu_bytes
        self.stack = Stack(addresses, mtu_bytes, entropy)
        self.stack.forwards = True
        self.forwarder = Forwarder(self, protect)
        self._clock = clock or SystemClock()
        self._on_frames: Callable[[list[Frame]], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: list[Frame] = []
        self._is_running = False
        self._is_kicked = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._latest = 0.0
        self._listeners: dict[AddrPort, Listener] = {}
        self._tasks = Tasks(log)

    # -- the engine's side -------------------------------------------------------------------------------------

    def attach(self, on_frames: Callable[[list[Frame]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self.kick()

    def deliver(self, frames: Sequence[Frame]) -> None:
        if self._is_running:
            self._inbox += frames
            return
        self._run(frames)

    def close(self) -> None:
        self.forwarder.close()
        self._on_frames = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tasks.cancel()

    def set_addresses(self, addresses: Sequence[IPAddress]) -> None:
        """Replace our overlay addresses; connections are not touched."""
        self.stack.set_addresses(addresses)

    def set_subnets(self, subnets: Sequence[IPPrefix]) -> None:
        """Prefixes that we forward for other nodes (advertised and approved routes, exit node)."""
        self.stack.set_subnets(subnets)

    def proxy_origin(self, proto: str, host: AddrPort) -> AddrPort | None:
        """Which overlay client is behind a socket that we opened on the host; `proto` is "tcp" or "udp"."""
        return self.forwarder.origins.get((proto, host))

    # -- the application's side --------------------------------------------------------------------------------

    async def connect(self, remote: AddrPort, timeout_s: float = 10.0) -> OverlayStream:
        connection = self.stack.connect(remote, self.now())
        source = self.stack.own_address(remote.ip.version) or remote.ip
        stream = OverlayStream(self, connection, AddrPort(source, connection.header.lport), remote)
        self.kick()
        await stream.wait_open(timeout_s)
        return stream

    async def listen(self, local: AddrPort, handler: StreamHandler) -> int:
        address = None if local.ip.is_unspecified else local.ip
        listener = self.stack.listen(address, local.port, handler)
        self._listeners[AddrPort(local.ip, listener.port)] = listener
        return listener.port

    def unlisten(self, local: AddrPort) -> None:
        listener = self._listeners.pop(local, None)
        if listener is not None:
            self.stack.unlisten(listener)

    async def open_datagram(self, local: AddrPort | None, remote_family: int = 4) -> OverlayDatagrams:
        if local is not None:
            remote_family = local.ip.version
        own = self.stack.own_address(remote_family)
        if own is None:
            raise OSError(99, f"no IPv{remote_family} overlay address")
        if local is None:
            return OverlayDatagrams(self, own, 0, own)
        address = None if local.ip.is_unspecified else local.ip
        return OverlayDatagrams(self, address, local.port, own)

    # -- driving the stack -------------------------------------------------------------------------------------

    def now(self) -> float:
        """Never less than before, also after a timer that fired early: round trips are measured with it."""
        now = self._clock.now()
        if now < self._latest:
            return self._latest
        self._latest = now
        return now

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def touch(self, connection: Connection) -> None:
        """A connection has something to send; it does so at the end of this loop iteration."""
        self.stack.touch(connection)
        if not self._is_kicked and not self._is_running:
            self._is_kicked = True
            self.loop.call_soon(self._on_kick)

    def kick(self) -> None:
        """Frames or events may wait in the stack."""
        if not self._is_kicked and not self._is_running:
            self._is_kicked = True
            self.loop.call_soon(self._on_kick)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """A task that lives at most as long as the TUN."""
        self._tasks.spawn(coroutine, self.loop)

    def _on_kick(self) -> None:
        self._is_kicked = False
        self._run(())

    def _on_timer(self) -> None:
        self._timer = None
        self._latest = max(self._latest, self._timer_at)
        self.stack.on_deadline(self.now())
        self._run(())

    def _run(self, frames: Sequence[Frame]) -> None:
        """Feed, dispatch, send, until nothing is left; then arm the timer."""
        if self._is_running:
            return
        self._is_running = True
        try:
            for _ in range(_MAX_ROUNDS):
                self._run_once(frames)
                frames = self._inbox
                self._inbox = []
                if not frames and not self.stack.has_work:
                    break
            else:
                self._inbox += frames
        finally:
            self._is_running = False
        if self._inbox or self.stack.has_work:
            self.loop.call_soon(self._on_kick)
        self._arm()

    def _run_once(self, frames: Sequence[Frame]) -> None:
        now = self.now()
        if frames:
            self.stack.receive(frames, now)
        for event in self.stack.take_events():
            self._dispatch(event)
        self.stack.flush(now)
        out = self.stack.take_frames()
        if out and self._on_frames is not None:
            self._on_frames(out)

    def _arm(self) -> None:
        deadline = self.stack.next_deadline()
        if deadline is None or self._on_frames is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline.at:
                return  # it looks again when it fires
            self._timer.cancel()
        self._timer_at = deadline.at
        self._timer = self.loop.call_later(max(deadline.at - self.now(), 0.0), self._on_timer)

    # -- events ------------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, StreamAdvanced):
            owner = event.connection.owner
            if owner is not None:
                owner.on_events(event.bits)
        elif isinstance(event, StreamAccepted):
            self._accept(event)
        elif isinstance(event, SynReceived):
            self.forwarder.on_syn(event)
        elif isinstance(event, DatagramReceived):
            if event.port is not None:
                event.port.owner.on_datagram(event.payload, event.remote)
            elif not self.forwarder.on_datagram(event):
                self.stack.datagrams.send_unreachable(event.packet, UNREACHABLE_PORT, self.now())
        elif isinstance(event, EchoRequested):
            self.forwarder.on_echo(event)

    def _accept(self, event: StreamAccepted) -> None:
        connection = event.connection
        local, remote = self.stack.endpoints(connection)
        stream = OverlayStream(self, connection, local, remote)
        self.spawn(serve_stream(event.listener.owner, stream, log))
