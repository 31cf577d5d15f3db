"""A simulated internet on the jump loop: hosts, links, NATs, blocked ports, sleep and roaming, all from one seed.

A host is chosen by context: everything started inside `with net.on(host)` opens its sockets there (`harness.simloop`
overrides the loop's own ways). UDP is what `Link` says; TCP is an ordered byte stream that survives loss and stands
still while its path is cut.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any

from harness.simnat import Nat
from harness.simtrace import Trace, kind_of
from tsd.base.addr import AddrPort, IPAddress
from tsd.hull import LinkState

if TYPE_CHECKING:
    from harness.simloop import SimLoop, SimStream

RESOLUTION_S = 1e-9
"""The loop runs timers that are due within this."""

current_host: contextvars.ContextVar[Host | None] = contextvars.ContextVar("sim_host", default=None)


@dataclass(slots=True)
class Link:
    """How a host hangs on the internet; each value counts for its own end of a way."""

    latency_s: float = 0.005
    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    udp_blocked: bool = False
    is_up: bool = True
    """False: everything is lost on the way, and nobody is told."""
    scrubs: Callable[[bytes, bool], bool] | None = None
    """A box on the way that swallows some datagrams; called with each, and whether it is inbound for this host."""


@dataclass(slots=True, eq=False)
class Host:
    """One machine. `is_plugged` False: the interface is down and the kernel says so."""

    net: SimNet
    name: str
    addresses: list[IPAddress]
    link: Link = field(default_factory=Link)
    nat: Nat | None = None
    is_plugged: bool = True
    is_frozen: bool = False
    """SIGSTOP: nothing runs, the kernel goes on."""
    is_asleep: bool = False
    """Suspended: nothing runs, nothing arrives, and timers stand still."""
    slept_s: float = 0.0
    blocked: dict[tuple[str, int], None] = field(default_factory=dict)
    """("udp" | "tcp", port) of this host that a firewall drops."""
    udp: dict[tuple[int, int], SimUdp] = field(default_factory=dict)
    listeners: dict[int, Callable[[], Any]] = field(default_factory=dict)
    streams: list[SimStream] = field(default_factory=list)
    link_listeners: list[Callable[[], None]] = field(default_factory=list)
    parked: list[Callable[[], None]] = field(default_factory=list)
    timers_fired: int = 0
    wakes: int = 0
    """Moments at which anything ran here."""
    next_port: int = 40000
    _last_wake: float = -1.0
    _asleep_since: float = 0.0

    @property
    def ip(self) -> IPAddress:
        return self.addresses[0]

    @property
    def is_running(self) -> bool:
        return not (self.is_frozen or self.is_asleep)

    @property
    def is_reachable(self) -> bool:
        return self.is_plugged and self.link.is_up and not self.is_asleep

    def address(self, family: int) -> IPAddress | None:
        return next((ip for ip in self.addresses if ip.version == family), None)

    def free_port(self) -> int:
        self.next_port += 1
        return self.next_port

    def ran(self, now: float) -> None:
        if now != self._last_wake:
            self._last_wake = now
            self.wakes += 1

    def link_state(self) -> LinkState:
        addresses = tuple(ip_network(ip) for ip in self.addresses) if self.is_plugged else ()
        v4, v6 = (self.address(family) is not None and self.is_plugged for family in (4, 6))
        return LinkState({"eth0": addresses}, "eth0" if v4 else "", "eth0" if v6 else "", self.is_plugged)

    def clocks_s(self) -> tuple[float, float]:
        """(boot time, the part of it spent asleep)."""
        return self.net.loop.time(), self.slept_s

    # -- what happens to machines ------------------------------------------------------------------------------

    def cut_streams(self) -> None:
        """Reset every TCP connection, as the end of a process does."""
        for stream in list(self.streams):
            stream.abort()

    def plug(self, is_plugged: bool) -> None:
        self.is_plugged = is_plugged
        self.net.note(self, "link up" if is_plugged else "link down")
        self._tell_links()

    def roam(self, *ips: str, nat: Nat | None = None) -> None:
        """Another network: other addresses, perhaps another NAT. Old connections lead nowhere."""
        self.net.place(self, [ip_address(ip) for ip in ips], nat)
        self.net.note(self, f"roams to {', '.join(ips)}")
        self._tell_links()

    def freeze(self) -> None:
        self.is_frozen = True
        self.net.note(self, "frozen")

    def suspend(self) -> None:
        self.is_asleep = True
        self._asleep_since = self.net.loop.time()
        self.net.note(self, "asleep")

    def resume(self) -> None:
        """After `freeze` or `suspend`."""
        if self.is_asleep:
            self.slept_s += self.net.loop.time() - self._asleep_since
        self.is_frozen = self.is_asleep = False
        self.net.note(self, "runs again")
        parked, self.parked = self.parked, []
        for action in parked:
            action()

    def _tell_links(self) -> None:
        for told in list(self.link_listeners):
            told()


class SimNet:
    """All hosts and NATs. `trace` is for diagrams and for comparing runs."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self.loop = loop
        self.seed = seed
        self.random = random.Random(seed)
        self.trace = Trace()
        self.hosts: dict[str, Host] = {}
        self.public: dict[IPAddress, Host | Nat] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._event_count = 0
        loop.net = self

    # -- building ----------------------------------------------------------------------------------------------

    def host(self, name: str, *ips: str, nat: Nat | None = None, link: Link | None = None) -> Host:
        made = self.hosts[name] = Host(self, name, [], link or Link())
        self.place(made, [ip_address(ip) for ip in ips], nat)
        return made

    def place(self, host: Host, addresses: list[IPAddress], nat: Nat | None) -> None:
        """IPv4 behind the NAT when there is one; IPv6 is always public."""
        for table in (self.public, host.nat.inside if host.nat is not None else {}):
            for ip in [ip for ip, owner in table.items() if owner is host]:
                del table[ip]
        host.addresses, host.nat = addresses, nat
        for ip in addresses:
            (nat.inside if nat is not None and ip.version == 4 else self.public)[ip] = host
        if nat is not None:
            self.connect_nat(nat)

    def connect_nat(self, nat: Nat) -> None:
        """Also after it got another external address."""
        table = nat.outer.inside if nat.outer is not None else self.public
        for ip in [ip for ip, owner in table.items() if owner is nat]:
            del table[ip]
        table[nat.external] = nat
        if nat.outer is not None:
            self.connect_nat(nat.outer)

    @contextlib.contextmanager
    def on(self, host: Host) -> Iterator[Host]:
        token = current_host.set(host)
        try:
            yield host
        finally:
            current_host.reset(token)

    def resolve(self, name: str) -> IPAddress:
        """Host names, or literals. Raises ValueError."""
        found = self.hosts.get(name)
        return found.ip if found is not None else ip_address(name)

    def note(self, host: Host, text: str) -> None:
        self.trace.note(self.loop.time(), host.name, text)

    # -- time --------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Run later; what is due at the same moment runs in the order in which it was asked for."""
        at = self.loop.time() + delay_s
        self._event_count += 1
        heapq.heappush(self._events, (at, self._event_count, action, args))
        self.loop.call_at_for_nobody(at, self._run_due)

    def _run_due(self) -> None:
        while self._events and self._events[0][0] <= self.loop.time() + RESOLUTION_S:
            _, _, action, args = heapq.heappop(self._events)
            action(*args)

    # -- UDP ---------------------------------------------------------------------------------------------------

    def way(self, sender: Host, source: AddrPort, to: AddrPort) -> tuple[Host, int, AddrPort] | str:
        """(host, its port, source as seen there), or why a datagram does not get there. Opens NAT mappings."""
        now = self.loop.time()
        nat = sender.nat if to.ip.version == 4 else None
        target: Any = None
        while nat is not None:
            target = nat.inside.get(to.ip)
            if target is not None:
                break
            if to.ip == nat.external and nat.mapping != "none" and not nat.hairpins:
                return "no hairpin"
            source = nat.outbound(source, to, now)
            nat = nat.outer
        if target is None:
            target = self.public.get(to.ip)
        port = to.port
        while isinstance(target, Nat):
            inner = target.inbound(source, port, now)
            if inner is None:
                return "filtered"
            target, port = target.inside.get(inner.ip), inner.port
        return (target, port, source) if target is not None else "no such address"

    def send_udp(self, sender: Host, port: int, datagrams: bytes, size: int, to: AddrPort) -> int:
        """0 or an errno; `datagrams` lie back to back."""
        local = sender.address(to.ip.version)
        if not sender.is_plugged or local is None:
            return errno.ENETUNREACH
        run: list[bytes] = []
        run_way: Any = None
        for start in range(0, len(datagrams), size):
            data = bytes(datagrams[start : start + size])
            found = self._fate(sender, AddrPort(local, port), data, to)
            if found == run_way and isinstance(found, tuple):
                run.append(data)
                continue
            self._flush(run_way, run, to)
            run, run_way = ([data], found) if isinstance(found, tuple) else ([], None)
        self._flush(run_way, run, to)
        return 0

    def _flush(self, way: Any, run: list[bytes], to: AddrPort) -> None:
        if run:
            target, port, source, delay_s = way
            self.after(delay_s, self._arrive, target, to, port, b"".join(run), len(run[0]), source)

    def _fate(self, sender: Host, source: AddrPort, data: bytes, to: AddrPort) -> tuple[Any, ...] | None:
        """(host, port, source, delay) of one datagram; None when it is lost. Also writes the trace."""
        now, link = self.loop.time(), sender.link
        fate: tuple[Host, int, AddrPort] | str = self._lost_at(link, data, is_inbound=False)
        if not fate:
            fate = self.way(sender, source, to)
        if not isinstance(fate, str):
            target, port, _ = fate
            blocked = "blocked port" if ("udp", port) in target.blocked else ""
            reason = blocked or self._lost_at(target.link, data, is_inbound=True)
            self.trace.datagram(now, sender.name, target.name, data, reason)
            if reason:
                return None
            delay_s = link.latency_s + target.link.latency_s
            if self._happens(link.reorder) or self._happens(target.link.reorder):
                delay_s += self.random.uniform(0, 0.02)
            if self._happens(link.duplicate) or self._happens(target.link.duplicate):
                self.after(delay_s + self.random.uniform(0, 0.01), self._arrive, target, to, port, data, 0, fate[2])
            return *fate, delay_s
        self.trace.datagram(now, sender.name, str(to), data, fate)
        return None

    def _lost_at(self, link: Link, data: bytes, *, is_inbound: bool) -> str:
        if link.udp_blocked or not link.is_up:
            return "blocked" if link.is_up else "link is cut"
        if link.scrubs is not None and link.scrubs(data, is_inbound):
            return "scrubbed"
        return "lost" if self._happens(link.loss) else ""

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self.random.random() < chance

    def _arrive(self, target: Host, to: AddrPort, port: int, datagrams: bytes, size: int, source: AddrPort) -> None:
        if not target.is_reachable:
            return
        sock = target.udp.get((source.ip.version, port))
        if sock is None:
            return
        if target.is_frozen:
            if len(target.parked) < 2000:
                target.parked.append(lambda: sock.arrive(datagrams, size, source))
            return
        sock.arrive(datagrams, size, source)


class SimUdp:
    """The UDP socket of a simulated host, with the interface of `tsd.transport.udp.UdpSocket`."""

    def __init__(
        self,
        net: SimNet,
        host: Host,
        family: int,
        port: int,
        on_batch: Callable[[Any, int, AddrPort], None],
        on_error: Callable[[AddrPort, int], None] = lambda to, error: None,
    ) -> None:
        """Raises OSError when the port is taken or the host has no such family."""
        if host.address(family) is None:
            raise OSError(errno.EADDRNOTAVAIL, f"no IPv{family} address")
        if port and (family, port) in host.udp:
            raise OSError(errno.EADDRINUSE, "address already in use")
        self._net = net
        self._host = host
        self._family = family
        self._on_batch = on_batch
        self._on_error = on_error
        self.port = port or host.free_port()
        host.udp[family, self.port] = self

    @property
    def local(self) -> AddrPort:
        ip = self._host.address(self._family)
        assert ip is not None
        return AddrPort(ip, self.port)

    def send(self, datagrams: bytes, datagram_bytes: int, to: AddrPort) -> bool:
        failure = self._net.send_udp(self._host, self.port, datagrams, datagram_bytes or len(datagrams) or 1, to)
        if failure:
            self._on_error(to, failure)
        return failure == 0

    def arrive(self, datagrams: bytes, size: int, source: AddrPort) -> None:
        if self._host.udp.get((self._family, self.port)) is self:
            with self._net.on(self._host):
                self._host.ran(self._net.loop.time())
                self._on_batch(memoryview(datagrams), size or len(datagrams), source)

    def close(self) -> None:
        if self._host.udp.get((self._family, self.port)) is self:
            del self._host.udp[self._family, self.port]


__all__ = ["Host", "Link", "Nat", "SimNet", "SimUdp", "current_host", "kind_of"]
