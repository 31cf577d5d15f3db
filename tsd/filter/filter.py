"""The packet filter of a node: which packets from peers may enter (tailscale: `wgengine/filter/filter.go`).

Stateless for TCP (only a SYN needs a rule), stateful for UDP and SCTP (`FlowTable`), no tracking for ICMP. That the
source address belongs to the peer was checked before. Not here: logging, counters, per-peer choice of the filter for
jailed peers (give them a second, empty `PacketFilter`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tsd.base.addr import IPAddress, IPPrefix
from tsd.filter.flows import FlowTable
from tsd.filter.prefixset import PrefixSet
from tsd.filter.rules import LAST_PORT, Match
from tsd.packet.constants import FRAGMENT, ICMP, ICMPV6, SCTP, TCP, TCP_ACK, TCP_SYN, TSMP, UDP, UNKNOWN
from tsd.packet.parse import Packet
from tsd.packet.tsmp import REASON_ACL, REASON_SHIELDS_UP, rejection_of

HasCapability = Callable[[bytes, str], bool]
"""Whether the node with a source address (raw) has a node capability."""

_METADATA_SERVICE = bytes((169, 254, 169, 254))
_DISCO_MAGIC = b"TS\xf0\x9f\x92\xac"
_CACHE_LIMIT = 4096


class Verdict(NamedTuple):
    accept: bool
    reason: str
    """Of a drop: the label of upstream's metrics ("acl", "multicast", ...). Of an accept: for people."""
    reject_tsmp: bytes | None = None
    """An IP packet that tells the sender why; send it back through the tunnel."""

    @property
    def is_for_all_like(self) -> bool:
        """Whether packets of the same protocol, addresses and destination port are accepted, too."""
        return self is _RULE or self is _PEERAPI


_TOO_SHORT = Verdict(False, "too_short")
_UNKNOWN_PROTOCOL = Verdict(False, "unknown_protocol")
_MULTICAST = Verdict(False, "multicast")
_LINK_LOCAL = Verdict(False, "link_local_unicast")
_ACL = Verdict(False, "acl")
_SELF_DISCO = Verdict(False, "self_disco")
_KEEPALIVE = Verdict(True, "keepalive")
_FRAGMENT = Verdict(True, "fragment")
_OUT = Verdict(True, "ok out")
_TCP_RUNNING = Verdict(True, "tcp non-syn")
_ICMP_ANSWER = Verdict(True, "icmp response")
_KNOWN_FLOW = Verdict(True, "known flow")
_RULE = Verdict(True, "rule")
_TSMP = Verdict(True, "tsmp")
_PEERAPI = Verdict(True, "peerapi")


class _FamilyMatch:
    """A match cut down to one address family, with everything as integers."""

    __slots__ = ("caps", "destinations", "protos", "sources")

    def __init__(self, match: Match, version: int) -> None:
        self.protos = match.protos
        self.sources = PrefixSet(prefix for prefix in match.sources if prefix.version == version)
        self.caps = match.source_caps
        self.destinations = [
            (prefix.max_prefixlen - prefix.prefixlen, _high_bits(prefix), first, last)
            for prefix, first, last in match.destinations
            if prefix.version == version
        ]

    @property
    def is_useful(self) -> bool:
        return bool((self.sources or self.caps) and self.destinations)


class PacketFilter:
    """Immutable rules; replace the whole filter when they change (`replace` keeps the flows)."""

    def __init__(
        self,
        rules: Sequence[Match],
        local_prefixes: Sequence[IPPrefix],
        *,
        shields_up: bool = False,
        state: FlowTable | None = None,
    ) -> None:
        self.shields_up = shields_up
        self.local_prefixes = tuple(local_prefixes)
        self.state = state if state is not None else FlowTable()
        self.has_capability: HasCapability = lambda source, capability: False
        self.peerapi: frozenset[tuple[bytes, int]] = frozenset()
        """(address, port) of our own PeerAPI listeners: open to every peer, they judge each request themselves."""
        self.own_disco_key = b""
        """A disco message of ours that comes back through the tunnel is dropped."""
        self._rules = () if shields_up else tuple(rules)
        self._local = {4: _of_version(local_prefixes, 4), 6: _of_version(local_prefixes, 6)}
        self._matches = {version: self._family(version) for version in (4, 6)}
        self._asks_caps = any(rule.source_caps for rule in self._rules)
        self._cache: dict[tuple[int, bytes, bytes, int], bool] = {}
        self._running: dict[bytes, bool] = {}

    def replace(
        self, rules: Sequence[Match], local_prefixes: Sequence[IPPrefix], *, shields_up: bool = False
    ) -> PacketFilter:
        """The next filter. Flows go on, except when the shields go up now."""
        state = None if shields_up and not self.shields_up else self.state
        successor = PacketFilter(rules, local_prefixes, shields_up=shields_up, state=state)
        successor.has_capability = self.has_capability
        successor.peerapi = self.peerapi
        successor.own_disco_key = self.own_disco_key
        return successor

    def inbound(self, packet: Packet) -> Verdict:
        """A packet that a peer sent us."""
        verdict = self._preliminary(packet)
        if verdict is not None:
            return verdict
        if packet.proto == UDP and self.own_disco_key and self._is_own_disco(packet):
            return _SELF_DISCO
        return self._judge(packet) or self._refuse(packet)

    def lets_running_tcp_to(self, destination: bytes) -> bool:
        """What `inbound` says of every TCP packet that does not open a connection: only where it goes matters."""
        known = self._running.get(destination)
        if known is None:
            if len(self._running) >= _CACHE_LIMIT:
                self._running.clear()
            version = 4 if len(destination) == 4 else 6
            packet = Packet(bytes(20), version, TCP, destination, destination, 0, 0, TCP_ACK, 0, 0, 20, False)
            known = self._running[destination] = self.inbound(packet).accept
        return known

    def outbound(self, packet: Packet) -> Verdict:
        """A packet of ours: nearly always accepted; remembers UDP flows so that answers come back."""
        verdict = self._preliminary(packet)
        if verdict is not None:
            return verdict
        if packet.proto in (UDP, SCTP):
            self.state.add((packet.proto, packet.dst, packet.dport, packet.src, packet.sport))
        return _OUT

    def check(self, src: IPAddress, dst: IPAddress, dport: int, proto: int = TCP) -> bool:
        """Whether a new flow would be let in."""
        flags = TCP_SYN if proto == TCP else 0
        packet = Packet(bytes(20), src.version, proto, src.packed, dst.packed, 0, dport, flags, 0, 0, 20, False)
        return src.version == dst.version and self.inbound(packet).accept

    def caps(self, src: IPAddress, dst: IPAddress) -> dict[str, list[Any]]:
        """Peer capabilities of `src` towards `dst` (one of our addresses), values of several grants joined."""
        found: dict[str, list[Any]] = {}
        for rule in self._rules:
            if not rule.grants or not any(_contains(prefix, src) for prefix in rule.sources):
                continue
            for prefix, capability, values in rule.grants:
                if capability and _contains(prefix, dst):
                    found.setdefault(capability, []).extend(values)
        return found

    # Detail

    def _family(self, version: int) -> list[_FamilyMatch]:
        matches = [_FamilyMatch(rule, version) for rule in self._rules]
        return [match for match in matches if match.is_useful]

    @staticmethod
    def _preliminary(packet: Packet) -> Verdict | None:
        """What holds in both directions."""
        size = len(packet.packet)
        if size < 20:
            return _TOO_SHORT if size else _KEEPALIVE
        if packet.proto == UNKNOWN:
            return _UNKNOWN_PROTOCOL
        dst = packet.dst
        if len(dst) == 4:
            if dst[0] >> 4 == 14:
                return _MULTICAST
            if dst[0] == 169 and dst[1] == 254 and dst != _METADATA_SERVICE:
                return _LINK_LOCAL
        elif dst[0] == 0xFF:
            return _MULTICAST
        elif dst[0] == 0xFE and dst[1] & 0xC0 == 0x80:
            return _LINK_LOCAL
        return _FRAGMENT if packet.proto == FRAGMENT else None

    def _judge(self, packet: Packet) -> Verdict | None:
        """An accept, or None when nothing allows the packet."""
        if int.from_bytes(packet.dst, "big") not in self._local[packet.version]:
            return None
        proto = packet.proto
        if proto == TCP:
            if packet.tcp_flags & (TCP_SYN | TCP_ACK) != TCP_SYN:
                return _TCP_RUNNING
            return _RULE if self._allows(packet) else None
        if proto in (UDP, SCTP):
            if self.state.touch((proto, packet.src, packet.sport, packet.dst, packet.dport)):
                return _KNOWN_FLOW
            return _RULE if self._allows(packet) else None
        if proto == (ICMP if packet.version == 4 else ICMPV6):
            if packet.is_icmp_answer:
                return _ICMP_ANSWER
            return _RULE if self._allows_icmp(packet) else None
        if proto == TSMP:
            return _TSMP
        return _RULE if self._allows_other(packet) else None

    def _refuse(self, packet: Packet) -> Verdict:
        if packet.proto != TCP or not packet.tcp_flags & TCP_SYN:
            return _ACL
        if packet.is_tcp_syn and (packet.dst, packet.dport) in self.peerapi:
            return _PEERAPI
        if packet.version != 4:
            return _ACL
        reason = REASON_SHIELDS_UP if self.shields_up else REASON_ACL
        return Verdict(False, "acl", rejection_of(packet, reason))

    def _allows(self, packet: Packet) -> bool:
        """Protocol, source, destination and port."""
        if self._asks_caps:
            return self._matches_any(packet)
        key = (packet.proto, packet.src, packet.dst, packet.dport)
        known = self._cache.get(key)
        if known is None:
            if len(self._cache) >= _CACHE_LIMIT:
                self._cache.clear()
            known = self._cache[key] = self._matches_any(packet)
        return known

    def _matches_any(self, packet: Packet) -> bool:
        src, dst = int.from_bytes(packet.src, "big"), int.from_bytes(packet.dst, "big")
        proto, port = packet.proto, packet.dport
        for match in self._matches[packet.version]:
            if proto not in match.protos or not (src in match.sources or self._source_has_cap(match, packet.src)):
                continue
            for shift, high, first, last in match.destinations:
                if dst >> shift == high and first <= port <= last:
                    return True
        return False

    def _source_has_cap(self, match: _FamilyMatch, source: bytes) -> bool:
        return any(self.has_capability(source, capability) for capability in match.caps)

    def _allows_icmp(self, packet: Packet) -> bool:
        """If anything is open between two addresses, ICMP is; a source capability opens every local address to it."""
        src, dst = int.from_bytes(packet.src, "big"), int.from_bytes(packet.dst, "big")
        matches = self._matches[packet.version]
        for match in matches:
            if src in match.sources and any(dst >> shift == high for shift, high, _, _ in match.destinations):
                return True
        return any(self._source_has_cap(match, packet.src) for match in matches)

    def _allows_other(self, packet: Packet) -> bool:
        """Protocols without ports: only rules that name the protocol and open all ports count."""
        src, dst = int.from_bytes(packet.src, "big"), int.from_bytes(packet.dst, "big")
        for match in self._matches[packet.version]:
            if packet.proto not in match.protos or src not in match.sources:
                continue
            for shift, high, first, last in match.destinations:
                if dst >> shift == high and first == 0 and last == LAST_PORT:
                    return True
        return False

    def _is_own_disco(self, packet: Packet) -> bool:
        payload = packet.payload
        return payload[:6] == _DISCO_MAGIC and payload[6:38] == self.own_disco_key


def _of_version(prefixes: Sequence[IPPrefix], version: int) -> PrefixSet:
    return PrefixSet(prefix for prefix in prefixes if prefix.version == version)


def _high_bits(prefix: IPPrefix) -> int:
    return int(prefix.network_address) >> (prefix.max_prefixlen - prefix.prefixlen)


def _contains(prefix: IPPrefix, address: IPAddress) -> bool:
    return prefix.version == address.version and address in prefix
