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

from tsd.base.addr import IPPrefix
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


@dataclass(slots=True)
class LinuxHull(Hull):
    """A `Hull` with what only this one has."""

    device: KernelTun
    threaded: ThreadedRouter
    sockets: HostNet
    services: ServiceStack
    claim: SlotClaim
    care: Caretaker
    router_proper: LinuxRouter
    kernel: RtNetlink
    names: SystemNames
    ports: list[int]

    async def start(self, resolve: ResolveWire, report: Report, on_names: Callable[[str], None]) -> None:
        self.device.on_lost = self._lost
        self.threaded.on_trouble = lambda text: report("router-failed", text)
        self.names.on_fight = on_names
        await self.services.start(resolve)
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
        names, config = self.claim.names, self.threaded.config
        facts = await asyncio.to_thread(host_facts, names, config)
        return await Hull.report(self) | {"IsUp": self.device.is_up} | facts

    def set_ports(self, ports: tuple[int, ...]) -> None:
        if list(ports) != self.ports:
            self.ports[:] = ports
            self.threaded.verify()

    def firewall_wiring(self) -> list[str]:
        return self.router_proper.firewall.hints()

    def forwarding_trouble(self, routes: Sequence[IPPrefix]) -> str:
        return forwarding_trouble(routes)

    def close(self) -> None:
        self.care.stop()
        self.services.close()
        self.sockets.close()
        Hull.close(self)
        self.threaded.close()
        self.kernel.close()
        self.claim.close()


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
    tun = open_tun(device, mtu_bytes, offload=offload)
    claim: SlotClaim | None = None
    try:
        claim = claim_slot(device)
        kernel = RtNetlink()
        journal, ports = UndoJournal(folder), list[int]()
        netfilter = HostFirewall(claim.names, journal, forced=netfilter_kind)
        router = LinuxRouter(
            kernel, claim.names, netfilter, journal, mtu_bytes=mtu_bytes, udp_ports=lambda: tuple(ports)
        )
        router.revert(stays_closed=True)  # what a crash left under our names
        is_closed = is_barred(kernel, claim.names)
    except HullError:
        tun.close()
        if claim is not None:
            claim.close()
        raise
    watcher = links if links is not None else LinkWatcher(device)
    threaded = ThreadedRouter(router, is_closed=is_closed)
    names = SystemNames(folder, device, threaded.own_addresses)
    net = HostNet(threaded.own_addresses)
    services = ServiceStack(tun, entropy, clock, loopback_port=loopback_port)
    care = Caretaker(claim.names, router, threaded, lambda: tun.is_up)
    log.info("network device: %s; routing table %d", tun.describe(), claim.names.table)
    return LinuxHull(
        "linux",
        tun,
        net,
        threaded,
        names,
        store,
        watcher,
        MarkedUnderlay(watcher),
        tun,
        threaded,
        net,
        services,
        claim,
        care,
        router,
        kernel,
        names,
        ports,
    )


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
