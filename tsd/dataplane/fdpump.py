"""The seam to the pump on file descriptors: OS threads that move packets between a TUN and UDP sockets by themselves.

`FdPump` stands on a `Core` and shares it: sessions, peers and allowed IPs are set on the core as ever, also while the
threads run; both take nonces from the same counters. Who drives it owns the descriptors and stops reading them itself.

What goes on in the threads: established sessions with a UDP path, the filter's quick half, coalescing and cutting. What
comes up as an `Upcall` goes where a frame or datagram without the pump would go (`DataPath`):

* STAGE: stage at WireGuard. HOST: `DataPath.from_host`. SEALED: send by relay.
* OTHER: handshake, disco or STUN of a source.
* INBOUND: ask filter and interceptors, then `deliver`; when a rule accepted it, `allow_like`, so that its like is not
  asked about again.
* HEARD: `Magicsock.note_received`. CONFIRMED, ATTENTION: `WireGuard.note`. SEND_ERROR: `Magicsock.send_failed`.

A peer that is never given a session makes its allowed IPs come up as STAGE with its handle: the way for addresses that
the daemon answers itself. Implemented by `tsnative.FdPump`; there is no Python one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from tsd.base.addr import AddrPort, IPPrefix
from tsd.dataplane.pump import Core
from tsd.hull import Frame, Tun


class UpKind(IntEnum):
    STAGE = 1
    """A frame from the host for `peer`, which has no session. `unit`: segment size, as in `Frame`."""
    HOST = 2
    """A frame from the host that belongs to no peer, or that the filter must see. `unit` as above."""
    SEALED = 3
    """A batch of datagrams for `peer`, each `unit` long: its path is "up", or it has none yet."""
    OTHER = 4
    """A datagram that is not transport data; `detail` is a `tsd.dataplane.pump.Other`; from `source`."""
    INBOUND = 5
    """An opened frame of `peer` that needs a verdict. `unit`: segment size."""
    HEARD = 6
    """Authentic data of `peer` came from `source`: told when the source changes, and once a second."""
    CONFIRMED = 7
    """The `next` session of `peer` became current: flush what was staged."""
    ATTENTION = 8
    """The timers of `peer` changed state: ask `Core.activity`. At most every 0.2 s, the last change included."""
    SEND_ERROR = 9
    """Sending to `source` failed with errno `detail`; at most once a second for a peer."""
    TUN_ERROR = 10
    """Reading the TUN failed with errno `detail`; it is not read any more."""


class Upcall(NamedTuple):
    kind: UpKind
    peer: int
    data: bytes
    unit: int
    detail: int
    source: AddrPort | None


@dataclass(frozen=True, slots=True)
class FdPumpOptions:
    """What the descriptors can do; what is refused later is given up for good, and counted."""

    vnet_header: bool = True
    """The TUN has IFF_VNET_HDR: 10 bytes before each packet."""
    tun_tcp_gso: bool = True
    """TUNSETOFFLOAD accepted TSO4 and TSO6."""
    tun_udp_gso: bool = True
    """It accepted USO4 and USO6 as well."""
    udp_gso: bool = True
    udp_gro: bool = True
    """UDP_GRO is on for the sockets."""
    threads: int = 2
    """2: one for each direction. 1: both in one, better for a single stream on few cores."""
    ring_bytes: int = 0
    """Room for upcalls; 0: 4 MiB."""


@runtime_checkable
class DeviceTun(Tun, Protocol):
    """A TUN that a pump may work on itself."""

    has_gso: bool
    has_uso: bool
    divert: Callable[[Frame], bool]
    """Asked for a frame of the host that may be for a service of the hull's own; True: it was."""

    @property
    def has_header(self) -> bool:
        """Whether every packet comes and goes behind a virtio header of 10 bytes."""

    def fileno(self) -> int:
        """It does not block."""

    def release(self, on_frames: Callable[[list[Frame]], None]) -> None:
        """Read no more on the loop; `attach` starts it again. `deliver` goes on working, and `on_frames` takes what the
        hull itself sends into the overlay."""

    def lost(self, code: int) -> None:
        """The pump cannot read it any more, for this errno."""


class FdPump(Protocol):
    """All methods may be called while the threads run; from one thread at a time."""

    @property
    def core(self) -> Core: ...

    def start(
        self, tun_fd: int, udp4_fd: int | None, udp6_fd: int | None, options: FdPumpOptions = FdPumpOptions()
    ) -> None:
        """The descriptors must not block and stay open until `stop`. Raises OSError."""

    def set_sockets(self, udp4_fd: int | None, udp6_fd: int | None, udp_gso: bool = True, udp_gro: bool = True) -> None:
        """Others from now on; call it with None before the old ones are closed. Flows, paths and counters stay."""

    def stop(self) -> None:
        """Returns when the threads have ended; messages not taken are lost. Sessions stay in the core."""

    def fileno(self) -> int:
        """Readable when there are messages: for `loop.add_reader`."""

    def take(self, limit: int = 256) -> list[Upcall]:
        """What came up, oldest first. When the ring overflows the newest are lost (`counters["up_overflow"]`)."""

    def deliver(self, frames: Sequence[Frame]) -> None:
        """Write frames to the TUN: what was asked about, and what came by relay."""

    def set_path(self, peer: int, udp: AddrPort | None, up: bool = False) -> None:
        """Where sealed batches go: a UDP address, up to the caller (None), or both (`up` as well). None was set: up."""

    def set_local(self, prefixes: Sequence[IPPrefix]) -> None:
        """Where packets may go that need no rule: running TCP, ICMP answers, known flows. Replaces, and forgets every
        `allow_like`: call it with each new filter."""

    def allow_like(self, packet: bytes | bytearray | memoryview) -> None:
        """A rule let this inbound packet in: do not ask about packets with the same protocol, addresses and
        destination port."""

    def set_guarded(self, peers: Sequence[int]) -> None:
        """Every packet of these peers, and to them, needs a look (INBOUND, HOST): jailed ones, and those that know us
        by another address. Replaces; a peer that is new to the core comes before."""

    def forget_flows(self) -> None:
        """Also the flows that we started: when the shields go up."""

    def forget_peer(self, peer: int) -> None:
        """After `Core.remove_peer`."""

    def watch_icmp(self, on: bool) -> None:
        """While on, ICMP answers come up: one of our own pings waits for its reply."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Names as in native/src/fdpump.c, counts since `start`."""
