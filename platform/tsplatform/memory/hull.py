"""A host that exists in memory only: it records what the engine asks of it and wires hosts in one process together.

For tests and simulations. Nothing here touches the machine; `MemorySwitch` joins the overlay sockets of several
hosts, in order and without loss.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tsd.base.addr import AddrPort, IPAddress
from tsd.hull import DatagramPort, DnsConfig, Frame, Hull, LinkState, RouterConfig, Stream, StreamHandler
from tsplatform.state_file import MemoryStore


class MemoryTun:
    """Records what is delivered; `inject` plays the host that sends."""

    is_userspace = True

    def __init__(self, name: str = "memory0", mtu_bytes: int = 1280) -> None:
        self.name = name
        self.mtu_bytes = mtu_bytes
        self.delivered: list[Frame] = []
        self.is_closed = False
        self._on_frames: Callable[[list[Frame]], None] | None = None

    def attach(self, on_frames: Callable[[list[Frame]], None]) -> None:
        self._on_frames = on_frames

    def deliver(self, frames: Sequence[Frame]) -> None:
        self.delivered.extend(Frame(bytes(frame.packet), frame.segment_bytes) for frame in frames)

    def inject(self, packets: Sequence[bytes]) -> None:
        if self._on_frames is not None and not self.is_closed:
            self._on_frames([Frame(packet) for packet in packets])

    def take_delivered(self) -> list[Frame]:
        out, self.delivered = self.delivered, []
        return out

    def close(self) -> None:
        self.is_closed = True


class RecordingRouter:
    def __init__(self) -> None:
        self.config = RouterConfig()
        self.applied: list[RouterConfig] = []

    def apply(self, config: RouterConfig) -> None:
        if config != self.config:
            self.applied.append(config)
        self.config = config

    def revert(self) -> None:
        self.config = RouterConfig()


class RecordingDns:
    def __init__(self, base: Sequence[str] = ()) -> None:
        self.config = DnsConfig()
        self.applied: list[DnsConfig] = []
        self._base = list(base)

    def apply(self, config: DnsConfig) -> None:
        if config != self.config:
            self.applied.append(config)
        self.config = config

    def revert(self) -> None:
        self.config = DnsConfig()

    def base_resolvers(self) -> list[str]:
        return list(self._base)

    def describe(self) -> dict[str, Any]:
        return {"Mode": "none", "Because": ["memory hull"]}


class ManualLinks:
    """Links that a test changes by hand."""

    def __init__(self, state: LinkState | None = None) -> None:
        self._state = state if state is not None else LinkState(is_up=True)
        self._queue: asyncio.Queue[LinkState] = asyncio.Queue()

    def state(self) -> LinkState:
        return self._state

    def change(self, state: LinkState) -> None:
        self._state = state
        self._queue.put_nowait(state)

    def wake(self) -> None:
        """As after a suspension: the same state again."""
        self._queue.put_nowait(self._state)

    async def changes(self) -> AsyncIterator[LinkState]:
        while True:
            yield await self._queue.get()


class MemoryUnderlay:
    def __init__(self, addresses: Sequence[IPAddress] = ()) -> None:
        self.local = list(addresses)
        self.protected_count = 0

    def protect(self, sock: socket.socket) -> None:
        self.protected_count += 1

    def addresses(self) -> list[IPAddress]:
        return list(self.local)


class MemoryStream:
    """One end of a pipe between two hosts."""

    def __init__(self, local: AddrPort, remote: AddrPort) -> None:
        self.local = local
        self.remote = remote
        self.peer: MemoryStream | None = None
        self._received: asyncio.Queue[bytes | None] = asyncio.Queue(64)
        self._rest = b""
        self._is_at_end = False
        self._is_reset = False

    async def read(self, limit: int) -> bytes:
        if not self._rest and not self._is_at_end:
            chunk = await self._received.get()
            self._is_at_end = chunk is None
            self._rest = chunk or b""
        if self._is_reset:
            raise ConnectionResetError("reset by peer")
        out, self._rest = self._rest[:limit], self._rest[limit:]
        return out

    async def write(self, data: bytes | memoryview) -> None:
        if self._is_reset or self.peer is None:
            raise ConnectionResetError("connection closed")
        if data:
            await self.peer._received.put(bytes(data))

    async def write_eof(self) -> None:
        if self.peer is not None:
            await self.peer._received.put(None)

    def abort(self) -> None:
        for end in (self, self.peer):
            if end is not None:
                end._is_reset = True
                if not end._received.full():
                    end._received.put_nowait(None)
        self.peer = None

    async def close(self) -> None:
        if self.peer is not None:
            peer, self.peer = self.peer, None
            await peer._received.put(None)


@dataclass(slots=True)
class MemorySwitch:
    """Listeners of all hosts that share it, by overlay address."""

    listeners: dict[AddrPort, StreamHandler] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, handler: StreamHandler, stream: MemoryStream) -> None:
        async def serve() -> None:
            await handler(stream)

        task = asyncio.get_running_loop().create_task(serve())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class MemoryNet:
    """Implements `tsd.hull.OverlayNet` on a switch; datagrams are not carried."""

    def __init__(self, switch: MemorySwitch, address: IPAddress) -> None:
        self._switch = switch
        self._address = address
        self._next_port = 49152

    async def connect(self, remote: AddrPort, timeout_s: float = 10.0) -> Stream:
        handler = self._switch.listeners.get(remote)
        if handler is None:
            raise ConnectionRefusedError(f"nobody listens on {remote}")
        near, far = MemoryStream(AddrPort(self._address, self._free_port()), remote), MemoryStream(remote, remote)
        far.remote, near.peer, far.peer = near.local, far, near
        self._switch.accept(handler, far)
        return near

    async def listen(self, local: AddrPort, handler: StreamHandler) -> int:
        port = local.port or self._free_port()
        if AddrPort(local.ip, port) in self._switch.listeners:
            raise OSError(98, "address already in use")
        self._switch.listeners[AddrPort(local.ip, port)] = handler
        return port

    def unlisten(self, local: AddrPort) -> None:
        self._switch.listeners.pop(local, None)

    async def open_datagram(self, local: AddrPort | None, remote_family: int = 4) -> DatagramPort:
        raise OSError(95, "the memory hull carries no datagrams")

    def _free_port(self) -> int:
        self._next_port += 1
        return self._next_port


def build_memory_hull(
    address: IPAddress, switch: MemorySwitch | None = None, underlay: Sequence[IPAddress] = ()
) -> Hull:
    """A hull whose parts can be inspected: `hull.tun` is a MemoryTun, `hull.router` a RecordingRouter, and so on."""
    return Hull(
        kind="memory",
        tun=MemoryTun(),
        net=MemoryNet(switch if switch is not None else MemorySwitch(), address),
        router=RecordingRouter(),
        dns=RecordingDns(),
        store=MemoryStore(),
        links=ManualLinks(),
        underlay=MemoryUnderlay(underlay),
    )
