"""Drives an `FdPump` for one plane: its threads move the packets; this tells them paths and rules, and takes the rest.

A peer has a lane while magicsock trusts one direct address for it: then the threads send there by themselves. Everybody
else's batches come up sealed and go where `DataPath.send_sealed` says, so that relays, doubt and probing are decided in
one place. A sweep compares lanes with magicsock while there are any. Contract: tsd/dataplane/fdpump.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tsd.base.addr import QUAD_100, QUAD_100_V6, AddrPort, is_via_route
from tsd.base.clock import Clock
from tsd.base.log import fields
from tsd.dataplane.fdpump import DeviceTun, FdPump, FdPumpOptions, Upcall, UpKind
from tsd.dataplane.pump import Opened, Other, Sealed
from tsd.engine.driver import Driver
from tsd.engine.path.datapath import DataPath, PathTraffic
from tsd.engine.path.masquerade import MasqueradingCore
from tsd.engine.path.sockets import UdpSockets
from tsd.filter.flows import FlowTable
from tsd.hull import Frame
from tsd.magicsock.magicsock import Magicsock

log = logging.getLogger(__name__)

SWEEP_S = 0.5
SERVICES = 0
"""The handle that owns the service addresses: never a peer's, and never given a session."""


@dataclass(slots=True)
class Lane:
    udp: AddrPort
    last_send: float = 0.0


class FastPath:
    """`start` it once; `stop` it before the device is closed."""

    def __init__(
        self,
        pump: FdPump,
        core: MasqueradingCore,
        datapath: DataPath,
        magicsock: Magicsock,
        sockets: UdpSockets,
        clock: Clock,
        driver: Driver,
    ) -> None:
        self._pump = pump
        self._core = core
        self._datapath = datapath
        self._magicsock = magicsock
        self._sockets = sockets
        self._clock = clock
        self._driver = driver
        self.on_failed: Callable[[], None] = lambda: None
        """It stopped by itself: somebody else must read the device."""
        self._device: DeviceTun | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader = -1
        self._lanes: dict[int, Lane] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._host_frames: list[Frame] = []
        self._counted: Mapping[str, int] = {}
        self._flows: FlowTable | None = None
        self._handlers: dict[UpKind, Callable[[Upcall], None]] = {
            UpKind.STAGE: self._on_stage,
            UpKind.HOST: self._on_host,
            UpKind.SEALED: self._on_sealed,
            UpKind.OTHER: self._on_other,
            UpKind.INBOUND: self._on_inbound,
            UpKind.HEARD: self._on_heard,
            UpKind.CONFIRMED: lambda up: self._datapath.note((), (up.peer,)),
            UpKind.ATTENTION: lambda up: self._datapath.note((up.peer,), ()),
            UpKind.SEND_ERROR: self._on_send_error,
            UpKind.TUN_ERROR: self._on_tun_error,
        }

    # --- life

    def start(self, device: DeviceTun) -> None:
        """Takes device and sockets over. Raises OSError, with everything as it was."""
        self._core.add_peer(SERVICES)
        self._core.set_allowed_ips(SERVICES, [QUAD_100.packed, QUAD_100_V6.packed])
        lent = self._sockets.lend(self)
        options = FdPumpOptions(
            vnet_header=device.has_header,
            tun_tcp_gso=device.has_gso,
            tun_udp_gso=device.has_uso,
            udp_gso=lent.has_gso,
            udp_gro=lent.has_gro,
        )
        try:
            self._pump.start(device.fileno(), lent.v4, lent.v6, options)
        except BaseException:
            self._sockets.take_back()
            raise
        device.release(self._datapath.from_host)
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._reader = self._pump.fileno()
        self._loop.add_reader(self._reader, self._on_readable)
        self._datapath.on_allowed = self._pump.allow_like
        self.apply_rules()

    def stop(self) -> None:
        """The sockets are read by the loop again; who wants the device attaches itself."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._reader)
        self._loop = None
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        self._datapath.on_allowed = lambda packet: None
        self._pump.stop()
        self._sockets.take_back()

    # --- sockets.Borrower

    def sockets_closing(self) -> None:
        with suppress(OSError):  # no threads are left then, and `sockets_opened` will see it
            self._pump.set_sockets(None, None)

    def sockets_opened(self) -> None:
        lent = self._sockets.lent()
        try:
            self._pump.set_sockets(lent.v4, lent.v6, lent.has_gso, lent.has_gro)
        except OSError as err:
            log.error(fields("packets are moved by the event loop: the pump's threads do not start again", reason=err))
            self.stop()
            self.on_failed()

    # --- told by the plane

    def apply_rules(self) -> None:
        """The filter, or who is jailed or masqueraded, is another one."""
        if self._loop is None:
            return
        chosen = self._datapath.filter
        if chosen.state is not self._flows:
            self._flows = chosen.state
            self._pump.forget_flows()
        self._pump.set_local([prefix for prefix in chosen.local_prefixes if not is_via_route(prefix)])
        self._pump.set_guarded(sorted(self._datapath.jailed | self._core.masqueraded))

    def watch_icmp(self, on: bool) -> None:
        if self._loop is not None:
            self._pump.watch_icmp(on)

    def path_changed(self, handle: int) -> None:
        if handle in self._lanes:
            self._settle(handle, self._clock.now())

    def settle_all(self) -> None:
        now = self._clock.now()
        for handle in list(self._lanes):
            self._settle(handle, now)

    def remove_peer(self, handle: int) -> None:
        self._lanes.pop(handle, None)
        if self._loop is not None:
            self._pump.forget_peer(handle)

    @property
    def counters(self) -> Mapping[str, int]:
        return self._pump.counters if self._loop is not None else {}

    def count_traffic(self) -> None:
        """What the threads moved since the last call goes into the counters of the path's traffic."""
        if self._loop is None:
            return
        before, self._counted = self._counted, self.counters
        traffic = self._datapath.traffic
        for family, kind in ((4, traffic.direct_ipv4), (6, traffic.direct_ipv6)):
            _add(kind, f"udp{family}_", before, self._counted)

    # --- what comes up

    def _on_readable(self) -> None:
        for message in self._pump.take():
            if self._host_frames and message.kind is not UpKind.HOST:
                self._send_host_frames()
            try:
                self._handlers[message.kind](message)
            except Exception:
                log.exception("a message of the packet pump could not be handled: %s", message.kind.name)
        self._send_host_frames()
        self._driver.kick()

    def _is_for_service(self, frame: Frame) -> bool:
        return self._device is not None and self._device.divert(frame)

    def _on_stage(self, up: Upcall) -> None:
        frame = Frame(up.data, up.unit)
        if up.peer == SERVICES:
            self._is_for_service(frame)
        else:
            self._datapath.stage(((up.peer, frame),))

    def _on_host(self, up: Upcall) -> None:
        frame = Frame(up.data, up.unit)
        if not self._is_for_service(frame):
            self._host_frames.append(frame)

    def _send_host_frames(self) -> None:
        if self._host_frames:
            frames, self._host_frames = self._host_frames, []
            self._datapath.from_host(frames)

    def _on_sealed(self, up: Upcall) -> None:
        now = self._clock.now()
        count = -(-len(up.data) // up.unit) if up.unit else 1
        self._datapath.send_sealed((Sealed(up.peer, up.data, up.unit, count),), now)
        self._settle(up.peer, now)

    def _on_other(self, up: Upcall) -> None:
        if up.source is not None and not up.source.ip.is_link_local:  # its zone would be lost on the way back (W08)
            self._datapath.take_other(Other(up.detail), up.data, up.source)

    def _on_inbound(self, up: Upcall) -> None:
        self._datapath.take_opened((self._core.inbound(Opened(up.peer, Frame(up.data, up.unit))),))

    def _on_heard(self, up: Upcall) -> None:
        if up.source is not None:
            self._magicsock.note_received((up.peer,), up.source, self._clock.now())

    def _on_send_error(self, up: Upcall) -> None:
        if up.source is not None:
            self._magicsock.send_failed(up.peer, up.source, up.detail, self._clock.now())

    def _on_tun_error(self, up: Upcall) -> None:
        if self._device is not None:
            self._device.lost(up.detail)

    # --- lanes

    def _settle(self, handle: int, now: float) -> None:
        udp = self._magicsock.trusted(handle, now)
        lane = self._lanes.get(handle)
        if udp is None:
            if lane is not None:
                del self._lanes[handle]
                self._pump.set_path(handle, None)
        elif lane is None or lane.udp != udp:
            self._lanes[handle] = Lane(udp)
            self._pump.set_path(handle, udp)
            self._arm_sweep()

    def _arm_sweep(self) -> None:
        if self._sweep_timer is None and self._lanes and self._loop is not None:
            self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Trust ends by time, and sending keeps magicsock probing: it sees neither by itself."""
        self._sweep_timer = None
        now = self._clock.now()
        for handle, lane in list(self._lanes.items()):
            last_send = self._core.activity(handle).last_send
            if last_send > lane.last_send:
                lane.last_send = last_send
                self._magicsock.route(handle, now)
            self._settle(handle, now)
        self._driver.kick()
        self._arm_sweep()


def _add(kind: PathTraffic, prefix: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
    def since(name: str) -> int:
        return now.get(prefix + name, 0) - before.get(prefix + name, 0)

    kind.rx_packets += since("datagrams")
    kind.rx_bytes += since("bytes")
    kind.tx_packets += since("datagrams_sent")
    kind.tx_bytes += since("bytes_sent")
