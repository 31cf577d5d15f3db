"""The Python core against published transport vectors and against itself."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from tsd.dataplane.pump import OpenResult, Other, Sealed
from tsd.dataplane.reference import ReferenceCore
from tsd.hull import Frame
from tsd.packet import build
from tsd.packet.constants import TCP_ACK, TCP_PSH

K1 = bytes.fromhex("8c467a49ee5feffc8b390fba6ff460b5d66abf66f5e4bf9e0a5612b256498238")
K2 = bytes.fromhex("eb356022624730ae787d7fccc635655d1b1b1fb7d81f299043b0ce85e3a3a4b4")
KEEPALIVE = bytes.fromhex("04000000222222220000000000000000291241ac6c6d0b472543a7c56d5dbcd0")
PING = bytes.fromhex("4500001d000000004063b1fb6440000164400002700102030405060708")
PING_SEALED = bytes.fromhex(
    "04000000222222220100000000000000edb9011809b933b29a01df372b6ce46d5caf592a9e1a611e9426bcd3c03d8797"
    "ab1f595751cc213f64a672c2b8575194"
)
A4, B4, C4 = (bytes([100, 64, 0, n]) for n in (1, 2, 3))
A6, B6 = ip_address("fd7a:115c:a1e0::1").packed, ip_address("fd7a:115c:a1e0::2").packed
NOW = 1000.0


def cores() -> tuple[ReferenceCore, ReferenceCore]:
    """A (initiator, 100.64.0.1) and B (responder, 100.64.0.2); each knows the other as peer 7."""
    a, b = ReferenceCore(), ReferenceCore()
    a.add_peer(7)
    b.add_peer(7)
    a.set_allowed_ips(7, [ip_network("100.64.0.2/32"), ip_network("fd7a:115c:a1e0::2/128")])
    b.set_allowed_ips(7, [ip_network("100.64.0.1/32"), ip_network("fd7a:115c:a1e0::1/128")])
    a.install_session(7, 0x11111111, 0x22222222, K1, K2, True, NOW)
    b.install_session(7, 0x22222222, 0x11111111, K2, K1, False, NOW)
    return a, b


def udp(size: int, src: bytes = A4, dst: bytes = B4) -> bytes:
    return build.udp_packet(src, 1, dst, 2, bytes(size - (28 if len(src) == 4 else 48)))


def carry(sealed: list[Sealed], core: ReferenceCore, now: float = NOW) -> list[OpenResult]:
    return [core.open(item.datagrams, item.datagram_bytes, now) for item in sealed]


def test_vectors() -> None:
    a, b = cores()
    assert a.seal_to(7, [b""], NOW) == [Sealed(7, KEEPALIVE, 32, 1)]
    result = a.seal([Frame(PING)], NOW)
    assert result.sealed == [Sealed(7, PING_SEALED, len(PING_SEALED), 1)]
    assert result.attention == [7] and not result.no_session
    opened = b.open(KEEPALIVE + PING_SEALED, 32, NOW)
    assert opened.confirmed == [7] and opened.opened == []
    opened = b.open(PING_SEALED, 0, NOW)
    assert [(item.peer, item.frame) for item in opened.opened] == [(7, Frame(PING, 0))]
    assert opened.confirmed == [] and opened.authenticated == [7]


def test_responder_does_not_send_under_next() -> None:
    a, b = cores()
    assert b.seal_to(7, [b""], NOW) == []
    assert b.seal([Frame(udp(100, B4, A4))], NOW).no_session == [(7, Frame(udp(100, B4, A4)))]
    carry(a.seal_to(7, [b""], NOW), b)
    assert b.activity(7).has_current and not b.activity(7).has_next
    (result,) = carry(b.seal([Frame(udp(100, B4, A4))], NOW).sealed, a)
    assert result.opened[0].frame == Frame(udp(100, B4, A4), 0)


@pytest.mark.parametrize(
    ("size", "wire"), [(1280, 1312), (1279, 1312), (1265, 1312), (1264, 1296), (28, 64), (1300, 1344), (1290, 1328)]
)
def test_padding_stops_at_the_mtu(size: int, wire: int) -> None:
    a, b = cores()
    (sealed,) = a.seal([Frame(udp(size))], NOW).sealed
    assert sealed.datagram_bytes == wire
    assert carry([sealed], b)[0].opened[0].frame.packet == udp(size)


def test_grouping() -> None:
    a, _ = cores()
    a.add_peer(8)
    a.set_allowed_ips(8, [ip_network("100.64.0.3/32")])
    a.install_session(8, 3, 4, K1, K2, True, NOW)
    sizes = [400, 400, 100, 100, 400, 1200]
    frames = [Frame(udp(size)) for size in sizes]
    frames.insert(1, Frame(udp(400, A4, C4)))
    frames.append(Frame(udp(400, A4, C4)))
    sealed = a.seal(frames, NOW).sealed
    assert [(item.peer, item.datagram_bytes, item.count) for item in sealed] == [
        (7, 432, 3),
        (8, 432, 2),
        (7, 144, 1),
        (7, 432, 1),
        (7, 1232, 1),
    ]
    many = a.seal([Frame(udp(1280))] * 200, NOW).sealed
    assert [item.count for item in many] == [49, 49, 49, 49, 4]
    assert [item.count for item in a.seal([Frame(udp(64))] * 130, NOW).sealed] == [64, 64, 2]
    assert all(len(item.datagrams) <= 65000 for item in many)


@pytest.mark.parametrize(("src", "dst"), [(A4, B4), (A6, B6)])
def test_super_segment_crosses_and_comes_back_whole(src: bytes, dst: bytes) -> None:
    a, b = cores()
    payload = bytes(range(256)) * 100
    whole = build.tcp_packet(
        src,
        5,
        dst,
        6,
        sequence=0xFFFFFF00,
        acknowledgement=9,
        flags=TCP_ACK | TCP_PSH,
        options=b"\1" * 12,
        payload=payload,
    )
    unit = 1280 - len(src) * 2 - (12 if len(src) == 4 else 8) - 32
    sealed = a.seal([Frame(whole, unit)], NOW).sealed
    assert all(item.datagram_bytes <= 1312 for item in sealed)
    assert sum(item.count for item in sealed) == -(-len(payload) // unit)
    frames = [item.frame for result in carry(sealed, b) for item in result.opened]
    assert len(frames) == 1 and frames[0].segment_bytes == unit
    header = 52 if len(src) == 4 else 72
    assert bytes(frames[0].packet[header:]) == payload
    assert frames[0].packet[: header - 16] == whole[: header - 16]
    # Cutting the merged packet again gives valid packets, however its checksum field was left.
    again = a.seal([frames[0]], NOW)
    assert sum(item.count for item in again.sealed) == -(-len(payload) // unit)


def test_the_largest_super_segment_is_cut_and_not_too_big() -> None:
    a, b = cores()
    whole = build.tcp_packet(A4, 5, B4, 6, sequence=1, flags=TCP_ACK, payload=bytes(65535 - 40))
    sealed = a.seal([Frame(whole, 1240)], NOW).sealed
    opened = [item.frame for result in carry(sealed, b) for item in result.opened]
    assert sum(len(frame.packet) - 40 for frame in opened) == 65535 - 40
    a.seal([Frame(whole, 64900)], NOW)
    assert a.drops["too_big"] == 1


def test_drops_are_counted_and_never_raise() -> None:
    a, b = cores()
    sealed = a.seal([Frame(udp(200))], NOW).sealed[0].datagrams
    assert b.open(sealed, 0, NOW).authenticated == [7]
    for bad, reason in [
        (sealed, "replay"),
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), "auth"),
        (sealed[:4] + b"abcd" + sealed[8:], "no_session"),
        (sealed[:31], "short"),
        (b"\7", "short"),
        (b"\5\0\0\0" + bytes(40), "unknown_type"),
        (b"\4\1\0\0" + bytes(40), "unknown_type"),
        (b"\1\0\0\0" + bytes(140), "bad_length"),
    ]:
        result = b.open(bad, 0, NOW)
        assert b.drops[reason] == 1, reason
        assert result == OpenResult([], [], [], [], [])
        b.drops.clear()
    assert b.open(b"", 0, NOW) == OpenResult([], [], [], [], [])
    for inner, reason in [
        (udp(100, C4, B4), "source"),
        (udp(100)[:60], "malformed"),
        (b"\x45" + bytes(30), "malformed"),
        (b"\0" * 40, "malformed"),
        (b"\x60" + bytes(30), "malformed"),
    ]:
        (result,) = carry(a.seal_to(7, [inner], NOW), b)
        assert result.opened == [] and result.authenticated == [7]
        assert b.drops == {reason: 1}
        b.drops.clear()
    a.seal([Frame(b""), Frame(b"\x45"), Frame(udp(100, A4, C4)), Frame(udp(100), 10)], NOW)
    assert a.drops == {"malformed": 3, "no_peer": 1}
    assert a.seal_to(99, [b""], NOW) == []


def test_others_are_handed_up() -> None:
    a, _ = cores()
    stun = bytes.fromhex("000100142112a442000102030405060708090a0b")
    disco = b"TS\xf0\x9f\x92\xac" + bytes(60)
    handshake = b"\1\0\0\0" + bytes(144)
    geneve = bytes.fromhex("00007a1200000700") + bytes(40)
    geneve_disco = bytes.fromhex("00807a1100000700") + disco
    for datagram, kind in [
        (stun, Other.STUN),
        (disco, Other.DISCO),
        (handshake, Other.HANDSHAKE),
        (geneve, Other.GENEVE_WIREGUARD),
        (geneve_disco, Other.GENEVE_DISCO),
    ]:
        assert a.open(memoryview(datagram), 0, NOW).others == [(kind, datagram)]
    assert a.open(handshake * 3, 148, NOW).others == [(Other.HANDSHAKE, handshake)] * 3


def test_ages() -> None:
    a, b = cores()
    carry(a.seal_to(7, [b""], NOW), b)
    assert a.seal([Frame(udp(100))], NOW + 119).attention == [7]
    assert not a.activity(7).rekey_wanted
    assert a.seal([Frame(udp(100))], NOW + 119.5).attention == []
    assert a.seal([Frame(udp(100))], NOW + 120.1).attention == [7]
    assert a.activity(7).rekey_wanted
    assert a.seal([Frame(udp(100))], NOW + 121).attention == []
    assert not b.activity(7).rekey_wanted
    b.seal([Frame(udp(100, B4, A4))], NOW + 130)
    assert not b.activity(7).rekey_wanted, "only the initiator rekeys"
    late = a.seal([Frame(udp(100))], NOW + 179.9).sealed
    assert a.seal([Frame(udp(100))], NOW + 180).no_session
    carry(late, b, NOW + 180)
    assert b.drops == {"expired": 1}


def test_last_chance_on_receive() -> None:
    a, b = cores()
    carry(a.seal_to(7, [b""], NOW), b)
    (result,) = carry(b.seal([Frame(udp(100, B4, A4))], NOW + 166).sealed, a, NOW + 166)
    assert result.attention == [7] and a.activity(7).rekey_wanted
    a.install_session(7, 9, 10, K1, K2, True, NOW + 167)
    assert not a.activity(7).rekey_wanted


def test_activity_follows_traffic() -> None:
    a, b = cores()
    (keepalive,) = a.seal_to(7, [b""], NOW + 1)
    assert a.activity(7).first_unanswered_send == 0.0 and a.activity(7).last_send == NOW + 1
    carry([keepalive], b, NOW + 1)
    assert b.activity(7).first_unreplied_receive == 0.0
    data = a.seal([Frame(udp(100)), Frame(udp(100))], NOW + 2).sealed
    assert a.activity(7).first_unanswered_send == NOW + 2
    (result,) = carry(data, b, NOW + 3)
    assert result.attention == [7] and b.activity(7).first_unreplied_receive == NOW + 3
    assert (b.activity(7).rx_packets, b.activity(7).rx_bytes) == (3, 32 + 2 * 144)
    (reply,) = b.seal_to(7, [b""], NOW + 4)
    assert b.activity(7).first_unreplied_receive == 0.0
    (result,) = carry([reply], a, NOW + 5)
    assert result.attention == [7] and a.activity(7).first_unanswered_send == 0.0


def test_three_slots() -> None:
    a, b = cores()
    keys = [(bytes([n]) * 32, bytes([n + 1]) * 32) for n in range(10, 30, 2)]
    old = a.seal([Frame(udp(100))], NOW).sealed
    carry(old, b)
    in_flight = a.seal([Frame(udp(101))], NOW).sealed
    a.install_session(7, 101, 201, *keys[0], True, NOW)
    b.install_session(7, 201, 101, keys[0][1], keys[0][0], False, NOW)
    assert carry(in_flight, b)[0].opened, "the current session still opens"
    fresh = a.seal([Frame(udp(100))], NOW).sealed
    assert carry(fresh, b)[0].confirmed == [7]
    late = b.activity(7)
    assert late.has_current and not late.has_next
    # An initiator that has a next session keeps that one as previous.
    a.install_session(7, 102, 202, *keys[1], False, NOW)
    a.install_session(7, 103, 203, *keys[2], True, NOW)
    c = ReferenceCore()
    c.add_peer(1)
    c.install_session(1, 202, 102, keys[1][1], keys[1][0], True, NOW)
    assert carry(c.seal_to(1, [b""], NOW), a)[0].authenticated == [7]
    assert not carry(b.seal_to(7, [b""], NOW), a)[0].authenticated
    a.drop_sessions(7)
    assert not a.activity(7).has_current and a.seal_to(7, [b""], NOW) == []
    a.remove_peer(7)
    assert a.route(B4) is None
