"""The Linux hull: a kernel TUN, the host's routing and firewall, our marks on our own sockets, and how it is undone.

Routing is changed by one thread, because reading ten thousand routes or running nft must not stop packets; the engine
waits a moment for it, so that what it does next finds the addresses in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsd.base.addr import IPAddress
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy, system_entropy
from tsd.base.errors import HullError
from tsd.hull import Hull, LinkMonitor, RouterConfig, StateStore
from tsplatform.links import LinkWatcher
from tsplatform.linux.checks import host_facts
from tsplatform.linux.dns.system import SystemNames
from tsplatform.linux.dns.undo import undo_names
from tsplatform.linux.hostnames import BYPASS_MARK, HostNames, SlotClaim, claim_slot, try_slot
from tsplatform.linux.journal import UndoJournal
from tsplatform.linux.net import HostNet
from tsplatform.linux.netfilter import NftTable
from tsplatform.linux.router import LinuxRouter, purge_routing
from tsplatform.linux.rtnetlink import RtNetlink
from tsplatform.linux.service import ResolveWire, ServiceStack
from tsplatform.linux.tun import KernelTun, open_tun
from tsplatform.linux.watch import RoutingWatch
from tsplatform.underlay import HostUnderlay

log = logging.getLogger(__name__)

PATIENCE_S = 0.25
REVERT_S = 8.0


class MarkedUnderlay(HostUnderlay):
    """Implements `tsd.hull.Underlay`: our own sockets carry a mark, and marked packets never see our routes."""

    def protect(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a family without marks; a TUN without the right to mark there is not
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, BYPASS_MARK)


class ThreadedRouter:
    """Implements `tsd.hull.Router` over another one that may block. The newest configuration wins."""

    def __init__(self, router: LinuxRouter) -> None:
        self._router = router
        self._pool = ThreadPoolExecutor(1, "router")
        self._latest = RouterConfig()
        self._done: RouterConfig | None = RouterConfig()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.cost_s = 0.0
        """CPU time of the last work that was done."""
        self.on_trouble: Callable[[str], None] = lambda text: None
        """What went wrong after `apply` returned; called on the loop. "" means that all is well again."""

    @property
    def config(self) -> RouterConfig:
        """As asked for last."""
        return self._latest

    def own_addresses(self) -> list[IPAddress]:
        return [prefix.network_address for prefix in self._latest.local_addresses]

    def apply(self, config: RouterConfig) -> None:
        """Raises `HullError` when it fails within a moment; later failures are told to `on_trouble`."""
        self._loop = asyncio.get_running_loop()
        is_news = config != self._done
        self._latest = config
        if not is_news and not config.local_addresses:
            return
        work = self._pool.submit(self._work, config)
        if is_news:
            with contextlib.suppress(TimeoutError):
                work.result(PATIENCE_S)
                return
        work.add_done_callback(self._report)

    def verify(self) -> None:
        """Compare with reality again and repair, in the background."""
        if self._latest.local_addresses:
            self._loop = asyncio.get_running_loop()
            self._pool.submit(self._work, self._latest).add_done_callback(self._report)

    def revert(self) -> None:
        self._latest = RouterConfig()
        try:
            self._pool.submit(self._work, self._latest).result(REVERT_S)
        except TimeoutError:
            raise HullError("take back routing", f"not done within {REVERT_S:.0f} s", "run tsd --cleanup") from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, config: RouterConfig) -> None:
        if config is not self._latest:
            return
        self._done = None
        started_s = time.thread_time()
        try:
            self._router.apply(config)
        finally:
            self.cost_s = time.thread_time() - started_s
        self._done = config

    def _report(self, work: Future[None]) -> None:
        if work.cancelled() or self._loop is None:
            return
        err = work.exception()
        if err is not None and not isinstance(err, HullError):
            log.error("routing thread failed", exc_info=err)
        with contextlib.suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(self.on_trouble, str(err) if err is not None else "")


@dataclass(slots=True)
class LinuxHull(Hull):
    """A `Hull` with what only this one has."""

    device: KernelTun
    threaded: ThreadedRouter
    sockets: HostNet
    services: ServiceStack
    claim: SlotClaim
    watch: RoutingWatch
    kernel: RtNetlink
    names: SystemNames

    async def start(
        self, resolve: ResolveWire, on_routing: Callable[[str], None], on_names: Callable[[str], None]
    ) -> None:
        """Answer DNS on the service addresses and repair what others change; on the running loop.

        `on_routing` and `on_names` are told what goes wrong later, "" when that is over.
        """
        self.threaded.on_trouble = on_routing
        self.names.on_fight = on_names
        await self.services.start(resolve)
        self.watch.start()

    def verify(self) -> None:
        self.threaded.verify()
        self.names.check()

    async def report(self) -> dict[str, Any]:
        """Reading the kernel's tables may take a moment: in a thread."""
        names, config = self.claim.names, self.threaded.config
        facts = await asyncio.to_thread(host_facts, names, config)
        return await Hull.report(self) | {"IsUp": self.device.is_up} | facts

    def close(self) -> None:
        self.watch.stop()
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
    entropy: Entropy = system_entropy,
    clock: Clock | None = None,
) -> LinuxHull:
    """`folder` keeps the undo journal. Raises `HullError` that names what is missing and the fix, leaving nothing."""
    tun = open_tun(device, mtu_bytes, offload=offload)
    claim: SlotClaim | None = None
    try:
        claim = claim_slot(device)
        kernel = RtNetlink()
        netfilter = NftTable(claim.names)
        router = LinuxRouter(kernel, claim.names, netfilter, UndoJournal(folder), mtu_bytes=mtu_bytes)
        router.revert()  # what a crash left under our names
    except HullError:
        tun.close()
        if claim is not None:
            claim.close()
        raise
    watcher = links if links is not None else LinkWatcher(device)
    threaded = ThreadedRouter(router)
    names = SystemNames(folder, device, threaded.own_addresses)
    net = HostNet(threaded.own_addresses)
    services = ServiceStack(tun, entropy, clock)
    watch = RoutingWatch(threaded.verify, lambda: tun.is_up, device, lambda: threaded.cost_s)
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
        watch,
        kernel,
        names,
    )


def undo_leftovers(folder: Path) -> None:
    """Undo what the journal of a daemon that is gone says; never raises. Slots in use are left alone."""
    undo_names(folder)
    journal = UndoJournal(folder)
    for entry in journal.entries:
        try:
            claim = try_slot(entry.slot, entry.device)
            if claim is None:
                continue
            try:
                _purge(claim.names)
            finally:
                claim.close()
        except HullError as err:
            log.warning("left over on this host: %s", err)
            continue
        journal.forget(entry)
        log.info("undone what a daemon that was killed left: rules, routes and firewall of %s", entry.device)


def _purge(names: HostNames) -> None:
    kernel = RtNetlink()
    try:
        failures = purge_routing(kernel, names)
    finally:
        kernel.close()
    NftTable(names).remove()
    if failures:
        raise HullError("take back routing", "; ".join(failures))
