"""The peers of the tailnet as the netmap has them, and what each is to the plane: paths, routes, treatment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tsd.base.addr import AddrPort
from tsd.base.errors import DecodeError
from tsd.base.keys import DiscoPublic
from tsd.base.log import fields
from tsd.engine.account.expiry import KeyTime
from tsd.engine.jobs import Steps
from tsd.engine.path.masquerade import Aliases, aliases_of
from tsd.engine.path.plane import Plane
from tsd.engine.peers import Peer, PeerTable
from tsd.magicsock.types import PeerPaths
from tsd.netmap.netmap import Diff, Netmap
from tsd.routes.rules import AllowedIp
from tsd.tailcfg.node import Node

log = logging.getLogger(__name__)

NO_DISCO = str(DiscoPublic.zero())
LARGE_CHANGE = 300
"""More changed peers than this are worked in piece by piece, so that packets are not kept waiting."""
SLICE_PEERS = 25


class Members:
    """`plane` is the one in force, if any; `routed_to` says which addresses the plan routes to a node."""

    def __init__(
        self, keys: KeyTime, plane: Callable[[], Plane | None], routed_to: Callable[[int], Sequence[AllowedIp]]
    ) -> None:
        self._keys = keys
        self._plane = plane
        self._routed_to = routed_to
        self.peers = PeerTable()
        self.jailed: dict[int, None] = {}
        self.aliases: dict[int, Aliases] = {}
        """Few peers are jailed or know us by another address; those are kept apart, by handle."""
        self.unsigned: dict[int, tuple[str, ...]] = {}
        """Peers that tailnet lock does not look at, with all they may claim to be; they get our PeerAPI alone."""
        self._advertised_disco: dict[int, DiscoPublic] = {}

    def clear(self) -> None:
        self.peers.clear()
        self.jailed.clear()
        self.aliases.clear()
        self.unsigned.clear()
        self._advertised_disco.clear()

    def place_all(self) -> Steps:
        is_large = len(self.peers) > LARGE_CHANGE
        for count, peer in enumerate(list(self.peers), 1):
            self._place(peer)
            if is_large and count % SLICE_PEERS == 0:
                yield

    def expire(self) -> None:
        """The clock passed a key's end: such peers are unreachable from now on."""
        plane, now_ns = self._plane(), self._keys.now_ns()
        for peer in self.peers:
            if peer.node.is_expired(now_ns):
                self._place(peer)
                if plane is not None:
                    plane.core.drop_sessions(peer.handle)

    def learn_disco_key(self, handle: int, disco_key: DiscoPublic) -> None:
        """A peer told its disco key inside its session; the netmap may lag behind."""
        peer = self.peers.by_handle(handle)
        if peer is None or disco_key.is_zero:
            return
        self._advertised_disco[handle] = disco_key
        plane = self._plane()
        if plane is not None:
            plane.set_peer(peer)

    def apply(self, new: Netmap, diff: Diff) -> Steps:
        for node_id in diff.removed:
            gone = self.peers.remove(node_id)
            if gone is not None:
                self._forget(gone)
        is_large = len(diff.upserted) > LARGE_CHANGE
        for count, node_id in enumerate(diff.upserted, 1):
            node = new.peers.get(node_id)
            if node is not None:
                self._upsert(node, new.self_node)
            if is_large and count % SLICE_PEERS == 0:
                yield

    def _upsert(self, node: Node, own: Node) -> None:
        if node.id == own.id or node.key == own.key:
            log.warning(fields("the server lists this node among its peers; left out", peer=node.name))
            return
        before = self.peers.by_id(node.id)
        old_disco = before.node.disco_key if before is not None else None
        try:
            peer, replaced = self.peers.upsert(node)
        except DecodeError as err:
            log.warning(fields("peer left out", peer=node.name, reason=err))
            return
        if replaced is not None:
            self._forget(replaced)
        if old_disco and node.disco_key and old_disco not in (node.disco_key, NO_DISCO):
            self._note_restart(peer, node.disco)
        self._note_treatment(peer)
        self._place(peer)

    def _note_restart(self, peer: Peer, new_disco: DiscoPublic | None) -> None:
        """A new disco key is a new process, unless the peer told us itself, inside a session of now."""
        if new_disco is not None:
            plane = self._plane()
            if plane is not None and self._advertised_disco.get(peer.handle) != new_disco:
                plane.restart_session(peer)
            self._advertised_disco.pop(peer.handle, None)

    def _note_treatment(self, peer: Peer) -> None:
        self._forget_treatment(peer)
        if peer.node.is_jailed:
            self.jailed[peer.handle] = None
        if peer.node.unsigned_peerapi_only:
            self.unsigned[peer.handle] = (*(peer.node.addresses or ()), *(peer.node.allowed_ips or ()))
        named = aliases_of(peer.node)
        if named:
            self.aliases[peer.handle] = named

    def _forget_treatment(self, peer: Peer) -> None:
        for kept in (self.jailed, self.aliases, self.unsigned):
            kept.pop(peer.handle, None)

    def _place(self, peer: Peer) -> None:
        plane = self._plane()
        if plane is not None:
            plane.set_peer(peer)
            plane.core.set_allowed_ips(peer.handle, self._allowed(peer))

    def _forget(self, peer: Peer) -> None:
        self._advertised_disco.pop(peer.handle, None)
        self._forget_treatment(peer)
        plane = self._plane()
        if plane is not None:
            plane.remove_peer(peer)

    def _allowed(self, peer: Peer) -> Sequence[AllowedIp]:
        return () if self._keys.is_expired(peer.node) else self._routed_to(peer.node.id)

    def paths_of(self, peer: Peer) -> PeerPaths:
        node = peer.node
        endpoints = []
        for text in node.endpoints or ():
            try:
                endpoints.append(AddrPort.parse(text))
            except DecodeError:
                continue
        is_expired = self._keys.is_expired(node)
        return PeerPaths(
            node_key=peer.node_key,
            disco_key=self._advertised_disco.get(peer.handle) or node.disco,
            endpoints=() if is_expired else tuple(endpoints),
            home_derp=0 if is_expired else node.home_region,
            capver=node.cap,
            is_wireguard_only=node.is_wireguard_only,
            addresses=peer.addresses,
        )
