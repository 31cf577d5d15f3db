"""The packet filter against a model that is written as the rules read."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from hypothesis import given
from hypothesis import strategies as st

from tsd.base.addr import IPPrefix
from tsd.filter.filter import PacketFilter
from tsd.filter.rules import DEFAULT_PROTOS, Destination, Match
from tsd.packet import build
from tsd.packet.constants import TCP, TCP_ACK, TCP_SYN
from tsd.packet.parse import Packet, parse, running_tcp_destination

ADDRESSES = [ip_address(text) for text in ("100.64.0.1", "100.64.0.2", "10.1.0.5", "fd7a::1", "fd7a::2")]
PREFIXES: list[IPPrefix] = [
    ip_network(text)
    for text in ("0.0.0.0/0", "::/0", "100.64.0.0/30", "100.64.0.2/32", "10.1.0.0/16", "fd7a::/64", "fd7a::2/128")
]
LOCAL = [ip_network("100.64.0.1/32"), ip_network("fd7a::1/128"), ip_network("10.1.0.0/16")]

prefixes = st.sampled_from(PREFIXES)
ports = st.sampled_from([(0, 65535), (22, 22), (1, 1024)])
protos = st.sampled_from([DEFAULT_PROTOS, frozenset((6,)), frozenset((17,)), frozenset((47,)), frozenset[int]()])
matches = st.builds(
    lambda protos, sources, caps, dsts: Match(
        protos, tuple(sources), tuple(caps), tuple(Destination(prefix, *span) for prefix, span in dsts)
    ),
    protos,
    st.lists(prefixes, max_size=3),
    st.lists(st.sampled_from(["yes", "no"]), max_size=1),
    st.lists(st.tuples(prefixes, ports), max_size=3),
)
kinds = st.sampled_from(["syn", "ack", "udp", "echo", "reply", "gre"])


def make(kind: str, src: IPv4Address | IPv6Address, dst: IPv4Address | IPv6Address, port: int) -> Packet:
    ends = src.packed, dst.packed
    if kind in ("syn", "ack"):
        flags = TCP_SYN if kind == "syn" else TCP_ACK
        return parse(build.tcp_packet(ends[0], 1, ends[1], port, sequence=0, flags=flags))
    if kind == "udp":
        return parse(build.udp_packet(ends[0], 1, ends[1], port, b""))
    if kind == "gre":
        return parse(build.ip_packet(*ends, 47, b""))
    request = build.icmp_echo_request(*((ends[1], ends[0]) if kind == "reply" else ends), 1, 1)
    if kind == "echo":
        return parse(request)
    reply = build.icmp_echo_reply_to(parse(request))
    assert reply is not None
    return parse(reply)


def model(
    rules: list[Match], kind: str, src: IPv4Address | IPv6Address, dst: IPv4Address | IPv6Address, port: int
) -> bool:
    if not any(dst in prefix for prefix in LOCAL if prefix.version == dst.version):
        return False
    if kind in ("ack", "reply"):
        return True
    proto = {"syn": 6, "udp": 17, "gre": 47, "echo": 0}[kind]
    for rule in rules:
        here = [dst_rule for dst_rule in rule.destinations if dst_rule.prefix.version == src.version]
        from_prefix = any(src in prefix for prefix in rule.sources if prefix.version == src.version)
        reached = [dst_rule for dst_rule in here if dst in dst_rule.prefix]
        has_cap = "yes" in rule.source_caps and bool(here)
        if kind == "echo":
            if (from_prefix and reached) or has_cap:
                return True
        elif proto not in rule.protos:
            continue
        elif kind == "gre":
            if from_prefix and any((first, last) == (0, 65535) for _, first, last in reached):
                return True
        elif (from_prefix or has_cap) and any(first <= port <= last for _, first, last in reached):
            return True
    return False


@given(
    st.lists(matches, max_size=5),
    st.lists(st.tuples(kinds, st.sampled_from(ADDRESSES), st.sampled_from(ADDRESSES), st.sampled_from([22, 80, 5000]))),
)
def test_filter_is_its_model(
    rules: list[Match],
    flows: list[tuple[str, IPv4Address | IPv6Address, IPv4Address | IPv6Address, int]],
) -> None:
    packet_filter = PacketFilter(rules, LOCAL)
    packet_filter.has_capability = lambda source, capability: capability == "yes"
    for kind, src, dst, port in flows:
        if src.version != dst.version:
            continue
        packet = make(kind, src, dst, port)
        # Twice: the second answer comes from the cache.
        for _ in range(2):
            assert packet_filter.inbound(packet).accept == model(rules, kind, src, dst, port), (kind, src, dst, port)
        destination = running_tcp_destination(packet.packet)
        assert (destination is not None) == (kind == "ack")
        if destination is not None:
            assert packet_filter.lets_running_tcp_to(destination) == packet_filter.inbound(packet).accept
        if kind in ("syn", "udp"):
            assert packet_filter.check(src, dst, port, packet.proto) == model(rules, kind, src, dst, port)


@given(st.binary(max_size=120))
def test_filter_never_raises(data: bytes) -> None:
    packet_filter = PacketFilter((), LOCAL)
    packet_filter.own_disco_key = bytes(32)
    packet_filter.inbound(parse(data))
    packet_filter.outbound(parse(data))


@given(st.sampled_from(ADDRESSES), st.data())
def test_the_short_way_for_running_tcp_says_what_parse_says(
    src: IPv4Address | IPv6Address, data: st.DataObject
) -> None:
    packet = bytearray(build.tcp_packet(src.packed, 1, src.packed, 2, sequence=0, flags=TCP_ACK, payload=b"x"))
    for at, value in data.draw(
        st.dictionaries(st.integers(0, len(packet) - 1), st.integers(0, 255), max_size=3)
    ).items():
        packet[at] = value
    destination = running_tcp_destination(bytes(packet[: data.draw(st.integers(0, len(packet)))]))
    parsed = parse(bytes(packet))
    if destination is not None:
        assert parsed.proto == TCP and parsed.dst == destination and not parsed.is_tcp_syn and not parsed.is_fragment
