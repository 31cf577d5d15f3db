"""A simulated internet on the jump loop: hosts, latency, loss, NAT, blocked UDP, all from one seed.

A host is chosen by context: everything started inside `with net.on(host)` opens its sockets there, because
`SimLoop` overrides the loop's own ways to open connections. TCP is an ordered byte stream without loss; UDP is what
`Link` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from harness.jumploop import JumpLoop
from tsd.base.addr import AddrPort, IPAddress

_current_host: contextvars.ContextVar[Host] = contextvars.ContextVar("sim_host")


@dataclass(slots=True)
class Link:
    """How a host hangs on the internet."""

    latency_s: float = 0.005
    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    udp_blocked: bool = False
    is_up: bool = True


@dataclass(slots=True, eq=False)
class Host:
    """One machine; `nat` names the external address when it sits behind a NAT (EIM mapping, APDF filter)."""

    name: str
    ip: IPAddress
    link: Link = field(default_factory=Link)
    nat: Nat | None = None
    udp: dict[int, SimUdp] = field(default_factory=dict)
    listeners: dict[int, Callable[[], asyncio.BaseProtocol]] = field(default_factory=dict)
    streams: list[SimStream] = field(default_factory=list)
    next_port: int = 40000

    def free_port(self) -> int:
        self.next_port += 1
        return self.next_port

    def cut_streams(self) -> None:
        """Reset every TCP connection of this host, as a restart of the network would."""
        for stream in list(self.streams):
            stream.abort()


@dataclass(slots=True, eq=False)
class Nat:
    """One external address; `is_hard` maps by destination (APDM), else endpoint-independent; filtering is APDF."""

    external: IPAddress
    is_hard: bool = False
    out: dict[tuple[Any, ...], int] = field(default_factory=dict)
    back: dict[int, tuple[Host, int]] = field(default_factory=dict)
    allowed: set[tuple[int, AddrPort]] = field(default_factory=set)
    next_port: int = 50000

    def outbound(self, host: Host, port: int, to: AddrPort) -> AddrPort:
        key = (host.name, port, to) if self.is_hard else (host.name, port)
        if key not in self.out:
            self.next_port += 1
            self.out[key] = self.next_port
            self.back[self.next_port] = (host, port)
        external_port = self.out[key]
        self.allowed.add((external_port, to))
        return AddrPort(self.external, external_port)

    def inbound(self, source: AddrPort, port: int) -> tuple[Host, int] | None:
        return self.back.get(port) if (port, source) in self.allowed else None

    def reboot(self) -> None:
        """Lose every mapping."""
        self.out.clear()
        self.back.clear()
        self.allowed.clear()


class SimNet:
    """All hosts. `trace` holds (time, from, to, what) of UDP for a diagram of a failed run."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self.loop = loop
        self.random = random.Random(seed)
        self.hosts: dict[IPAddress, Host] = {}
        self.nats: dict[IPAddress, Nat] = {}
        self.names: dict[str, IPAddress] = {}
        self.trace: list[tuple[float, str, str, str]] = []
        loop.net = self

    def host(self, name: str, ip: str, *, nat: Nat | None = None, link: Link | None = None) -> Host:
        made = Host(name, ip_address(ip), link or Link(), nat)
        self.hosts[made.ip] = made
        self.names[name] = made.ip
        if nat is not None:
            self.nats[nat.external] = nat
        return made

    @contextlib.contextmanager
    def on(self, host: Host) -> Iterator[Host]:
        token = _current_host.set(host)
        try:
            yield host
        finally:
            _current_host.reset(token)

    def send_udp(self, sender: Host, port: int, data: bytes, to: AddrPort) -> None:
        link = sender.link
        if link.udp_blocked or not link.is_up or self.random.random() < link.loss:
            return
        source = AddrPort(sender.ip, port)
        target = self.hosts.get(to.ip)
        same_lan = target is not None and target.nat is sender.nat
        if sender.nat is not None and not same_lan:
            source = sender.nat.outbound(sender, port, to)
        target_port: int = to.port
        if target is None or (target.nat is not None and not same_lan):
            nat = self.nats.get(to.ip)
            mapped = nat.inbound(source, to.port) if nat is not None else None
            if mapped is None:
                return
            target, target_port = mapped
        if target.link.udp_blocked or not target.link.is_up or self.random.random() < target.link.loss:
            return
        copies = 2 if self.random.random() < link.duplicate else 1
        for _ in range(copies):
            delay_s = link.latency_s + target.link.latency_s
            if self.random.random() < link.reorder:
                delay_s += self.random.uniform(0, 0.02)
            self.loop.call_later(delay_s, self._arrive, target, target_port, data, source)

    @staticmethod
    def _arrive(target: Host, port: int, data: bytes, source: AddrPort) -> None:
        sock = target.udp.get(port)
        if sock is not None:
            sock.arrive(data, source)


class SimUdp:
    """The UDP socket of a simulated host, with the interface of `tsd.transport.udp.UdpSocket`."""

    def __init__(self, net: SimNet, host: Host, port: int, on_batch: Callable[[bytes, int, AddrPort], None]) -> None:
        self._net = net
        self._host = host
        self.port = port if port and port not in host.udp else host.free_port()
        self.local = AddrPort(host.ip, self.port)
        self._on_batch = on_batch
        host.udp[self.port] = self

    def send(self, datagrams: bytes, datagram_bytes: int, to: AddrPort) -> None:
        size = datagram_bytes or len(datagrams)
        for start in range(0, len(datagrams), size):
            self._net.send_udp(self._host, self.port, bytes(datagrams[start : start + size]), to)

    def arrive(self, data: bytes, source: AddrPort) -> None:
        self._on_batch(data, len(data), source)

    def close(self) -> None:
        self._host.udp.pop(self.port, None)


class SimStream(asyncio.Transport):
    """One end of a TCP connection."""

    def __init__(self, loop: SimLoop, local: AddrPort, remote: AddrPort, host: Host) -> None:
        super().__init__({"sockname": (str(local.ip), local.port), "peername": (str(remote.ip), remote.port)})
        self._loop = loop
        self._host = host
        self._protocol: asyncio.BaseProtocol | None = None
        self.peer: SimStream | None = None
        self.latency_s = 0.0
        self._closing = False
        self._lost = False
        self._paused = False
        self._held: list[bytes] = []
        self._clear_at = 0.0
        host.streams.append(self)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        if self._closing or not data:
            return
        self._later(self._peer_receives, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._later(self._peer_eof)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return None

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        held, self._held = self._held, []
        for data in held:
            self._deliver(data)

    def is_reading(self) -> bool:
        return not self._paused

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._later(self._peer_lost, None)
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._closing = True
        self._later(self._peer_lost, ConnectionResetError("reset by peer"))
        self._loop.call_soon(self._lose, None)

    def _later(self, action: Callable[..., None], *args: Any) -> None:
        at = max(self._loop.time() + self.latency_s, self._clear_at)
        self._clear_at = at
        self._loop.call_at(at, action, *args)

    def _peer_receives(self, data: bytes) -> None:
        if self.peer is not None:
            self.peer._deliver(data)

    def _deliver(self, data: bytes) -> None:
        if self._lost or not self._host.link.is_up:
            return
        if self._paused:
            self._held.append(data)
        elif isinstance(self._protocol, asyncio.BufferedProtocol):
            view = memoryview(data)
            while view:
                buffer = self._protocol.get_buffer(len(view))
                size = min(len(buffer), len(view))
                memoryview(buffer)[:size] = view[:size]
                self._protocol.buffer_updated(size)
                view = view[size:]
        elif isinstance(self._protocol, asyncio.Protocol):
            self._protocol.data_received(data)

    def _peer_eof(self) -> None:
        peer = self.peer
        if peer is None or peer._lost:
            return
        protocol = peer._protocol
        if isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol) and not protocol.eof_received():
            peer.close()

    def _peer_lost(self, exc: Exception | None) -> None:
        if self.peer is not None:
            self.peer._closing = True
            self.peer._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        if self in self._host.streams:
            self._host.streams.remove(self)
        if self._protocol is not None:
            self._protocol.connection_lost(exc)


class _SimServer(asyncio.AbstractServer):
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


class SimLoop(JumpLoop):
    """A jump loop whose connections run over a `SimNet`."""

    net: SimNet

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **kw: Any) -> Any:  # type: ignore[override]
        if kw.get("ssl"):
            raise OSError("the simulated network speaks no TLS: use plain ports in simulations")
        here = _current_host.get()
        ip = self.net.names.get(host) or ip_address(host)
        there = self.net.hosts.get(ip)
        latency_s = here.link.latency_s + (there.link.latency_s if there else 0.0)
        await asyncio.sleep(2 * latency_s)
        if there is None or not there.link.is_up or not here.link.is_up:
            await asyncio.sleep(30)
            raise TimeoutError(f"{host}:{port} does not answer")
        accept = there.listeners.get(port)
        if accept is None:
            raise ConnectionRefusedError(f"{host}:{port} refused")
        source_ip = here.nat.external if here.nat is not None and there.nat is not here.nat else here.ip
        source = AddrPort(source_ip, here.free_port())
        near, far = (
            SimStream(self, source, AddrPort(ip, port), here),
            SimStream(self, AddrPort(ip, port), source, there),
        )
        near.peer, far.peer = far, near
        near.latency_s = far.latency_s = latency_s
        with self.net.on(there):
            server_protocol = accept()
            far.set_protocol(server_protocol)
            server_protocol.connection_made(far)
        protocol = protocol_factory()
        near.set_protocol(protocol)
        protocol.connection_made(near)
        return near, protocol

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **kw: Any) -> Any:  # type: ignore[override]
        here = _current_host.get()
        chosen = port or here.free_port()
        if chosen in here.listeners:
            raise OSError(98, "address already in use")
        here.listeners[chosen] = protocol_factory
        return _SimServer(here, chosen)

    async def getaddrinfo(self, host: Any, port: Any, **kw: Any) -> Any:  # type: ignore[override]
        ip = self.net.names.get(host) or ip_address(host)
        family = 2 if ip.version == 4 else 10
        return [(family, 1, 6, "", (str(ip), port or 0))]
