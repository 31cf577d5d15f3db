"""Netcheck against played servers, and the stickiness of the home region."""

from ipaddress import IPv4Address, IPv6Address

import pytest

from tsd.base.addr import AddrPort, parse_ip
from tsd.base.entropy import SeededEntropy
from tsd.netcheck.home import HomeChooser
from tsd.netcheck.netcheck import HttpsWanted, NetcheckMachine, ReportReady, SendStun
from tsd.netcheck.plan import hosts_to_resolve, stun_target
from tsd.netcheck.report import Report
from tsd.stun.messages import decode_request, encode_reply
from tsd.tailcfg.derpmap import DERPHomeParams, DERPMap, DERPNode, DERPRegion


def node(region: int, **fields) -> DERPNode:
    base = {"name": f"{region}a", "region_id": region, "host_name": f"relay{region}.test", "ipv4": f"192.0.2.{region}"}
    return DERPNode(**(base | fields))


def make_map(*nodes: DERPNode, scores=None) -> DERPMap:
    regions = {n.region_id: DERPRegion(region_id=n.region_id, nodes=(n,)) for n in nodes}
    return DERPMap(regions=regions, home_params=DERPHomeParams(region_score=scores) if scores else None)


class World:
    """Servers with latencies (None: silent) and the address that each sees of us."""

    def __init__(self, latencies: dict[int, float | None]) -> None:
        self.latency = latencies
        self.machine = NetcheckMachine(entropy=SeededEntropy(4))
        self.now = 1000.0
        self.sent = 0
        self.seen = lambda target: AddrPort(IPv4Address("203.0.113.5"), 4000)
        self.https: dict[int, float] = {}

    def look(self, derp_map: DERPMap, **options) -> Report:
        self.machine.start(derp_map, self.now, **({"resolved": {}} | options))
        pending: list[tuple[float, bytes, AddrPort]] = []
        while True:
            for output in self.machine.take_outputs():
                match output:
                    case ReportReady(report):
                        return report
                    case HttpsWanted(regions):
                        for region in regions:
                            self.machine.https_measured(region, self.https.get(region), self.now)
                    case SendStun(address, datagram):
                        self.sent += 1
                        latency = self.latency.get(address.ip.packed[-1])
                        if latency is not None:
                            reply = encode_reply(decode_request(datagram), self.seen(address))
                            pending.append((self.now + latency, reply, address))
            pending.sort()
            deadline = self.machine.next_deadline()
            if deadline is None:
                continue
            if pending and pending[0][0] <= deadline.at:
                self.now, reply, address = pending.pop(0)
                self.machine.receive_stun(reply, address, self.now)
            else:
                self.now = max(self.now, deadline.at)
                self.machine.on_deadline(self.now)


def test_full_report_and_home():
    world = World({1: 0.05, 2: 0.02, 3: 0.08})
    report = world.look(make_map(node(1), node(2), node(3)))
    assert report.udp and report.ipv4 and not report.ipv6
    assert report.region_latency_s == pytest.approx({1: 0.05, 2: 0.02, 3: 0.08})
    assert report.preferred_derp == 2 and report.mapping_varies is False
    assert report.global_v4 == {AddrPort(IPv4Address("203.0.113.5"), 4000): 3}
    assert report.derp_latency() == pytest.approx({"1-v4": 0.05, "2-v4": 0.02, "3-v4": 0.08})
    assert world.now - 1000 < 0.5


def test_hard_nat_is_seen_and_one_server_cannot_tell():
    world = World({1: 0.02, 2: 0.03})
    world.seen = lambda target: AddrPort(IPv4Address("203.0.113.5"), 4000 + target.ip.packed[-1])
    assert world.look(make_map(node(1), node(2))).mapping_varies is True
    assert world.look(make_map(node(1)), full=True).mapping_varies is None


def test_incremental_look_asks_less_and_keeps_home():
    world = World({i: 0.01 * i for i in range(1, 9)})
    derp_map = make_map(*(node(i) for i in range(1, 9)))
    world.look(derp_map)
    full, world.sent = world.sent, 0
    world.now += 20
    report = world.look(derp_map)
    assert world.sent <= 4 < full and report.preferred_derp == 1 and len(report.region_latency_s) <= 3


def test_dead_udp_falls_back_to_https_and_ends():
    world = World({})
    world.https = {2: 0.2, 1: 0.4}
    report = world.look(make_map(node(1), node(2), node(3)))
    assert not report.udp and report.region_latency_s == {1: 0.4, 2: 0.2} and report.preferred_derp == 2
    world.https = {}
    report = world.look(make_map(node(1)), last_heard=lambda region: world.now)
    assert report.preferred_derp == 2
    assert world.look(DERPMap(regions={})).region_latency_s == {}
    world.https = {2: 0.1}
    assert world.look(make_map(node(2)), no_udp=True).preferred_derp == 2


def test_w01_hostile_replies_do_not_stop_it():
    world = World({1: 0.02})
    world.machine.start(make_map(node(1)), world.now, resolved={})
    for raw in (b"", bytes(40), encode_reply(bytes(12), AddrPort(IPv4Address("1.2.3.4"), 5))):
        world.machine.receive_stun(raw, AddrPort(IPv4Address("192.0.2.1"), 3478), world.now)
    assert sum(world.machine.drops.values()) == 3
    assert world.look(make_map(node(1))).preferred_derp == 1


def test_n18_ports_and_families_are_honoured():
    assert stun_target(node(1, stun_port=-1), 4, {}) is None
    assert stun_target(node(1), 4, {}) == AddrPort(IPv4Address("192.0.2.1"), 3478)
    assert stun_target(node(1, stun_port=3000), 4, {}).port == 3000
    assert stun_target(node(1, ipv6="none"), 6, {}) is None
    assert stun_target(node(1, stun_test_ip="127.0.0.1"), 4, {}).ip == IPv4Address("127.0.0.1")
    named = node(1, ipv4="", ipv6="")
    assert hosts_to_resolve(make_map(named, node(2))) == ["relay1.test"]
    resolved = {"relay1.test": [IPv6Address("2001:db8::1"), IPv4Address("192.0.2.77")]}
    assert stun_target(named, 4, resolved).ip == IPv4Address("192.0.2.77")
    assert stun_target(named, 6, resolved).ip == IPv6Address("2001:db8::1")
    assert stun_target(node(1, ipv4="none"), 4, resolved) is None


def test_ipv6_answers_and_kernel_refusals():
    world = World({1: 0.02})
    v6 = node(9, ipv4="none", ipv6="2001:db8::1")
    world.seen = lambda target: AddrPort(IPv6Address("2001:db8::99"), 5)
    report = world.look(make_map(v6), has_v6=True)
    assert report.ipv6 and report.region_v6_latency_s and not report.global_v4
    world = World({})
    world.machine.start(make_map(node(1)), world.now, resolved={})
    for output in world.machine.take_outputs():
        world.machine.send_failed(output.address)
    world.machine.on_deadline(world.now)
    assert isinstance(world.machine.take_outputs()[0], HttpsWanted)


def choose(chooser: HomeChooser, now: float, latency: dict[int, float], heard: float = -1e9, **options) -> int:
    report = Report(now=now, region_latency_s=latency)
    return chooser.choose(report, now - 1, last_heard=lambda region: heard, **options)


def test_home_is_sticky():
    chooser = HomeChooser()
    assert choose(chooser, 1, {1: 0.030, 2: 0.035}) == 1
    assert choose(chooser, 2, {1: 0.030, 2: 0.025}) == 1
    assert choose(chooser, 400, {1: 0.100, 2: 0.080}) == 1
    assert choose(chooser, 401, {1: 0.100, 2: 0.020}) == 2
    assert choose(chooser, 402, {}, heard=400) == 2
    assert choose(chooser, 900, {}) == 0 and chooser.home == 2


def test_f17_home_without_answer_or_with_dead_relay_is_left():
    chooser = HomeChooser()
    assert choose(chooser, 1, {1: 0.01, 2: 0.05}) == 1
    assert choose(chooser, 30, {2: 0.05}, heard=29.5) == 2 or chooser.home == 1
    assert choose(chooser, 60, {2: 0.05}) == 2
    chooser = HomeChooser()
    assert choose(chooser, 1, {1: 0.01, 2: 0.05}) == 1
    assert choose(chooser, 30, {1: 0.01, 2: 0.05}, unreachable={1}) == 2
    assert choose(chooser, 60, {1: 0.01}, unreachable={1}) == 1


def test_scores_and_forced_home():
    chooser = HomeChooser()
    assert choose(chooser, 1, {1: 0.01, 2: 0.02}, scores={1: 4.0}) == 2
    assert choose(chooser, 2, {1: 0.01, 2: 0.02}, forced=1) == 1
    assert choose(HomeChooser(), 3, {1: 0.01}, forced=7) == 1


@pytest.mark.parametrize("seen", ["172.18.0.1", "0.0.0.0", "2001:db8::7", "127.0.0.1", "224.0.0.1"])
def test_w01_a_server_that_sees_its_own_proxy_is_not_believed(seen: str) -> None:
    """TS#17565: a relay in a container, whose host forwards to it; its answers made us look like behind a hard NAT."""
    world = World({1: 0.05, 2: 0.02})
    addresses = {1: AddrPort(parse_ip("198.51.99.5"), 4000), 2: AddrPort(parse_ip(seen), 4000)}
    world.seen = lambda target: addresses[target.ip.packed[-1]]
    report = world.look(make_map(node(1, ipv4="9.9.9.1"), node(2, ipv4="9.9.9.2")))
    assert list(report.global_v4) == [addresses[1]] and report.global_v6 == {}
    assert not report.mapping_varies and report.preferred_derp == 2, "it is as near as it is"
