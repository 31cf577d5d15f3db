"""Which packets may pass: control's filter and the user's wishes, as the plane applies them, and special peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_network
from typing import TYPE_CHECKING

from tsd.base.addr import IPAddress, IPPrefix
from tsd.base.errors import DecodeError
from tsd.engine.members import Members
from tsd.filter.filter import PacketFilter
from tsd.filter.rules import Match, matches_from_rules
from tsd.tailcfg.filterrule import FilterRule

if TYPE_CHECKING:
    from tsd.engine.engine import Engine


class PacketRules:
    """`filter` drops everything until `apply`; flows live on when rules change."""

    def __init__(self, engine: Engine, members: Members) -> None:
        self._engine = engine
        self._members = members
        self.filter = PacketFilter((), ())
        self.jailed_filter = PacketFilter((), ())
        self._rules: Sequence[FilterRule] = ()
        self._local: Sequence[IPPrefix] = ()
        self._unsigned: frozenset[tuple[str, ...]] = frozenset()

    def apply(self, rules: Sequence[FilterRule], local: Sequence[IPPrefix], own_addresses: Sequence[IPAddress]) -> None:
        """`local`: what we answer for. Rules that cannot be read let nothing in."""
        engine = self._engine
        self._rules, self._local = rules, local
        self._unsigned = frozenset(self._members.unsigned.values())
        try:
            matches, mistake = matches_from_rules(rules)
        except DecodeError as err:
            matches, mistake = [], str(err)
        if self._unsigned and permits(matches, self._unsigned):
            matches, mistake = [], "it lets a peer in that nobody signed"
        engine.health.set_if("invalid-packet-filter", bool(mistake), error=mistake)
        self.filter = self.filter.replace(matches, local, shields_up=engine.account.prefs.shields_up)
        self.filter.own_disco_key = engine.disco_private.public().raw
        self.filter.peerapi = frozenset((ip.packed, port) for ip, port in engine.peerapi.ports.items())
        self.filter.has_capability = self._source_has_capability
        self.jailed_filter = self.jailed_filter.replace((), local)
        if engine.plane is not None:
            engine.plane.datapath.filter = self.filter
            engine.plane.datapath.jailed_filter = self.jailed_filter
            self._apply_treatment(own_addresses)

    def peers_changed(self, own_addresses: Sequence[IPAddress]) -> None:
        if frozenset(self._members.unsigned.values()) != self._unsigned:
            self.apply(self._rules, self._local, own_addresses)
        else:
            self._apply_treatment(own_addresses)

    def _apply_treatment(self, own_addresses: Sequence[IPAddress]) -> None:
        """Who is jailed, and who knows us by another address."""
        plane = self._engine.plane
        if plane is not None:
            plane.core.set_aliases(own_addresses, self._members.aliases)
            plane.datapath.jailed = frozenset(self._members.jailed)
            plane.rules_changed()

    def _source_has_capability(self, source: bytes, capability: str) -> bool:
        peer = self._members.peers.by_packed(source)
        return peer is not None and peer.handle not in self._members.unsigned and peer.node.has_cap(capability)


def permits(matches: Sequence[Match], unsigned: Iterable[tuple[str, ...]]) -> bool:
    """Whether a rule lets in what tailnet lock did not look at: then the server is broken, or an attacker's.

    tailscale: ipn/ipnlocal/local.go, packetFilterPermitsUnlockedNodes. What cannot be read counts as let in.
    """
    try:
        claimed = [ip_network(text, strict=False) for texts in unsigned for text in texts]
    except ValueError:
        return True
    return any(
        _overlap(source, prefix)
        for match in matches
        if match.destinations
        for source in match.sources
        for prefix in claimed
    )


def _overlap(one: IPPrefix, other: IPPrefix) -> bool:
    return one.version == other.version and one.overlaps(other)
