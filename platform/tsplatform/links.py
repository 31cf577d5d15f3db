"""The link monitor: what interfaces, addresses and default routes the host has, and when that changes.

tailscale: net/netmon. On Linux netlink says when to look again (no thread: the socket sits on the event loop); where
that is refused (gVisor, Cloud Run) or does not exist, the state is polled. A slow tick also notices that the machine
was suspended or the process frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path

from tsd.base.addr import IPPrefix
from tsd.hull import LinkState
from tsplatform import netlink

log = logging.getLogger(__name__)

DEBOUNCE_S = 0.25
TICK_S = 5.0
"""The longest time until a suspension is noticed when nothing else tells."""
SLEEP_SLACK_S = 10.0
OWN_INTERFACE_PREFIXES = ("tsd", "tailscale")

_PROC = Path("/proc/net")
_NO_GATEWAY_MASK = "00000000"
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
"""This process lacks something for looking; the links are as they were."""


class LinkWatcher:
    """Implements `tsd.hull.LinkMonitor` for the host.

    `own` is the name of our own device, which never counts; `assume_up` is for hosts that have loopback only.
    Simulated hosts override `listen` and `clocks_s`.
    """

    def __init__(self, own: str = "", read: Callable[[], LinkState] | None = None, assume_up: bool = False) -> None:
        self._source = read if read is not None else (lambda: read_state(own))
        self._assume_up = assume_up
        self._state = self._read()

    def _read(self, last: LinkState | None = None) -> LinkState:
        try:
            state = self._source()
        except OSError as err:
            log.warning("links cannot be looked at, so what was seen last counts: %s", err.strerror)
            state = last if last is not None else LinkState()
        return replace(state, is_up=True) if self._assume_up else state

    def state(self) -> LinkState:
        """As last seen."""
        return self._state

    def refresh(self) -> LinkState:
        """Look now."""
        self._state = self._read(self._state)
        return self._state

    async def changes(self) -> AsyncIterator[LinkState]:
        """Yields when the state differs from the last one, and after a suspension even when it does not."""
        heard = asyncio.Event()
        stop_listening = self.listen(heard.set)
        try:
            while True:
                asleep_s = await self._wait(heard)
                before, after = self._state, self.refresh()
                if asleep_s > 0:
                    log.info("the machine was asleep for %.0f s", asleep_s)
                if after != before or asleep_s > 0:
                    yield after
        finally:
            stop_listening()

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` when the host says that links changed; returns what ends that."""
        return _listen(asyncio.get_running_loop(), on_change)

    def clocks_s(self) -> tuple[float, float]:
        """(time since boot, the part of it that was spent suspended)."""
        return _boottime_s(), _asleep_s()

    async def _wait(self, heard: asyncio.Event) -> float:
        """Until something was heard (debounced), or the tick; seconds that the machine slept meanwhile."""
        began, slept_before = self.clocks_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await heard.wait()
                await asyncio.sleep(DEBOUNCE_S)
        heard.clear()
        now, slept = self.clocks_s()
        suspended_s = slept - slept_before
        overslept_s = now - began - TICK_S - DEBOUNCE_S
        return max(suspended_s if suspended_s > 1.0 else 0.0, overslept_s if overslept_s > SLEEP_SLACK_S else 0.0)


def _listen(loop: asyncio.AbstractEventLoop, on_change: Callable[[], None]) -> Callable[[], None]:
    if not sys.platform.startswith("linux"):
        return lambda: None
    try:
        sock = netlink.open_changes()
    except OSError as err:
        log.info("link changes are found by polling every %.0f s: netlink: %s", TICK_S, err.strerror)
        return lambda: None

    def stop() -> None:
        loop.remove_reader(sock)
        sock.close()

    netlink.watch(loop, sock, on_change)
    return stop


def read_state(own: str = "") -> LinkState:
    """The host's links now; a host that tells nothing is up and has no addresses. Raises OSError only where this
    process has no file or memory left for looking."""
    if not sys.platform.startswith("linux"):
        return _read_portable()
    try:
        names = {link.number: link for link in netlink.interfaces() if link.flags & netlink.IFF_UP}
        found: dict[str, list[IPPrefix]] = {}
        networks: set[IPPrefix] = set()
        for address in netlink.addresses():
            link = names.get(address.number)
            if link is not None and address.is_usable and not _is_own(link.name, own):
                found.setdefault(link.name, []).append(ip_network(address.ip))
                networks.add(ip_network((address.ip, address.prefix_length), strict=False))
    except OSError as err:
        if err.errno in _SHORTAGES:
            raise
        log.info("interfaces cannot be read by netlink: %s", err.strerror)
        return _read_portable()
    (default_v4, gateway), default_v6 = default_route_v4(own=own), default_interface_v6(own=own)
    addresses = {name: tuple(prefixes) for name, prefixes in sorted(found.items())}
    shared = [p for p in networks if p.prefixlen < p.max_prefixlen and not (p.is_loopback or p.is_link_local)]
    is_up = bool(default_v4 or default_v6 or _has_global(addresses))
    return LinkState(addresses, default_v4, default_v6, is_up, tuple(sorted(shared, key=str)), gateway)


def _is_own(name: str, own: str) -> bool:
    return bool(own and name == own) or name.startswith(OWN_INTERFACE_PREFIXES)


def _has_global(addresses: dict[str, tuple[IPPrefix, ...]]) -> bool:
    hosts = (prefix.network_address for prefixes in addresses.values() for prefix in prefixes)
    return any(not (ip.is_loopback or ip.is_link_local) for ip in hosts)


def default_route_v4(path: Path = _PROC / "route", own: str = "") -> tuple[str, IPv4Address | None]:
    """Interface and gateway of the IPv4 default route with the lowest metric; ("", None) without one."""
    best: tuple[int, str, int] | None = None
    for line in _lines(path)[1:]:
        columns = line.split()
        if len(columns) < 8 or columns[1] != _NO_GATEWAY_MASK or columns[7] != _NO_GATEWAY_MASK:
            continue
        if int(columns[3], 16) & 0x1 and not _is_own(columns[0], own):
            found = (int(columns[6]), columns[0], socket.ntohl(int(columns[2], 16)))
            best = min(best, found) if best else found
    if best is None:
        return "", None
    return best[1], IPv4Address(best[2]) if best[2] else None


def default_interface_v6(path: Path = _PROC / "ipv6_route", own: str = "") -> str:
    """Interface of the IPv6 default route; the kernel's own unreachable routes on `lo` do not count."""
    best: tuple[int, str] | None = None
    for line in _lines(path):
        columns = line.split()
        if len(columns) < 10 or columns[0] != "0" * 32 or columns[1] != "00":
            continue
        if columns[9] != "lo" and not _is_own(columns[9], own):
            best = min(best or (1 << 32, ""), (int(columns[5], 16), columns[9]))
    return best[1] if best else ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError as err:
        if err.errno in _SHORTAGES:
            raise
        return []


def _read_portable() -> LinkState:
    """Without netlink: the source addresses that the host would use towards the world (nothing is sent)."""
    found: list[IPPrefix] = []
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            found.append(ip_network(ip_address(sock.getsockname()[0].partition("%")[0])))
    has_v4, has_v6 = (any(p.version == version for p in found) for version in (4, 6))
    return LinkState(
        {"default": tuple(found)} if found else {},
        "default" if has_v4 else "",
        "default" if has_v6 else "",
        bool(found),
    )


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


def _asleep_s() -> float:
    """Seconds spent suspended since boot: the monotonic clock stands still meanwhile."""
    return _boottime_s() - time.monotonic() if hasattr(time, "CLOCK_BOOTTIME") else 0.0
