"""UDP, ICMP, fragments and what is not ours."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from harness.netwire import A4, A6, B4, B6, Pair
from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.hull import Frame
from tsd.netstack.events import DatagramReceived, EchoRequested
from tsd.netstack.fragments import Reassembler, cut
from tsd.netstack.stack import Stack
from tsd.netstack.tcp import constants as c
from tsd.packet import tsmp
from tsd.packet.build import (
    UNREACHABLE_ADMIN,
    icmp_echo_request,
    icmp_unreachable,
    ip_packet,
    tcp_packet,
    udp_packet,
)
from tsd.packet.parse import parse


def make(address: str = B4) -> Stack:
    return Stack([ip_address(address)], 1280, SeededEntropy(1))


def raw(text: str) -> bytes:
    return ip_address(text).packed


@pytest.mark.parametrize(("a", "b"), [(A4, B4), (A6, B6)])
@pytest.mark.parametrize("size", [0, 1, 1000, 4000, 60000])
def test_udp_both_ways_with_fragments(a: str, b: str, size: int) -> None:
    pair = Pair()
    binding = pair.b.bind_datagram(ip_address(b), 53, "owner")
    payload = bytes(n & 255 for n in range(size))
    pair.a.datagrams.send(AddrPort(ip_address(a), 4000), AddrPort(ip_address(b), 53), payload)
    pair.flush()
    pair.run(1.0)
    events = [e for name, e in pair.events if name == "b" and isinstance(e, DatagramReceived)]
    assert len(events) == 1 and events[0].payload == payload and events[0].port is binding
    assert events[0].remote == AddrPort(ip_address(a), 4000)
    assert pair.there.largest_bytes <= 1280


def test_unbound_port_is_an_event_and_can_be_answered() -> None:
    stack = make()
    packet = udp_packet(raw(A4), 1000, raw(B4), 2000, b"hi")
    stack.receive([Frame(packet)], 1.0)
    (event,) = stack.take_events()
    assert isinstance(event, DatagramReceived) and event.port is None
    stack.datagrams.send_unreachable(event.packet, 3, 1.0)
    answer = parse(stack.take_frames()[0].packet)
    assert answer.icmp_type == 3


def test_unreachables_are_rate_limited() -> None:
    stack = make()
    packet = udp_packet(raw(A4), 1000, raw(B4), 2000, b"hi")
    for _ in range(500):
        stack.datagrams.send_unreachable(packet, 3, 1.0)
    assert len(stack.take_frames()) <= 100
    assert stack.datagrams.drops["icmp_rate"]


@pytest.mark.parametrize(("a", "b"), [(A4, B4), (A6, B6)])
@pytest.mark.parametrize("size", [0, 56, 3000])
def test_echo_to_own_address_is_answered(a: str, b: str, size: int) -> None:
    stack = make(b)
    for piece in cut(icmp_echo_request(raw(a), raw(b), 7, 9, bytes(size)), 1280, 77):
        stack.receive([Frame(piece)], 1.0)
    frames = stack.take_frames()
    reply = parse(frames[0].packet)
    assert reply.src == raw(b) and reply.dst == raw(a)
    assert reply.transport[4:8] == b"\0\x07\0\x09"
    assert all(len(f.packet) <= 1280 for f in frames)


def test_echo_to_subnet_is_an_event_and_elsewhere_is_dropped() -> None:
    stack = make()
    request = icmp_echo_request(raw(A4), raw("10.1.2.3"), 7, 9)
    stack.receive([Frame(request)], 1.0)
    assert not stack.take_events() and stack.drops["not_ours"] == 1
    stack.set_subnets([ip_network("10.1.0.0/16")])
    stack.receive([Frame(request)], 1.0)
    (event,) = stack.take_events()
    assert isinstance(event, EchoRequested) and event.target == ip_address("10.1.2.3")
    stack.datagrams.answer_echo(event.packet)
    assert parse(stack.take_frames()[0].packet).icmp_type == 0


def test_bad_checksums_are_dropped() -> None:
    stack = make()
    good = udp_packet(raw(A4), 1000, raw(B4), 2000, b"hello")
    for at in range(len(good)):
        spoiled = bytearray(good)
        spoiled[at] ^= 0x10
        stack.receive([Frame(bytes(spoiled))], 1.0)
    assert not stack.take_events() and not stack.take_frames()
    no_sum = bytearray(good)
    no_sum[26:28] = b"\0\0"
    stack.receive([Frame(bytes(no_sum))], 1.0)
    assert len(stack.take_events()) == 1  # IPv4 allows it


def test_short_packet_with_tcp_protocol_number() -> None:
    stack = make()
    stack.receive([Frame(ip_packet(raw(A4), raw(B4), 6, b"\0\1"))], 1.0)
    assert not stack.take_frames()


def test_overlapping_fragments_void_the_datagram() -> None:
    reassembler = Reassembler()
    packet = udp_packet(raw(A4), 1, raw(B4), 2, bytes(3000))
    pieces = cut(packet, 1280, 5)
    evil = bytearray(pieces[1])
    evil[6:8] = ((int.from_bytes(evil[6:8], "big") & 0x1FFF) - 1 | 0x2000).to_bytes(2, "big")
    assert reassembler.add(pieces[0], 0.0) is None
    assert reassembler.add(bytes(evil), 0.0) is None
    assert all(reassembler.add(piece, 0.0) is None for piece in pieces[1:])


def test_fragments_in_any_order_and_bounded() -> None:
    reassembler = Reassembler()
    packet = udp_packet(raw(A6), 1, raw(B6), 2, bytes(range(250)) * 12)
    pieces = cut(packet, 1280, 5)
    results = [reassembler.add(piece, 0.0) for piece in reversed(pieces)]
    assert results[:-1] == [None] * (len(pieces) - 1) and results[-1] == packet
    for n in range(1000):
        reassembler.add(cut(packet, 1280, n)[0], 1.0)
    assert len(reassembler._partials) <= 64 and reassembler._held_bytes <= 1 << 20
    reassembler.add(cut(packet, 1280, 9999)[0], 100.0)
    assert len(reassembler._partials) == 1


def test_ports() -> None:
    stack = make()
    first = stack.bind_datagram(None, 0, None)
    second = stack.bind_datagram(None, 0, None)
    assert first.port != second.port
    with pytest.raises(OSError):
        stack.bind_datagram(None, first.port, None)
    with pytest.raises(OSError):
        stack.bind_datagram(ip_address(A4), 5, None)
    stack.datagrams.unbind(first)
    stack.bind_datagram(None, first.port, None)
    with pytest.raises(OSError):
        stack.datagrams.send(AddrPort(ip_address(B4), 1), AddrPort(ip_address(A4), 2), bytes(65508))


@pytest.mark.parametrize(
    ("address", "is_forwarded"),
    [
        ("8.8.8.8", True),
        ("10.0.0.1", True),
        ("2606:4700::1", True),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("fe80::1", False),
    ],
)
def test_default_route_does_not_reach_into_the_host(address: str, is_forwarded: bool) -> None:
    stack = Stack([ip_address(B4), ip_address(B6)], 1280, SeededEntropy(1))
    stack.set_subnets([ip_network("0.0.0.0/0"), ip_network("::/0")])
    source = A4 if ip_address(address).version == 4 else A6
    stack.receive([Frame(udp_packet(raw(source), 1000, raw(address), 2000, b"hi"))], 1.0)
    assert bool(stack.take_events()) is is_forwarded
    stack.set_subnets([ip_network("127.0.0.0/8")])
    assert stack._is_in_subnets(raw("127.0.0.1"))


@pytest.mark.parametrize(("near", "far"), [("100.64.0.1", "100.64.0.2"), ("fd7a::1", "fd7a::2")], ids=["IPv4", "IPv6"])
def test_a_refusal_of_the_peer_ends_an_attempt_but_not_a_connection(near: str, far: str) -> None:
    local, remote = ip_address(near), ip_address(far)
    stack = Stack([local], 1280, SeededEntropy(1))
    attempt = stack.connect(AddrPort(remote, 80), 1.0)
    stack.flush(1.0)
    [frame] = stack.take_frames()
    syn = parse(bytes(frame.packet))
    told = parse(tsmp.rejection_of(syn, tsmp.REASON_ACL))
    message = tsmp.read(told)
    assert isinstance(message, tsmp.Rejected)
    error = tsmp.unreachable_for(told, message)
    assert error is not None
    stack.receive([Frame(error)], 1.1)
    assert attempt.state == c.CLOSED and attempt.error == "prohibited"
    other = stack.connect(AddrPort(remote, 80), 2.0)
    other.state = c.ESTABLISHED
    about = tcp_packet(local.packed, other.header.lport, remote.packed, 80, sequence=0)
    unreachable = icmp_unreachable(parse(about), UNREACHABLE_ADMIN)
    assert unreachable is not None
    stack.receive([Frame(unreachable)], 2.1)
    assert other.state == c.ESTABLISHED
