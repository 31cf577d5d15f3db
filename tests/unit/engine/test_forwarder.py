"""The forwarder against resolvers on loopback: races, TCP, HTTPS, an exit node's PeerAPI, loops, failures in words."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import pytest
import trustme

from harness.dnsdouble import DnsDouble, reply_with
from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.dns.publicdns import Provider
from tsd.engine.names import doh
from tsd.engine.names.dialer import Dialer
from tsd.engine.names.forwarder import Answer, Surroundings
from tsd.engine.names.resolver import Resolver
from tsd.engine.peerapi import Caller, PeerApi
from tsd.hull import DnsConfig, LinkState, StreamHandler
from tsd.transport.host import HostStream

X = reply_with("x.example. A 192.0.2.9")


class NoOverlay:
    def tailnet_addresses(self, name: str) -> list[IPAddress]:
        return []

    def is_overlay(self, ip: IPAddress) -> bool:
        return False

    is_own = is_overlay

    def held_back(self, ip: IPAddress) -> str:
        return ""

    async def resolve_upstream(self, name: str) -> list[IPAddress]:
        raise OSError("not asked")


def resolver(*upstreams: str, surroundings: Surroundings | None = None, **config: Any) -> Resolver:
    made = Resolver(Dialer(None, NoOverlay()), tuple, surroundings)  # type: ignore[arg-type]
    made.configure(DnsConfig(resolvers=upstreams, **config))
    return made


async def ask(made: Resolver, name: str = "x.example", over_tcp: bool = False, **options: Any) -> dns.message.Message:
    return dns.message.from_wire((await answer(made, name, over_tcp, **options)).wire)


async def answer(made: Resolver, name: str = "x.example", over_tcp: bool = False, **options: Any) -> Answer:
    return await made.ask(dns.message.make_query(name, options.pop("rdtype", "A"), **options).to_wire(), over_tcp)


@contextlib.asynccontextmanager
async def doubles(*answering: Any, **attributes: Any) -> AsyncIterator[list[DnsDouble]]:
    made = [DnsDouble(one) for one in answering]
    for one in made:
        for name, value in attributes.items():
            setattr(one, name, value)
        await one.start()
    try:
        yield made
    finally:
        for one in made:
            one.close()


def ede(reply: dns.message.Message) -> dns.edns.EDEOption:
    return next(option for option in reply.options if isinstance(option, dns.edns.EDEOption))


async def test_who_answered_and_by_what_is_told() -> None:
    async with doubles(X) as (one,):
        found = await answer(resolver(one.text))
        assert (found.upstream, found.transport) == (one.text, "udp")
        assert dns.message.from_wire(found.wire).answer[0][0].to_text() == "192.0.2.9"


async def test_a_silent_or_failing_upstream_costs_little() -> None:
    async with doubles(lambda query, over: None, reply_with(rcode=2), reply_with(rcode=5), X) as made:
        loop = asyncio.get_running_loop()
        started = loop.time()
        found = await answer(resolver(*(one.text for one in made)))
        assert found.upstream == made[3].text and loop.time() - started < 8


async def test_silence_over_udp_is_followed_by_tcp() -> None:
    async with doubles(lambda query, over: X(query, over) if over == "tcp" else None) as (one,):
        assert (await answer(resolver(one.text))).transport == "tcp"


async def test_a_large_answer_comes_whole_over_tcp_and_cut_over_udp() -> None:
    big = reply_with(*(f'x.example. TXT "{n}{"t" * 200}"' for n in range(40)))
    async with doubles(big) as (one,):
        made = resolver(one.text)
        whole = await ask(made, over_tcp=True, rdtype="TXT")
        assert sum(len(rrset) for rrset in whole.answer) == 40
        cut = await ask(made, rdtype="TXT")
        assert cut.flags & dns.flags.TC


async def test_d02_what_the_asker_cannot_take_is_cut_at_a_records_border() -> None:
    """An upstream that ignores the size that was asked for."""
    texts = [f'x.example. TXT "{n:03}{"t" * 100}"' for n in range(12)]
    async with doubles(lambda query, over: reply_with(*texts)(query, "tcp")) as (one,):
        wire = (await answer(resolver(one.text), rdtype="TXT", use_edns=0, payload=800)).wire
        cut = dns.message.from_wire(wire)
        assert len(wire) <= 800 and cut.flags & dns.flags.TC and cut.edns == 0
        assert 1 < sum(len(rrset) for rrset in cut.answer) < 12


async def test_refused_by_all_is_refused_and_else_it_is_servfail() -> None:
    async with doubles(reply_with(rcode=5), reply_with(rcode=5)) as made:
        assert (await ask(resolver(*(one.text for one in made)))).rcode() == dns.rcode.REFUSED
    async with doubles(reply_with(rcode=5), reply_with(rcode=2)) as made:
        assert (await ask(resolver(*(one.text for one in made)))).rcode() == dns.rcode.SERVFAIL


async def test_a_failure_says_why() -> None:
    async with doubles(X) as (one,):
        gone = one.text
    told: list[str] = []
    made = resolver(gone)
    made.forwarder.on_failing = told.append
    reply = await ask(made, use_edns=0)
    assert reply.rcode() == dns.rcode.SERVFAIL and told == [gone]
    assert ede(reply).code == 22 and f"{gone}: connection refused" in (ede(reply).text or "").lower()
    assert (await answer(made)).failure == f"{gone}: Connection refused"
    nobody = await ask(resolver(), use_edns=0, want_dnssec=True)
    assert "no resolver" in (ede(nobody).text or "") and nobody.ednsflags & dns.flags.DO


async def test_equal_questions_are_asked_once() -> None:
    async def later(query: dns.message.Message) -> None: ...

    async with doubles(X) as (one,):
        made = resolver(one.text)
        queries = [dns.message.make_query("x.example", "A", id=number).to_wire() for number in range(50)]
        replies = await asyncio.gather(*(made.query(query) for query in queries))
        assert [reply[:2] for reply in replies] == [query[:2] for query in queries] and len(one.asked) == 1


async def test_numbers_of_questions_are_our_own() -> None:
    seen: list[int] = []

    def note(query: dns.message.Message, over: str) -> bytes:
        seen.append(query.id)
        return X(query, over)

    async with doubles(note) as (one,):
        made = resolver(one.text)
        for _ in range(4):
            reply = await ask(made, id=1)
            assert reply.id == 1
        assert len(set(seen)) == 4


async def test_service_discovery_of_the_network_around_goes_nowhere() -> None:
    async with doubles(X) as (one,):
        reply = await ask(resolver(one.text), "lb._dns-sd._udp.0.2.0.192.in-addr.arpa", rdtype="PTR")
        assert reply.rcode() == dns.rcode.NXDOMAIN and one.asked == []


# --- HTTPS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def https(one: DnsDouble, authority: trustme.CA, **changes: Any) -> Surroundings:
    """192.0.2.53 is known to answer over HTTPS as dns.example, which is reached at the double."""

    def context() -> ssl.SSLContext:
        made = ssl.create_default_context()
        authority.configure_trust(made)
        made.set_alpn_protocols(["h2"])
        return made

    known = changes.pop("provider", Provider("https://dns.example/dns-query", False))
    return Surroundings(
        provider_of=lambda ip: known if str(ip) == "192.0.2.53" else None,
        addresses_of=lambda url: (parse_ip("127.0.0.1"),),
        tls_context=context,
        https_port=one.https_port,
    )


def server_context(authority: trustme.CA, name: str = "dns.example") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    context.set_alpn_protocols(["h2"])
    return context


async def test_a_known_public_resolver_is_asked_over_https(authority: trustme.CA) -> None:
    async with doubles(X) as (one,):
        await one.start_https(server_context(authority))
        made = resolver("192.0.2.53", surroundings=https(one, authority))
        for name in ("x.example", "y.example", "z.example"):
            found = await answer(made, name)
            assert (found.upstream, found.transport) == ("192.0.2.53", "https")
        assert [over for over, _ in one.asked] == ["https"] * 3
        many = await asyncio.gather(*(answer(made, f"n{number}.example") for number in range(20)))
        assert all(found.transport == "https" for found in many)
        made.close()


async def test_an_idle_https_connection_is_closed_and_a_lost_one_made_anew(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doh, "IDLE_S", 1.5)
    async with doubles(X) as (one,):
        await one.start_https(server_context(authority))
        made = resolver("192.0.2.53", surroundings=https(one, authority))
        for number in range(3):
            assert (await answer(made, f"n{number}.example")).transport == "https"
        before = one.https_connections
        await asyncio.sleep(3)
        assert (await answer(made)).transport == "https" and one.https_connections == before + 1
        made.close()


@pytest.mark.parametrize("reply", [b"", b"\0" * 11, b"\0" * 70000, b"\xff" * 100])
async def test_what_is_no_answer_over_https_is_a_failure(authority: trustme.CA, reply: bytes) -> None:
    async with doubles(lambda query, over: reply) as (one,):
        await one.start_https(server_context(authority))
        only = Provider("https://dns.example/dns-query", True)
        made = resolver("192.0.2.53", surroundings=https(one, authority, provider=only))
        assert (await ask(made)).rcode() == dns.rcode.SERVFAIL
        made.close()


async def test_https_that_fails_is_followed_by_plain_dns(authority: trustme.CA) -> None:
    """A certificate of another name: that is not our resolver."""
    async with doubles(X) as (one,):
        await one.start_https(server_context(authority, "other.example"))
        made = resolver("192.0.2.53", one.text, surroundings=https(one, authority))
        found = await answer(made)
        assert (found.upstream, found.transport) == (one.text, "udp")
        only = resolver(
            "192.0.2.53",
            surroundings=https(one, authority, provider=Provider("https://dns.example/dns-query", True)),
        )
        reply = await ask(only, use_edns=0)
        assert reply.rcode() == dns.rcode.SERVFAIL and "certificate" in (ede(reply).text or "").lower()
        made.close()
        only.close()


# --- the exit node's PeerAPI


class Loopback:
    """An overlay net made of loopback sockets."""

    async def listen(self, local: AddrPort, handler: StreamHandler) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(HostStream(reader, writer))

        self.server = await asyncio.start_server(serve, str(local.ip), 0)
        return int(self.server.sockets[0].getsockname()[1])


class ExitNode:
    def __init__(self, served: Resolver, may_use_dns: bool = True) -> None:
        self._served = served
        self._may = may_use_dns

    def self_name(self) -> str:
        return "exit"

    def own_addresses(self) -> list[IPAddress]:
        return [parse_ip("127.0.0.1")]

    def identify(self, source: IPAddress) -> Caller | None:
        return Caller("client", "", False, self._may)

    async def resolve_dns(self, query: bytes) -> bytes:
        return await self._served.query_for_peer(query)


@pytest.mark.parametrize("may_use_dns", [True, False])
async def test_names_by_way_of_an_exit_node(may_use_dns: bool) -> None:
    hosts = {"web.tn.example": (parse_ip("100.64.0.7"),)}
    async with doubles(X) as (one,):
        served = resolver(
            one.text, hosts=hosts, magic_suffix="tn.example", exit_node_filtered=(".secret.example", "one.example")
        )
        net = Loopback()
        api = PeerApi(net, ExitNode(served, may_use_dns), lambda count: bytes(count))  # type: ignore[arg-type]
        await api.serve([parse_ip("127.0.0.1")])
        url = f"http://127.0.0.1:{api.ports[parse_ip('127.0.0.1')]}/dns-query"
        made = resolver(url)
        found = await answer(made)
        if may_use_dns:
            assert (found.upstream, found.transport) == (url, "http")
            for name in ("a.secret.example", "one.example"):
                assert (await ask(made, name)).rcode() == dns.rcode.REFUSED
            assert "web.tn.example" not in [name for _, name in one.asked]
            assert (await ask(made, "a.one.example")).rcode() == dns.rcode.NOERROR
        else:
            assert found.wire[3] & 15 == dns.rcode.SERVFAIL and one.asked == []
        net.server.close()


# --- loops


async def test_d05_a_resolver_of_the_host_that_asks_us_in_turn_is_not_asked() -> None:
    """As systemd-resolved on 127.0.0.53 whose own upstream is 100.100.100.100."""
    loop = asyncio.get_running_loop()
    asked_back: list[str] = []

    async def ask_back(query: dns.message.Message) -> None:
        asked_back.append(query.question[0].name.to_text())
        await made.query(query.to_wire())

    def circle(query: dns.message.Message, over: str) -> None:
        loop.call_later(0.01, lambda: background.add(asyncio.ensure_future(ask_back(query))))

    background: set[Any] = set()
    told: list[str] = []
    async with doubles(circle, X) as (round_trip, good):
        made = resolver(round_trip.text, good.text, surroundings=Surroundings(can_loop=True))
        made.forwarder.on_loop = told.append
        for name in ("x.example", "y.example"):
            assert (await answer(made, name)).upstream == good.text
        await asyncio.sleep(0.1)
        assert told == [round_trip.text] and len(asked_back) == 1 and "loop-check" in asked_back[0]
        made.configure(DnsConfig(resolvers=(good.text, round_trip.text)))
        round_trip.answering = X
        made.configure(DnsConfig(resolvers=(round_trip.text,)))
        assert (await answer(made)).upstream == round_trip.text and told == [round_trip.text, ""]


async def test_d05_a_circle_that_nobody_found_does_not_grow() -> None:
    """A far resolver that asks us in turn: the same question comes back and waits for itself, it is not sent again."""
    background: set[Any] = set()

    def circle(query: dns.message.Message, over: str) -> None:
        background.add(asyncio.ensure_future(made.query(query.to_wire())))

    async with doubles(circle) as (one,):
        made = resolver(one.text)
        waiting = asyncio.ensure_future(answer(made))
        for _ in range(1000):
            await asyncio.sleep(0 if one.asked else 0.01)
        await asyncio.sleep(0.5)
        assert len(one.asked) == 1
        made.close()
        for task in (waiting, *background):
            task.cancel()
        await asyncio.gather(waiting, *background, return_exceptions=True)


# --- networks without IPv4


@pytest.mark.parametrize("synthesizes", [True, False])
async def test_d16_the_local_resolver_is_asked_where_it_makes_addresses_for_the_ipv4_world(synthesizes: bool) -> None:
    """As DNS64 does, on an uplink without IPv4; the tailnet's own choice would give addresses without a way."""
    state = LinkState(default_interface_v6="eth0")
    nat64 = reply_with(*(["ipv4only.arpa. AAAA 64:ff9b::c000:aa"] if synthesizes else []))
    async with doubles(nat64, X) as (local, chosen):
        made = Resolver(
            Dialer(None, NoOverlay()),  # type: ignore[arg-type]
            lambda: [local.text],
            Surroundings(links=lambda: state),
        )
        made.configure(DnsConfig(resolvers=(chosen.text,), routes={"corp.example": (chosen.text,)}))
        wanted = local.text if synthesizes else chosen.text
        for name in ("x.example", "y.example"):
            assert (await answer(made, name)).upstream == wanted
        assert [name for _, name in local.asked].count("ipv4only.arpa") == 1
        assert (await answer(made, "srv.corp.example")).upstream == chosen.text
        state = LinkState(default_interface_v4="eth0", default_interface_v6="eth0")
        assert (await answer(made, "z.example")).upstream == chosen.text
