"""Disco traffic of one engine: pings sent and answered, call-me-maybe, and the rules of what to believe.

Spec: tailscale: disco/disco.go and wgengine/magicsock (handleDiscoMessage). A pong is credited to the *target* of
its ping, whatever address it came from. Messages about other paths are believed only over DERP from the node that
owns the disco key. Peer relays (types 4 to 9) are not spoken yet and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from tsd.base.addr import AddrPort
from tsd.base.entropy import Entropy
from tsd.base.errors import DecodeError
from tsd.base.keys import DiscoPrivate, NodePrivate
from tsd.base.log import DropCounter
from tsd.disco import box, messages
from tsd.disco.box import DiscoKeyring
from tsd.magicsock import constants as c
from tsd.magicsock.peer import PeerState
from tsd.magicsock.types import DERP_MAGIC_IP, DerpSource, Output, SendDerp, SendUdp

_ANSWERED_MAX = 2048


class SentPing(NamedTuple):
    """A ping in flight; `target` None means that it went by relay to `region`."""

    handle: int
    target: AddrPort | None
    region: int
    sent_at: float
    token: int
    """0, or the number of a ping that a person asked for."""


class Discovery:
    """Codec and bookkeeping; decisions are handed to the callbacks of `Magicsock`."""

    def __init__(
        self, node_private: NodePrivate, disco_private: DiscoPrivate, entropy: Entropy, outputs: list[Output]
    ) -> None:
        self.ring = DiscoKeyring(disco_private)
        self.drops = DropCounter()
        self.outputs = outputs
        self.by_disco: dict[bytes, list[PeerState]] = {}
        self.by_node: dict[bytes, PeerState] = {}
        self.is_udp_allowed = True
        self.unknown_sender: Callable[[bytes], None] = lambda disco_key: None
        self.on_ping: Callable[[PeerState, AddrPort | DerpSource, float], None] = lambda *_: None
        self.on_pong: Callable[[PeerState, SentPing, AddrPort | DerpSource, float], None] = lambda *_: None
        self.on_call: Callable[[PeerState, tuple[AddrPort, ...], float], None] = lambda *_: None
        self._node_key = node_private.public().raw
        self._entropy = entropy
        self._in_flight: dict[bytes, SentPing] = {}
        self._answered: OrderedDict[tuple[bytes, AddrPort | DerpSource], None] = OrderedDict()

    # -- whom we know -------------------------------------------------------------------------------------------

    def enlist(self, peer: PeerState) -> None:
        self.by_node[peer.paths.node_key.raw] = peer
        if peer.disco is not None:
            self.by_disco.setdefault(peer.disco, []).append(peer)

    def delist(self, peer: PeerState) -> None:
        if self.by_node.get(peer.paths.node_key.raw) is peer:
            del self.by_node[peer.paths.node_key.raw]
        self.forget_pings(peer.handle)
        owners = self.by_disco.get(peer.disco or b"")
        if owners and peer in owners:
            owners.remove(peer)
            if not owners and peer.disco is not None:
                del self.by_disco[peer.disco]
                self.ring.forget(peer.disco)

    # -- sending ------------------------------------------------------------------------------------------------

    def ping(self, peer: PeerState, target: AddrPort | None, now: float, *, token: int = 0, padding: int = 0) -> bytes:
        """Ping an address, or with None the peer's relay; returns the transaction id, b"" when it cannot be sent."""
        region = peer.relay_region if target is None else 0
        if peer.disco is None or (target is None and not region) or (target is not None and not self.is_udp_allowed):
            self.drops.add("no path for ping")
            return b""
        txid = self._entropy(messages.TXID_BYTES)
        if self._send(peer, target or region, messages.Ping(txid, self._node_key, padding)):
            self._in_flight[txid] = SentPing(peer.handle, target, region, now, token)
            return txid
        return b""

    def expire(self, txid: bytes) -> SentPing | None:
        """The ping, if it is still unanswered; a late pong will not count."""
        return self._in_flight.pop(txid, None)

    def forget_pings(self, handle: int) -> None:
        for txid in [t for t, sent in self._in_flight.items() if sent.handle == handle]:
            del self._in_flight[txid]

    def call(self, peer: PeerState, own: tuple[AddrPort, ...]) -> None:
        """Tell a peer, over its home relay, to ping us at all our endpoints."""
        if peer.relay_region:
            self._send(peer, peer.relay_region, messages.CallMeMaybe(own))

    def _send(self, peer: PeerState, via: AddrPort | int, message: messages.Ping | messages.CallMeMaybe) -> bool:
        if peer.disco is None:
            return False
        try:
            datagram = self.ring.seal_to(peer.disco, self._entropy(box.NONCE_BYTES), message.encode())
        except DecodeError as err:
            self.drops.add(err.reason)
            return False
        if isinstance(via, int):
            self.outputs.append(SendDerp(via, peer.paths.node_key, datagram))
        else:
            self.outputs.append(SendUdp(via, datagram))
        return True

    # -- receiving ----------------------------------------------------------------------------------------------

    def receive(self, datagram: bytes, source: AddrPort | DerpSource, now: float) -> None:
        try:
            sender = box.sender_of(datagram)
            owners = self.by_disco.get(sender)
            if not owners:
                self.unknown_sender(sender)
                owners = self.by_disco.get(sender)
            if not owners:
                self.drops.add("unknown disco key")
                return
            message = messages.decode(self.ring.open_from(sender, datagram))
        except DecodeError as err:
            self.drops.add(err.reason)
            return
        match message:
            case messages.Ping():
                self._receive_ping(sender, owners, message, source, now)
            case messages.Pong():
                self._receive_pong(sender, message, source, now)
            case messages.CallMeMaybe():
                self._receive_call(sender, message, source, now)
            case _:
                self.drops.add("message not spoken")

    def _receive_ping(
        self, sender: bytes, owners: list[PeerState], ping: messages.Ping, source: AddrPort | DerpSource, now: float
    ) -> None:
        mark = (ping.txid, source)
        if mark in self._answered:
            self.drops.add("repeated ping")
            return
        self._answered[mark] = None
        if len(self._answered) > _ANSWERED_MAX:
            self._answered.popitem(last=False)
        self._answer(sender, ping, source)
        peer = self._attribute(sender, owners, ping, source)
        if peer is not None:
            self.on_ping(peer, source, now)

    def _answer(self, sender: bytes, ping: messages.Ping, source: AddrPort | DerpSource) -> None:
        if isinstance(source, DerpSource):
            seen = AddrPort(DERP_MAGIC_IP, source.region & 0xFFFF)
        elif self.is_udp_allowed:
            seen = source
        else:
            return
        pong = messages.Pong(ping.txid, seen).encode()
        datagram = self.ring.seal_to(sender, self._entropy(box.NONCE_BYTES), pong)
        if isinstance(source, DerpSource):
            self.outputs.append(SendDerp(source.region, source.node_key, datagram))
        else:
            self.outputs.append(SendUdp(source, datagram))

    def _attribute(
        self, sender: bytes, owners: list[PeerState], ping: messages.Ping, source: AddrPort | DerpSource
    ) -> PeerState | None:
        """Whose ping it is: by relay provenance, by the key it names, or as the only owner of the disco key."""
        if isinstance(source, DerpSource):
            peer = self.by_node.get(source.node_key.raw)
            if peer is not None and peer.disco == sender:
                return peer
        peer = self.by_node.get(ping.node_key)
        if peer is not None and peer.disco == sender:
            return peer
        return owners[0] if len(owners) == 1 else None

    def _receive_pong(self, sender: bytes, pong: messages.Pong, source: AddrPort | DerpSource, now: float) -> None:
        sent = self._in_flight.get(pong.txid)
        peer = next((p for p in self.by_disco[sender] if sent is not None and p.handle == sent.handle), None)
        if sent is None or peer is None or now - sent.sent_at > c.PING_TIMEOUT_S:
            self.drops.add("pong without ping")
            return
        del self._in_flight[pong.txid]
        self.on_pong(peer, sent, source, now)

    def _receive_call(
        self, sender: bytes, call: messages.CallMeMaybe, source: AddrPort | DerpSource, now: float
    ) -> None:
        peer = self.by_node.get(source.node_key.raw) if isinstance(source, DerpSource) else None
        if peer is None or peer.disco != sender:
            self.drops.add("call-me-maybe without provenance")
            return
        self.on_call(peer, call.endpoints, now)
