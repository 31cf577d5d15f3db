"""The Linux hull: a kernel TUN, the host's routing and firewall, our marks on our own sockets, and how it is undone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsd.base.addr import AddrPort, IPPrefix
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy, system_entropy
from tsd.base.errors import HullError
from tsd.hull import Hull, LinkMonitor, Report, ResolveWire, StateStore
from tsplatform.links import LinkWatcher
from tsplatform.linux.caretaker import Caretaker
from tsplatform.linux.checks import host_facts
from tsplatform.linux.dns.system import SystemNames
from tsplatform.linux.dns.undo import undo_names
from tsplatform.linux.hostnames import BYPASS_MARK, HostNames, SlotClaim, claim_slot, try_slot
from tsplatform.linux.journal import UndoJournal
from tsplatform.linux.net import HostNet
from tsplatform.linux.netfilter.choose import HostFirewall
from tsplatform.linux.router import LinuxRouter, is_barred, purge_routing
from tsplatform.linux.rtnetlink import RtNetlink
from tsplatform.linux.service import ServiceStack
from tsplatform.linux.sites import SiteGateway
from tsplatform.linux.sysctls import MarkedSources, forwarding_trouble
from tsplatform.linux.threaded import ThreadedRouter
from tsplatform.linux.tun import KernelTun, open_tun
from tsplatform.underlay import HostUnderlay

log = logging.getLogger(__name__)


class MarkedUnderlay(HostUnderlay):
    """Implements `tsd.hull.Underlay`: our own sockets carry a mark, and marked packets never see our routes."""

    def protect(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a family without marks; a TUN without the right to mark there is not
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, BYPASS_MARK)


@dataclass(frozen=True, slots=True)
class Slot:
    """What the kernel does for us, under names that no other daemon of this host has."""

    claim: SlotClaim
    kernel: RtNetlink
    router: LinuxRouter
    is_closed: bool
    """A daemon before us used an exit node and was killed: nothing leaves this host around it."""

    @property
    def names(self) -> HostNames:
        return self.claim.names

    def close(self) -> None:
        self.kernel.close()
        self.claim.close()


def open_slot(tun: KernelTun, folder: Path, netfilter_kind: str, ports: list[int]) -> Slot:
    """Undoes what a crash left there. Raises `HullError`, leaving nothing."""
    claim = claim_slot(tun.name)
    try:
        kernel, journal = RtNetlink(), UndoJournal(folder)
        netfilter = HostFirewall(claim.names, journal, forced=netfilter_kind)
        router = LinuxRouter(
            kernel, claim.names, netfilter, journal, mtu_bytes=tun.mtu_bytes, udp_ports=lambda: tuple(ports)
        )
        try:
            router.revert(stays_closed=True)
        except HullError as err:  # a host without a working firewall program has nothing of ours in it either
            log.warning("what a crash may have left is not undone: %s", err)
        return Slot(claim, kernel, router, is_barred(kernel, claim.names))
    except HullError:
        claim.close()
        raise


@dataclass(slots=True)
class LinuxHull(Hull):
    """A `Hull` with what only this one has."""

    device: KernelTun
    threaded: ThreadedRouter
    sockets: HostNet
    services: ServiceStack
    sites: SiteGateway
    slot: Slot
    care: Caretaker
    names: SystemNames
    ports: list[int]

    async def start(self, resolve: ResolveWire, report: Report, on_names: Callable[[str], None]) -> None:
        self.device.on_lost = self._lost
        self.threaded.on_trouble = lambda text: report("router-failed", text)
        self.names.on_fight = on_names
        await self.services.start(resolve)
        self.sites.start()
        self.care.start(report)

    def _lost(self, err: HullError) -> None:
        """As after a crash, nothing may pass an exit node by until the next daemon is up."""
        self.threaded.stays_closed = True
        self.on_lost(err)

    def verify(self) -> None:
        self.threaded.verify()
        self.names.check()

    async def report(self) -> dict[str, Any]:
        """Reading the kernel's tables may take a moment: in a thread."""
        names, config = self.slot.names, self.threaded.config
        facts = await asyncio.to_thread(host_facts, names, config)
        return await Hull.report(self) | {"IsUp": self.device.is_up} | facts

    def set_ports(self, ports: tuple[int, ...]) -> None:
        if list(ports) != self.ports:
            self.ports[:] = ports
            self.threaded.verify()

    def firewall_wiring(self) -> list[str]:
        return self.slot.router.firewall.hints()

    def proxy_origin(self, proto: str, host: AddrPort) -> AddrPort | None:
        return self.sites.proxy_origin(proto, host)

    def forwarding_trouble(self, routes: Sequence[IPPrefix]) -> str:
        return forwarding_trouble(routes)

    def close(self) -> None:
        self.care.stop()
        self.services.close()
        self.sites.close()
        self.sockets.close()
        Hull.close(self)
        self.threaded.close()
        self.slot.close()


def build_linux_hull(
    device: str,
    store: StateStore,
    folder: Path,
    *,
    links: LinkMonitor | None = None,
    mtu_bytes: int = 1280,
    offload: bool = True,
    netfilter_kind: str = "",
    loopback_port: int = 0,
    entropy: Entropy = system_entropy,
    clock: Clock | None = None,
) -> LinuxHull:
    """`folder` keeps the undo journal; `netfilter_kind` overrules the prefs; `loopback_port`: see `ServiceStack`.

    Raises `HullError` that names what is missing and the fix, leaving nothing.
    """
    tun, ports = open_tun(device, mtu_bytes, offload=offload), list[int]()
    try:
        slot = open_slot(tun, folder, netfilter_kind, ports)
    except HullError:
        tun.close()
        raise
    watcher = links if links is not None else LinkWatcher(device)
    below = MarkedUnderlay(watcher)
    threaded = ThreadedRouter(slot.router, is_closed=slot.is_closed)
    names = SystemNames(folder, device, threaded.own_addresses)
    net = HostNet(threaded.own_addresses)
    services = ServiceStack(tun, entropy, clock, loopback_port=loopback_port)
    sites = SiteGateway(tun, threaded.own_addresses, below.protect, entropy, clock)
    tun.divert = lambda frame: services.divert(frame) or sites.divert(frame)
    threaded.on_config = lambda config: sites.set_routes(config.subnet_routes)
    care = Caretaker(slot.names, slot.router, threaded, lambda: tun.is_up)
    log.info("network device: %s; routing table %d", tun.describe(), slot.names.table)
    host = (tun, net, threaded, names, store, watcher, below)
    return LinuxHull("linux", *host, tun, threaded, net, services, sites, slot, care, names, ports)


def undo_leftovers(folder: Path, *, stays_closed: bool = False) -> None:
    """Undo what the journal of a daemon that is gone says; never raises. Slots in use are left alone.

    `stays_closed`: but for what keeps traffic from leaking around an exit node.
    """
    undo_names(folder)
    journal = UndoJournal(folder)
    for entry in [entry for entry in journal.entries if entry.kind == "slot"]:
        try:
            claim = try_slot(entry.slot, entry.device)
            if claim is None:
                continue
            try:
                is_closed = _purge(claim.names, journal, stays_closed)
            finally:
                claim.close()
        except HullError as err:
            log.warning("left over on this host: %s", err)
            continue
        if is_closed:
            log.warning(
                "nothing leaves this host around its exit node until tsd is up again, or `tsd --cleanup` is run"
            )
        else:
            journal.forget(entry)
        log.info("undone what a daemon that was killed left: rules, routes and firewall of %s", entry.device)
    journal.tidy()


def _purge(names: HostNames, journal: UndoJournal, stays_closed: bool) -> bool:
    """Whether the host is left closed."""
    MarkedSources(journal, names.slot).restore()
    kernel = RtNetlink()
    try:
        is_closed = stays_closed and is_barred(kernel, names)
        failures = purge_routing(kernel, names, keeps_bars=is_closed)
    finally:
        kernel.close()
    HostFirewall(names, journal).remove()
    if failures:
        raise HullError("take back routing", "; ".join(failures))
    return is_closed
