"""All DERP connections of one engine: the home region always, others on demand.

Spec: tailscale: wgengine/magicsock/derp.go. Other regions are opened by the first packet for them and closed after
60 s without one. Failed dials back off, so that neither a dead network (P03) nor a stolen key (W13) becomes a
storm. An empty DERP map keeps the links in use (N24).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tsd.base.addr import IPAddress
from tsd.base.entropy import uniform
from tsd.base.keys import NodePublic
from tsd.base.log import DropCounter, fields
from tsd.tailcfg.derpmap import DERPMap
from tsd.transport.derp import DerpConnection, DerpError, DerpOptions

_log = logging.getLogger("tsd.transport.derp")

IDLE_CLOSE_S = 60.0
IDLE_CHECK_S = 15.0
BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 20.0
STABLE_AFTER_S = 30.0
UNREACHABLE_AFTER = 3
FAILURE_COUNTS_S = 300.0
_FORGOTTEN = "relay has forgotten this connection"


def _ignore(*_: object) -> None:
    return None


@dataclass(slots=True)
class PoolCallbacks:
    """What the pool tells the engine; all are called on the loop."""

    on_packets: Callable[[int, NodePublic, list[bytes]], None]
    on_peer_gone: Callable[[int, NodePublic, bool], None] = _ignore
    on_connected: Callable[[int, bool, str], None] = _ignore
    """(region, is_connected, reason)"""
    on_health: Callable[[int, str], None] = _ignore
    """(region, text); "" when the complaint is over"""


@dataclass(slots=True, eq=False)
class _Link:
    """What the pool knows about one region, connected or not."""

    region_id: int
    connection: DerpConnection | None = None
    opening: asyncio.Task[None] | None = None
    failures: int = 0
    forgotten: int = 0
    ready_at: float = 0.0
    retry: asyncio.TimerHandle | None = None
    last_error: str = ""
    last_heard: float = field(default=-1e9)


class DerpPool:
    """Owns the connections. Everything is non-blocking; close it with `close`."""

    def __init__(self, options: DerpOptions, callbacks: PoolCallbacks) -> None:
        self.drops = DropCounter()
        self.home = 0
        self._options = options
        self._callbacks = callbacks
        self._map = DERPMap()
        self._links: dict[int, _Link] = {}
        self._failed: dict[int, tuple[int, float]] = {}
        self._loop = asyncio.get_running_loop()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def set_map(self, derp_map: DERPMap) -> None:
        """A map without regions changes nothing but `problem`; a region redefined or gone loses its connection."""
        if not derp_map.is_usable and self._map.is_usable:
            self._callbacks.on_health(0, "the relay map is empty; keeping the links in use")
            return
        old, self._map = self._map, derp_map
        for region_id, link in list(self._links.items()):
            region = derp_map.region(region_id)
            if region is None:
                self._forget(link, "region left the relay map")
            elif region != old.region(region_id) and link.connection is not None:
                link.connection.close("region was redefined")
        if self.home and derp_map.region(self.home) is not None:
            self._ensure(self.home)

    def set_home(self, region_id: int) -> None:
        """0 means none. The new home is dialled at once and stays connected."""
        if region_id == self.home:
            return
        self.home = region_id
        for link in self._links.values():
            if link.connection is not None and link.connection.is_ready:
                link.connection.note_preferred(link.region_id == region_id)
        if region_id:
            self._ensure(region_id)

    def send(self, region_id: int, dst: NodePublic, packet: bytes) -> bool:
        """Queue a packet; opens the region when needed. False when the region is unknown or backing off."""
        connection = self._for_sending(region_id)
        if connection is None:
            self.drops.add("no relay")
            return False
        connection.send(dst, packet)
        return True

    def send_many(
        self, region_id: int, dst: NodePublic, datagrams: bytes, datagram_bytes: int, *, bundled: bool = False
    ) -> bool:
        """As `send`, for datagrams that lie back to back; `bundled` when `dst` unpacks bundles."""
        connection = self._for_sending(region_id)
        if connection is None:
            self.drops.add("no relay", -(-len(datagrams) // (datagram_bytes or len(datagrams) or 1)))
            return False
        connection.send_many(dst, datagrams, datagram_bytes, bundled=bundled)
        return True

    def is_connected(self, region_id: int) -> bool:
        link = self._links.get(region_id)
        return link is not None and link.connection is not None and link.connection.is_ready

    def last_heard(self, region_id: int) -> float:
        """When a frame of the region last came in, for the choice of home; far in the past when never."""
        link = self._links.get(region_id)
        return link.last_heard if link is not None else -1e9

    def last_error(self, region_id: int) -> str:
        link = self._links.get(region_id)
        return link.last_error if link is not None else ""

    def unreachable(self) -> frozenset[int]:
        """Regions whose relay failed repeatedly of late and not succeeded since: no candidates for home (F17)."""
        limit = self._options.clock.now() - FAILURE_COUNTS_S
        return frozenset(r for r, (count, at) in self._failed.items() if count >= UNREACHABLE_AFTER and at > limit)

    def link_changed(self, local: Collection[IPAddress] = ()) -> None:
        """The underlay changed: give up what left from an address that is gone, test the rest, dial at once.

        `local` are the host's addresses; empty when they are not known.
        """
        self._failed.clear()
        for link in list(self._links.values()):
            link.failures = 0
            connection = link.connection
            if connection is not None and local and connection.local_ip not in (None, *local):
                connection.close("local address is gone")
                link.failures = 0
            elif connection is not None and connection.is_ready:
                connection.probe()
            if link.retry is not None:
                link.retry.cancel()
                link.retry = None
                self._open(link)

    def close(self) -> None:
        self._is_closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for link in list(self._links.values()):
            self._forget(link, "closed")

    # -- Owner of the connections -------------------------------------------------------------------------------

    def on_ready(self, connection: DerpConnection) -> None:
        link = self._link_of(connection)
        if link is not None:
            link.ready_at = link.last_heard = self._options.clock.now()
            link.last_error = ""
            self._failed.pop(link.region_id, None)
            if not link.forgotten:
                self._callbacks.on_health(link.region_id, "")
            if link.region_id == self.home:
                connection.note_preferred(True)
            _log.info(fields("relay connected", derp_region=link.region_id))
            self._callbacks.on_connected(link.region_id, True, "")

    def on_packets(self, connection: DerpConnection, source: NodePublic, packets: list[bytes]) -> None:
        link = self._links.get(connection.region.region_id)
        if link is not None:
            link.last_heard = self._options.clock.now()
        self._callbacks.on_packets(connection.region.region_id, source, packets)

    def on_peer_gone(self, connection: DerpConnection, key: NodePublic, is_not_here: bool) -> None:
        self._callbacks.on_peer_gone(connection.region.region_id, key, is_not_here)

    def on_health(self, connection: DerpConnection, text: str) -> None:
        self._callbacks.on_health(connection.region.region_id, text)

    def on_closed(self, connection: DerpConnection, reason: str) -> None:
        link = self._link_of(connection)
        if link is None:
            return
        link.connection = None
        link.last_error = reason
        now = self._options.clock.now()
        if link.ready_at and now - link.ready_at > STABLE_AFTER_S:
            link.failures = 0
        else:
            link.failures += 1
        if link.ready_at:
            self._note_forgotten(link, reason)
        else:
            self._failed[link.region_id] = (self._failed.get(link.region_id, (0, 0.0))[0] + 1, now)
        link.ready_at = 0.0
        level = logging.DEBUG if link.failures > 1 else logging.WARNING
        _log.log(level, fields("relay lost", derp_region=link.region_id, reason=reason))
        self._callbacks.on_connected(link.region_id, False, reason)
        self._wait(link)

    # -- inside -------------------------------------------------------------------------------------------------

    def _note_forgotten(self, link: _Link, reason: str) -> None:
        link.forgotten = link.forgotten + 1 if reason == _FORGOTTEN else 0
        if link.forgotten >= 2:
            text = "the relay keeps losing this node; another machine may be using the same node key (copied state)"
            self._callbacks.on_health(link.region_id, text)

    def _link_of(self, connection: DerpConnection) -> _Link | None:
        link = self._links.get(connection.region.region_id)
        return link if link is not None and link.connection is connection else None

    def _for_sending(self, region_id: int) -> DerpConnection | None:
        link = self._links.get(region_id)
        if link is not None and link.connection is not None:
            return link.connection
        return self._ensure(region_id)

    def _ensure(self, region_id: int) -> DerpConnection | None:
        if self._is_closed or region_id <= 0 or self._map.region(region_id) is None:
            return None
        link = self._links.get(region_id)
        if link is None:
            link = self._links[region_id] = _Link(region_id)
        if link.connection is None and link.retry is None:
            self._open(link)
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(IDLE_CHECK_S, self._close_idle)
        return link.connection

    def _open(self, link: _Link) -> None:
        region = self._map.region(link.region_id)
        if region is not None and not self._is_closed:
            link.connection = DerpConnection(region, self._options, self)
            prefers = link.region_id == self.home
            link.opening = self._loop.create_task(self._run_open(link.connection, prefers))

    async def _run_open(self, connection: DerpConnection, prefers: bool) -> None:
        try:
            await connection.open(prefers=prefers)
        except DerpError as err:
            connection.close(str(err))
        except Exception as err:
            _log.exception("relay connection failed unexpectedly")
            connection.close(str(err))

    def _wait(self, link: _Link) -> None:
        """Every region waits out its back-off; only the home region is dialled again without being asked."""
        if self._is_closed or link.retry is not None or self._links.get(link.region_id) is not link:
            return
        ceiling = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(link.failures, 10))
        delay = uniform(self._options.entropy, ceiling / 2, ceiling)
        link.retry = self._loop.call_later(delay, self._retry, link)

    def _retry(self, link: _Link) -> None:
        link.retry = None
        if link.region_id == self.home and self._links.get(link.region_id) is link:
            self._open(link)

    def _forget(self, link: _Link, reason: str) -> None:
        del self._links[link.region_id]
        if link.retry is not None:
            link.retry.cancel()
        if link.opening is not None:
            link.opening.cancel()
        if link.connection is not None:
            was_ready = link.connection.is_ready
            link.connection.close(reason)
            if was_ready:
                self._callbacks.on_connected(link.region_id, False, reason)

    def _close_idle(self) -> None:
        self._idle_timer = None
        limit = self._options.clock.now() - IDLE_CLOSE_S
        for link in list(self._links.values()):
            connection = link.connection
            is_idle = connection is None or (connection.is_ready and connection.last_write < limit)
            if link.region_id != self.home and is_idle and link.retry is None:
                self._forget(link, "idle")
        if any(region_id != self.home for region_id in self._links):
            self._idle_timer = self._loop.call_later(IDLE_CHECK_S, self._close_idle)
