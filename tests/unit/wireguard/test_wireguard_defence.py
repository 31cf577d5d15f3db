"""The WireGuard device under attack: floods, cookies, garbage, and what the key log says."""

from __future__ import annotations

from harness.wgnode import WgNode, Wire, pair
from tsd.base.addr import AddrPort, parse_ip
from tsd.base.entropy import SeededEntropy
from tsd.hull import Frame
from tsd.wireguard.cookie import MacStamp
from tsd.wireguard.events import HandshakeCompleted
from tsd.wireguard.load import LoadMeter, RateLimiter
from tsd.wireguard.messages import CookieReply

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


def flood(node: WgNode, count: int, to: WgNode) -> list[bytes]:
    """Valid initiations from as many strangers: cheap to make, as only MAC1 must be right."""
    macs = MacStamp(to.private.public().raw)
    entropy = SeededEntropy("flood")
    return [macs.stamp(b"\1\0\0\0" + entropy(112), 0.0) for _ in range(count)]


def test_cookies_under_load() -> None:
    wire = pair()
    for datagram in flood(wire.a, 140, wire.b):
        wire.b.take(datagram, SOURCE)
    assert wire.b.wg.drops["cookie_demanded"] == 13 and len(wire.b.replies) == 13
    assert all(source == SOURCE and len(datagram) == 64 for source, datagram in wire.b.replies)
    # Our first initiation is answered by a cookie, the repetition carries it and is served.
    wire.b.replies.clear()
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    ((source, reply),) = wire.b.replies
    assert source == "a" and wire.count(RESPONSE) == 0
    assert CookieReply.decode(reply).receiver_index == int.from_bytes(wire.flights[0].datagram[4:8], "little")
    wire.a.take(reply)
    wire.advance(0.5)
    for datagram in flood(wire.a, 140, wire.b):
        wire.b.take(datagram, SOURCE)
    wire.clock.advance(5.0 - 0.5)
    for datagram in flood(wire.a, 140, wire.b):
        wire.b.take(datagram, SOURCE)
    wire.advance(0.5)
    assert wire.flights[1].datagram[-16:] != bytes(16) and len(wire.b.received) == 1
    wire.a.take(reply)
    assert wire.a.wg.drops["cookie"] == 1
    wire.advance(130)
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    assert wire.flights[-2].kind == RESPONSE and wire.flights[-3].datagram[-16:] == bytes(16), "too old by now"


def test_load_meter_and_rate_limiter() -> None:
    meter = LoadMeter()
    assert not any(meter.is_loaded(10.0) for _ in range(127))
    assert meter.is_loaded(10.0) and meter.is_loaded(10.9)
    assert not meter.is_loaded(12.5)
    limiter = RateLimiter()
    assert [limiter.allow("x", 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert limiter.allow("y", 0.0) and limiter.allow("x", 0.05) and not limiter.allow("x", 0.06)


def test_garbage_is_counted() -> None:
    wire = established()
    for junk in (b"", b"\1", bytes(148), b"\1\0\0\0" + bytes(143), b"\4\0\0\0" + bytes(28), b"\2\0\0\0" + bytes(88)):
        wire.a.wg.receive(junk, SOURCE, wire.clock.now(), wire.clock.wall_ns())
    wire.a.wg.receive(b"\3\0\0\0" + bytes(60), None, wire.clock.now(), wire.clock.wall_ns())
    assert sum(wire.a.wg.drops.values()) == 7
    wire.a.wg.stage(77, Frame(b""), 0.0, 0)
    wire.a.wg.initiate(77, 0.0, 0)
    wire.a.wg.note([77], [77], [], 0.0, 0)
    wire.a.wg.remove_peer(77)
    wire.a.drain()
    assert wire.a.out == []


def test_tampered_response_does_not_spoil_the_real_one() -> None:
    wire = pair()
    wire.a.send(wire.a.udp_to(wire.b))
    (initiation,) = wire.a.out
    wire.a.out = []
    wire.b.take(initiation.datagram)
    (response,) = wire.b.out
    body = bytearray(response.datagram[:-32])
    body[50] ^= 1
    wire.a.take(MacStamp(wire.a.private.public().raw).stamp(bytes(body), 0.0))
    assert wire.a.wg.drops["not_authentic"] == 1
    wire.a.take(response.datagram)
    assert wire.a.events == [HandshakeCompleted(1, True)]
    wire.a.take(response.datagram)
    assert wire.a.wg.drops["unexpected_response"] == 1


def test_keylog_has_both_ephemerals() -> None:
    wire = pair()
    lines: list[str] = []
    wire.a.wg._write_keylog = lines.append
    wire.b.wg._write_keylog = lines.append
    wire.a.send(wire.a.udp_to(wire.b))
    wire.run()
    assert len(lines) == 2 and all(text.count("\n") == 4 and "LOCAL_EPHEMERAL_PRIVATE_KEY = " in text for text in lines)
