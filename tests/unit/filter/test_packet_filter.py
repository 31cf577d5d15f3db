"""Rule parsing and verdicts of the packet filter."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import msgspec
import pytest

from tsd.base.errors import DecodeError
from tsd.filter.filter import PacketFilter
from tsd.filter.flows import MAX_FLOWS, FlowTable
from tsd.filter.rules import ALLOW_ALL, DEFAULT_PROTOS, Match, matches_from_rules, parse_ip_set
from tsd.packet import build, tsmp
from tsd.packet.constants import SCTP, TCP_ACK, TCP_SYN, TSMP
from tsd.packet.parse import Packet, parse
from tsd.tailcfg.filterrule import FilterRule

ME, PEER, OTHER = (bytes([100, 64, 0, n]) for n in (1, 2, 3))
ME6, PEER6 = ip_address("fd7a:115c:a1e0::1").packed, ip_address("fd7a:115c:a1e0::2").packed
LOCAL = [ip_network("100.64.0.1/32"), ip_network("fd7a:115c:a1e0::1/128"), ip_network("10.1.0.0/16")]
ROUTED = bytes([10, 1, 2, 3])


def rules(text: str) -> list[Match]:
    matches, mistake = matches_from_rules(msgspec.json.decode(text, type=list[FilterRule]))
    assert mistake == ""
    return matches


def rule(src: str, dst: str, ports: str = "0-65535", protos: str = "null") -> str:
    first, _, last = ports.partition("-")
    return (
        f'{{"SrcIPs":["{src}"],"IPProto":{protos},'
        f'"DstPorts":[{{"IP":"{dst}","Ports":{{"First":{first},"Last":{last or first}}}}}]}}'
    )


def make(*texts: str, **options: bool) -> PacketFilter:
    return PacketFilter(rules("[" + ",".join(texts) + "]"), LOCAL, **options)


def syn(src: bytes = PEER, dst: bytes = ME, port: int = 22, flags: int = TCP_SYN) -> Packet:
    return parse(build.tcp_packet(src, 50000, dst, port, sequence=0, flags=flags))


def udp(src: bytes = PEER, dst: bytes = ME, sport: int = 53, dport: int = 1000) -> Packet:
    return parse(build.udp_packet(src, sport, dst, dport, b"x"))


def echo(src: bytes = PEER, dst: bytes = ME) -> Packet:
    return parse(build.icmp_echo_request(src, dst, 1, 1))


@pytest.mark.parametrize(
    ("text", "prefixes"),
    [
        ("*", ["0.0.0.0/0", "::/0"]),
        ("100.64.0.2", ["100.64.0.2/32"]),
        ("fd7a::1", ["fd7a::1/128"]),
        ("10.0.0.0/8", ["10.0.0.0/8"]),
        ("10.0.0.1-10.0.0.2", ["10.0.0.1/32", "10.0.0.2/32"]),
        ("2eff::1-2eff::1", ["2eff::1/128"]),
    ],
)
def test_ip_sets(text: str, prefixes: list[str]) -> None:
    assert [str(prefix) for prefix in parse_ip_set(text)[0]] == prefixes


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "x", "1-2", "10.0.0.2-10.0.0.1", "1.1.1.1-::1", "10.0.0.0/33", "-"])
def test_bad_ip_sets(text: str) -> None:
    with pytest.raises(DecodeError):
        parse_ip_set(text)


def test_rule_parsing_keeps_what_is_good() -> None:
    decoded = msgspec.json.decode(
        '[{"SrcIPs":["bad","100.64.0.2","cap:x"],"DstPorts":[{"IP":"10.0.0.1/8","Ports":{"First":1,"Last":2}},'
        '{"IP":"*","Ports":{"First":1,"Last":2}},{"IP":"cap:y","Ports":{"First":1,"Last":2}}],"IPProto":[6,-1,300]},'
        '{"SrcIPs":["*"],"IPProto":[999],"DstPorts":[]}]',
        type=list[FilterRule],
    )
    matches, mistake = matches_from_rules(decoded)
    assert "bad" in mistake
    assert [str(prefix) for prefix in matches[0].sources] == ["100.64.0.2/32"]
    assert matches[0].source_caps == ("x",) and len(matches[0].destinations) == 2
    assert matches[0].protos == {6} and matches[1].protos == frozenset()
    assert rules("[" + rule("*", "*") + "]") == [ALLOW_ALL]
    assert ALLOW_ALL.protos == DEFAULT_PROTOS
    for obsolete in ('{"SrcIPs":["*"],"SrcBits":[8]}', '{"DstPorts":[{"IP":"*","Bits":8}]}'):
        with pytest.raises(DecodeError):
            matches_from_rules(msgspec.json.decode(f"[{obsolete}]", type=list[FilterRule]))


def test_nothing_is_let_in_by_default() -> None:
    empty = PacketFilter((), ())
    for packet in (syn(), udp(), echo(), syn(flags=TCP_ACK)):
        assert not empty.inbound(packet).accept
    known = PacketFilter((), LOCAL)
    assert known.inbound(syn(flags=TCP_ACK)).accept
    assert known.inbound(syn(flags=TCP_SYN | TCP_ACK)).accept
    assert not known.inbound(echo()).accept
    assert known.inbound(parse(build.ip_packet(PEER, ME, TSMP, bytes(8)))).accept
    assert known.inbound(parse(b"")).accept


def test_tcp_rule_and_rejection() -> None:
    guarded = make(rule("100.64.0.2", "100.64.0.1", "22"))
    assert guarded.inbound(syn()).accept
    verdict = guarded.inbound(syn(port=23))
    assert verdict == (False, "acl", verdict.reject_tsmp)
    assert verdict.reject_tsmp is not None
    answer = parse(verdict.reject_tsmp)
    assert (answer.src, answer.dst) == (ME, PEER)
    assert tsmp.read(answer) == tsmp.Rejected(6, tsmp.REASON_ACL, 50000, 23)
    assert not guarded.inbound(syn(src=OTHER)).accept
    assert guarded.inbound(syn(src=PEER6, dst=ME6)).reject_tsmp is None
    assert guarded.inbound(udp(dport=80)).reject_tsmp is None
    assert not guarded.inbound(syn(dst=OTHER)).accept, "not one of our addresses"


def test_families_do_not_mix() -> None:
    mixed = '{"SrcIPs":["100.64.0.2"],"DstPorts":[{"IP":"fd7a:115c:a1e0::1","Ports":{"First":0,"Last":65535}}]}'
    assert not make(mixed).inbound(syn(src=PEER6, dst=ME6)).accept
    assert not make(mixed).inbound(syn()).accept
    assert make(rule("*", "*")).inbound(syn(src=PEER6, dst=ME6)).accept


def test_udp_answers_come_back() -> None:
    guarded = PacketFilter((), LOCAL)
    assert not guarded.inbound(udp()).accept
    assert guarded.outbound(udp(src=ME, dst=PEER, sport=1000, dport=53)).accept
    assert guarded.inbound(udp()).reason == "known flow"
    assert not guarded.inbound(udp(dport=1001)).accept
    assert not guarded.inbound(udp(src=OTHER)).accept
    assert guarded.replace((), LOCAL).inbound(udp()).accept, "flows survive new rules"
    shielded = guarded.replace((ALLOW_ALL,), LOCAL, shields_up=True)
    assert not shielded.inbound(udp()).accept, "but not the shields going up"
    shielded.outbound(udp(src=ME, dst=PEER, sport=1000, dport=53))
    assert shielded.replace((), LOCAL, shields_up=True).inbound(udp()).accept
    assert shielded.replace((ALLOW_ALL,), LOCAL).inbound(syn()).accept


def test_shields_up() -> None:
    shielded = PacketFilter((ALLOW_ALL,), LOCAL, shields_up=True)
    verdict = shielded.inbound(syn())
    assert verdict.reject_tsmp is not None
    assert tsmp.read(parse(verdict.reject_tsmp)) == tsmp.Rejected(6, tsmp.REASON_SHIELDS_UP, 50000, 22)
    assert shielded.inbound(syn(flags=TCP_ACK)).accept
    reply = build.icmp_echo_reply_to(echo(src=ME, dst=PEER))
    assert reply is not None and shielded.inbound(parse(reply)).accept
    assert not shielded.inbound(echo()).accept


def test_icmp_follows_any_rule_between_the_addresses() -> None:
    guarded = make(rule("100.64.0.2", "100.64.0.1", "22", "[6]"))
    assert guarded.inbound(echo()).accept
    assert not guarded.inbound(echo(src=OTHER)).accept
    assert not guarded.inbound(echo(dst=ROUTED)).accept


def test_other_protocols_need_all_ports() -> None:
    gre = parse(build.ip_packet(PEER, ME, 47, bytes(8)))
    assert not make(rule("*", "*")).inbound(gre).accept
    assert not make(rule("*", "*", "1-65535", "[47]")).inbound(gre).accept
    assert make(rule("*", "*", "0-65535", "[47]")).inbound(gre).accept
    sctp = parse(build.ip_packet(PEER, ME, SCTP, bytes([0, 1, 0, 2]) + bytes(8)))
    assert make(rule("*", "*", "2", f"[{SCTP}]")).inbound(sctp).accept
    assert not make(rule("*", "*", "2")).inbound(sctp).accept


def test_source_capabilities() -> None:
    guarded = make(rule("cap:example.com/cap/x", "100.64.0.1", "22"))
    assert not guarded.inbound(syn()).accept
    guarded.has_capability = lambda source, capability: source == PEER and capability == "example.com/cap/x"
    assert guarded.inbound(syn()).accept
    assert not guarded.inbound(syn(src=OTHER)).accept
    assert guarded.inbound(echo(dst=ROUTED)).accept, "a capability opens ICMP to every local address"
    assert guarded.replace(rules("[" + rule("cap:z", "*") + "]"), LOCAL).has_capability is guarded.has_capability


@pytest.mark.parametrize(
    ("dst", "reason"),
    [
        ("224.0.0.1", "multicast"),
        ("239.255.255.250", "multicast"),
        ("ff02::1", "multicast"),
        ("169.254.0.1", "link_local_unicast"),
        ("fe80::1", "link_local_unicast"),
        ("febf::1", "link_local_unicast"),
    ],
)
def test_both_directions_refuse(dst: str, reason: str) -> None:
    address = ip_address(dst)
    src = PEER if address.version == 4 else PEER6
    guarded = make(rule("*", "*"))
    packet = udp(src=src, dst=address.packed)
    assert guarded.inbound(packet) == guarded.outbound(packet) == (False, reason, None)


def test_odd_packets() -> None:
    guarded = make(rule("*", "*"))
    assert guarded.inbound(parse(b"\x45" + bytes(10))).reason == "too_short"
    assert guarded.inbound(parse(bytes(40))).reason == "unknown_protocol"
    assert guarded.outbound(udp(dst=bytes([169, 254, 169, 254]))).accept
    later = bytearray(build.udp_packet(PEER, 1, OTHER, 2, b"x" * 20))
    later[7] = 20
    assert guarded.inbound(parse(later)).reason == "fragment"


def test_peerapi_port_is_open() -> None:
    guarded = PacketFilter((), LOCAL)
    guarded.peerapi = frozenset(((ME, 58436), (ME6, 58436)))
    assert guarded.inbound(syn(port=58436)).accept
    assert guarded.inbound(syn(src=PEER6, dst=ME6, port=58436)).accept
    assert not guarded.inbound(syn(port=58437)).accept
    assert guarded.replace((), LOCAL).inbound(syn(port=58436)).accept


def test_capability_grants() -> None:
    granted = make(
        '{"SrcIPs":["100.64.0.2"],"CapGrant":[{"Dsts":["100.64.0.1/32"],"Caps":["a"],"CapMap":{"b":[{"x":1}],"c":null}}]}',
        '{"SrcIPs":["*"],"CapGrant":[{"Dsts":["0.0.0.0/0"],"CapMap":{"b":[2]}}]}',
    )
    me, peer = ip_address("100.64.0.1"), ip_address("100.64.0.2")
    assert granted.caps(peer, me) == {"a": [], "b": [{"x": 1}, 2], "c": []}
    assert granted.caps(ip_address("100.64.0.9"), me) == {"b": [2]}
    assert granted.caps(ip_address("fd7a::9"), me) == {"b": [2]}
    assert granted.caps(ip_address("fd7a::9"), ip_address("fd7a::1")) == {}
    assert not granted.inbound(syn()).accept, "a grant opens nothing"


def test_check() -> None:
    guarded = make(rule("100.64.0.2", "100.64.0.1", "53"))
    me, peer = ip_address("100.64.0.1"), ip_address("100.64.0.2")
    assert guarded.check(peer, me, 53) and guarded.check(peer, me, 53, 17)
    assert not guarded.check(peer, me, 54) and not guarded.check(peer, ip_address("fd7a::1"), 53)


def test_flow_table_forgets_the_least_recently_used() -> None:
    table = FlowTable()
    flows = [(17, ME, port, PEER, 53) for port in range(MAX_FLOWS + 1)]
    for flow in flows[:-1]:
        table.add(flow)
    assert table.touch(flows[0])
    table.add(flows[-1])
    assert table.touch(flows[0]) and not table.touch(flows[1]) and len(table) == MAX_FLOWS
