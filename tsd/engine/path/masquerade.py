"""Peers that know us by another address: control may give each peer its own name for us (Node's
SelfNodeV4/V6MasqAddrForThisPeer). Sources are rewritten on the way to such a peer, destinations on the way back.

It sits around the core, so that everything above it (filter, netstack, pings, staged packets) only ever sees our own
addresses. Rules: tailscale: net/tstun/wrap.go. Packets of others that we forward are left alone. Costs nothing while
no peer has such an address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tsd.base.addr import IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.dataplane.pump import Core, Opened, OpenResult, Sealed, SealResult
from tsd.hull import Frame
from tsd.packet.rewrite import with_destination, with_source
from tsd.tailcfg.node import Node

Aliases = tuple[IPAddress, ...]
"""What a peer calls us: at most one address of each family."""


def aliases_of(node: Node) -> Aliases:
    """From a peer's node; addresses that do not parse are left out."""
    found = []
    for text in (node.self_node_v4_masq_addr, node.self_node_v6_masq_addr):
        if text:
            with suppress(DecodeError):
                found.append(parse_ip(text))
    return tuple(found)


class MasqueradingCore:
    """A `Core` around another one."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._own: dict[int, bytes] = {}
        self._aliases: dict[int, dict[int, bytes]] = {}
        self.name = core.name
        self.seal: Callable[[Sequence[Frame], float], SealResult] = core.seal
        self.seal_to: Callable[[int, Sequence[bytes], float], list[Sealed]] = core.seal_to
        self.open: Callable[[bytes | bytearray | memoryview, int, float], OpenResult] = core.open
        self.add_peer, self.remove_peer, self.drop_sessions = core.add_peer, core.remove_peer, core.drop_sessions
        self.set_allowed_ips, self.route = core.set_allowed_ips, core.route
        self.install_session, self.activity = core.install_session, core.activity

    def set_aliases(self, own: Sequence[IPAddress], aliases: Mapping[int, Aliases]) -> None:
        """Replace everything: our own addresses, and what each peer (by handle) calls us."""
        self._own = {len(ip.packed): ip.packed for ip in reversed(own)}
        self._aliases = {peer: {len(ip.packed): ip.packed for ip in named} for peer, named in aliases.items() if named}
        core = self._core
        self.seal = self._seal if self._aliases else core.seal
        self.seal_to = self._seal_to if self._aliases else core.seal_to
        self.open = self._open if self._aliases else core.open

    @property
    def masqueraded(self) -> frozenset[int]:
        """Peers that know us by another address."""
        return frozenset(self._aliases)

    # --- what is rewritten

    def _seal(self, frames: Sequence[Frame], now: float) -> SealResult:
        return self._core.seal([self._outbound(frame) for frame in frames], now)

    def _seal_to(self, peer: int, packets: Sequence[bytes], now: float) -> list[Sealed]:
        named = self._aliases.get(peer)
        if named is None:
            return self._core.seal_to(peer, packets, now)
        return self._core.seal_to(peer, [bytes(self._renamed(Frame(packet), named).packet) for packet in packets], now)

    def _open(self, datagrams: bytes | bytearray | memoryview, datagram_bytes: int, now: float) -> OpenResult:
        result = self._core.open(datagrams, datagram_bytes, now)
        if not any(item.peer in self._aliases for item in result.opened):
            return result
        return result._replace(opened=[self.inbound(item) for item in result.opened])

    def _outbound(self, frame: Frame) -> Frame:
        peer = self._core.route(_destination(frame.packet))
        named = self._aliases.get(peer) if peer is not None else None
        return frame if named is None else self._renamed(frame, named)

    def _renamed(self, frame: Frame, named: Mapping[int, bytes]) -> Frame:
        source = _source(frame.packet)
        alias = named.get(len(source))
        if alias is None or source != self._own.get(len(source)):
            return frame
        return Frame(with_source(frame.packet, alias, is_partial=frame.segment_bytes > 0), frame.segment_bytes)

    def inbound(self, item: Opened) -> Opened:
        """A packet that somebody else opened, as everything above must see it."""
        frame = item.frame
        destination = _destination(frame.packet)
        own = self._own.get(len(destination))
        if own is None or self._aliases.get(item.peer, {}).get(len(destination)) != destination:
            return item
        packet = with_destination(frame.packet, own, is_partial=frame.segment_bytes > 0)
        return Opened(item.peer, Frame(packet, frame.segment_bytes))

    # --- what is passed on

    @property
    def drops(self) -> Mapping[str, int]:
        return self._core.drops


def _source(packet: bytes | bytearray | memoryview) -> bytes:
    if len(packet) < 20:
        return b""
    return bytes(packet[12:16]) if packet[0] >> 4 == 4 else bytes(packet[8:24])


def _destination(packet: bytes | bytearray | memoryview) -> bytes:
    if len(packet) < 20:
        return b""
    return bytes(packet[16:20]) if packet[0] >> 4 == 4 else bytes(packet[24:40])
