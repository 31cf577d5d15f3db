"""PeerAPI over memory streams, and the four kinds of ping against a pretend peer."""

from __future__ import annotations

import asyncio
import base64
from ipaddress import ip_address
from typing import Any

import dns.message
import pytest

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import DiscoPrivate, DiscoPublic, NodePrivate
from tsd.engine import peerapi
from tsd.engine.path.pings import DiscoReply, Pings
from tsd.engine.peerapi import Caller, PeerApi, candidate_ports
from tsd.engine.peers import Peer
from tsd.hull import Frame, Stream
from tsd.packet import tsmp
from tsd.packet.build import icmp_packet, tcp_packet, udp_packet
from tsd.packet.parse import parse
from tsd.tailcfg.hostinfo import Hostinfo, Service
from tsd.tailcfg.node import Node, hostinfo_field
from tsplatform.memory.hull import MemoryNet, MemorySwitch

OWN, PEER = parse_ip("100.64.0.1"), parse_ip("100.64.0.2")


class _Host:
    def __init__(self) -> None:
        self.caller: Caller | None = Caller("two.tn.example", "ann@example", True, True)

    def self_name(self) -> str:
        return "one.tn.example"

    def own_addresses(self) -> list[IPAddress]:
        return [OWN]

    def identify(self, source: IPAddress) -> Caller | None:
        return self.caller

    async def resolve_dns(self, query: bytes) -> bytes:
        return b"reply to " + query[:2]


def test_ports_follow_from_the_address() -> None:
    assert candidate_ports(ip_address("100.64.0.1"), SeededEntropy(1))[:2] == [58436, 36467]
    assert candidate_ports(ip_address("100.64.0.1"), SeededEntropy(1))[-1] == 0


class _Served:
    """A PeerAPI and a way to talk to it."""

    def __init__(self) -> None:
        switch = MemorySwitch()
        self.host = _Host()
        self.api = PeerApi(MemoryNet(switch, OWN), self.host, SeededEntropy(1))
        self.client = MemoryNet(switch, PEER)

    async def ask(self, raw: bytes) -> bytes:
        stream = await self.client.connect(AddrPort(OWN, self.api.ports[OWN]))
        await stream.write(raw)
        await stream.write_eof()
        answer = b""
        while chunk := await asyncio.wait_for(stream.read(65536), 5):
            answer += chunk
        return answer


@pytest.fixture
async def served() -> _Served:
    made = _Served()
    await made.api.serve([OWN])
    return made


class TestPeerApi:
    async def test_hello_and_head(self, served: _Served) -> None:
        answer = await served.ask(b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and b"ann@example" in answer
        remote = AddrPort(OWN, served.api.ports[OWN])
        assert await peerapi.head(served.client.connect, remote) == 200

    @pytest.mark.parametrize(
        "head", ["Host: evil.example", "Host: peer\r\nOrigin: http://x", "Host: peer\r\nReferer: http://x"]
    )
    async def test_browsers_are_refused(self, served: _Served, head: str) -> None:
        assert (await served.ask(f"GET / HTTP/1.1\r\n{head}\r\n\r\n".encode())).startswith(b"HTTP/1.1 403")

    async def test_c07_a_file_is_refused_with_the_reason_before_all_of_it_has_come(self, served: _Served) -> None:
        head = b"PUT /v0/put/a%20b.txt HTTP/1.1\r\nHost: peer\r\nContent-Length: 99999999\r\n\r\n"
        stream = await served.client.connect(AddrPort(OWN, served.api.ports[OWN]))
        await stream.write(head + bytes(1000))
        answer = await asyncio.wait_for(stream.read(65536), 5)
        assert answer.startswith(b"HTTP/1.1 403") and b"this node takes no files" in answer
        await stream.close()
        assert b"this node takes no files" in await served.ask(head.replace(b"99999999", b"0"))

    async def test_strangers_are_refused(self, served: _Served) -> None:
        served.host.caller = None
        assert (await served.ask(b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n")).startswith(b"HTTP/1.1 403")

    async def test_dns_needs_the_right(self, served: _Served) -> None:
        query = dns.message.make_query("a.example", "A", id=7).to_wire()
        encoded = base64.urlsafe_b64encode(query).rstrip(b"=")
        request = b"GET /dns-query?dns=" + encoded + b" HTTP/1.1\r\nHost: peer\r\n\r\n"
        assert (await served.ask(request)).endswith(b"reply to \x00\x07")
        served.host.caller = Caller("two", "", False, False)
        assert (await served.ask(request)).startswith(b"HTTP/1.1 403")

    @pytest.mark.parametrize(
        "raw", [b"", b"\x00" * 50, b"GET / HTTP/1.1\r\nHost: peer\r\nContent-Length: 99999999\r\n\r\n"]
    )
    async def test_garbage_and_huge_bodies_end_the_connection_only(self, served: _Served, raw: bytes) -> None:
        await served.ask(raw)
        assert (await served.ask(b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n")).startswith(b"HTTP/1.1 200")

    async def test_addresses_come_and_go(self, served: _Served) -> None:
        await served.api.serve([])
        assert not served.api.ports
        await served.api.serve([OWN])
        assert OWN in served.api.ports


class _PingHost:
    """An engine whose only peer answers TSMP and ICMP as soon as it is asked."""

    def __init__(self) -> None:
        info = Hostinfo(services=(Service(proto="peerapi4", port=1000),))
        key = NodePrivate(b"\x02" * 32).public()
        node = Node(id=2, name="two.tn.example.", key=str(key), hostinfo_raw=hostinfo_field(info))
        self.peer = Peer(5, node, key.raw, (PEER.packed,))
        self.pings: Pings | None = None
        self.is_expired_now = False
        self.sent: list[Frame] = []
        self.delivered: list[Frame] = []
        self.learnt: list[tuple[int, DiscoPublic]] = []
        self.disco_failures = 0

    def peer_for(self, ip: IPAddress) -> Peer | None:
        return self.peer if ip == PEER else None

    def is_own(self, ip: IPAddress) -> bool:
        return ip == OWN

    def own_address_for(self, ip: IPAddress) -> IPAddress | None:
        return OWN if ip.version == 4 else None

    def is_expired(self, peer: Peer) -> bool:
        return self.is_expired_now

    def derp_code(self, region: int) -> str:
        return "lab"

    def send(self, frames: list[Frame]) -> None:
        self.sent += frames
        assert self.pings is not None
        for frame in frames:
            packet = parse(bytes(frame.packet))
            pong = tsmp.pong_to(packet, 1000)
            if pong is not None:
                self.pings.intercept(5, parse(pong))
            elif packet.icmp_type == 8:
                reply = icmp_packet(packet.dst, packet.src, 0, 0, bytes(packet.transport[4:8]))
                assert self.pings.intercept(5, parse(reply))

    def deliver(self, frames: list[Frame]) -> None:
        self.delivered += frames

    def disco_ping(self, peer: Peer, size: int) -> asyncio.Future[DiscoReply]:
        reply: asyncio.Future[DiscoReply] = asyncio.get_running_loop().create_future()
        if self.disco_failures:
            self.disco_failures -= 1
            reply.set_exception(OSError("no path"))
        else:
            reply.set_result(DiscoReply(0.01, None, 900))
        return reply

    async def connect(self, remote: AddrPort) -> Stream:
        raise ConnectionRefusedError("refused")

    def own_peerapi_port(self, ip: IPAddress) -> int:
        return 4321

    def learn_disco_key(self, handle: int, disco_key: DiscoPublic) -> None:
        self.learnt.append((handle, disco_key))


@pytest.fixture
def host() -> _PingHost:
    made = _PingHost()
    made.pings = Pings(made, ManualClock(), SeededEntropy(2))
    return made


async def ping(host: _PingHost, ip: IPAddress, kind: str) -> dict[str, Any]:
    assert host.pings is not None
    return await asyncio.wait_for(host.pings.ping(ip, kind), 10)


class TestPings:
    async def test_each_kind_says_its_own(self, host: _PingHost) -> None:
        disco = await ping(host, PEER, "disco")
        assert (disco["NodeName"], disco["DERPRegionCode"], disco["Err"]) == ("two", "lab", "")
        assert (await ping(host, PEER, "TSMP"))["PeerAPIPort"] == 1000
        assert (await ping(host, PEER, "ICMP"))["NodeIP"] == str(PEER)
        assert "refused" in (await ping(host, PEER, "peerapi"))["Err"]

    async def test_c02_each_refusal_has_its_own_text(self, host: _PingHost) -> None:
        own = await ping(host, OWN, "disco")
        assert own["IsLocalIP"] and "local" in own["Err"]
        assert (await ping(host, parse_ip("100.64.0.9"), "ICMP"))["Err"] == "no matching peer"
        host.is_expired_now = True
        assert "expired" in (await ping(host, PEER, "disco"))["Err"]

    async def test_a_new_peer_gets_time_to_find_a_path(self, host: _PingHost) -> None:
        host.disco_failures = 2
        assert (await ping(host, PEER, "disco"))["Err"] == ""

    async def test_an_unknown_kind_is_never_answered(self, host: _PingHost) -> None:
        assert host.pings is not None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.pings.ping(PEER, "nosuch"), 0.05)

    async def test_we_answer_tsmp_and_learn_disco_keys(self, host: _PingHost) -> None:
        assert host.pings is not None
        assert host.pings.intercept(5, parse(tsmp.ping(PEER.packed, OWN.packed, b"12345678")))
        answer = tsmp.read(parse(bytes(host.sent[-1].packet)))
        assert isinstance(answer, tsmp.Pong) and answer.peerapi_port == 4321
        disco_key = DiscoPrivate.generate(SeededEntropy(3)).public()
        assert host.pings.intercept(5, parse(tsmp.disco_advertisement(PEER.packed, OWN.packed, disco_key)))
        assert host.learnt == [(5, disco_key)]

    async def test_a_refusal_reaches_the_host_as_icmp(self, host: _PingHost) -> None:
        assert host.pings is not None
        syn = parse(tcp_packet(OWN.packed, 5000, PEER.packed, 80, sequence=7, flags=2))
        for reason in tsmp.REASON_TEXTS:
            assert host.pings.intercept(5, parse(tsmp.rejection_of(syn, reason)))
        told = [parse(bytes(frame.packet)) for frame in host.delivered]
        assert [(one.icmp_type, one.transport[1], one.src, one.dst) for one in told] == [
            (3, 13, PEER.packed, OWN.packed)
        ] * len(tsmp.REASON_TEXTS)
        host.delivered.clear()
        assert host.pings.intercept(5, parse(tsmp.rejection_of(syn, tsmp.REASON_ACL, maybe_broken=True)))
        udp = parse(udp_packet(OWN.packed, 5000, PEER.packed, 53, b"x"))
        assert host.pings.intercept(5, parse(tsmp.rejection_of(udp, tsmp.REASON_ACL)))
        assert not host.delivered

    async def test_other_icmp_goes_on(self, host: _PingHost) -> None:
        assert host.pings is not None
        assert not host.pings.intercept(5, parse(icmp_packet(PEER.packed, OWN.packed, 0, 0, b"\x00\x01\x00\x01")))
