"""Paths in trouble: lost data, rebooted NATs, roaming, peers that fled, odd keys."""

from ipaddress import IPv4Address

import pytest
from msgspec.structs import replace

from harness.natsim import CLASSES, Lab
from harness.pathbench import A4, A6, B4, OWN, Bench
from tsd.base.addr import AddrPort
from tsd.base.keys import DiscoPrivate, NodePrivate
from tsd.disco import messages
from tsd.disco.box import is_disco
from tsd.magicsock.endpoints import EndpointList, StunFindings
from tsd.magicsock.types import CliPingFailed, CliPong, DataProbeWanted, PeerPaths, Route, SendUdp


def test_two_nodes_with_one_disco_key_are_told_apart():
    bench = Bench()
    twin = NodePrivate.generate(bench.entropy).public()
    bench.sock.set_peer(1, replace(bench.paths, node_key=twin, endpoints=()), bench.now)
    bench.say(messages.Ping(bytes(12), twin.raw), B4)
    assert bench.sock.path(1).candidates == (B4,) and bench.sock.path(0).candidates == (A4,)
    bench.say(messages.Ping(bytes(11) + b"1"), A6)
    assert len(bench.opened()) == 2 and A6 not in bench.sock.path(0).candidates


def test_w09_data_lost_while_disco_answers_falls_back_to_relay():
    lab = Lab()
    a, b = lab.add("E"), lab.add("E")
    lab.introduce()
    lab.talk(a, b, 10)
    assert lab.is_direct(a, b)
    lab.passes = lambda source, to, datagram: is_disco(datagram)
    lab.talk(a, b, 20)
    b.received.clear()
    lab.talk(a, b, 30)
    assert len(b.received) >= 29 and not lab.is_direct(a, b)
    lab.passes = lambda *_: True
    lab.talk(a, b, 90)
    assert lab.is_direct(a, b)


def test_w09_silence_from_before_the_path_or_short_of_the_limit_is_no_loss():
    for age_s, is_kept in ((60.0, True), (0.0, False)):
        bench = Bench()
        bench.make_direct()
        since = bench.now - age_s
        bench.sock.unanswered_since = lambda handle, since=since: since
        for _ in range(6):
            bench.sock.route(0, bench.now)
            bench.tick(3)
            for where, message in bench.opened():
                if isinstance(message, messages.Ping):
                    bench.say(messages.Pong(message.txid, A4), where)
            if bench.now - since < 12:
                assert bench.sock.route(0, bench.now).udp == A4
        assert (bench.sock.route(0, bench.now).udp == A4) is is_kept


def test_p04_nat_reboot_recovers_within_half_a_minute():
    lab = Lab()
    a, b = lab.add("E"), lab.add("E")
    lab.introduce()
    lab.talk(a, b, 10)
    a.nat.forget()
    lab.talk(a, b, 30)
    assert lab.is_direct(a, b) and lab.is_direct(b, a)


def test_udp_blocked_and_freed_again():
    lab = Lab()
    a, b = lab.add("P"), lab.add("E")
    lab.introduce()
    lab.talk(a, b, 5)
    lab.passes = lambda *_: False
    lab.talk(a, b, 20)
    assert not lab.is_direct(a, b)
    b.received.clear()
    lab.talk(a, b, 10)
    assert len(b.received) >= 9
    lab.passes = lambda *_: True
    lab.talk(a, b, 15)
    assert lab.is_direct(a, b) and lab.is_direct(b, a)


def test_p03_no_network_does_not_spin():
    lab = Lab()
    a, b = lab.add("B"), lab.add("B")
    lab.relay_passes = False
    lab.introduce()
    lab.send(a, b)
    lab.run(600)
    assert a.wakes + b.wakes < 60


def test_roaming_to_another_network_keeps_the_peer_reachable():
    lab = Lab()
    a, b = lab.add("E"), lab.add("P")
    lab.introduce()
    lab.talk(a, b, 10)
    a.nat.mapping, a.nat.filtering = CLASSES["H"]
    a.nat.external = IPv4Address("198.51.100.77")
    a.nat.forget()
    a.magicsock.link_changed(lab.now)
    lab.drain(a)
    lab.talk(a, b, 10)
    assert lab.is_direct(a, b) and lab.is_direct(b, a)


def test_private_address_is_preferred_at_equal_latency():
    lan = AddrPort.parse("192.168.7.7:41641")
    bench = Bench([A4, lan])
    bench.sock.route(0, bench.now)
    pings = [(where, m.txid) for where, m in bench.opened() if isinstance(m, messages.Ping)]
    bench.now += 0.01
    for where, txid in pings:
        bench.say(messages.Pong(txid, A4), where)
    assert bench.sock.route(0, bench.now) == Route(lan, 0)
    assert bench.sock.path(0, bench.now).latency_s == pytest.approx(0.01)


def test_hundred_peers_share_one_timer_queue():
    bench = Bench()
    for i in range(1, 100):
        node, disco = NodePrivate.generate(bench.entropy), DiscoPrivate.generate(bench.entropy)
        bench.sock.set_peer(i, PeerPaths(node.public(), disco.public(), (A4,), 5), bench.now)
        bench.sock.route(i, bench.now)
    bench.out()
    bench.tick(60)
    assert bench.sock.next_deadline() is None or bench.sock.next_deadline().at >= bench.now
    for i in range(100):
        bench.sock.remove_peer(i)
    bench.tick(60)
    assert bench.sock.next_deadline() is None


def test_own_endpoints_order_and_cache():
    endpoints = EndpointList()
    public, other, mapped = (AddrPort.parse(f"203.0.113.{i}:4") for i in (1, 2, 3))
    stun = StunFindings(((public, 3), (other, 1)), (), True)
    local = [IPv4Address("192.168.1.2")]
    got = endpoints.collect(0, stun=stun, local=local, port_v4=41641, portmapped=mapped, fixed_port=9)
    assert [(str(e.address), int(e.kind)) for e in got] == [
        ("203.0.113.3:4", 3),
        ("203.0.113.1:4", 2),
        ("203.0.113.1:9", 4),
        ("192.168.1.2:41641", 1),
    ]
    later = endpoints.collect(300, stun=StunFindings(), local=local, port_v4=41641)
    assert public in [e.address for e in later]
    assert len(endpoints.collect(700, stun=StunFindings(), local=local, port_v4=41641)) == 1


def test_an_address_that_the_peer_no_longer_names_is_not_trusted_any_more():
    for said, used in (("call", A4), ("netmap", None)):
        bench = Bench()
        bench.make_direct()
        if said == "call":
            bench.say(messages.CallMeMaybe((B4,)), bench.relay())
        else:
            bench.sock.set_peer(0, replace(bench.paths, endpoints=(B4,)), bench.now)
        assert bench.sock.route(0, bench.now) == Route(used, 5)
        pings = {where: m.txid for where, m in bench.opened() if isinstance(m, messages.Ping)}
        bench.say(messages.Pong(pings[B4], OWN[0].address), B4)
        assert bench.sock.route(0, bench.now) == Route(B4, 0)


def test_an_address_that_is_named_again_stays_trusted():
    bench = Bench()
    bench.make_direct()
    bench.say(messages.CallMeMaybe((B4, A4)), bench.relay())
    assert bench.sock.route(0, bench.now) == Route(A4, 0)


def test_a_ping_is_answered_by_one_of_ours_while_nothing_is_trusted():
    bench = Bench()
    bench.say(messages.Ping(bytes(12)), B4)
    assert [type(m) for _, m in bench.opened()] == [messages.Pong]
    bench.sock.route(0, bench.now)
    bench.out()
    bench.say(messages.Ping(bytes(11) + b"1"), A4)
    assert [type(m) for _, m in bench.opened()] == [messages.Pong]
    bench.now += 0.3
    bench.say(messages.Ping(bytes(11) + b"2"), A4)
    sent = bench.opened()
    assert [type(m) for _, m in sent] == [messages.Pong, messages.Ping]
    bench.say(messages.Pong(sent[1][1].txid, A4), A4)
    bench.now += 0.3
    bench.say(messages.Ping(bytes(11) + b"3"), A4)
    assert [type(m) for _, m in bench.opened()] == [messages.Pong]


def pass_pongs(bench: Bench, seconds: float, by_relay: bool) -> list[DataProbeWanted]:
    """Traffic both ways while every ping to A4 is answered; the peer's data comes by relay or from A4."""
    probes = []
    for _ in range(round(seconds)):
        bench.sock.route(0, bench.now)
        bench.sock.note_received([0], bench.relay() if by_relay else A4, bench.now)
        for output in bench.out():
            probes += [output] if isinstance(output, DataProbeWanted) else []
            message = bench.read(output.datagram) if isinstance(output, SendUdp) else None
            if isinstance(message, messages.Ping):
                bench.say(messages.Pong(message.txid, A4), A4)
        bench.tick(1)
    return probes


def test_w09_a_path_that_the_peer_fled_is_left_until_data_passed_it():
    bench = Bench()
    bench.make_direct()
    pass_pongs(bench, 30, by_relay=False)
    bench.sock.note_received([0], bench.relay(), bench.now)
    pass_pongs(bench, 30, by_relay=False)
    assert bench.sock.route(0, bench.now) == Route(A4, 0)
    pass_pongs(bench, 15, by_relay=True)
    assert bench.sock.route(0, bench.now) == Route(None, 5)
    bench.out()
    bench.say(messages.Ping(bytes(12)), A4)
    assert [type(m) for _, m in bench.opened()] == [messages.Pong], "two that suspect a path would ping for ever"
    probes = pass_pongs(bench, 60, by_relay=True)
    assert 3 <= len(probes) <= 5 and set(probes) == {DataProbeWanted(0, A4)}
    assert bench.sock.route(0, bench.now) == Route(None, 5)
    bench.sock.data_passed(0, A4)
    bench.sock.data_passed(99, A4)
    pass_pongs(bench, 60, by_relay=True)
    assert bench.sock.route(0, bench.now) == Route(A4, 0), "data passes our way, whatever the peer prefers"
    bench.sock.unanswered_since = lambda handle: bench.now - 13
    pass_pongs(bench, 30, by_relay=True)
    assert bench.sock.route(0, bench.now) == Route(None, 5)


def test_f12_one_address_is_asked_alone_and_kept_off_while_there_is_a_relay():
    bench = Bench()
    bench.make_direct()
    token = bench.sock.probe(0, A4, bench.now, 1312)
    ((where, ping),) = bench.opened()
    assert where == A4 and isinstance(ping, messages.Ping) and ping.padding == 1312 - 124
    bench.say(messages.Pong(ping.txid, A4), A4)
    assert any(isinstance(one, CliPong) and one.token == token for one in bench.sock.take_outputs())
    bench.sock.keep_off(0, A4, 60.0, bench.now)
    assert bench.sock.route(0, bench.now).udp is None and bench.sock.route(0, bench.now).derp_region
    bench.sock.take_outputs()
    bench.sock.probe(9, A4, bench.now, 0)
    assert any(isinstance(one, CliPingFailed) for one in bench.sock.take_outputs())
