"""What other rooms ask the engine: pings (`PingHost`), names (`NameSource`), PeerAPI (`PeerApiHost`), LocalAPI.

Answers only; nothing here changes what the engine does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.errors import TsdError
from tsd.base.keys import DiscoPublic
from tsd.engine.path.pings import DiscoReply
from tsd.engine.peerapi import Caller, PeerApi
from tsd.engine.peers import Peer
from tsd.hull import Frame, Stream

if TYPE_CHECKING:
    from tsd.engine.account.account import Account
    from tsd.engine.control.hostinfo import HostFacts
    from tsd.engine.engine import EngineOptions
    from tsd.engine.names.resolver import Resolver
    from tsd.engine.path.plane import Plane
    from tsd.engine.path.reach import Reach
    from tsd.engine.tailnet import Tailnet


class Views:
    """Base of the engine, which has these parts."""

    options: EngineOptions
    facts: HostFacts
    account: Account
    tailnet: Tailnet
    reach: Reach
    resolver: Resolver
    peerapi: PeerApi
    plane: Plane | None

    def peer_for(self, ip: IPAddress) -> Peer | None:
        return self.tailnet.peer_for(ip)

    def is_own(self, ip: IPAddress) -> bool:
        return ip in self.tailnet.own_addresses

    def is_overlay(self, ip: IPAddress) -> bool:
        return self.tailnet.is_routed(ip) and not self.tailnet.stays_local(ip)

    def held_back(self, ip: IPAddress) -> str:
        return self.tailnet.held_back(ip)

    def own_address_for(self, ip: IPAddress) -> IPAddress | None:
        return next((own for own in self.tailnet.own_addresses if own.version == ip.version), None)

    def own_addresses(self) -> list[IPAddress]:
        return self.tailnet.names_of_us()

    def is_expired(self, peer: Peer) -> bool:
        return peer.node.is_expired(self.tailnet.keys.now_ns())

    def derp_code(self, region: int) -> str:
        found = self.reach.derp_map.region(region)
        return found.region_code if found is not None else ""

    def send(self, frames: list[Frame]) -> None:
        if self.plane is not None:
            self.plane.datapath.send(frames)

    def deliver(self, frames: list[Frame]) -> None:
        self.options.hull.tun.deliver(frames)

    def disco_ping(self, peer: Peer, size: int) -> asyncio.Future[DiscoReply]:
        if self.plane is None:
            raise TsdError("not running")
        self.reach.note_traffic()
        return self.plane.disco_ping(peer, size)

    async def connect(self, remote: AddrPort) -> Stream:
        return await self.options.hull.net.connect(remote)

    def own_peerapi_port(self, ip: IPAddress) -> int:
        return self.peerapi.ports.get(ip, 0)

    def learn_disco_key(self, handle: int, disco_key: DiscoPublic) -> None:
        self.tailnet.members.learn_disco_key(handle, disco_key)

    def tailnet_addresses(self, name: str) -> list[IPAddress]:
        return [] if _is_localhost(name) else self.resolver.lookup(name)

    async def resolve_upstream(self, name: str) -> list[IPAddress]:
        """Names for which control chose upstreams by those, everything else by the host; nobody is asked for names of
        the tailnet's own zones that do not exist."""
        is_ours = self.resolver.owns(name) or bool(self.resolver.configured_for(name))
        if is_ours and self.tailnet.wants_own_dns and not _is_localhost(name):
            return await self.resolver.addresses(name)
        found: list[IPAddress] = await self.options.resolve_host(name)
        return found

    def self_name(self) -> str:
        node = self.account.self_node
        return node.name.rstrip(".") if node is not None else self.facts.hostname

    def identify(self, source: IPAddress) -> Caller | None:
        return self.tailnet.identify(source)

    async def resolve_dns(self, query: bytes) -> bytes:
        return await self.resolver.query_for_peer(query)


def _is_localhost(name: str) -> bool:
    """This machine whatever others are called (RFC 6761, 6.3): no peer and no server may take its place."""
    return f".{name.rstrip('.').lower()}".endswith(".localhost")
