"""Cases of names: what our resolver answers itself, what it asks others, and what it must not believe."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rrset
import pytest

from harness.fedstream import FedStream
from harness.loneengine import lone_engine, peer_json
from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.dns import message
from tsd.dns import wire as codec
from tsd.dns.zone import Zone
from tsd.engine.names.resolver import Resolver
from tsd.hull import DnsConfig
from tsd.netmap.netmap import Netmap
from tsd.routes.derive import RouteWishes, derive
from tsd.tailcfg.dns import DNSConfig
from tsd.tailcfg.node import Node
from tsplatform.userspace.hull import HostDns

ZONE = Zone({"host.tn.example": (parse_ip("100.64.0.7"), parse_ip("fd7a:115c:a1e0::7"))}, ("tn.example",))


def query(name: str, rdtype: str = "A", **options: Any) -> bytes:
    return dns.message.make_query(name, rdtype, **options).to_wire()


class Port:
    """A datagram port to one upstream: `answer` makes the reply to a question, or None."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self._replies: asyncio.Queue[tuple[bytes, AddrPort]] = asyncio.Queue()

    def send(self, data: bytes, remote: AddrPort) -> None:
        made = self._answer(data)
        for reply in made if isinstance(made, list) else [made]:
            if reply is not None:
                self._replies.put_nowait((reply, remote))

    async def receive(self) -> tuple[bytes, AddrPort]:
        return await self._replies.get()

    def close(self) -> None: ...


class Numbered(FedStream):
    """Prepared bytes of a reply over TCP, with the number of the question."""

    async def write(self, data: bytes | memoryview) -> None:
        if len(self._data) > 4:
            self._data = self._data[:2] + bytes(data[2:4]) + self._data[4:]


class Upstreams:
    """A dialer whose resolvers answer from `records` (name -> list of texts in zone-file form)."""

    def __init__(self, records: dict[str, list[str]] | None = None) -> None:
        self.records = records or {}
        self.asked: list[tuple[str, str]] = []
        self.over_tcp: bytes | None = None
        self.reply: Any = self._from_records
        self.target: AddrPort | None = None

    def _from_records(self, data: bytes) -> bytes:
        message = dns.message.from_wire(data)
        name = message.question[0].name.to_text(omit_final_dot=True)
        self.asked.append((str(self.target), name))
        made = dns.message.make_response(message)
        for text in self.records.get(name.lower(), []):
            owner, kind, value = text.split(" ", 2)
            made.answer.append(dns.rrset.from_text(owner, 60, "IN", kind, value))
        return made.to_wire(max_size=65535)

    async def open_datagram(self, ip: IPAddress) -> Port:
        self.target = AddrPort(ip, 53)
        return Port(lambda data: self.reply(data))

    async def dial_ip(self, remote: AddrPort, timeout_s: float = 10.0) -> Any:
        if self.over_tcp is None:
            raise ConnectionRefusedError("no TCP")
        return Numbered(self.over_tcp)


def resolver(upstreams: Upstreams, **config: Any) -> Resolver:
    made = Resolver(upstreams, lambda: ["192.0.2.53"])  # type: ignore[arg-type]
    hosts = {"host.tn.example": (parse_ip("100.64.0.7"), parse_ip("fd7a:115c:a1e0::7"))}
    made.configure(DnsConfig(hosts=hosts, magic_suffix="tn.example", search_domains=("tn.example",), **config))
    return made


async def ask(made: Resolver, name: str, rdtype: str = "A") -> dns.message.Message:
    return dns.message.from_wire(await made.query(query(name, rdtype), over_tcp=True))


@pytest.mark.parametrize(
    ("edns", "limit"), [({}, 512), ({"use_edns": 0, "payload": 1232}, 1232), ({"use_edns": 0, "payload": 0}, 512),
                        ({"use_edns": 0, "payload": 65535}, message.MAX_UDP_BYTES)],
)  # fmt: skip
def test_d02_and_d03_answers_fit_the_asker(edns: dict[str, Any], limit: int) -> None:
    """Cut at a record's border with TC set, question and OPT kept; whole over TCP."""
    texts = [f'"{"x" * 200}{n}"' for n in range(30)]
    many = dns.rrset.from_text("many.example.", 5, "IN", "TXT", *texts)
    question = dns.message.from_wire(query("many.example", "TXT", **edns))
    reply = dns.message.make_response(question)
    reply.answer.append(many)
    raw = codec._finish(reply, question, None)
    assert len(raw) <= limit
    cut = dns.message.from_wire(raw)
    assert cut.question == question.question and cut.flags & dns.flags.TC
    assert (cut.edns >= 0) == bool(edns)
    reply = dns.message.make_response(question)
    reply.answer.append(many)
    assert len(dns.message.from_wire(codec._finish(reply, question, 65535)).answer[0]) == 30


async def test_d04_many_records_by_tcp_and_no_pointer_loops() -> None:
    upstreams = Upstreams()
    full = dns.message.make_response(dns.message.from_wire(query("many.example", id=7)))
    addresses = [f"192.0.{n // 250}.{n % 250 + 1}" for n in range(400)]
    full.answer.append(dns.rrset.from_text("many.example.", 5, "IN", "A", *addresses))
    raw = full.to_wire(max_size=65535)
    upstreams.over_tcp = struct.pack(">H", len(raw)) + raw
    upstreams.reply = lambda data: data[:2] + b"\x83\x80" + data[4:]
    made = resolver(upstreams)
    got = dns.message.from_wire(await made.query(query("many.example", id=7), over_tcp=True))
    assert len(got.answer[0]) == 400
    loop = query("x.example", id=9)[:12] + b"\xc0\x0c\x00\x01\x00\x01"
    assert (await made.query(loop))[3] & 15 == dns.rcode.FORMERR
    upstreams.reply = lambda data: data[:2] + b"\x81\x80\x00\x01\x00\x01\0\0\0\0" + data[12:] + b"\xc0\x1b\xc0\x1b"
    assert isinstance(await made.query(query("y.example")), bytes)
    with pytest.raises(OSError, match="no address"):
        await made.addresses("y.example")


@pytest.mark.parametrize("short", [b"", b"\x00\x02ab", b"\x00\x0c" + bytes(12), b"\xff\xff" + bytes(40)])
async def test_d04_a_short_or_foreign_answer_by_tcp(short: bytes) -> None:
    upstreams = Upstreams()
    upstreams.over_tcp = short
    upstreams.reply = lambda data: data[:2] + b"\x83\x80" + data[4:]
    reply = await resolver(upstreams).query(query("many.example"), over_tcp=True)
    assert reply[3] & 15 == dns.rcode.SERVFAIL


async def test_d05_no_way_to_ask_ourselves() -> None:
    """Own addresses as upstream, replies that come in as queries, and too many questions at once."""
    upstreams = Upstreams()
    made = resolver(upstreams, resolvers=("100.100.100.100", "100.64.0.1", "[fd7a:115c:a1e0::53]:53", "nonsense"))
    made.own_addresses = frozenset([parse_ip("100.64.0.1")])
    assert (await ask(made, "x.example")).rcode() == dns.rcode.SERVFAIL and upstreams.asked == []
    answer = dns.message.make_response(dns.message.from_wire(query("x.example"))).to_wire()
    assert (await made.query(answer))[3] & 15 == dns.rcode.FORMERR
    silent = resolver(upstreams, resolvers=("192.0.2.53",))
    upstreams.reply = lambda data: None
    waiting = [asyncio.ensure_future(silent.query(query(f"n{n}.example"))) for n in range(300)]
    await asyncio.sleep(0.1)
    refused = [task for task in waiting if task.done()]
    assert len(refused) == 300 - 256
    assert all(task.result()[3] & 15 == dns.rcode.SERVFAIL for task in refused)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_d06_an_alias_into_the_tailnet_is_followed() -> None:
    chain = [f"c{n}.example. CNAME c{n + 1}.example." for n in range(9)]
    upstreams = Upstreams(
        {
            "app.example": ["app.example. CNAME host.tn.example."],
            "c0.example": [*chain, "c9.example. CNAME host.tn.example."],
            "loop.example": ["loop.example. CNAME b.example.", "b.example. CNAME loop.example."],
            "corp-alias.example": ["corp-alias.example. CNAME srv.corp.example."],
            "srv.corp.example": ["srv.corp.example. A 10.0.0.9"],
            "gone.example": ["gone.example. CNAME no.tn.example."],
            "ping.corp.example": ["ping.corp.example. CNAME pong.example."],
            "pong.example": ["pong.example. CNAME ping.corp.example."],
        }
    )
    made = resolver(upstreams, resolvers=("192.0.2.1",), routes={"corp.example": ("192.0.2.2",)})
    for name in ("app.example", "c0.example"):
        assert "100.64.0.7" in (await ask(made, name)).to_text()
        assert "fd7a:115c:a1e0::7" in (await ask(made, name, "AAAA")).to_text()
        assert await made.addresses(name) == [parse_ip("100.64.0.7"), parse_ip("fd7a:115c:a1e0::7")]
    assert (await ask(made, "loop.example")).rcode() == dns.rcode.SERVFAIL
    assert await made.addresses("corp-alias.example") == [parse_ip("10.0.0.9")]
    assert ("192.0.2.2:53", "srv.corp.example") in upstreams.asked
    with pytest.raises(OSError, match="no address"):
        await made.addresses("gone.example")
    assert (await ask(made, "pong.example")).rcode() == dns.rcode.SERVFAIL


async def test_d13_upstreams_are_read_anew(tmp_path: Any) -> None:
    path = tmp_path / "resolv.conf"
    upstreams = Upstreams({"x.example": ["x.example. A 192.0.2.9"]})
    made = Resolver(upstreams, HostDns(path).base_resolvers)  # type: ignore[arg-type]
    made.configure(DnsConfig())
    assert (await ask(made, "x.example")).rcode() == dns.rcode.SERVFAIL
    path.write_text("nameserver 192.0.2.53\nnameserver fe80::1%eth0\nnameserver nonsense\n")
    assert await made.addresses("x.example") == [parse_ip("192.0.2.9")]
    assert upstreams.asked[-1][0] == "192.0.2.53:53"
    path.write_bytes(b"\xff\xfe\0nameserver\n")
    assert made.upstreams_for("x.example") == ()


def test_d14_search_domains_of_every_kind() -> None:
    wanted = ("", ".", "example.ts.net", "example.ts.net.", *(f"d{n}.example" for n in range(40)), "x" * 300)
    wanted += ("a b", "evil\nnameserver 203.0.113.66", "tab\t", "\x00")
    node = Node(id=1, name="self.tn.example.", addresses=("100.64.0.1/32",))
    plan = derive(Netmap(node, dns=DNSConfig(proxied=True, domains=wanted)), RouteWishes())
    assert plan.dns.search_domains[:2] == ("example.ts.net", "d0.example")
    assert len(set(plan.dns.search_domains)) == len(plan.dns.search_domains) == 41
    made = Resolver(Upstreams())  # type: ignore[arg-type]
    made.configure(plan.dns)
    for name in ("", ".", "web", "x" * 300, "a..b"):
        assert made.lookup(name) == []


def test_d15_the_askers_case_is_kept() -> None:
    raw = codec.answer(ZONE, query("HoSt.Tn.ExAmPlE"))
    assert raw is not None and b"HoSt\x02Tn\x07ExAmPlE" in raw
    assert dns.message.from_wire(raw).answer[0][0].to_text() == "100.64.0.7"


async def test_d15_an_upstream_may_answer_in_another_case() -> None:
    upstreams = Upstreams()
    upstreams.reply = lambda data: data[:2] + b"\x81\x80" + data[4:12] + data[12:].lower()
    assert (await ask(resolver(upstreams), "MiXeD.example")).rcode() == dns.rcode.NOERROR


async def test_d05_only_the_answer_to_our_question_counts() -> None:
    """Right number, wrong question: somebody guesses, or an old answer comes late."""
    upstreams = Upstreams({"x.example": ["x.example. A 192.0.2.9"]})

    def several(data: bytes) -> list[bytes]:
        forged = dns.message.make_response(
            dns.message.from_wire(query("y.example", id=int.from_bytes(data[:2], "big")))
        )
        forged.answer.append(dns.rrset.from_text("y.example.", 5, "IN", "A", "203.0.113.66"))
        return [b"", data[:2], data, forged.to_wire(), bytes(12), upstreams._from_records(data)]

    upstreams.reply = several
    assert await resolver(upstreams).addresses("x.example") == [parse_ip("192.0.2.9")]


async def test_d17_our_own_look_ups_do_not_go_through_the_tunnel() -> None:
    """Relays and the coordination server are found by the host's resolver, whatever control says about DNS."""
    async with lone_engine() as lone:
        lone.first_map(peer_json(2), DNSConfig={"Proxied": True, "Resolvers": [{"Addr": "100.64.0.2"}]})
        lone.names["relay.example"] = [parse_ip("192.0.2.1")]
        lone.sent.clear()
        node = {"Name": "1a", "RegionID": 1, "HostName": "relay.example"}
        lone.map(DERPMap={"Regions": {"1": {"RegionID": 1, "Nodes": [node]}}})
        await asyncio.sleep(0.2)
        assert {str(to.ip) for to, _ in lone.sent} == {"192.0.2.1"}
        lone.map(DERPMap={"Regions": {"1": {"RegionID": 1, "Nodes": [node | {"HostName": "a..b"}, node]}}})
        await asyncio.sleep(0.2)


async def test_d18_a_split_zone_on_a_tailnet_address_is_asked_through_the_tailnet() -> None:
    async with lone_engine() as lone:
        lone.first_map(peer_json(9), DNSConfig={"Proxied": True, "Routes": {"corp.example": [{"Addr": "100.64.0.9"}]}})
        opened: list[int] = []

        async def open_datagram(local: Any, family: int = 4) -> Any:
            opened.append(family)
            return Port(Upstreams({"srv.corp.example": ["srv.corp.example. A 10.0.0.9"]})._from_records)

        lone.hull.net.open_datagram = open_datagram  # type: ignore[method-assign]
        assert await lone.engine.dialer.addresses("srv.corp.example") == [parse_ip("10.0.0.9")]
        assert opened == [4, 4]


async def test_d04_names_that_dns_cannot_spell() -> None:
    """Names come from control: a node may be called anything, and its reverse look-up must not break the resolver."""
    odd = ["a..b", "x" * 70, "x y", "tab\there", "*", "\u00e4\u00f6", "-x-", ".", "nul\0", "a." * 130]
    zone = Zone(
        {f"{name}.tn.example": (parse_ip(f"100.64.1.{n}"),) for n, name in enumerate(odd)}, ("tn.example", "b d")
    )
    for n in range(len(odd)):
        raw = codec.answer(zone, query(f"{n}.1.64.100.in-addr.arpa", "PTR"))
        assert raw is None or dns.message.from_wire(raw).rcode() in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN)
    for name in ("no.tn.example", "tn.example", "x.b\\032d", "."):
        for rdtype in ("A", "AAAA", "ANY", "TXT", "SOA", "PTR"):
            codec.answer(zone, query(name, rdtype))
