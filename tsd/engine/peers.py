"""Peers of the current netmap, found by handle, node ID, node key, address or name; each change costs O(1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_network

from tsd.base.addr import IPAddress
from tsd.base.errors import DecodeError
from tsd.base.keys import NodePublic
from tsd.derp.bundle import SERVICE
from tsd.tailcfg.node import Node


@dataclass(slots=True, eq=False)
class Peer:
    """One peer. `handle` names it in the core, in WireGuard and in magicsock; a new node key means a new handle."""

    handle: int
    node: Node
    node_key: NodePublic
    addresses: tuple[IPAddress, ...]
    is_in_wireguard: bool = False
    last_handshake_ns: int = 0
    last_write_ns: int = 0
    last_data_send: float = 0.0
    takes_bundles: bool = False
    """Whether several datagrams may come in one relay packet."""

    @property
    def short_name(self) -> str:
        return self.node.base_name or self.node_key.short()


def node_addresses(node: Node) -> tuple[IPAddress, ...]:
    """The single addresses of a node; entries that are not addresses are left out."""
    found: list[IPAddress] = []
    for text in node.addresses or ():
        try:
            prefix = ip_network(text, strict=False)
        except ValueError:
            continue
        if prefix.prefixlen == prefix.max_prefixlen and "%" not in text:
            found.append(prefix.network_address)
    return tuple(found)


class PeerTable:
    """All peers; `upsert` keeps the handle as long as the node key stays the same."""

    def __init__(self) -> None:
        self._next_handle = 1
        self._by_id: dict[int, Peer] = {}
        self._by_handle: dict[int, Peer] = {}
        self._by_key: dict[NodePublic, Peer] = {}
        self._by_address: dict[IPAddress, Peer] = {}
        self._by_name: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_id.values())

    def by_id(self, node_id: int) -> Peer | None:
        return self._by_id.get(node_id)

    def by_handle(self, handle: int) -> Peer | None:
        return self._by_handle.get(handle)

    def by_key(self, node_key: NodePublic) -> Peer | None:
        return self._by_key.get(node_key)

    def by_address(self, ip: IPAddress) -> Peer | None:
        return self._by_address.get(ip)

    def by_name(self, name: str) -> Peer | None:
        """`name` is a lower-case FQDN without trailing dot."""
        return self._by_name.get(name)

    def upsert(self, node: Node) -> tuple[Peer, Peer | None]:
        """(the peer as it is now, the peer it replaces because its key changed). Raises `DecodeError`."""
        node_key = node.node_key
        if node_key.is_zero:
            raise DecodeError("engine", f"node {node.id} has no key")
        old = self._by_id.get(node.id)
        replaced: Peer | None = None
        if old is not None:
            self._unindex(old)
            if old.node_key != node_key:
                replaced = old
        if old is not None and replaced is None:
            old.node, old.addresses = node, node_addresses(node)
            peer = old
        else:
            peer = Peer(self._next_handle, node, node_key, node_addresses(node))
            self._next_handle += 1
        peer.takes_bundles = node.hostinfo is not None and node.hostinfo.service_port(SERVICE) == 1
        self._index(peer)
        return peer, replaced

    def remove(self, node_id: int) -> Peer | None:
        peer = self._by_id.get(node_id)
        if peer is not None:
            self._unindex(peer)
        return peer

    def clear(self) -> list[Peer]:
        """Forget all; returns those that were there."""
        gone = list(self._by_id.values())
        for index in (self._by_id, self._by_handle, self._by_key, self._by_address, self._by_name):
            index.clear()
        return gone

    def _index(self, peer: Peer) -> None:
        self._by_id[peer.node.id] = peer
        self._by_handle[peer.handle] = peer
        self._by_key[peer.node_key] = peer
        for ip in peer.addresses:
            self._by_address[ip] = peer
        name = peer.node.name.rstrip(".").lower()
        if name:
            self._by_name[name] = peer

    def _unindex(self, peer: Peer) -> None:
        self._by_id.pop(peer.node.id, None)
        self._by_handle.pop(peer.handle, None)
        if self._by_key.get(peer.node_key) is peer:
            del self._by_key[peer.node_key]
        for ip in peer.addresses:
            if self._by_address.get(ip) is peer:
                del self._by_address[ip]
        name = peer.node.name.rstrip(".").lower()
        if self._by_name.get(name) is peer:
            del self._by_name[name]
