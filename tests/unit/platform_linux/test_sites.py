"""4via6 beside a TUN: which packets the userspace stack takes, where its own go, and what it never forwards."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address, ip_network

import pytest

from tsd.base.addr import AddrPort
from tsd.base.entropy import system_entropy
from tsd.hull import Frame
from tsd.netstack.datagrams import is_routed_by
from tsd.netstack.events import DatagramReceived
from tsd.packet.build import udp_packet
from tsplatform.linux.sites import SiteGateway

OWN, PEER = IPv6Address("fd7a:115c:a1e0::1"), IPv6Address("fd7a:115c:a1e0::2")
SITE = ip_network("fd7a:115c:a1e0:b1a:0:7:a01:200/120")
HOST = IPv6Address("fd7a:115c:a1e0:b1a:0:7:a01:203")


def frame(source: IPv6Address, target: IPv6Address) -> Frame:
    return Frame(udp_packet(source.packed, 1, target.packed, 2, b"x"))


class FakeTun:
    mtu_bytes = 1280

    def __init__(self) -> None:
        self.to_host: list[Frame] = []
        self.to_peers: list[Frame] = []

    def deliver(self, frames: list[Frame]) -> None:
        self.to_host += frames

    def send(self, frames: list[Frame]) -> None:
        self.to_peers += frames


class Bed:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tun = FakeTun()
        self.gateway = SiteGateway(self.tun, lambda: [OWN], lambda sock: None, system_entropy)  # type: ignore[arg-type]
        self.asked: list[DatagramReceived] = []
        monkeypatch.setattr(
            self.gateway._stack.forwarder,
            "on_datagram",
            lambda event: not self.asked.append(event),  # type: ignore[func-returns-value]
        )

    def inbound(self, *frames: Frame) -> list[Frame]:
        return list(self.tun.divert_inbound(frames))  # type: ignore[attr-defined]


@pytest.fixture
async def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:  # type: ignore[misc]
    made = Bed(monkeypatch)
    made.gateway.start()
    yield made
    made.gateway.close()


async def test_what_goes_to_a_site_of_ours_is_taken_and_the_rest_left(bed: Bed) -> None:
    to_site, to_us = frame(PEER, HOST), frame(PEER, OWN)
    assert bed.inbound(to_site, to_us) == [to_site, to_us], "no routes yet"
    bed.gateway.set_routes([ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"), SITE])
    others = [frame(PEER, HOST + 256), frame(PEER, HOST + (1 << 32)), frame(PEER, IPv6Address("2001:db8::1"))]
    assert bed.inbound(to_us, to_site, *others) == [to_us, *others]
    assert [event.local for event in bed.asked] == [AddrPort(HOST, 2)]
    assert [event.remote for event in bed.asked] == [AddrPort(PEER, 1)]


async def test_programs_of_the_host_may_go_there_but_nobody_through_it(bed: Bed) -> None:
    bed.gateway.set_routes([SITE])
    assert not bed.gateway.divert(frame(IPv6Address("2001:db8:5::9"), HOST))
    assert not bed.gateway.divert(frame(PEER, HOST)) and not bed.asked
    assert not bed.gateway.divert(frame(OWN, PEER))
    assert bed.gateway.divert(frame(OWN, HOST)) and len(bed.asked) == 1


async def test_answers_go_to_the_peer_or_to_the_host(bed: Bed) -> None:
    bed.gateway.set_routes([SITE])
    stack = bed.gateway._stack
    stack.stack.datagrams.send(AddrPort(HOST, 2), AddrPort(OWN, 1), b"host")
    stack.stack.datagrams.send(AddrPort(HOST, 2), AddrPort(PEER, 1), b"peer")
    stack._run(())
    assert [bytes(frame.packet[24:40]) for frame in bed.tun.to_host] == [OWN.packed]
    assert [bytes(frame.packet[24:40]) for frame in bed.tun.to_peers] == [PEER.packed]


async def test_a_route_that_goes_takes_nothing_more(bed: Bed) -> None:
    bed.gateway.set_routes([SITE])
    bed.gateway.set_routes([])
    assert bed.inbound(frame(PEER, HOST)) and not bed.gateway.divert(frame(OWN, HOST))


INNER = ["127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "169.254.169.254", "100.64.0.1", "240.0.0.1"]


@pytest.mark.parametrize("inner", INNER)
def test_addresses_that_are_no_hosts_of_a_site(inner: str) -> None:
    site = ip_network("fd7a:115c:a1e0:b1a:0:7::/96")
    address = site.network_address + int(ip_address(inner))
    assert not is_routed_by(site, address) and not is_routed_by(ip_network("::/0"), address)


def test_only_a_site_route_covers_a_host_of_a_site() -> None:
    assert is_routed_by(SITE, HOST) and not is_routed_by(SITE, HOST + (1 << 32))
    assert not is_routed_by(ip_network("::/0"), HOST) and not is_routed_by(ip_network("fd7a:115c:a1e0::/48"), HOST)
    assert is_routed_by(ip_network("::/0"), IPv6Address("2001:db8::1"))
    assert not is_routed_by(ip_network("::/0"), IPv6Address("fe80::1"))
    assert is_routed_by(ip_network("fe80::/64"), IPv6Address("fe80::1")), "asked for by name"
