"""Two devices joined by a pretend wire, in hand-turned time."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from harness.wgnode import Flight, WgNode, Wire, pair
from tsd.base.addr import AddrPort, parse_ip
from tsd.base.clock import ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import NodePrivate, NodePublic
from tsd.packet.build import udp_packet
from tsd.wireguard.cookie import MacStamp
from tsd.wireguard.events import HandshakeCompleted, HandshakeFailed, KeysZeroed, SessionExpired

INITIATION, RESPONSE, COOKIE, DATA = 1, 2, 3, 4
SOURCE = AddrPort(parse_ip("192.0.2.1"), 41641)


def established() -> Wire:
    """A pair whose handshake (a initiates) is done and answered, at time 1000."""
    wire = pair()
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    wire.b.send(wire.b.udp_to(wire.a))
    wire.run()
    wire.log.clear()
    wire.a.events.clear()
    wire.b.events.clear()
    return wire


def chatter(wire: Wire, seconds: float, step: float = 1.0) -> None:
    """One packet each way every `step`."""
    for _ in range(int(seconds / step)):
        wire.advance(step)
        wire.a.send(wire.a.udp_to(wire.b))
        wire.b.send(wire.b.udp_to(wire.a))
        wire.run()


def test_first_packet_makes_a_session() -> None:
    wire = pair()
    packet = wire.a.udp_to(wire.b)
    wire.a.send(packet, packet)
    wire.run()
    assert wire.b.received == [(2, packet), (2, packet)]
    assert [kind for _, _, kind in wire.log] == [INITIATION, RESPONSE, DATA, DATA]
    assert wire.a.events == [HandshakeCompleted(1, True)]
    assert wire.b.events == [HandshakeCompleted(2, False)]
    assert wire.a.wg.last_handshake_wall_ns(1) == wire.clock.wall_ns()
    assert wire.a.wg.last_handshake_wall_ns(99) == 0


def test_session_without_data_is_confirmed_by_a_keepalive() -> None:
    wire = pair()
    wire.a.wg.initiate(1, wire.clock.now(), wire.clock.wall_ns())
    wire.a.drain()
    wire.run()
    assert [kind for _, _, kind in wire.log] == [INITIATION, RESPONSE, DATA]
    assert wire.flights[-1].is_keepalive
    wire.advance(60)
    assert len(wire.log) == 3, "an idle session is silent"


def test_responder_stages_until_confirmed() -> None:
    wire = pair()
    wire.drop = lambda flight: flight.kind == DATA
    wire.a.wg.initiate(1, wire.clock.now(), wire.clock.wall_ns())
    wire.a.drain()
    wire.run()
    packet = wire.b.udp_to(wire.a)
    wire.b.send(packet)
    wire.run()
    assert wire.count(INITIATION) == 1 and wire.b.events == []
    wire.drop = lambda flight: False
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    assert wire.a.received == [(1, packet)]


def test_lost_initiation_is_repeated_with_jitter() -> None:
    wire = pair()
    wire.drop = lambda flight: True
    wire.a.send(wire.a.udp_to(wire.b))
    wire.advance(30)
    times = [at for at, _, kind in wire.log if kind == INITIATION]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) == 6 and all(5.0 <= gap < 5.334 for gap in gaps)
    datagrams = {flight.datagram[8:40] for flight in wire.flights}
    assert len(datagrams) == 6, "each has its own ephemeral"
    wire.drop = lambda flight: False
    wire.advance(6)
    assert len(wire.b.received) == 1


def test_lost_response_is_repaired() -> None:
    wire = pair()
    wire.drop = lambda flight: flight.kind == RESPONSE and wire.count(RESPONSE) == 1
    wire.a.send(wire.a.udp_to(wire.b))
    wire.advance(6)
    assert len(wire.b.received) == 1 and wire.count(RESPONSE) == 2


def test_gives_up_after_20_initiations() -> None:
    wire = pair()
    wire.drop = lambda flight: True
    wire.a.send(wire.a.udp_to(wire.b))
    wire.advance(200)
    assert wire.count(INITIATION) == 20
    assert wire.a.events == [HandshakeFailed(1)]
    wire.drop = lambda flight: False
    wire.advance(10)
    assert not wire.b.received, "what was staged is gone"
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    assert len(wire.b.received) == 1


def test_staged_frames_are_the_newest_128() -> None:
    wire = pair()
    wire.drop = lambda flight: flight.kind == INITIATION
    packets = [wire.a.udp_to(wire.b, f"{index}".encode()) for index in range(200)]
    wire.a.send(*packets)
    wire.run()
    assert wire.a.wg.drops["staged_full"] == 72
    wire.drop = lambda flight: False
    wire.advance(6)
    assert [packet for _, packet in wire.b.received] == packets[72:]


def test_only_the_initiator_rekeys_at_120() -> None:
    wire = established()
    chatter(wire, 119)
    assert wire.count(INITIATION) == 0
    chatter(wire, 3)
    assert wire.count(INITIATION, "a") == 1 and wire.count(INITIATION, "b") == 0
    chatter(wire, 300)
    assert wire.count(INITIATION, "a") == 3 and wire.count(INITIATION, "b") == 0
    assert len(wire.b.received) == 1 + 422 and len(wire.a.received) == 1 + 422, "nothing was lost while rekeying"


def test_last_chance_rekey_on_receive() -> None:
    wire = established()
    for _ in range(170):
        wire.advance(1.0)
        # The initiator never sends data, only keepalives (every 10 s), which do not count below 120 s of age.
        if wire.clock.now() < 1115 or wire.clock.now() > 1164:
            wire.b.send(wire.b.udp_to(wire.a))
            wire.run()
    assert wire.count(INITIATION, "b") == 0
    times = [at for at, who, kind in wire.log if kind == INITIATION and who == "a"]
    assert len(times) == 1 and 1120 < times[0] <= 1167


def test_old_sessions_are_refused_and_the_responder_may_start_anew() -> None:
    wire = established()
    wire.advance(181)
    assert SessionExpired(1) in wire.a.events and SessionExpired(2) in wire.b.events
    wire.b.send(wire.b.udp_to(wire.a))
    wire.run()
    assert wire.count(INITIATION, "b") == 1 and len(wire.a.received) == 2


def test_keys_are_zeroed_after_540_seconds() -> None:
    wire = established()
    wire.advance(541)
    assert KeysZeroed(1) in wire.a.events and KeysZeroed(2) in wire.b.events
    assert not wire.a.core.activity(1).has_current
    assert wire.a.wg.next_deadline() is None
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    assert len(wire.b.received) == 2


def test_a_peer_that_never_answers_is_cleaned_up_too() -> None:
    wire = pair()
    wire.drop = lambda flight: True
    wire.a.send(wire.a.udp_to(wire.b))
    wire.advance(545)
    assert wire.a.events == [HandshakeFailed(1), KeysZeroed(1)] and wire.a.wg.next_deadline() is None


def test_passive_keepalive() -> None:
    wire = established()
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    start = wire.clock.now()
    wire.advance(9.9)
    assert wire.count(DATA, "b") == 0
    wire.advance(60)
    keepalives = [at for at, who, kind in wire.log if who == "b" and kind == DATA]
    assert keepalives == [pytest.approx(start + 10.0)]


def test_keepalive_again_when_more_came_meanwhile() -> None:
    wire = established()
    start = wire.clock.now()
    for _ in range(3):
        wire.a.send(wire.a.udp_to(wire.b))
        wire.advance(2)
    wire.advance(60)
    keepalives = [at for at, who, kind in wire.log if who == "b" and kind == DATA]
    assert keepalives == [pytest.approx(start + 10.0), pytest.approx(start + 20.0)]


def test_silence_makes_a_new_handshake_after_15_seconds() -> None:
    wire = established()
    wire.drop = lambda flight: flight.sender is wire.b
    wire.a.send(wire.a.udp_to(wire.b))
    start = wire.clock.now()
    wire.advance(14.9)
    assert wire.count(INITIATION) == 0
    wire.advance(1)
    (at,) = [at for at, _, kind in wire.log if kind == INITIATION]
    assert start + 15 <= at < start + 15.334
    wire.drop = lambda flight: False
    wire.advance(10)
    assert wire.count(INITIATION) == 2
    wire.advance(60)
    assert wire.count(INITIATION) == 2, "answered: nothing more"


def test_continuous_data_into_a_black_hole_never_gives_up() -> None:
    wire = established()
    wire.drop = lambda flight: True
    for _ in range(400):
        wire.advance(1.0)
        wire.a.send(wire.a.udp_to(wire.b))
    assert HandshakeFailed(1) not in wire.a.events
    assert 60 <= wire.count(INITIATION, "a") <= 78


def test_session_derived_by_response_answers_earlier_silence() -> None:
    wire = established()
    wire.drop = lambda flight: flight.kind == DATA and flight.sender is wire.a
    wire.a.send(wire.a.udp_to(wire.b))
    wire.advance(16)
    assert wire.count(INITIATION) == 1 and wire.count(RESPONSE) == 1
    wire.a.send(wire.a.udp_to(wire.b))
    wire.advance(16)
    assert wire.count(INITIATION) == 2, "silence is noticed in the new session as well"


def test_simultaneous_initiation() -> None:
    wire = pair()
    wire.a.send(wire.a.udp_to(wire.b))
    wire.b.send(wire.b.udp_to(wire.a))
    wire.run()
    assert len(wire.a.received) == 1 and len(wire.b.received) == 1
    chatter(wire, 100)
    assert wire.count(INITIATION) == 2
    chatter(wire, 100)
    assert 3 <= wire.count(INITIATION) <= 4
    assert len(wire.a.received) == 201 and len(wire.b.received) == 201


def test_priority_message_goes_first_and_never_starts_a_handshake() -> None:
    wire = pair()
    first = {node: udp_packet(node.address, 7, other.address, 7, b"first") for node, other in
             ((wire.a, wire.b), (wire.b, wire.a))}  # fmt: skip
    wire.a.wg.priority_message = lambda peer: first[wire.a]
    wire.b.wg.priority_message = lambda peer: first[wire.b]
    packet = wire.a.udp_to(wire.b)
    wire.a.send(packet)
    wire.run()
    assert wire.b.received == [(2, first[wire.a]), (2, packet)]
    assert wire.a.received == [(1, first[wire.b])]
    wire.a.wg.priority_message = lambda peer: bytes(1281)
    wire.a.wg.initiate(1, wire.clock.advance(6), wire.clock.wall_ns())
    wire.a.drain()
    wire.run()
    assert len(wire.b.received) == 2


def test_strangers_meet_silence() -> None:
    wire = pair()
    stranger = WgNode("stranger", "100.64.0.9", wire.clock)
    stranger.add_peer(1, wire.b)
    stranger.send(stranger.udp_to(wire.b))
    (flight,) = stranger.out
    wire.b.take(flight.datagram, SOURCE)
    assert wire.b.out == [] and wire.b.replies == [] and wire.b.wg.drops == {"stranger": 1}
    wrong_key = MacStamp(wire.a.private.public().raw).stamp(flight.datagram[:-32], 0.0)
    wire.b.take(wrong_key, SOURCE)
    assert wire.b.out == [] and wire.b.wg.drops["mac1"] == 1


def test_lazy_peer_is_added_by_its_initiation() -> None:
    wire = pair()
    newcomer = WgNode("newcomer", "100.64.0.9", wire.clock)
    newcomer.add_peer(1, wire.b)
    asked: list[NodePublic] = []

    def lookup(public: NodePublic) -> int | None:
        asked.append(public)
        wire.b.add_peer(50, newcomer)
        return 50

    wire.b.wg.unknown_peer_lookup = lookup
    newcomer.send(newcomer.udp_to(wire.b))
    second = Wire(newcomer, wire.b, wire.clock)
    second.run()
    assert asked == [newcomer.private.public()] and wire.b.received[0][0] == 50
    wire.b.wg.unknown_peer_lookup = lambda public: 2
    other = WgNode("other", "100.64.0.10", wire.clock)
    other.add_peer(1, wire.b)
    other.send(other.udp_to(wire.b))
    wire.b.take(other.out[0].datagram)
    assert wire.b.wg.drops["stranger"] == 1, "a wrong handle does not lend its identity"


def test_own_key_is_a_stranger() -> None:
    clock = ManualClock()
    node = WgNode("self", "100.64.0.1", clock)
    node.add_peer(1, node)
    node.send(udp_packet(node.address, 1, node.address, 2, b"x"))
    node.take(node.out[0].datagram)
    assert node.wg.drops["stranger"] == 1 and len(node.out) == 1


def test_replayed_and_flooded_initiations() -> None:
    wire = pair()
    wire.a.send(wire.a.udp_to(wire.b))
    first = wire.a.out[0].datagram
    wire.run()
    wire.b.take(first)
    assert wire.b.wg.drops["old_timestamp"] == 1
    # Two fresh ones closer than 20 ms.
    wire.advance(10)
    wire.a.wg.initiate(1, wire.clock.now(), wire.clock.wall_ns())
    wire.a.drain()
    wire.run()
    again = Wire(wire.a, wire.b, wire.clock)
    wire.clock.advance(0.01)
    wire.a.wg.remove_peer(1)
    wire.a.add_peer(1, wire.b)
    wire.a.wg.initiate(1, wire.clock.now(), wire.clock.wall_ns())
    wire.a.drain()
    again.run()
    assert wire.b.wg.drops["initiation_flood"] == 1 and again.count(RESPONSE) == 0


def test_w18_clock_that_went_back(caplog: pytest.LogCaptureFixture) -> None:
    wire = established()
    rebooted = WgNode("a", "100.64.0.1", ManualClock(5.0, 1_600_000_000_000_000_000))
    rebooted.add_peer(1, wire.b)
    with caplog.at_level(logging.WARNING, "tsd.wireguard"):
        for _ in range(3):
            rebooted.wg.initiate(1, rebooted.clock.advance(6), rebooted.clock.wall_ns())
            rebooted.drain()
            wire.b.take(rebooted.out[-1].datagram)
    assert wire.b.out == [] and wire.b.wg.drops["old_timestamp"] == 3
    assert len([record for record in caplog.records if "clock" in record.message]) == 1
    restored = WgNode("a", "100.64.0.1", ManualClock(5.0, 1_600_000_000_000_000_000))
    restored.tai64n.last_ns = wire.a.tai64n.last_ns
    restored.add_peer(1, wire.b)
    wire.clock.advance(1)
    second = Wire(restored, wire.b, wire.clock)
    restored.send(restored.udp_to(wire.b))
    second.run()
    assert second.count(RESPONSE) == 1


def test_remove_peer_forgets_it() -> None:
    wire = established()
    wire.a.wg.remove_peer(1)
    assert not wire.a.wg.has_peer(1) and wire.a.wg.next_deadline() is None
    wire.b.send(wire.b.udp_to(wire.a))
    wire.run()
    assert len(wire.a.received) == 1
    with pytest.raises(Exception, match="x25519"):
        wire.a.wg.add_peer(9, NodePublic(bytes(32)))


def test_many_peers_have_one_timer_heap() -> None:
    clock = ManualClock()
    hub = WgNode("hub", "100.64.0.1", clock)
    for handle in range(2, 52):
        private = NodePrivate.generate(SeededEntropy(handle))
        hub.wg.add_peer(handle, private.public())
        hub.wg.initiate(handle, clock.now() + handle / 100, clock.wall_ns())
    deadline = hub.wg.next_deadline()
    assert deadline is not None and 1005.02 <= deadline.at < 1006
    seen = 0
    while (deadline := hub.wg.next_deadline()) is not None and deadline.at < 1100:
        clock.advance(deadline.at - clock.now())
        hub.wg.on_deadline(clock.now(), clock.wall_ns())
        hub.drain()
        seen += 1
    assert len(hub.out) > 50 * 15 and seen <= len(hub.out)


def test_flights_are_typed() -> None:
    node = WgNode("n", "100.64.0.1", ManualClock())
    assert Flight(b"\4" + bytes(31), node, 1).is_keepalive


def test_restarted_peer_gets_a_handshake_at_once() -> None:
    wire = established()
    wire.b = WgNode("b", "100.64.0.2", wire.clock)
    wire.b.add_peer(2, wire.a)
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    assert wire.b.received == []
    wire.a.wg.restart_peer(1)
    wire.a.wg.restart_peer(77)
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    assert len(wire.b.received) == 1 and wire.count(INITIATION) == 1


def test_an_initiation_that_could_not_leave_is_repeated_when_asked() -> None:
    wire = pair()
    wire.a.wg.retry(1, wire.clock.now(), wire.clock.wall_ns())
    wire.a.wg.retry(99, wire.clock.now(), wire.clock.wall_ns())
    wire.a.drain()
    assert wire.a.out == [], "nothing is wanted yet"
    wire.drop = lambda flight: True
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    wire.drop = lambda flight: False
    wire.advance(0.1)
    wire.a.wg.retry(1, wire.clock.now(), wire.clock.wall_ns())
    wire.a.drain()
    wire.run()
    assert len(wire.b.received) == 1 and wire.count(INITIATION) == 2
    wire.a.wg.retry(1, wire.clock.now(), wire.clock.wall_ns())
    wire.a.drain()
    wire.run()
    assert wire.count(INITIATION) == 2


def test_a_peer_that_the_relay_does_not_know_yet_is_asked_again_soon_but_once() -> None:
    wire = pair()
    wire.drop = lambda flight: True
    wire.a.send(wire.a.udp_to(wire.b))
    for _ in range(20):
        wire.a.wg.retry_soon(1, wire.clock.now())
        wire.advance(0.5)
    times = [at - wire.log[0][0] for at, _, kind in wire.log if kind == INITIATION]
    assert times[:2] == [0.0, pytest.approx(1.0)] and len(times) == 3 and times[2] > 6.0


def test_a_peer_that_restarted_with_an_older_clock_is_answered() -> None:
    wire = established()
    wire.a.wg.remove_peer(1)
    wire.a.add_peer(1, wire.b)
    wire.a.tai64n.last_ns = 0
    wire.clock._wall_ns -= 10**15
    wire.advance(1)
    wire.b.wg.restart_peer(2)
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    assert wire.b.wg.drops["old_timestamp"] == 0 and len(wire.b.received) == 2
