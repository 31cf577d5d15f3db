"""Whether full-sized packets pass a direct path: small ones, and disco with them, may pass where data vanishes (F12).

Each new direct path is asked with a padded disco ping as large as a full packet of the tunnel, and those in use again
from time to time. When none of several is answered though small ones in between all are, the largest size that passes
is searched for, and the path is kept out of use for a while: the relay's TCP finds its way. Padding: tailscale:
disco/disco.go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from tsd.base.addr import AddrPort
from tsd.base.log import fields
from tsd.base.tasks import Tasks

log = logging.getLogger(__name__)

WIREGUARD_BYTES = 32
"""What a packet grows by as a datagram."""
LEAST_MTU_BYTES = 576
SETTLE_S, ANSWER_S = 1.0, 1.5
AGAIN_S, KEEP_OFF_S = 300.0, 600.0
TRIES = 3
_STEP_BYTES = 16
"""WireGuard fills packets up to a multiple of this, where the sender's own MTU is not reached."""
_RENEWAL_S = 30.0


class PathMtuHost(Protocol):
    """What the watch needs of the plane."""

    def probe_path(self, handle: int, address: AddrPort, size: int) -> Awaitable[object]:
        """Ends with the answer to one ping of `size` bytes. Raises OSError."""

    def path_mtu_bytes(self, handle: int) -> int:
        """The largest packet that both tunnels may send."""

    def is_in_use(self, handle: int) -> bool:
        """Whether something was sent to the peer a moment ago."""

    def keep_off_path(self, handle: int, address: AddrPort, seconds: float) -> None:
        """Use another address or the relay, where there is one."""


class Narrow(NamedTuple):
    """A direct path that is too narrow; `mtu_bytes` is what the tunnel's MTU would have to be."""

    address: AddrPort
    mtu_bytes: int


class PathMtuWatch:
    """One per plane. `on_found` is told all narrow paths by handle whenever they change."""

    def __init__(self, host: PathMtuHost, on_found: Callable[[dict[int, Narrow]], None]) -> None:
        self._host = host
        self._on_found = on_found
        self._current: dict[int, AddrPort] = {}
        self._found: dict[int, Narrow] = {}
        self._tasks = Tasks(log)
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._renewing: asyncio.Task[None] | None = None

    def path_changed(self, handle: int, address: AddrPort | None) -> None:
        """`address` is that of the direct path now, None without one."""
        if self._current.get(handle) == address:
            return
        self._current.pop(handle, None)
        task = self._asking.pop(handle, None)
        if task is not None:
            task.cancel()
        if address is not None:
            self._current[handle] = address
            self._asking[handle] = self._tasks.spawn(self._ask(handle, address))
            if self._renewing is None:
                self._renewing = self._tasks.spawn(self._renew())

    def forget(self, handle: int) -> None:
        """The peer is gone."""
        self.path_changed(handle, None)
        self._drop(handle)

    def link_changed(self) -> None:
        """What was found belongs to another network."""
        self._tell({})

    def close(self) -> None:
        self._tasks.cancel()
        self._current.clear()
        self._tell({})

    async def _renew(self) -> None:
        """One timer for all, and none for peers that are idle: they would wake, and keep awake, for nothing."""
        while True:
            await asyncio.sleep(AGAIN_S)
            for handle, address in self._current.items():
                if self._asking[handle].done() and self._host.is_in_use(handle):
                    self._asking[handle] = self._tasks.spawn(self._ask(handle, address))

    async def _ask(self, handle: int, address: AddrPort) -> None:
        await asyncio.sleep(SETTLE_S)
        full_bytes = self._host.path_mtu_bytes(handle)
        most_bytes = await self._most(handle, address, full_bytes)
        if most_bytes == full_bytes:
            self._drop(handle)
        elif most_bytes:
            self._narrow(handle, Narrow(address, most_bytes))

    def _narrow(self, handle: int, found: Narrow) -> None:
        log.warning(
            fields("large packets vanish on a direct path", endpoint=found.address, fitting_mtu=found.mtu_bytes)
        )
        self._tell(self._found | {handle: found})
        self._tasks.spawn(self._forget_later(handle, found))
        self._host.keep_off_path(handle, found.address, KEEP_OFF_S)

    async def _forget_later(self, handle: int, found: Narrow) -> None:
        await asyncio.sleep(KEEP_OFF_S + AGAIN_S + _RENEWAL_S)
        if self._found.get(handle) is found:
            self._drop(handle)

    def _drop(self, handle: int) -> None:
        self._tell({other: one for other, one in self._found.items() if other != handle})

    def _tell(self, found: dict[int, Narrow]) -> None:
        is_news, self._found = found != self._found, found
        if is_news:
            self._on_found(found)

    # --- asking

    async def _most(self, handle: int, address: AddrPort, full_bytes: int) -> int:
        """The largest MTU whose packets pass; 0 when that cannot be said."""
        for _ in range(TRIES):
            if await self._passes(handle, address, full_bytes):
                return full_bytes
            if not await self._passes(handle, address, 0):
                return 0
        low, high = LEAST_MTU_BYTES, full_bytes
        if high <= low or not await self._passes_soon(handle, address, low):
            return 0
        while high - low > _STEP_BYTES:
            middle = (low + high) // 2 // _STEP_BYTES * _STEP_BYTES
            if await self._passes_soon(handle, address, middle):
                low = middle
            else:
                high = middle
        return full_bytes if await self._passes(handle, address, full_bytes) else low

    async def _passes_soon(self, handle: int, address: AddrPort, mtu_bytes: int) -> bool:
        return await self._passes(handle, address, mtu_bytes) or await self._passes(handle, address, mtu_bytes)

    async def _passes(self, handle: int, address: AddrPort, mtu_bytes: int) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._host.probe_path(handle, address, mtu_bytes + WIREGUARD_BYTES if mtu_bytes else 0)
        except (OSError, TimeoutError):
            return False
        return True
