"""The resolver: own names, split routes, loops, failing upstreams, over real sockets on loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import dns.message
import dns.rcode
import pytest

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.engine.names.resolver import Resolver
from tsd.hull import DnsConfig


class _Dialer:
    async def open_datagram(self, ip: IPAddress) -> Any:
        return None

    async def dial_ip(self, remote: AddrPort, timeout_s: float = 10.0) -> Any:
        raise ConnectionRefusedError("no TCP here")


class _Upstream(asyncio.DatagramProtocol):
    def __init__(self, rcode: int = 0) -> None:
        self.rcode = rcode
        self.asked: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        self.asked.append(query.question[0].name.to_text())
        reply = dns.message.make_response(query)
        reply.set_rcode(dns.rcode.Rcode.make(self.rcode))
        if not self.rcode:
            reply.answer.append(dns.rrset.from_text(query.question[0].name, 5, "IN", "A", "192.0.2.9"))
        self.transport.sendto(reply.to_wire(), addr)


async def upstream(rcode: int = 0) -> tuple[_Upstream, str]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(lambda: _Upstream(rcode), local_addr=("127.0.0.1", 0))
    return protocol, f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"


def resolver(**config: Any) -> Resolver:
    made = Resolver(_Dialer())  # type: ignore[arg-type]
    hosts = {"web.tn.example": (parse_ip("100.64.0.7"),)}
    made.configure(DnsConfig(hosts=hosts, search_domains=("tn.example",), magic_suffix="tn.example", **config))
    return made


async def ask(made: Resolver, name: str) -> dns.message.Message:
    return dns.message.from_wire(await made.query(dns.message.make_query(name, "A").to_wire(), over_tcp=True))


async def test_own_names_long_and_short() -> None:
    made = resolver()
    assert made.lookup("WEB") == made.lookup("web.tn.example.") == [parse_ip("100.64.0.7")]
    assert (await ask(made, "web.tn.example")).answer[0][0].to_text() == "100.64.0.7"
    assert (await ask(made, "nosuch.tn.example")).rcode() == dns.rcode.NXDOMAIN
    with pytest.raises(OSError, match="no such name"):
        await made.addresses("nosuch.tn.example")


async def test_the_longest_suffix_wins() -> None:
    general, general_at = await upstream()
    special, special_at = await upstream()
    made = resolver(routes={"example": (general_at,), "corp.example": (special_at,)}, resolvers=(general_at,))
    await ask(made, "a.corp.example")
    await ask(made, "b.example")
    await ask(made, "c.test")
    assert special.asked == ["a.corp.example."] and general.asked == ["b.example.", "c.test."]
    assert await made.addresses("x.corp.example") == [parse_ip("192.0.2.9")]


async def test_a_failing_upstream_does_not_end_the_race() -> None:
    _, broken_at = await upstream(dns.rcode.SERVFAIL)
    _, good_at = await upstream()
    assert (await ask(resolver(resolvers=(broken_at, good_at)), "x.test")).answer


async def test_d05_own_addresses_are_never_upstreams() -> None:
    made = resolver(resolvers=("100.100.100.100", "100.64.0.1"))
    made.own_addresses = frozenset({parse_ip("100.64.0.1")})
    assert (await ask(made, "x.test")).rcode() == dns.rcode.SERVFAIL


async def test_garbage_gets_an_answer_and_no_exception() -> None:
    assert len(await resolver().query(b"\x12\x34" + bytes(20))) >= 12
    assert await resolver().query(b"") is not None
