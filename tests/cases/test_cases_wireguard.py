"""Reported faults that touch WireGuard, the packet pump and the packet filter."""

from __future__ import annotations

import logging
from ipaddress import ip_network

import pytest

from harness.wgnode import WgNode, Wire, pair
from tsd.base.clock import ManualClock
from tsd.base.keys import DiscoPublic
from tsd.dataplane.reference import ReferenceCore
from tsd.filter.filter import PacketFilter
from tsd.filter.rules import ALLOW_ALL
from tsd.hull import Frame
from tsd.packet import build, tsmp
from tsd.packet.constants import TCP_ACK, TSMP
from tsd.packet.parse import parse
from tsd.wireguard.tai64n import Tai64nSource

INITIATION = 1
LOCAL = [ip_network("100.64.0.1/32")]
ME, PEER, OTHER = (bytes([100, 64, 0, n]) for n in (1, 2, 3))


def established() -> Wire:
    wire = pair()
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    wire.b.send(wire.b.udp_to(wire.a))
    wire.run()
    wire.log.clear()
    return wire


def test_w16_timer_origin() -> None:
    wire = established()
    for _ in range(20):
        if wire.clock.now() > 1019:
            break
        wire.advance(1)
    wire.advance(80)
    for _ in range(20):
        wire.a.send(wire.a.udp_to(wire.b))
        wire.advance(0.2)
        wire.b.send(wire.b.udp_to(wire.a))
        wire.advance(0.5)
    assert wire.count(INITIATION) == 0, "an answered packet is not silence, however long it was quiet before"
    wire.advance(125)
    wire.log.clear()
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    wire.b.send(wire.b.udp_to(wire.a))
    wire.advance(60)
    assert wire.count(INITIATION) == 1


def test_w16_silence_counts_from_the_first_unanswered_packet() -> None:
    wire = established()
    wire.advance(100)
    wire.drop = lambda flight: flight.sender is wire.b
    start = wire.clock.now()
    for _ in range(15):
        wire.a.send(wire.a.udp_to(wire.b))
        wire.advance(1)
    assert wire.count(INITIATION) == 0
    wire.advance(1)
    (at,) = [at for at, _, kind in wire.log if kind == INITIATION]
    assert start + 15 <= at <= start + 15.334


@pytest.mark.parametrize("idle_s", [10.0, 119.0, 121.0, 179.9, 181.0, 400.0, 539.0, 541.0, 10_000.0])
def test_w17_next_deadline_is_never_in_the_past(idle_s: float) -> None:
    wire = established()
    wire.clock.advance(idle_s)
    for node in (wire.a, wire.b):
        for _ in range(20):
            deadline = node.wg.next_deadline()
            if deadline is None or deadline.at > wire.clock.now():
                break
            node.wg.on_deadline(wire.clock.now(), wire.clock.wall_ns())
        else:
            raise AssertionError("the loop would spin")
        node.wg.note([1, 2], [], [], wire.clock.now(), wire.clock.wall_ns())
        deadline = node.wg.next_deadline()
        assert deadline is None or deadline.at >= wire.clock.now()


def test_w18_peer_with_an_old_clock_is_refused_silently_and_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    wire = established()
    year_ns = 365 * 24 * 3600 * 10**9
    reborn = WgNode("a", "100.64.0.1", ManualClock(9.0, wire.clock.wall_ns() - year_ns))
    reborn.add_peer(1, wire.b)
    with caplog.at_level(logging.WARNING, "tsd.wireguard"):
        for _ in range(4):
            reborn.wg.initiate(1, reborn.clock.advance(10), reborn.clock.wall_ns())
            reborn.drain()
            wire.b.take(reborn.out[-1].datagram)
    assert wire.b.out == []
    assert sum("clock" in record.message for record in caplog.records) == 1


def test_w18_our_own_stamps_survive_a_restart_with_an_old_clock() -> None:
    source = Tai64nSource()
    last = source.stamp(1_700_000_000 * 10**9)
    assert Tai64nSource(source.last_ns).stamp(1_600_000_000 * 10**9) > last


def test_w19_no_handshake_is_zero_and_not_an_age() -> None:
    wire = pair()
    assert wire.a.wg.last_handshake_wall_ns(1) == 0
    wire.a.wg.initiate(1, wire.clock.now(), wire.clock.wall_ns())
    assert wire.a.wg.last_handshake_wall_ns(1) == 0


@pytest.mark.parametrize(
    "raw",
    [
        build.ip_packet(PEER, ME, 6, b"\0\x16"),
        b"\x4f" + build.ip_packet(PEER, ME, 6, b"")[1:],
        bytes.fromhex("6000000000002c40") + bytes(32),
        bytes.fromhex("6000000000082c40") + bytes(32) + bytes([6, 0, 0, 1, 0, 0, 0, 0]),
    ],
)
def test_w20_truncated_inner_packets(raw: bytes) -> None:
    packet = parse(raw)
    for packet_filter in (PacketFilter((ALLOW_ALL,), LOCAL), PacketFilter((), ())):
        assert not packet_filter.inbound(packet).accept and not packet_filter.outbound(packet).accept
    core = ReferenceCore()
    core.seal([Frame(raw), Frame(raw, 100)], 1.0)


def test_w20_later_fragment_passes_by_the_fragment_rule() -> None:
    fragment = bytearray(build.ip_packet(PEER, ME, 6, bytes(3)))
    fragment[7] = 185
    assert PacketFilter((), LOCAL).inbound(parse(bytes(fragment))).reason == "fragment"
    fragment[7] = 1
    assert not PacketFilter((ALLOW_ALL,), LOCAL).inbound(parse(bytes(fragment))).accept


@pytest.mark.parametrize("extra", [1, 8, 64])
def test_w21_tsmp_ignores_what_follows_and_refuses_what_lacks(extra: int) -> None:
    for message, size in ((b"p", 9), (b"o", 9), (b"!", 7), (b"a", 33)):
        body = message.ljust(size, b"\1")
        assert tsmp.read(parse(build.ip_packet(PEER, ME, TSMP, body + bytes(extra)))) is not None
        assert tsmp.read(parse(build.ip_packet(PEER, ME, TSMP, body[:-1]))) is None


def test_w22_our_own_disco_through_the_tunnel() -> None:
    packet_filter = PacketFilter((ALLOW_ALL,), LOCAL)
    ours = DiscoPublic(bytes(range(32)))
    packet_filter.own_disco_key = ours.raw
    wrapper = b"TS\xf0\x9f\x92\xac"
    looped = parse(build.udp_packet(PEER, 41641, ME, 41641, wrapper + ours.raw + bytes(60)))
    verdict = packet_filter.inbound(looped)
    assert not verdict.accept and verdict.reject_tsmp is None
    assert not packet_filter.replace((ALLOW_ALL,), LOCAL).inbound(looped).accept
    theirs = parse(build.udp_packet(PEER, 41641, ME, 41641, wrapper + bytes(32) + bytes(60)))
    assert packet_filter.inbound(theirs).accept


def test_u01_udp_answers_pass_without_a_rule() -> None:
    packet_filter = PacketFilter((), LOCAL)
    packet_filter.outbound(parse(build.udp_packet(ME, 5353, PEER, 7, b"echo")))
    assert packet_filter.inbound(parse(build.udp_packet(PEER, 7, ME, 5353, b"echo"))).accept
    assert not packet_filter.inbound(parse(build.udp_packet(PEER, 8, ME, 5353, b"echo"))).accept
    assert not packet_filter.inbound(parse(build.udp_packet(PEER, 7, ME, 5354, b"echo"))).accept
    assert not packet_filter.inbound(parse(build.udp_packet(OTHER, 7, ME, 5353, b"echo"))).accept


def test_f14_super_segments_are_cut_before_encryption() -> None:
    core = ReferenceCore()
    core.add_peer(1)
    core.set_allowed_ips(1, [ip_network("100.64.0.2/32")])
    core.install_session(1, 1, 2, bytes(32), bytes(32), True, 0.0)
    whole = build.tcp_packet(ME, 80, PEER, 5000, sequence=1, flags=TCP_ACK, payload=bytes(60_000))
    sealed = core.seal([Frame(whole, 1240)], 1.0).sealed
    assert all(item.datagram_bytes <= 1280 + 32 for item in sealed) and sum(item.count for item in sealed) == 49
