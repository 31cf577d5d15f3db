"""Everything that exists once per node key: core, WireGuard, magicsock, DERP connections and the packet path.

A new node key means a new plane; the UDP sockets, the disco key and the host's TUN live longer and are handed in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.errors import ProtocolError
from tsd.base.keys import DiscoPrivate, NodePrivate, NodePublic
from tsd.base.log import fields
from tsd.base.machine import Deadline
from tsd.dataplane.fdpump import DeviceTun, FdPump
from tsd.dataplane.pump import Core
from tsd.engine.driver import Driver
from tsd.engine.path.datapath import DataPath, Traffic
from tsd.engine.path.fastpath import FastPath
from tsd.engine.path.masquerade import MasqueradingCore
from tsd.engine.path.pathmtu import Narrow, PathMtuWatch
from tsd.engine.path.pings import DiscoReply
from tsd.engine.path.sockets import UdpSockets
from tsd.engine.peers import Peer, PeerTable
from tsd.hull import Tun
from tsd.magicsock import types as paths
from tsd.magicsock.magicsock import Magicsock
from tsd.transport.derp import DerpOptions
from tsd.transport.derp_pool import DerpPool, PoolCallbacks
from tsd.wireguard import events
from tsd.wireguard.device import WireGuard
from tsd.wireguard.tai64n import Tai64nSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlaneOptions:
    """What all planes of one engine share."""

    clock: Clock
    entropy: Entropy
    new_core: Callable[[], Core]
    tai64n: Tai64nSource
    disco_private: DiscoPrivate
    derp: Callable[[NodePrivate], DerpOptions]
    never_direct_udp: bool = False
    always_use_derp: bool = False
    write_keylog: Callable[[str], None] | None = None
    new_pump: Callable[[Core], FdPump | None] = lambda core: None
    """Threads that move the packets of a device by themselves, on such a core; None: the loop moves them."""


@dataclass(slots=True)
class PlaneEvents:
    """What the plane tells the engine."""

    on_endpoints_wanted: Callable[[str], None] = lambda reason: None
    on_rebind_wanted: Callable[[str], None] = lambda reason: None
    on_relay: Callable[[int, bool, str], None] = lambda region, is_connected, reason: None
    on_relay_health: Callable[[int, str], None] = lambda region, text: None
    on_session: Callable[[Peer], None] = lambda peer: None
    on_handshake_sent: Callable[[], None] = lambda: None
    on_narrow_paths: Callable[[dict[int, Narrow]], None] = lambda found: None


class _Timed:
    """WireGuard as the driver wants it: its deadlines also need the wall clock."""

    def __init__(self, wireguard: WireGuard, clock: Clock) -> None:
        self._wireguard = wireguard
        self._clock = clock

    def next_deadline(self) -> Deadline | None:
        return self._wireguard.next_deadline()

    def on_deadline(self, now: float) -> None:
        self._wireguard.on_deadline(now, self._clock.wall_ns())

    def take_outputs(self) -> list[Any]:
        return self._wireguard.take_outputs()


class Plane:
    """One node key's machinery. `close` it before another one is made."""

    def __init__(
        self, node_private: NodePrivate, options: PlaneOptions, peers: PeerTable, sockets: UdpSockets, told: PlaneEvents
    ) -> None:
        self.node_private = node_private
        self._options = options
        self._clock = options.clock
        self._peers = peers
        self._sockets = sockets
        self._told = told
        self._pings: dict[int, asyncio.Future[DiscoReply]] = {}
        self.make_probe: Callable[[IPAddress, Callable[[], None]], bytes | None] = lambda ip, on_pong: None
        """A packet that the peer answers, and what to call then; the engine sets it."""
        self._bare_core = options.new_core()
        self.core = MasqueradingCore(self._bare_core)
        self.wireguard = WireGuard(
            node_private,
            self.core,
            entropy=options.entropy,
            tai64n=options.tai64n,
            write_keylog=options.write_keylog,
        )
        self.wireguard.unknown_peer_lookup = self._handle_of_stranger
        self.magicsock = Magicsock(
            node_private,
            options.disco_private,
            entropy=options.entropy,
            never_direct_udp=options.never_direct_udp,
            always_use_derp=options.always_use_derp,
        )
        self.paths_of: Callable[[Peer], paths.PeerPaths] = lambda peer: paths.PeerPaths(peer.node_key)
        self.magicsock.unknown_peer = self._enlist_handle
        self.magicsock.on_unknown_disco(self._enlist_disco)
        self.magicsock.unanswered_since = lambda handle: self.core.activity(handle).first_unanswered_send
        self.driver = Driver(self._clock)
        self.driver.add(_Timed(self.wireguard, self._clock), self._on_wireguard)
        self.driver.add(self.magicsock, self._on_magicsock)
        self.derp = DerpPool(
            options.derp(node_private),
            PoolCallbacks(self._on_derp_packets, self._on_peer_gone, told.on_relay, told.on_relay_health),
        )
        self.datapath = DataPath(self.core, self.wireguard, self.magicsock, self._clock, self, self.driver)
        self.datapath.node_key_of = self._node_key_of
        self.datapath.ensure_peer = self.ensure_in_wireguard
        self.fast: FastPath | None = None
        self._mtu_watch = PathMtuWatch(self, told.on_narrow_paths)
        self._mtu_bytes = 0

    def attach(self, tun: Tun) -> None:
        """The host's packets go through this plane from now on."""
        self._mtu_bytes = tun.mtu_bytes
        if isinstance(tun, DeviceTun):
            self.fast = self._start_fast(tun)
        self.datapath.attach(tun, reads=self.fast is None)

    def _start_fast(self, device: DeviceTun) -> FastPath | None:
        pump = self._options.new_pump(self._bare_core)
        if pump is None:
            return None
        fast = FastPath(pump, self.core, self.datapath, self.magicsock, self._sockets, self._clock, self.driver)
        try:
            fast.start(device)
        except (OSError, MemoryError) as err:
            log.warning(fields("packets are moved by the event loop: the pump's threads do not start", reason=err))
            return None
        fast.on_failed = lambda: self._without_fast(device)
        return fast

    def _without_fast(self, device: Tun) -> None:
        self.fast = None
        self.datapath.attach(device)

    def rules_changed(self) -> None:
        """The datapath's filters are other ones, or who is jailed or masqueraded."""
        if self.fast is not None:
            self.fast.apply_rules()

    def watch_icmp(self, on: bool) -> None:
        if self.fast is not None:
            self.fast.watch_icmp(on)

    def traffic(self) -> Traffic:
        if self.fast is not None:
            self.fast.count_traffic()
        return self.datapath.traffic

    def close(self) -> None:
        if self.fast is not None:
            self.fast.count_traffic()
            self.fast.stop()
        self._mtu_watch.close()
        self.driver.close()
        self.derp.close()
        for waiting in self._pings.values():
            waiting.cancel()

    # --- peers

    def set_peer(self, peer: Peer) -> None:
        """Known to the core. Magicsock and WireGuard learn of it when the first message goes or comes."""
        self.core.add_peer(peer.handle)
        if self.magicsock.has_peer(peer.handle):
            self._enlist(peer)

    def _enlist(self, peer: Peer) -> None:
        now = self._clock.now()
        peer_paths = self.paths_of(peer)
        self.magicsock.set_peer(peer.handle, peer_paths, now)
        if peer_paths.home_derp and peer.handle in self.datapath.unreached:
            del self.datapath.unreached[peer.handle]
            self.wireguard.retry(peer.handle, now, self._clock.wall_ns())

    def _enlist_handle(self, handle: int) -> None:
        """With all that share its disco key, so that a message of theirs can be told apart."""
        peer = self._peers.by_handle(handle)
        if peer is not None:
            self._enlist(peer)
            for sharing in self._peers.sharing_disco(peer):
                self._enlist(sharing)

    def _enlist_disco(self, disco_key: bytes) -> None:
        for peer in self._peers.by_disco(disco_key):
            self._enlist(peer)

    def remove_peer(self, peer: Peer) -> None:
        self.datapath.unreached.pop(peer.handle, None)
        self.wireguard.remove_peer(peer.handle)
        self.core.remove_peer(peer.handle)
        self.magicsock.remove_peer(peer.handle)
        self._mtu_watch.forget(peer.handle)
        if self.fast is not None:
            self.fast.remove_peer(peer.handle)

    def restart_session(self, peer: Peer) -> None:
        """The peer restarted: the next packet shakes hands at once."""
        if self.wireguard.has_peer(peer.handle):
            self.wireguard.restart_peer(peer.handle)

    def ensure_in_wireguard(self, handle: int) -> bool:
        if self.wireguard.has_peer(handle):
            return True
        peer = self._peers.by_handle(handle)
        if peer is None:
            return False
        try:
            self.wireguard.add_peer(handle, peer.node_key)
        except ProtocolError as err:
            log.warning(fields("peer has an unusable key", peer=peer.node_key.short(), reason=err))
            return False
        return True

    def link_changed(self, local: Collection[IPAddress]) -> None:
        """The underlay changed; `local` are the host's addresses now (empty: unknown)."""
        now, wall_ns = self._clock.now(), self._clock.wall_ns()
        self.magicsock.link_changed(now)
        self._mtu_watch.link_changed()
        self.derp.link_changed(local)
        for peer in self._peers:
            self.wireguard.retry(peer.handle, now, wall_ns)
        if self.fast is not None:
            self.fast.settle_all()
        self.driver.kick()

    def _handle_of_stranger(self, node_key: NodePublic) -> int | None:
        peer = self._peers.by_key(node_key)
        return peer.handle if peer is not None and self.ensure_in_wireguard(peer.handle) else None

    def _node_key_of(self, handle: int) -> NodePublic | None:
        peer = self._peers.by_handle(handle)
        return peer.node_key if peer is not None else None

    # --- out

    def send_udp(self, remote: AddrPort, datagrams: bytes, datagram_bytes: int) -> None:
        self._sockets.send(remote, datagrams, datagram_bytes)

    def send_derp(self, region: int, peer: NodePublic, datagrams: bytes, datagram_bytes: int) -> None:
        known = self._peers.by_key(peer)
        bundled = known is not None and known.takes_bundles
        self.derp.send_many(region, peer, datagrams, datagram_bytes, bundled=bundled)

    def _on_wireguard(self, output: events.Output) -> None:
        now = self._clock.now()
        match output:
            case events.Transmit(peer, datagram):
                self.datapath.send_datagram(peer, datagram, now)
                self._told.on_handshake_sent()
            case events.SealedReady(sealed):
                self.datapath.send_sealed(sealed, now)
            case events.Reply(source, datagram):
                self._reply(source, datagram)
            case events.HandshakeCompleted(handle, _):
                peer_now = self._peers.by_handle(handle)
                if peer_now is not None:
                    self._told.on_session(peer_now)
            case _:
                pass

    def _reply(self, source: object, datagram: bytes) -> None:
        if isinstance(source, AddrPort):
            self.send_udp(source, datagram, len(datagram))
        elif isinstance(source, paths.DerpSource):
            self.send_derp(source.region, source.node_key, datagram, len(datagram))

    def _on_magicsock(self, output: paths.Output) -> None:
        match output:
            case paths.SendUdp(address, datagram):
                self.send_udp(address, datagram, len(datagram))
            case paths.SendDerp(region, node_key, datagram):
                self.derp.send(region, node_key, datagram)
            case paths.PathChanged(handle, path):
                if self.fast is not None:
                    self.fast.path_changed(handle)
                if path.cur_addr is not None and not self.derp.is_connected(path.relay_region):
                    self.wireguard.direct_path_found(handle, self._clock.now())
                self._mtu_watch.path_changed(handle, path.cur_addr)
                log.debug(fields("path changed", peer=handle, endpoint=path.cur_addr, derp_region=path.relay_region))
            case paths.EndpointsWanted(reason):
                self._told.on_endpoints_wanted(reason)
            case paths.DataProbeWanted(handle, address):
                self._probe_path(handle, address)
            case paths.RebindWanted(reason):
                self._told.on_rebind_wanted(reason)
            case paths.CliPong(token, latency_s, endpoint, derp_region):
                self._finish_ping(token, DiscoReply(latency_s, endpoint, derp_region))
            case paths.CliPingFailed(token, reason):
                self._fail_ping(token, reason)
            case _:
                pass

    # --- pings

    def disco_ping(self, peer: Peer, size: int) -> asyncio.Future[DiscoReply]:
        """Fails with OSError when there is no way to ask."""
        return self._answer_to(self.magicsock.ping(peer.handle, self._clock.now(), size))

    def probe_path(self, handle: int, address: AddrPort, size: int) -> asyncio.Future[DiscoReply]:
        """One address of a peer alone. Fails with OSError when it cannot be asked."""
        return self._answer_to(self.magicsock.probe(handle, address, self._clock.now(), size))

    def path_mtu_bytes(self, handle: int) -> int:
        """What both tunnels may send."""
        peer = self._peers.by_handle(handle)
        return min(self._mtu_bytes, peer.mtu_bytes if peer is not None else self._mtu_bytes)

    def is_in_use(self, handle: int) -> bool:
        return self.magicsock.path(handle, self._clock.now()).is_active

    def keep_off_path(self, handle: int, address: AddrPort, seconds: float) -> None:
        if self.derp.is_connected(self.magicsock.path(handle).relay_region):
            self.magicsock.keep_off(handle, address, seconds, self._clock.now())
            self.driver.kick()

    def _answer_to(self, token: int) -> asyncio.Future[DiscoReply]:
        waiting: asyncio.Future[DiscoReply] = asyncio.get_running_loop().create_future()
        self._pings[token] = waiting
        waiting.add_done_callback(lambda _: self._pings.pop(token, None))
        self.driver.kick()
        return waiting

    def _finish_ping(self, token: int, reply: DiscoReply) -> None:
        waiting = self._pings.get(token)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def _fail_ping(self, token: int, reason: str) -> None:
        waiting = self._pings.get(token)
        if waiting is not None and not waiting.done():
            waiting.set_exception(OSError(reason))

    def _probe_path(self, handle: int, remote: AddrPort) -> None:
        """Whether data passes a direct path that lost some before (W09): a ping inside the session, that way only."""
        peer = self._peers.by_handle(handle)
        if peer is None or not peer.addresses:
            return
        packet = self.make_probe(peer.addresses[0], lambda: self.magicsock.data_passed(handle, remote))
        if packet is not None:
            for batch in self.core.seal_to(handle, [packet], self._clock.now()):
                self.send_udp(remote, batch.datagrams, batch.datagram_bytes)

    # --- in

    def on_udp(self, datagrams: memoryview, datagram_bytes: int, source: AddrPort) -> None:
        self.datapath.from_underlay(datagrams, datagram_bytes, source)

    def on_udp_error(self, remote: AddrPort, error: int) -> None:
        self.magicsock.send_failed(None, remote, error, self._clock.now())
        self.driver.kick()

    def _on_derp_packets(self, region: int, node_key: NodePublic, packets: list[bytes]) -> None:
        self.datapath.from_derp(packets, paths.DerpSource(region, node_key))

    def _on_peer_gone(self, region: int, node_key: NodePublic, is_not_here: bool) -> None:
        self.magicsock.derp_peer_gone(region, node_key)
        peer = self._peers.by_key(node_key) if is_not_here else None
        if peer is not None:
            self.wireguard.retry_soon(peer.handle, self._clock.now())
            self.driver.kick()
