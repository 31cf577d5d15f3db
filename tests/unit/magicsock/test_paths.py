"""Trust, loss and return of direct paths, and what must never happen."""

import errno
from ipaddress import IPv4Address

import pytest
from msgspec.structs import replace

from harness.pathbench import A4, A6, B4, OWN, Bench
from tsd.base.addr import AddrPort
from tsd.base.keys import DiscoPrivate, DiscoPublic, NodePrivate
from tsd.disco import messages
from tsd.disco.box import DiscoKeyring
from tsd.magicsock.types import (
    CliPingFailed,
    CliPong,
    DerpSource,
    EndpointsWanted,
    OwnEndpoint,
    PathChanged,
    RebindWanted,
    Route,
    SendDerp,
    SendUdp,
)


def test_first_packet_goes_by_relay_with_pings_and_a_call():
    bench = Bench([A4, B4])
    assert bench.sock.route(0, bench.now) == Route(None, 5)
    sent = bench.opened()
    assert [w for w, _ in sent] == [A4, B4, 5]
    assert sent[0][1].node_key == bench.node.public().raw
    assert sent[2][1] == messages.CallMeMaybe((OWN[0].address,))
    assert bench.sock.route(0, bench.now + 1) == Route(None, 5) and not bench.out()


def test_trust_lapses_into_double_sending_then_relay():
    bench = Bench()
    bench.make_direct()
    bench.now += 6.6
    assert bench.sock.route(0, bench.now) == Route(A4, 5)
    told = [o for o in bench.out() if isinstance(o, PathChanged)]
    assert told and told[0].path.cur_addr is None
    bench.tick(12)
    assert bench.sock.route(0, bench.now) == Route(None, 5)


def test_pong_is_credited_to_the_target_not_the_source():
    bench = Bench()
    bench.sock.route(0, bench.now)
    txid = bench.opened()[0][1].txid
    bench.say(messages.Pong(txid, OWN[0].address), B4)
    assert bench.sock.route(0, bench.now) == Route(A4, 0)
    bench.say(messages.Pong(txid, OWN[0].address), B4)
    assert bench.sock.drops["pong without ping"] == 1


def test_pongs_by_relay_and_foreign_pongs_make_no_path():
    bench = Bench()
    bench.sock.route(0, bench.now)
    txid = bench.opened()[0][1].txid
    stranger = DiscoPrivate.generate(bench.entropy)
    bench.say(messages.Pong(txid, A4), A4, DiscoKeyring(stranger))
    assert bench.sock.drops["unknown disco key"] == 1
    bench.say(messages.Pong(txid, A4), bench.relay())
    assert bench.sock.route(0, bench.now).udp is None
    bench.sock.note_received([0], A4, bench.now)
    assert bench.sock.route(0, bench.now).udp is None


def test_ping_is_answered_once_where_it_came_from_and_not_pinged_back():
    bench = Bench([])
    ping = messages.Ping(bytes(12), bench.peer_node.public().raw)
    bench.say(ping, B4)
    bench.say(ping, B4)
    assert bench.opened() == [(B4, messages.Pong(bytes(12), B4))]
    bench.say(ping, bench.relay(7))
    magic = AddrPort(IPv4Address("127.3.3.40"), 7)
    assert bench.opened() == [(7, messages.Pong(bytes(12), magic))]
    bench.sock.route(0, bench.now)
    assert (B4, messages.Ping) in [(w, type(m)) for w, m in bench.opened()]


def test_call_me_maybe_pings_all_and_is_never_answered_with_a_call():
    bench = Bench([A4])
    bench.sock.route(0, bench.now)
    bench.out()
    link_local = AddrPort.parse("[fe80::1]:5")
    bench.say(messages.CallMeMaybe((B4, link_local)), bench.relay())
    assert [(w, type(m)) for w, m in bench.opened()] == [(A4, messages.Ping), (B4, messages.Ping)]
    bench.say(messages.CallMeMaybe((A6,)), bench.relay())
    assert [w for w, _ in bench.opened()] == [A4, A6]


def test_call_needs_provenance():
    bench = Bench()
    other = NodePrivate.generate(bench.entropy)
    bench.say(messages.CallMeMaybe((B4,)), A4)
    bench.say(messages.CallMeMaybe((B4,)), DerpSource(5, other.public()))
    assert bench.opened() == [] and bench.sock.drops["call-me-maybe without provenance"] == 2


def test_heartbeats_keep_a_path_and_stop_when_idle():
    bench = Bench()
    bench.make_direct()
    pings = 0
    for _ in range(30):
        bench.tick(3)
        bench.sock.note_received([0], A4, bench.now)
        for where, message in bench.opened():
            if not isinstance(message, messages.Ping):
                continue
            pings += 1
            bench.say(messages.Pong(message.txid, A4), where)
    assert 14 <= pings <= 16
    assert bench.sock.next_deadline() is None or bench.sock.next_deadline().at > bench.now


def test_stale_endpoints_are_refreshed_before_a_call():
    bench = Bench()
    bench.now += 30
    bench.sock.route(0, bench.now)
    outputs = bench.out()
    assert [type(o) for o in outputs] == [SendUdp, EndpointsWanted]
    bench.sock.set_endpoints([OwnEndpoint(B4)], bench.now + 0.3)
    assert bench.opened() == [(5, messages.CallMeMaybe((B4,)))]
    bench.now += 30
    bench.sock.route(0, bench.now)
    bench.out()
    bench.tick(2)
    assert (5, messages.CallMeMaybe((B4,))) in bench.opened()


def test_w04_no_home_no_endpoints_no_disco_key_never_crash():
    bench = Bench([], 0)
    assert bench.sock.route(0, bench.now) == Route(None, 0)
    token = bench.sock.ping(0, bench.now)
    failures = [o for o in bench.out() if isinstance(o, CliPingFailed)]
    assert failures and failures[0].token == token
    for key in (None, DiscoPublic.zero()):
        bench.sock.set_peer(0, replace(bench.paths, disco_key=key), bench.now)
        assert bench.sock.route(0, bench.now) == Route(None, 0)
        bench.sock.ping(0, bench.now)
        bench.tick(5)
        assert [type(o) for o in bench.out()] == [CliPingFailed]
    assert bench.sock.route(99, bench.now) == Route(None, 0)
    bench.sock.note_received([99], A4, bench.now)
    bench.sock.set_peer(0, replace(bench.paths, home_derp=9), bench.now)
    assert bench.sock.route(0, bench.now) == Route(None, 9)


def test_peer_without_home_is_reached_where_it_was_last_heard():
    bench = Bench([], 0)
    bench.sock.note_received([0], bench.relay(12), bench.now)
    assert bench.sock.route(0, bench.now) == Route(None, 12)
    bench.sock.derp_peer_gone(12, bench.peer_node.public())
    assert bench.sock.route(0, bench.now) == Route(None, 0)


def test_w06_new_disco_key_voids_the_old_one():
    bench = Bench()
    bench.make_direct()
    new = DiscoPrivate.generate(bench.entropy)
    bench.sock.set_peer(0, replace(bench.paths, disco_key=new.public()), bench.now)
    assert any(isinstance(o, PathChanged) for o in bench.out())
    bench.say(messages.Ping(bytes(12)), A4)
    assert bench.opened() == [] and bench.sock.drops["unknown disco key"] == 1
    bench.say(messages.Ping(bytes(12)), A4, DiscoKeyring(new))
    pong, ping = bench.out()
    assert isinstance(bench.read(pong.datagram, DiscoKeyring(new)), messages.Pong)
    assert bench.sock.route(0, bench.now) == Route(None, 5)
    txid = bench.read(ping.datagram, DiscoKeyring(new)).txid
    bench.say(messages.Pong(txid, A4), A4, DiscoKeyring(new))
    assert bench.sock.route(0, bench.now) == Route(A4, 0)


def test_w07_a_family_without_route_does_not_stop_the_others():
    bench = Bench([A6, A4, B4])
    bench.sock.route(0, bench.now)
    assert [w for w, m in bench.opened() if isinstance(m, messages.Ping)] == [A6, A4, B4]
    bench.sock.send_failed(None, A6, errno.ENETUNREACH, bench.now)
    bench.now += 5
    bench.sock.route(0, bench.now)
    assert [w for w, m in bench.opened() if isinstance(m, messages.Ping)] == [A4, B4]
    bench.sock.link_changed(bench.now)
    bench.sock.route(0, bench.now)
    assert A6 in [w for w, m in bench.opened() if isinstance(m, messages.Ping)]


def test_send_errors_clear_the_best_address_or_ask_for_a_rebind():
    bench = Bench()
    bench.make_direct()
    bench.sock.send_failed(None, A4, errno.EPERM, bench.now)
    bench.sock.send_failed(None, A4, errno.EPERM, bench.now)
    assert bench.out() == [RebindWanted("EPERM")]
    assert bench.sock.route(0, bench.now).udp == A4
    bench.sock.send_failed(0, A4, errno.EMSGSIZE, bench.now)
    assert bench.sock.route(0, bench.now).udp == A4
    bench.sock.send_failed(0, A4, errno.EHOSTUNREACH, bench.now)
    assert bench.sock.route(0, bench.now).udp is None


def test_w08_link_local_endpoints_are_refused():
    link_local = AddrPort.parse("[fe80::a]:41641")
    bench = Bench([link_local])
    bench.sock.route(0, bench.now)
    assert all(isinstance(o, SendDerp) for o in bench.out())
    bench.say(messages.Ping(bytes(12)), link_local)
    assert bench.out() == [] and bench.sock.drops["unusable source"] == 1


def test_cli_ping_names_its_paths():
    bench = Bench([A4, B4])
    token = bench.sock.ping(0, bench.now, 200)
    sent = bench.opened()
    assert [w for w, _ in sent] == [A4, B4, 5] and sent[0][1].padding == 76
    bench.now += 0.02
    bench.say(messages.Pong(sent[2][1].txid, A4), bench.relay())
    bench.say(messages.Pong(sent[1][1].txid, A4), B4)
    pongs = [o for o in bench.out() if isinstance(o, CliPong)]
    assert [(p.token, p.endpoint, p.derp_region) for p in pongs] == [(token, None, 5), (token, B4, 0)]
    assert pongs[0].latency_s == pytest.approx(0.02)


def test_knobs():
    bench = Bench(always_use_derp=True)
    bench.sock.route(0, bench.now)
    txid = bench.opened()[0][1].txid
    bench.say(messages.Pong(txid, A4), A4)
    assert bench.sock.route(0, bench.now) == Route(None, 5)
    bench = Bench(never_direct_udp=True)
    bench.sock.route(0, bench.now)
    bench.say(messages.Ping(bytes(12)), A4)
    bench.say(messages.CallMeMaybe((B4,)), bench.relay())
    bench.tick(10)
    assert not any(isinstance(o, SendUdp) for o in bench.out())


def test_wireguard_only_peer_is_sent_to_directly():
    bench = Bench([A4, B4], 0)
    bench.sock.set_peer(0, replace(bench.paths, disco_key=None, is_wireguard_only=True), bench.now)
    assert bench.sock.route(0, bench.now) == Route(A4, 0)
    bench.sock.note_received([0], B4, bench.now)
    assert bench.sock.route(0, bench.now) == Route(B4, 0)
    assert not any(isinstance(o, SendUdp | SendDerp) for o in bench.out())
