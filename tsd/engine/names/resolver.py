"""Our resolver: own names from the zone, everything else to the upstreams that fit.

Longest suffix wins; an upstream inside the overlay is asked through the overlay (also without a TUN). Own look-ups
never go through ourselves: our service addresses are never used as upstream. Rules: tailscale:
net/dns/resolver/tsdns.go; asking others is `forwarder`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tsd.base.addr import IPAddress
from tsd.base.errors import DecodeError
from tsd.dns import message
from tsd.dns.zone import Zone, magic_suffixes
from tsd.engine.names.exchange import Dialing
from tsd.engine.names.forwarder import Answer, Forwarder, Surroundings
from tsd.engine.names.nat64 import Nat64
from tsd.hull import DnsConfig

MAX_ALIASES = 8
_BONJOUR = frozenset({"b", "db", "r", "dr", "lb"})


class Resolver:
    """One per engine; `configure` swaps names and upstreams at once."""

    def __init__(
        self,
        dialer: Dialing,
        base_resolvers: Callable[[], Sequence[str]] = tuple,
        surroundings: Surroundings | None = None,
    ) -> None:
        """`base_resolvers` tells the host's own upstreams; asked each time, for they change with its networks."""
        self._base = base_resolvers
        self._zone = Zone({})
        self._config = DnsConfig()
        self._routes: dict[str, tuple[str, ...]] = {}
        self.forwarder = Forwarder(dialer, surroundings)
        links = (surroundings or Surroundings()).links
        self._nat64 = Nat64(links, lambda: asyncio.get_running_loop().time())

    @property
    def own_addresses(self) -> frozenset[IPAddress]:
        return self.forwarder.own_addresses

    @own_addresses.setter
    def own_addresses(self, addresses: frozenset[IPAddress]) -> None:
        self.forwarder.own_addresses = addresses

    def configure(self, config: DnsConfig) -> None:
        own_zones = tuple(suffix for suffix, upstreams in config.routes.items() if not upstreams)
        self._routes = {s.strip(".").lower(): tuple(ups) for s, ups in config.routes.items() if ups}
        own_zones = (*magic_suffixes(config.magic_suffix), *own_zones)
        self._zone = Zone(config.hosts, own_zones, config.subdomain_hosts, self._routes)
        if (config.routes, config.resolvers) != (self._config.routes, self._config.resolvers):
            self.forwarder.loops.forget()
        self._config = config

    def close(self) -> None:
        self.forwarder.close()

    # --- names

    def lookup(self, name: str) -> list[IPAddress]:
        """Addresses of a tailnet name, long or short."""
        found = self._zone.lookup(name)
        if not found and "." not in name.rstrip("."):
            for domain in self._config.search_domains:
                found = self._zone.lookup(f"{name.rstrip('.')}.{domain}")
                if found:
                    break
        return list(found)

    def owns(self, name: str) -> bool:
        """Whether nobody else may be asked for this name."""
        return self._zone.owns(name)

    def upstreams_for(self, name: str) -> tuple[str, ...]:
        return self.configured_for(name) or tuple(self._base())

    def configured_for(self, name: str) -> tuple[str, ...]:
        """Upstreams that control chose for a name; empty when the host's own are to be asked."""
        suffix = self._suffix_for(name)
        return self._routes[suffix] if suffix else self._config.resolvers

    def _suffix_for(self, name: str) -> str:
        """The routed zone that a name lies in, "" for none; an own zone inside of it ends it."""
        plain = name.rstrip(".").lower()
        fitting = [s for s in self._routes if plain == s or plain.endswith("." + s)]
        return max(fitting, key=lambda s: s.count("."), default="")

    def resolvers_json(self, name: str) -> list[dict[str, Any]]:
        """Who would be asked for a name, as `dns query` shows it."""
        if self._zone.owns(name):
            return []
        return [{"Addr": upstream} for upstream in self.upstreams_for(name)]

    async def addresses(self, name: str) -> list[IPAddress]:
        """Addresses of any name by the resolvers in force. Raises OSError."""
        found = self.lookup(name)
        if found:
            return found
        if self._zone.owns(name):
            raise OSError(f"no such name: {name}")
        from tsd.dns import wire as codec

        for rdtype in ("A", "AAAA"):
            try:
                question = codec.question(name, rdtype)
            except DecodeError as err:
                raise OSError(str(err)) from None
            reply = await self.query(question, over_tcp=True)
            found += [ip for ip in codec.addresses_in(reply) if ip not in found]
        if not found:
            raise OSError(f"no address for {name}")
        return found

    # --- messages

    async def query(self, wire: bytes, over_tcp: bool = False) -> bytes:
        """The reply to a query in wire form; SERVFAIL when nobody answers, FORMERR for what is no query."""
        return (await self.ask(wire, over_tcp)).wire

    async def ask(self, wire: bytes, over_tcp: bool = False) -> Answer:
        """As `query`, and who answered. Without TCP the reply fits what the asker takes by UDP."""
        from tsd.dns import wire as codec  # here, because dnspython takes longer to import than the whole engine

        if message.is_reply(wire):
            return Answer(_format_error(wire))
        if self.forwarder.loops.came_back(wire):
            return Answer(message.refusal(wire, message.NXDOMAIN))
        own = codec.answer(self._zone, wire, max_bytes=65535 if over_tcp else None)
        if own is not None:
            return Answer(own)
        answer = await self._forward(wire, over_tcp, codec.name_in(wire))
        return answer if over_tcp else answer._replace(wire=message.fitted(answer.wire, message.udp_limit(wire)))

    async def query_for_peer(self, wire: bytes) -> bytes:
        """For a node that uses us as its exit node: only the world's names, and not those that control excludes."""
        from tsd.dns import wire as codec

        name = codec.name_in(wire)
        if name is None or message.is_reply(wire):
            return _format_error(wire)
        if _is_excluded(name.rstrip(".").lower(), self._config.exit_node_filtered):
            return message.refusal(wire, message.REFUSED, message.EDE_PROHIBITED, "not resolved for peers")
        return (await self._forward(wire, True, name)).wire

    async def _forward(self, wire: bytes, over_tcp: bool, name: str | None) -> Answer:
        if name is None or message.question_of(wire) is None:
            return Answer(_format_error(wire))
        if _is_bonjour(name):
            return Answer(message.refusal(wire, message.NXDOMAIN))
        suffix = self._suffix_for(name)
        upstreams = self.upstreams_for(name) if suffix else await self._for_the_world()
        answer = await self.forwarder.ask(wire, upstreams, over_tcp, suffix)
        if message.is_cut(answer.wire):
            return answer
        return await self._follow(answer, wire, upstreams, over_tcp)

    async def _for_the_world(self) -> tuple[str, ...]:
        """Control's choice, but where only the host's own resolvers know the way to the IPv4 world."""
        chosen, base = self._config.resolvers, tuple(self._base())
        is_by_exit_node = any(text.startswith("http:") for text in chosen)

        async def ask(query: bytes) -> bytes:
            return (await self.forwarder.ask(query, base, True)).wire

        if chosen and base and not is_by_exit_node and await self._nat64.is_here(ask):
            return base
        return chosen or base

    async def _follow(self, answer: Answer, wire: bytes, upstreams: tuple[str, ...], over_tcp: bool) -> Answer:
        """Follow an alias to a name of ours, or into a zone of other upstreams. SERVFAIL when there is no end to it."""
        from tsd.dns import wire as codec

        for _ in range(MAX_ALIASES):
            try:
                alias = codec.open_alias(answer.wire)
            except DecodeError:
                break
            if alias is None:
                return answer
            target, rdtype = alias
            if self._zone.owns(target):
                known = self._zone.lookup(target)
                return answer._replace(wire=codec.with_addresses(answer.wire, target, rdtype, known))
            others = self.configured_for(target)
            if not others or others == upstreams:
                return answer
            question = codec.question(target, rdtype, int.from_bytes(wire[:2], "big"))
            more = await self.forwarder.ask(question, others, over_tcp, self._suffix_for(target))
            if message.rcode_of(more.wire) or more.wire[6:8] == b"\0\0":
                return answer
            answer, upstreams = more._replace(wire=codec.joined(answer.wire, more.wire)), others
        return Answer(message.refusal(wire, message.SERVFAIL, message.EDE_OTHER, "the alias has no end"))


def _format_error(wire: bytes) -> bytes:
    return wire[:2].ljust(2, b"\0") + b"\x81\x01" + bytes(8)


def _is_bonjour(name: str) -> bool:
    """Looking for services of the network around: no upstream knows them, and there are many such questions."""
    labels = name.lower().split(".", 3)
    return len(labels) == 4 and labels[0] in _BONJOUR and labels[1:3] == ["_dns-sd", "_udp"]


def _is_excluded(name: str, rules: Sequence[str]) -> bool:
    """A rule with a dot at its beginning means a whole zone."""
    for rule in rules:
        plain = rule.strip(".").lower()
        if plain and (name == plain or (rule.startswith(".") and name.endswith("." + plain))):
            return True
    return False
