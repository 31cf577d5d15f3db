"""Peers that know us by another address: both directions, through real cores; nobody else is touched."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from tsd.dataplane.reference import ReferenceCore
from tsd.engine.path.masquerade import MasqueradingCore, aliases_of
from tsd.hull import Frame
from tsd.packet import build
from tsd.packet.checksum import is_transport_checksum_valid
from tsd.packet.constants import UDP
from tsd.packet.parse import parse
from tsd.tailcfg.node import Node

NOW = 50.0
OWN = (ip_address("100.64.0.1"), ip_address("fd7a:115c:a1e0::1"))
ALIAS = (ip_address("100.64.1.1"), ip_address("fd7a:115c:a1e0::1a"))
PEER = (ip_address("100.64.0.2"), ip_address("fd7a:115c:a1e0::2"))
FRIEND = ip_address("100.64.0.3")
STRANGER, KNOWN = 7, 8
K1, K2, K3, K4 = (bytes([n]) * 32 for n in range(1, 5))


def ours() -> MasqueradingCore:
    """Peer 7 calls us by the aliases, peer 8 by our own addresses."""
    core = MasqueradingCore(ReferenceCore())
    for handle, addresses in ((STRANGER, PEER), (KNOWN, (FRIEND,))):
        core.add_peer(handle)
        core.set_allowed_ips(handle, [ip_network(ip) for ip in addresses])
    core.install_session(STRANGER, 0x11111111, 0x22222222, K1, K2, True, NOW)
    core.install_session(KNOWN, 0x33333333, 0x44444444, K3, K4, True, NOW)
    core.set_aliases(OWN, {STRANGER: ALIAS})
    return core


def theirs() -> ReferenceCore:
    """The stranger: it believes that we are the aliases and nothing else."""
    core = ReferenceCore()
    core.add_peer(1)
    core.set_allowed_ips(1, [ip_network(ip) for ip in ALIAS])
    core.install_session(1, 0x22222222, 0x11111111, K2, K1, False, NOW)
    return core


@pytest.mark.parametrize("family", [0, 1])
def test_both_directions(family: int) -> None:
    us, them = ours(), theirs()
    own, alias, peer = OWN[family].packed, ALIAS[family].packed, PEER[family].packed
    sealed = us.seal([Frame(build.udp_packet(own, 1, peer, 2, b"to"))], NOW).sealed
    [arrived] = them.open(sealed[0].datagrams, sealed[0].datagram_bytes, NOW).opened
    packet = parse(arrived.frame.packet)
    assert (packet.src, packet.dst) == (alias, peer)
    assert is_transport_checksum_valid(packet.src, packet.dst, UDP, bytes(packet.transport))

    [back] = them.seal([Frame(build.udp_packet(peer, 2, alias, 1, b"from"))], NOW).sealed
    [opened] = us.open(back.datagrams, back.datagram_bytes, NOW).opened
    answer = parse(opened.frame.packet)
    assert (answer.src, answer.dst) == (peer, own)
    assert is_transport_checksum_valid(answer.src, answer.dst, UDP, bytes(answer.transport))


def test_first_packets_of_a_session_are_renamed_too() -> None:
    us, them = ours(), theirs()
    message = build.udp_packet(OWN[0].packed, 1, PEER[0].packed, 2, b"first")
    for item in us.seal_to(STRANGER, [b"", message], NOW):
        for opened in them.open(item.datagrams, item.datagram_bytes, NOW).opened:
            assert parse(opened.frame.packet).src == ALIAS[0].packed


def test_others_and_forwarded_packets_are_left_alone() -> None:
    us, them = ours(), theirs()
    plain = build.udp_packet(OWN[0].packed, 1, FRIEND.packed, 2, b"known")
    friend = ReferenceCore()
    friend.add_peer(1)
    friend.set_allowed_ips(1, [ip_network(OWN[0])])
    friend.install_session(1, 0x44444444, 0x33333333, K4, K3, False, NOW)
    [sealed] = us.seal([Frame(plain)], NOW).sealed
    [opened] = friend.open(sealed.datagrams, sealed.datagram_bytes, NOW).opened
    assert opened.frame.packet == plain
    them.set_allowed_ips(1, [ip_network("192.168.7.0/24")])
    forwarded = build.udp_packet(bytes([192, 168, 7, 7]), 1, PEER[0].packed, 2, b"lan")
    [sealed] = us.seal([Frame(forwarded)], NOW).sealed
    [opened] = them.open(sealed.datagrams, sealed.datagram_bytes, NOW).opened
    assert opened.frame.packet == forwarded


def test_without_aliases_the_core_is_called_directly() -> None:
    inner = ReferenceCore()
    core = MasqueradingCore(inner)
    assert core.seal == inner.seal and core.open == inner.open and core.seal_to == inner.seal_to
    core.set_aliases(OWN, {STRANGER: ALIAS})
    assert core.seal != inner.seal
    core.set_aliases(OWN, {})
    assert core.seal == inner.seal and core.open == inner.open


def test_aliases_of_a_node() -> None:
    assert aliases_of(Node()) == ()
    assert aliases_of(Node(self_node_v4_masq_addr="100.64.1.1", self_node_v6_masq_addr="nonsense")) == (ALIAS[0],)
