"""Names on a Linux host: finds out who keeps its resolver settings, has ours set by him, and watches over them.

All work is done in a thread with a loop of its own: files, D-Bus and resolvconf may take their time. The engine waits a
moment for it, so that plain mistakes come back to it at once. The choice is made again when services come or go, and
when somebody else wrote the resolver file.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tsd.base.addr import IPAddress
from tsd.base.errors import HullError
from tsd.dns.osconfig import SERVICE_TEXTS, OsDns, os_dns
from tsd.hull import DnsConfig
from tsplatform.linux.dns import file
from tsplatform.linux.dns.bus import SystemBus
from tsplatform.linux.dns.choose import Choice, HostSurveyor, Surveyor, choose
from tsplatform.linux.dns.claim import claim_names
from tsplatform.linux.dns.debian import DebianResolvconf
from tsplatform.linux.dns.direct import DirectFile
from tsplatform.linux.dns.keeper import REVERT_S, Keeper, NamesThread
from tsplatform.linux.dns.manager import Found, Manager, Mode
from tsplatform.linux.dns.networkmanager import NetworkManager
from tsplatform.linux.dns.openresolv import Openresolv
from tsplatform.linux.dns.resolved import ResolvedLink
from tsplatform.linux.hostnames import TakenError

log = logging.getLogger(__name__)

PATIENCE_S = 0.3


class SystemNames:
    """Implements `tsd.hull.Dns`. `own_addresses` tells which of our service addresses can be reached."""

    def __init__(
        self,
        folder: Path,
        device: str,
        own_addresses: Callable[[], Sequence[IPAddress]],
        path: Path = file.PATH,
        is_foreign: Callable[[Path], bool] = file.belongs_to_another_network,
        survey: Callable[[SystemBus], Surveyor] | None = None,
    ) -> None:
        self._folder = folder
        self._device = device
        self._own_addresses = own_addresses
        self._path = path
        self._is_foreign = is_foreign
        self._backup = folder / file.BACKUP_NAME
        self._new_survey = survey or (lambda bus: HostSurveyor(bus, self._backup, path))
        self._config = DnsConfig()
        self._asked: list[OsDns] = []
        self._thread: NamesThread | None = None
        self._keeper: Keeper | None = None
        self._choice = Choice()
        self._manager: Manager | None = None
        self._written = OsDns()
        self._trouble = ""
        self._stays_local = False
        self._main: asyncio.AbstractEventLoop | None = None
        self.on_fight: Callable[[str], None] = lambda text: None
        """Told when names cannot be set up or another program undoes it; "" when that is over."""

    # --- tsd.hull.Dns, called on the engine's loop

    def apply(self, config: DnsConfig) -> None:
        """Raises `HullError` when it fails within a moment; later failures are told to `on_fight`."""
        self._config = config
        asked = [os_dns(config, self._own_addresses(), can_split) for can_split in (True, False)]
        if (asked[0].is_empty and self._thread is None) or (asked == self._asked and not self._trouble):
            return
        self._asked = asked
        with contextlib.suppress(RuntimeError):
            self._main = asyncio.get_running_loop()
        work = self._keep().submit(self._reconcile())
        try:
            work.result(PATIENCE_S)
        except concurrent.futures.TimeoutError:
            work.add_done_callback(self._on_late)

    def revert(self) -> None:
        self._config, self._asked = DnsConfig(), []
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        try:
            thread.submit(self._end()).result(REVERT_S)
        except concurrent.futures.TimeoutError:
            raise HullError("give back names", f"not done within {REVERT_S:.0f} s", "run tsd --cleanup") from None
        finally:
            thread.stop()

    def check(self) -> None:
        """Look at the host again, soon: its networks may have changed."""
        if self._thread is not None:
            self._thread.submit(self._reconcile_quietly())

    def base_resolvers(self) -> list[str]:
        """As they are without us."""
        manager = self._manager
        if manager is not None:
            return manager.base_resolvers()
        return file.upstreams_in(file.kept(self._backup, self._path).content or b"")

    def describe(self) -> dict[str, Any]:
        """For `tsctl dns status`: who keeps the settings, why we think so, what we had written."""
        written = self._written
        return {
            "Mode": self._choice.mode.value if self._manager is not None else "",
            "Because": list(self._choice.because),
            "Nameservers": list(written.nameservers),
            "SearchDomains": list(written.search),
            "MatchDomains": list(written.match),
            "Trouble": self._trouble,
        }

    # --- the thread

    def _keep(self) -> NamesThread:
        if self._thread is None:
            self._thread = NamesThread()
            self._thread.submit(self._begin()).result(REVERT_S)
        return self._thread

    async def _begin(self) -> None:
        self._keeper = Keeper(self._look, self._reconcile_quietly)

    async def _end(self) -> None:
        keeper, self._keeper = self._keeper, None
        try:
            if keeper is not None:
                async with keeper.lock:
                    await self._drop_manager(keeper)
        finally:
            if keeper is not None:
                keeper.close()

    async def _reconcile(self) -> None:
        """Bring the host to what is wanted now."""
        keeper = self._keeper
        if keeper is None:
            return
        async with keeper.lock:
            if os_dns(self._config, (), False).is_empty:
                await self._drop_manager(keeper)
                self._tell("")
                return
            try:
                await self._set_up(keeper)
            except HullError as err:
                keeper.retry()
                self._tell(str(err))
                raise
            self._tell(self._choice.warning)

    async def _set_up(self, keeper: Keeper) -> None:
        if self._is_foreign(self._path):
            hint = f"ask {SERVICE_TEXTS[0]} for names of the tailnet"
            raise HullError(f"set up names in {self._path}", "the file is shared with another network namespace", hint)
        try:
            keeper.claim = keeper.claim or claim_names(self._folder)
        except TakenError as err:
            raise HullError(f"set up names in {self._path}", err.reason) from None
        await keeper.watch_bus()
        choice = await choose(self._new_survey(keeper.bus))
        keeper.bus.may_start = False
        if self._manager is None or self._manager.mode is not choice.mode:
            if self._manager is not None:
                await self._manager.revert()
            self._manager = await self._new_manager(choice.mode, keeper.bus)
            log.info("names: set up by %s: %s", choice.mode.value, "; ".join(choice.because))
        self._choice = choice
        self._stays_local = is_ipv6_only(self._device)
        own = self._own_addresses()
        wanted = os_dns(self._config, own, self._manager.can_split, stays_local=self._stays_local)
        await self._manager.set(wanted)
        if wanted != self._written:
            log.info("names: %s", _in_words(wanted))
        self._written = wanted
        keeper.watch_files(self._manager.watched())
        keeper.set_pace(is_told=choice.mode is Mode.RESOLVED)

    async def _new_manager(self, mode: Mode, bus: SystemBus) -> Manager:
        match mode:
            case Mode.RESOLVED:
                return ResolvedLink(bus, self._device)
            case Mode.NETWORK_MANAGER:
                splits = await self._new_survey(bus).network_manager_mode() in ("dnsmasq", "systemd-resolved")
                return NetworkManager(bus, self._device, list(self._own_addresses()), can_split=splits)
            case Mode.OPENRESOLV:
                return Openresolv(self._folder, self._device, self._path)
            case Mode.DEBIAN_RESOLVCONF:
                return DebianResolvconf(self._folder, self._device, self._path)
        return DirectFile(self._folder, self._path)

    async def _drop_manager(self, keeper: Keeper) -> None:
        keeper.watch_files([])
        manager, self._manager = self._manager, None
        self._written = OsDns()
        try:
            if manager is not None:
                await manager.revert()
        finally:
            if keeper.claim is not None:
                keeper.claim.close()
                keeper.claim = None

    async def _look(self) -> None:
        """Somebody may have changed something."""
        keeper = self._keeper
        if keeper is None:
            return
        async with keeper.lock:
            manager = self._manager
            if manager is None:
                return
            found = await manager.look()
        if found is Found.FINE and self._stays_local != is_ipv6_only(self._device):
            await self._reconcile_quietly()
        elif found is Found.FINE and keeper.fight.is_over(keeper.now()):
            self._tell(self._choice.warning)
        if found is Found.FINE:
            return
        # Seen in the middle of being written, a file names nobody.
        keeper.rival = manager.rival() or keeper.rival
        rival = keeper.rival or "another program"
        if not keeper.fight.may_go_on(keeper.now()):
            self._tell(f"{rival} keeps changing {self._what()} after tsd has set it: put back now and then only")
            return
        if not self._trouble:
            log.warning("names: %s was changed by %s; putting ours back", self._what(), rival)
        await self._reconcile_quietly()

    async def _reconcile_quietly(self) -> None:
        known = self._trouble
        try:
            await self._reconcile()
        except HullError as err:
            if str(err) != known:
                log.warning("names: %s", err)

    def _what(self) -> str:
        return str(self._path) if self._choice.mode is not Mode.RESOLVED else "the settings in systemd-resolved"

    # --- reports

    def _on_late(self, work: concurrent.futures.Future[None]) -> None:
        err = work.exception() if not work.cancelled() else None
        if err is not None and not isinstance(err, HullError):
            log.error("names thread failed", exc_info=err)

    def _tell(self, text: str) -> None:
        if not text and not self._trouble:
            return
        self._trouble = text
        if self._main is not None:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                self._main.call_soon_threadsafe(self.on_fight, text)
        else:
            self.on_fight(text)


def is_ipv6_only(device: str, folder: Path = Path("/proc/net")) -> bool:
    """Whether the way to the world is IPv6 alone; the tunnel is no way."""
    try:
        v4 = [line.split() for line in (folder / "route").read_text().splitlines()[1:]]
        v6 = [line.split() for line in (folder / "ipv6_route").read_text().splitlines()]
    except OSError:
        return False
    if any(words[1:2] == ["00000000"] for words in v4):
        return False
    defaults = [words[-1] for words in v6 if words[:2] == ["0" * 32, "00"]]
    return any(name not in ("lo", device) for name in defaults)


def _in_words(wanted: OsDns) -> str:
    zones = [zone for zone in wanted.match if not zone.endswith(".arpa")]
    for_what = f"for {', '.join(zones)}" if wanted.match else "for all names"
    return f"{', '.join(wanted.nameservers)} {for_what}; completed with {', '.join(wanted.search) or 'nothing'}"
