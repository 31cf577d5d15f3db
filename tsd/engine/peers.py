"""Peers of the current netmap, found by handle, node ID, node key, disco key, address or name; a change costs O(1).

A tailnet may have thousands of peers of which a few ever talk: what only those need is derived when it is first asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_network

from tsd.base.addr import IPAddress, packed_single
from tsd.base.errors import DecodeError
from tsd.base.keys import NodePublic
from tsd.derp.bundle import SERVICE
from tsd.tailcfg.node import Node

MTU_SERVICE, USUAL_MTU_BYTES = "tsd-mtu", 1280
"""A node whose tunnel has another MTU says so in its Hostinfo, so that nobody looks for room that it will not use."""
_KEY_PREFIX, _DISCO_PREFIX = NodePublic.PREFIX, "discokey:"


class Peer:
    """One peer. `handle` names it in the core, in WireGuard and in magicsock; a new node key means a new handle."""

    __slots__ = ("_addresses", "_node_key", "_takes_bundles", "handle", "node", "packed", "raw_key")

    def __init__(self, handle: int, node: Node, raw_key: bytes, packed: tuple[bytes, ...]) -> None:
        self.handle = handle
        self.raw_key = raw_key
        self._node_key: NodePublic | None = None
        self.update(node, packed)

    def update(self, node: Node, packed: tuple[bytes, ...]) -> None:
        """What control says now; `packed` are the single addresses, 4 or 16 bytes each."""
        self.node = node
        self.packed = packed
        self._addresses: tuple[IPAddress, ...] | None = None
        self._takes_bundles: bool | None = None

    @property
    def node_key(self) -> NodePublic:
        if self._node_key is None:
            self._node_key = NodePublic(self.raw_key)
        return self._node_key

    @property
    def addresses(self) -> tuple[IPAddress, ...]:
        if self._addresses is None:
            self._addresses = tuple(_unpacked(raw) for raw in self.packed)
        return self._addresses

    @property
    def takes_bundles(self) -> bool:
        """Whether several datagrams may come in one relay packet."""
        if self._takes_bundles is None:
            hostinfo = self.node.hostinfo
            self._takes_bundles = hostinfo is not None and hostinfo.service_port(SERVICE) == 1
        return self._takes_bundles

    @property
    def mtu_bytes(self) -> int:
        """Of its tunnel, as far as it says so."""
        hostinfo = self.node.hostinfo
        return (hostinfo.service_port(MTU_SERVICE) if hostinfo is not None else 0) or USUAL_MTU_BYTES

    @property
    def short_name(self) -> str:
        return self.node.base_name or self.node_key.short()


def packed_addresses(node: Node) -> tuple[bytes, ...]:
    """The single addresses of a node, 4 or 16 bytes each; entries that are not addresses are left out."""
    found: list[bytes] = []
    for text in node.addresses or ():
        packed = packed_single(text)
        if packed is None:
            if "%" in text:
                continue
            try:
                prefix = ip_network(text, strict=False)
            except ValueError:
                continue
            if prefix.prefixlen != prefix.max_prefixlen:
                continue
            packed = prefix.network_address.packed
        found.append(packed)
    return tuple(found)


def node_addresses(node: Node) -> tuple[IPAddress, ...]:
    """The single addresses of a node."""
    return tuple(_unpacked(raw) for raw in packed_addresses(node))


def _unpacked(raw: bytes) -> IPAddress:
    return IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw)


class PeerTable:
    """All peers; `upsert` keeps the handle as long as the node key stays the same."""

    def __init__(self) -> None:
        self._next_handle = 1
        self._by_id: dict[int, Peer] = {}
        self._by_handle: dict[int, Peer] = {}
        self._by_key: dict[bytes, Peer] = {}
        self._by_disco: dict[str, list[Peer]] = {}
        self._by_address: dict[bytes, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_id.values())

    def by_id(self, node_id: int) -> Peer | None:
        return self._by_id.get(node_id)

    def by_handle(self, handle: int) -> Peer | None:
        return self._by_handle.get(handle)

    def by_key(self, node_key: NodePublic) -> Peer | None:
        return self._by_key.get(node_key.raw)

    def by_disco(self, disco_key: bytes) -> list[Peer]:
        """Peers that the netmap gives this disco key to (nodes in one process may share one)."""
        return self._by_disco.get(_DISCO_PREFIX + disco_key.hex(), [])

    def sharing_disco(self, peer: Peer) -> list[Peer]:
        """All peers with the disco key of this one, itself included."""
        return self._by_disco.get((peer.node.disco_key or "").lower(), [])

    def by_address(self, ip: IPAddress) -> Peer | None:
        return self._by_address.get(ip.packed)

    def by_packed(self, address: bytes) -> Peer | None:
        """As `by_address`, for 4 or 16 bytes."""
        return self._by_address.get(address)

    def upsert(self, node: Node) -> tuple[Peer, Peer | None]:
        """(the peer as it is now, the peer it replaces because its key changed). Raises `DecodeError`."""
        raw_key = _raw_key(node)
        old = self._by_id.get(node.id)
        replaced: Peer | None = None
        if old is not None:
            self._unindex(old)
            if old.raw_key != raw_key:
                replaced = old
        packed = packed_addresses(node)
        if old is not None and replaced is None:
            peer = old
            peer.update(node, packed)
        else:
            peer = Peer(self._next_handle, node, raw_key, packed)
            self._next_handle += 1
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
        for index in (self._by_id, self._by_handle, self._by_key, self._by_disco, self._by_address):
            index.clear()
        return gone

    def _index(self, peer: Peer) -> None:
        node = peer.node
        self._by_id[node.id] = peer
        self._by_handle[peer.handle] = peer
        self._by_key[peer.raw_key] = peer
        if node.disco_key:
            self._by_disco.setdefault(node.disco_key.lower(), []).append(peer)
        for raw in peer.packed:
            self._by_address[raw] = peer

    def _unindex(self, peer: Peer) -> None:
        node = peer.node
        self._by_id.pop(node.id, None)
        self._by_handle.pop(peer.handle, None)
        if self._by_key.get(peer.raw_key) is peer:
            del self._by_key[peer.raw_key]
        if node.disco_key:
            sharing = self._by_disco[node.disco_key.lower()]
            sharing.remove(peer)
            if not sharing:
                del self._by_disco[node.disco_key.lower()]
        for raw in peer.packed:
            if self._by_address.get(raw) is peer:
                del self._by_address[raw]


def _raw_key(node: Node) -> bytes:
    """Raises `DecodeError`."""
    raw = NodePublic.parse(node.key).raw if not node.key.startswith(_KEY_PREFIX) else _hex(node.key)
    if not any(raw):
        raise DecodeError("engine", f"node {node.id} has no key")
    return raw


def _hex(key: str) -> bytes:
    try:
        raw = bytes.fromhex(key[len(_KEY_PREFIX) :])
    except ValueError:
        raw = b""
    return raw if len(raw) == 32 else NodePublic.parse(key).raw
