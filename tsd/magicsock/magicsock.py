"""The path to every peer: direct UDP while disco proves it, the relay otherwise, both while in doubt.

Spec: tailscale: wgengine/magicsock/{endpoint,magicsock}.go. Sans-IO: verbs in, `take_outputs` out; all timers live
in one heap, whatever the number of peers. Sockets, STUN and relay connections belong to the engine. Not here: peer
relays, ICMP probing of WireGuard-only peers.
"""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tsd.base.addr import AddrPort
from tsd.base.entropy import Entropy
from tsd.base.keys import DiscoPrivate, DiscoPublic, NodePrivate, NodePublic
from tsd.base.log import DropCounter
from tsd.base.machine import Deadline
from tsd.magicsock import constants as c
from tsd.magicsock.choice import Quality, is_better
from tsd.magicsock.discovery import Discovery, SentPing
from tsd.magicsock.peer import NEVER, PeerState, is_usable
from tsd.magicsock.types import (
    NO_ROUTE,
    CliPingFailed,
    CliPong,
    DataProbeWanted,
    DerpSource,
    EndpointsWanted,
    Output,
    OwnEndpoint,
    PathChanged,
    PathInfo,
    PeerPaths,
    PongReceived,
    RebindWanted,
    Route,
)

_PING_BYTES = 124
_LAST_USER_MAX = 65536
_LINK_SETTLES_S = 0.2
_NO_ROUTE_ERRNOS = frozenset({errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_LOST_ERRNOS = _NO_ROUTE_ERRNOS | {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_REBIND_ERRNOS = frozenset({errno.EPERM, errno.EPIPE})


class _Timer(NamedTuple):
    at: float
    number: int
    heartbeat: int
    """A peer's handle; -1 for the other kinds."""
    txid: bytes
    """A ping's timeout; b"" with `heartbeat` -1 means that waiting calls go out."""


class Magicsock:
    """Path choice for all peers. Handles are the pump's (not negative)."""

    def __init__(
        self,
        node_private: NodePrivate,
        disco_private: DiscoPrivate,
        *,
        entropy: Entropy,
        never_direct_udp: bool = False,
        always_use_derp: bool = False,
    ) -> None:
        self.disco_public: DiscoPublic = disco_private.public()
        self.home_derp = 0
        self.unanswered_since: Callable[[int], float] = lambda handle: 0.0
        """When WireGuard data for a peer was first sent after its last authentic packet (the pump's
        `Activity.first_unanswered_send`); 0.0 for none. The engine sets it."""
        self.unknown_peer: Callable[[int], object] = lambda handle: None
        """Asked for a handle that was never set: may call `set_peer`; idle peers of a large map cost nothing."""
        self._outputs: list[Output] = []
        self._discovery = Discovery(node_private, disco_private, entropy, self._outputs)
        self._discovery.is_udp_allowed = not never_direct_udp
        self._discovery.on_ping = self._on_ping
        self._discovery.on_pong = self._on_pong
        self._discovery.on_call = self._on_call
        self._always_use_derp = always_use_derp or never_direct_udp
        self._peers: dict[int, PeerState] = {}
        self._timers: list[_Timer] = []
        self._timer_count = 0
        self._beats: dict[int, float] = {}
        self._own: tuple[AddrPort, ...] = ()
        self._own_at = NEVER
        self._last_restun = NEVER
        self._last_rebind = NEVER
        self._last_user: dict[AddrPort, int] = {}
        self._next_token = 1
        self._now = 0.0

    @property
    def drops(self) -> DropCounter:
        return self._discovery.drops

    def on_unknown_disco(self, ask: Callable[[bytes], None]) -> None:
        """`ask` is called with a disco key (32 bytes) that nobody set; it may call `set_peer`."""
        self._discovery.unknown_sender = ask

    def has_peer(self, handle: int) -> bool:
        return handle in self._peers

    def _peer(self, handle: int) -> PeerState | None:
        peer = self._peers.get(handle)
        if peer is None:
            self.unknown_peer(handle)
            peer = self._peers.get(handle)
        return peer

    # -- configuration ------------------------------------------------------------------------------------------

    def set_peer(self, handle: int, paths: PeerPaths, now: float) -> None:
        """Add or update; a new disco key voids everything known about its paths (W06)."""
        peer = self._peers.get(handle)
        if peer is not None and peer.paths == paths:
            return
        if peer is not None and peer.paths.node_key != paths.node_key:
            self.remove_peer(handle)
            peer = None
        if peer is None:
            peer = self._peers[handle] = PeerState(handle, paths)
            self._discovery.enlist(peer)
        elif peer.paths.disco_key != paths.disco_key:
            self._discovery.delist(peer)
            peer.paths = paths
            peer.restart()
            self._discovery.enlist(peer)
        else:
            peer.paths = paths
        peer.set_netmap_endpoints(paths.endpoints, now)
        self._tell(peer, now)

    def remove_peer(self, handle: int) -> None:
        peer = self._peers.pop(handle, None)
        if peer is not None:
            self._beats.pop(handle, None)
            self._discovery.delist(peer)

    def set_home_derp(self, region: int, now: float) -> None:
        self.home_derp = region
        self._now = now

    def set_endpoints(self, endpoints: Sequence[OwnEndpoint], now: float) -> None:
        """Our endpoints as just found; calls that waited for them go out."""
        self._own = tuple(e.address for e in endpoints)
        self._own_at = now
        self._send_waiting_calls()

    # -- the hot path -------------------------------------------------------------------------------------------

    def route(self, handle: int, now: float) -> Route:
        """Where to send now. Stamps activity; drain outputs afterwards, a ping round may have started."""
        peer = self._peers.get(handle) or self._peer(handle)
        if peer is None:
            return NO_ROUTE
        peer.last_send = now
        if now <= peer.trust_until and not self._always_use_derp:
            if handle not in self._beats:
                self._beat_after(peer, now, c.HEARTBEAT_S)
            return peer.best_route
        return self._route_in_doubt(peer, now)

    def trusted(self, handle: int, now: float) -> AddrPort | None:
        """The address that everything goes to alone now; None: `route` decides for each batch. Stamps nothing."""
        peer = self._peers.get(handle)
        if peer is None or now > peer.trust_until or self._always_use_derp:
            return None
        return peer.best.address

    def note_received(self, handles: Sequence[int], source: AddrPort | DerpSource, now: float) -> None:
        """Authentic WireGuard data (or a handshake) came in. Proves no path, only that the peer hears us."""
        for handle in handles:
            peer = self._peers.get(handle)
            if peer is not None:
                peer.last_receive = now
                if isinstance(source, DerpSource):
                    peer.heard_region = source.region
                    peer.note_relayed(now)
                    continue
                peer.relayed_since = NEVER
                if peer.paths.is_wireguard_only:
                    peer.set_best(Quality(source, 1), now)

    def data_passed(self, handle: int, address: AddrPort) -> None:
        """The peer answered what a `DataProbeWanted` had asked for: the address may be used again."""
        peer = self._peers.get(handle)
        if peer is not None:
            peer.data_passed(address)

    def receive_disco(self, datagram: bytes, source: AddrPort | DerpSource, now: float) -> None:
        self._now = now
        if not isinstance(source, DerpSource) and not is_usable(source):
            self.drops.add("unusable source")
            return
        self._discovery.receive(datagram, source, now)

    def derp_peer_gone(self, region: int, node_key: NodePublic) -> None:
        """The relay lost that node: do not take its region for where the peer was last heard."""
        peer = self._discovery.by_node.get(node_key.raw)
        if peer is not None and peer.heard_region == region:
            peer.heard_region = 0

    # -- events -------------------------------------------------------------------------------------------------

    def ping(self, handle: int, now: float, size: int = 0) -> int:
        """Ping for a person: the trusted path or all candidates, and the relay. Returns the token of `CliPong`."""
        token = self._next_token
        self._next_token += 1
        peer = self._peer(handle)
        if peer is None or peer.disco is None:
            reason = "no such peer" if peer is None else "peer has no disco key"
            self._outputs.append(CliPingFailed(token, reason))
            return token
        padding = max(0, size - _PING_BYTES)
        trusted = peer.best.address if now <= peer.trust_until else None
        targets = [trusted] if trusted is not None else [a for a, x in peer.candidates.items() if not x.is_unreachable]
        sent = [self._ping(peer, target, now, token, padding) for target in targets]
        if peer.relay_region:
            sent.append(self._ping(peer, None, now, token, padding))
        if not any(sent):
            self._outputs.append(CliPingFailed(token, "no path to the peer: no endpoint and no home relay known"))
        peer.last_send = now
        if handle not in self._beats:
            self._beat_after(peer, now, c.HEARTBEAT_S)
        return token

    def probe(self, handle: int, address: AddrPort, now: float, size: int) -> int:
        """Ask one address alone, with a ping of `size` bytes. Returns the token of `CliPong`."""
        token = self._next_token
        self._next_token += 1
        peer = self._peers.get(handle)
        if peer is None or not self._ping(peer, address, now, token, max(0, size - _PING_BYTES)):
            self._outputs.append(CliPingFailed(token, "no such path"))
        return token

    def keep_off(self, handle: int, address: AddrPort, seconds: float, now: float) -> None:
        """An address that is no good though disco passes; without a relay it is better than nothing."""
        peer = self._peers.get(handle)
        if peer is None or not peer.relay_region:
            return
        peer.keep_off(address, now + seconds)
        self._tell(peer, now)

    def path(self, handle: int, now: float | None = None) -> PathInfo:
        peer = self._peers.get(handle)
        return peer.info(self._now if now is None else now) if peer is not None else PathInfo()

    def link_changed(self, now: float) -> None:
        """The underlay changed: nothing measured counts any more; active peers are probed at once."""
        self._own_at = NEVER
        self._restun("link-change", now)
        for peer in self._peers.values():
            peer.restart()
            self._tell(peer, now)
            if peer.handle in self._beats:
                self._beat_after(peer, now, _LINK_SETTLES_S)

    def send_failed(self, handle: int | None, address: AddrPort, error: int, now: float) -> None:
        """The kernel refused a datagram; other addresses are not touched (W07). `handle` None: whoever uses it."""
        owner = self._last_user.get(address) if handle is None else handle
        peer = self._peers.get(owner) if owner is not None else None
        if error in _REBIND_ERRNOS and now - self._last_rebind >= c.RESTUN_GAP_S:
            self._last_rebind = now
            self._outputs.append(RebindWanted(errno.errorcode.get(error, str(error))))
        if peer is None or error in _REBIND_ERRNOS:
            return
        candidate = peer.candidates.get(address)
        if candidate is not None and error in _NO_ROUTE_ERRNOS:
            candidate.is_unreachable = True
        if peer.best.address == address and error in _LOST_ERRNOS:
            peer.clear_best()
            self._tell(peer, now)

    def next_deadline(self) -> Deadline | None:
        return Deadline(self._timers[0].at, "magicsock") if self._timers else None

    def on_deadline(self, now: float) -> None:
        self._now = now
        while self._timers and self._timers[0].at <= now:
            timer = heapq.heappop(self._timers)
            if timer.heartbeat >= 0:
                peer = self._peers.get(timer.heartbeat)
                if peer is not None and self._beats.get(timer.heartbeat) == timer.at:
                    self._heartbeat(peer, now)
            elif timer.txid:
                self._ping_timed_out(timer.txid, now)
            else:
                self._send_waiting_calls()

    def take_outputs(self) -> list[Output]:
        outputs = self._outputs[:]
        self._outputs.clear()
        return outputs

    # -- decisions ----------------------------------------------------------------------------------------------

    def _route_in_doubt(self, peer: PeerState, now: float) -> Route:
        self._now = now
        if peer.paths.is_wireguard_only:
            return peer.best_route if now <= peer.trust_until else _first_endpoint(peer)
        if peer.told is not None:
            self._lost(peer, now)
        if now >= peer.next_full and peer.disco is not None:
            self._full_round(peer, now, calls=True)
        if peer.handle not in self._beats:
            self._beat_after(peer, now, c.HEARTBEAT_S)
        if self._always_use_derp:
            return Route(None, peer.relay_region)
        return Route(peer.best.address, peer.relay_region)

    def _heartbeat(self, peer: PeerState, now: float) -> None:
        if now - peer.last_send > c.SESSION_ACTIVE_S or peer.paths.is_wireguard_only or peer.disco is None:
            del self._beats[peer.handle]
            return
        if now <= peer.trust_until and self._loses_data(peer, now):
            peer.suspect_best(now)
        if now > peer.trust_until and peer.told is not None:
            self._lost(peer, now)
        if peer.best.address is not None:
            self._ping(peer, peer.best.address, now)
        if now >= peer.next_full and peer.wants_full_round(now):
            self._full_round(peer, now, calls=True)
        self._beat_after(peer, now, c.HEARTBEAT_S)

    def _loses_data(self, peer: PeerState, now: float) -> bool:
        """Whether data sent by the best address alone stayed unanswered for too long, or the peer fled it (W09)."""
        since = self.unanswered_since(peer.handle)
        is_unanswered = since > 0 and since >= peer.best_since and now - since > c.UNANSWERED_S
        return is_unanswered or peer.is_shunned()

    def _full_round(self, peer: PeerState, now: float, *, calls: bool) -> None:
        """Ping every candidate that was left alone for 5 s, and ask the peer to do the same."""
        peer.last_full = now
        peer.next_full = now + c.PING_GAP_S
        peer.prune(now)
        has_pinged = False
        for address, candidate in list(peer.candidates.items()):
            if not candidate.is_unreachable and now - candidate.last_ping >= c.PING_GAP_S:
                has_pinged = self._ping(peer, address, now) or has_pinged
        if calls and self._discovery.is_udp_allowed and (has_pinged or now >= peer.next_call):
            peer.next_call = now + c.CALL_GAP_S
            self._call(peer, now)

    def _ping(self, peer: PeerState, target: AddrPort | None, now: float, token: int = 0, padding: int = 0) -> bool:
        txid = self._discovery.ping(peer, target, now, token=token, padding=padding)
        if not txid:
            return False
        if target is not None:
            candidate = peer.candidates.get(target)
            if candidate is not None:
                candidate.last_ping = now
            if len(self._last_user) > _LAST_USER_MAX:
                self._last_user.clear()
            self._last_user[target] = peer.handle
        self._arm(now + c.PING_TIMEOUT_S, -1, txid)
        return True

    def _call(self, peer: PeerState, now: float) -> None:
        if now - self._own_at <= c.ENDPOINTS_FRESH_S:
            if self._own:
                self._discovery.call(peer, self._own)
            return
        peer.wants_call = True
        self._restun("call-me-maybe", now)
        self._arm(now + c.CALL_WAITS_S, -1, b"")

    def _send_waiting_calls(self) -> None:
        for peer in self._peers.values():
            if peer.wants_call:
                peer.wants_call = False
                if self._own:
                    self._discovery.call(peer, self._own)

    def _ping_timed_out(self, txid: bytes, now: float) -> None:
        sent = self._discovery.expire(txid)
        peer = self._peers.get(sent.handle) if sent is not None else None
        if sent is None or peer is None or sent.target is None:
            return
        if peer.best.address == sent.target and now > peer.trust_until:
            peer.clear_best()
            self._tell(peer, now)

    def _on_ping(self, peer: PeerState, source: AddrPort | DerpSource, now: float) -> None:
        if isinstance(source, DerpSource):
            peer.heard_region = source.region
            return
        candidate = peer.learn(source, now)
        if candidate is None:
            return
        candidate.last_ping_from = now
        is_wanted = now > peer.trust_until and now - peer.last_send <= c.SESSION_ACTIVE_S
        is_open = candidate.last_ping == NEVER or candidate.last_pong < candidate.last_ping
        if is_wanted and is_open and now - candidate.last_ping >= c.PING_BACK_GAP_S and self._discovery.is_udp_allowed:
            # Its firewall and ours are open now; what we sent before was lost.
            self._ping(peer, source, now)

    def _on_pong(self, peer: PeerState, sent: SentPing, source: AddrPort | DerpSource, now: float) -> None:
        latency_s = now - sent.sent_at
        self._outputs.append(PongReceived(peer.handle, sent.target, sent.region, latency_s))
        if sent.token:
            self._outputs.append(CliPong(sent.token, latency_s, sent.target, sent.region))
        if sent.target is None or isinstance(source, DerpSource):
            return
        candidate = peer.candidates.get(sent.target)
        if candidate is None:
            return
        candidate.last_pong, candidate.latency_s = now, latency_s
        candidate.is_unreachable = False
        if now < candidate.suspect_until:
            return
        found = Quality(sent.target, max(1, int(latency_s * 1e9)))
        if candidate.suspect_for_s:
            if now >= candidate.next_probe:
                candidate.next_probe = now + c.DATA_PROBE_GAP_S
                self._outputs.append(DataProbeWanted(peer.handle, sent.target))
        elif peer.best.address == sent.target or now > peer.trust_until or is_better(found, peer.best):
            peer.set_best(found, now)
        self._tell(peer, now)

    def _on_call(self, peer: PeerState, endpoints: tuple[AddrPort, ...], now: float) -> None:
        """Ping everything the peer named. Never answered with a call of our own: that would go on forever."""
        peer.set_called_endpoints((e for e in endpoints if is_usable(e)), now)
        if self._discovery.is_udp_allowed:
            self._full_round(peer, now, calls=False)

    # -- telling ------------------------------------------------------------------------------------------------

    def _lost(self, peer: PeerState, now: float) -> None:
        """A direct path went quiet: our own address may have changed (P04), so look again."""
        self._restun("path-lost", now)
        self._tell(peer, now)

    def _tell(self, peer: PeerState, now: float) -> None:
        trusted = peer.best.address if now <= peer.trust_until else None
        if trusted != peer.told:
            peer.told = trusted
            self._outputs.append(PathChanged(peer.handle, peer.info(now)))

    def _restun(self, reason: str, now: float) -> None:
        if now - self._last_restun >= c.RESTUN_GAP_S:
            self._last_restun = now
            self._outputs.append(EndpointsWanted(reason))

    def _beat_after(self, peer: PeerState, now: float, delay_s: float) -> None:
        self._beats[peer.handle] = now + delay_s
        self._arm(now + delay_s, peer.handle, b"")

    def _arm(self, at: float, heartbeat: int, txid: bytes) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, _Timer(at, self._timer_count, heartbeat, txid))


def _first_endpoint(peer: PeerState) -> Route:
    reachable = [a for a, x in peer.candidates.items() if not x.is_unreachable]
    return Route(reachable[0], 0) if reachable else NO_ROUTE
