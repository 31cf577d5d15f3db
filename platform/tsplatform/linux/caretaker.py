"""Keeps what the hull set up in force, and says what on this host works against it.

Changes of routing and firewall are heard over netlink and repaired by the router; repairs are paced, and a program that
undoes them again and again is named. Every few seconds the settings that routing depends on are looked at.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Callable

from tsd.base.errors import HullError
from tsd.hull import Report, RouterConfig
from tsplatform.linux.checks import detours, in_words, read_ruleset
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.netfilter.choose import NFTABLES
from tsplatform.linux.netfilter.foreign import foreign_drops
from tsplatform.linux.netfilter.iptables import LEGACY, TABLES
from tsplatform.linux.netfilter.remedy import remedy_for
from tsplatform.linux.netfilter.rules import ON
from tsplatform.linux.netfilter.watch import LegacyCounters, NftWatch
from tsplatform.linux.router import LinuxRouter
from tsplatform.linux.sysctls import forwarding_trouble, strict_interfaces
from tsplatform.linux.threaded import ThreadedRouter
from tsplatform.linux.watch import RoutingWatch

log = logging.getLogger(__name__)

LOOK_S, LEGACY_LOOK_S = 3.0, 0.5
FIGHT_REPAIRS, FIGHT_S = 6, 60.0
"""More repairs than this in that time are called a fight."""
SLOW_REPAIRS, SLOW_S = 10, 8.0
"""And after these they are made less often, until there is none in that time."""
FOREIGN_AFTER_S, FOREIGN_PACE_S, FOREIGN_REST_FACTOR = 0.5, 2.0, 50.0
"""Reading all rules of a large host takes seconds: then it is done seldom."""


class Caretaker:
    """One per Linux hull; everything on the running loop."""

    def __init__(
        self, names: HostNames, router: LinuxRouter, threaded: ThreadedRouter, is_up: Callable[[], bool]
    ) -> None:
        self._names = names
        self._router = router
        self._threaded = threaded
        self._is_up = is_up
        self._routing = RoutingWatch(threaded.verify, is_up, names.device, lambda: threaded.cost_s)
        self._nft = NftWatch(self._on_nft)
        self._legacy: LegacyCounters | None = None
        self._legacy_seen: tuple[bytes, ...] = ()
        self._report: Report = lambda code, text: None
        self._repairs: deque[tuple[float, tuple[str, ...]]] = deque(maxlen=SLOW_REPAIRS)
        self._culprit = ""
        self._timer: asyncio.TimerHandle | None = None
        self._foreign_timer: asyncio.TimerHandle | None = None
        self._foreign_at = -FOREIGN_PACE_S
        self._foreign_cost_s = 0.0
        self._foreign_task: asyncio.Task[None] | None = None
        self._detour_task: asyncio.Task[None] | None = None

    def start(self, report: Report) -> None:
        self._report = report
        self._threaded.on_done = self._on_done
        self._routing.start()
        self._nft.start()
        self._look()
        self._look_for_drops_soon()

    def stop(self) -> None:
        self._threaded.on_done = lambda: None
        self._routing.stop()
        self._nft.stop()
        for timer in (self._timer, self._foreign_timer):
            if timer is not None:
                timer.cancel()
        for task in (self._foreign_task, self._detour_task):
            if task is not None:
                task.cancel()
        if self._legacy is not None:
            self._legacy.close()

    # --- repairs

    def _on_nft(self, tables: frozenset[str], program: str) -> None:
        ours = {self._names.nft_table} if self._backend in (NFTABLES, "") else set(TABLES)
        if not tables or tables & ours:
            if program and not self._threaded.is_busy:
                self._culprit = program
            self._routing.poke()
        if tables - {self._names.nft_table}:
            self._look_for_drops_soon()

    @property
    def _backend(self) -> str:
        return self._router.firewall.backend

    def _on_done(self) -> None:
        """The router compared: what had to be put back?"""
        now = asyncio.get_running_loop().time()
        if self._router.put_back:
            what = ", ".join(self._router.put_back)
            by = f"; last changed by {self._culprit}" if self._culprit else ""
            log.warning("put back what somebody else removed: %s%s", what, by)
            self._repairs.append((now, self._router.put_back))
        self._tell_fight(now)
        self._tell_facts()
        if self._detour_task is None or self._detour_task.done():
            self._detour_task = asyncio.get_running_loop().create_task(self._find_detours())

    def _tell_fight(self, now: float) -> None:
        recent = [what for at, what in self._repairs if now - at < FIGHT_S]
        just_now = [at for at, _ in self._repairs if now - at < SLOW_S]
        # Slowed repairs are few: it stays so until there are none.
        self._routing.is_slowed = len(just_now) == SLOW_REPAIRS or (self._routing.is_slowed and bool(just_now))
        by = self._culprit or "another program"
        kinds = dict.fromkeys(kind for what in recent for kind in what)
        self._report("routing-fight", f"{by} removes {', '.join(kinds)}" if len(recent) >= FIGHT_REPAIRS else "")

    # --- looking

    def _look(self) -> None:
        is_legacy = self._backend == LEGACY
        if is_legacy:
            self._legacy = self._legacy or LegacyCounters(TABLES)
            seen = self._legacy.read()
            if seen != self._legacy_seen and not self._threaded.is_busy:
                self._legacy_seen = seen
                self._routing.poke()
        if self._threaded.is_failing and not self._threaded.is_busy:
            self._routing.poke()
        loop = asyncio.get_running_loop()
        if not is_legacy or int(loop.time()) % int(LOOK_S) == 0:
            self._tell_fight(loop.time())
            self._tell_facts()
        self._timer = loop.call_later(LEGACY_LOOK_S if is_legacy else LOOK_S, self._look)

    def _tell_facts(self) -> None:
        config = self._threaded.config
        self._report(
            "device-down", "" if not config.local_addresses or self._is_up() else _why_down(self._names.device)
        )
        self._report("ip-forwarding-off", forwarding_trouble(config.subnet_routes))
        self._report("lan-overlap", ", ".join(str(network) for network in self._router.overlaps))
        self._report("firewall-incomplete", self._router.firewall.trouble)
        self._report("rp-filter-strict", ", ".join(_strict(config)))
        is_exit = any(prefix.prefixlen == 0 for prefix in config.subnet_routes)
        self._report("nosnat-with-advertised-exit-node", "off" if is_exit and not config.snat_subnet_routes else "")

    async def _find_detours(self) -> None:
        """Rules of others that are asked before ours: a VPN's, by default, is put before all that are there."""
        config = self._threaded.config
        found = []
        if config.local_addresses and self._is_up():
            versions = (4,) if self._router.ipv6_off_because else (4, 6)
            try:
                found = await asyncio.to_thread(detours, self._names, config, versions)
            except HullError:
                return
        self._report("routing-detour", in_words(found, self._names.device))

    # --- drops of others

    def _look_for_drops_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._foreign_timer is None:
            pace_s = max(FOREIGN_PACE_S, FOREIGN_REST_FACTOR * self._foreign_cost_s)
            delay_s = max(FOREIGN_AFTER_S, self._foreign_at + pace_s - loop.time())
            self._foreign_timer = loop.call_later(delay_s, self._look_for_drops)

    def _look_for_drops(self) -> None:
        self._foreign_timer = None
        loop = asyncio.get_running_loop()
        self._foreign_at = loop.time()
        self._foreign_task = loop.create_task(self._find_drops())

    async def _find_drops(self) -> None:
        config = self._threaded.config
        if not config.local_addresses or config.netfilter_mode != ON:
            self._report("foreign-drop", "")
            return
        began = time.monotonic()
        try:
            ruleset = json.loads(await asyncio.to_thread(read_ruleset))["nftables"]
        except (HullError, ValueError, KeyError):
            return
        self._foreign_cost_s = time.monotonic() - began
        self._router.firewall.reconsider()
        self._routing.poke()
        drops = foreign_drops(ruleset, self._names.device)
        if not config.subnet_routes:
            drops = [drop for drop in drops if drop["Hook"] != "forward"]
        texts = [f"{drop['Chain']} ({drop['Why']}): {remedy_for(drop, self._names.device)}" for drop in drops]
        self._report("foreign-drop", "; ".join(texts))


def _why_down(device: str) -> str:
    try:
        socket.if_nametoindex(device)
    except OSError:
        return f"{device} is not here any more, renamed or moved: restart tsd, which makes it again"
    return f"{device} was set down: ip link set {device} up"


def _strict(config: RouterConfig) -> list[str]:
    """Interfaces that would drop the answers to our own packets, because no firewall rule of ours helps them."""
    return strict_interfaces() if config.uses_exit_node and config.netfilter_mode != ON else []
