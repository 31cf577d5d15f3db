"""The native core by itself: vectors, misuse, and what the differential test cannot show."""

from __future__ import annotations

import threading
from ipaddress import ip_network
from typing import Any

import pytest

import tsnative
from tsd.dataplane.pump import Other
from tsd.hull import Frame
from tsd.packet.build import tcp_packet, udp_packet

pytestmark = pytest.mark.skipif(tsnative.native is None, reason="the native core is not built")

A, B = bytes([100, 64, 0, 1]), bytes([100, 64, 0, 2])
K1 = bytes.fromhex("8c467a49ee5feffc8b390fba6ff460b5d66abf66f5e4bf9e0a5612b256498238")
K2 = bytes.fromhex("eb356022624730ae787d7fccc635655d1b1b1fb7d81f299043b0ce85e3a3a4b4")
TSMP_PING = bytes.fromhex("4500001d000000004063b1fb6440000164400002700102030405060708")
KEEPALIVE = bytes.fromhex("04000000222222220000000000000000291241ac6c6d0b472543a7c56d5dbcd0")
SEALED_PING = bytes.fromhex(
    "04000000222222220100000000000000edb9011809b933b29a01df372b6ce46d"
    "5caf592a9e1a611e9426bcd3c03d8797ab1f595751cc213f64a672c2b8575194"
)


def make(**options: Any) -> Any:
    assert tsnative.native is not None
    return tsnative.native.NativeCore(**options)


def pair() -> tuple[Any, Any]:
    """Initiator (A, knows peer 2 = B) and responder (B, knows peer 1 = A) of the published vectors."""
    a, b = make(), make()
    a.add_peer(2)
    b.add_peer(1)
    a.set_allowed_ips(2, [ip_network("100.64.0.2/32"), ip_network("fd7a::2/128")])
    b.set_allowed_ips(1, [ip_network("100.64.0.1/32"), ip_network("fd7a::1/128")])
    a.install_session(2, 0x11111111, 0x22222222, K1, K2, True, 1.0)
    b.install_session(1, 0x22222222, 0x11111111, K2, K1, False, 1.0)
    return a, b


def test_published_vectors() -> None:
    a, b = pair()
    assert a.seal_to(2, [b""], 2.0)[0].datagrams == KEEPALIVE
    (sealed,) = a.seal([Frame(TSMP_PING)], 2.0).sealed
    assert (sealed.peer, sealed.datagrams, sealed.datagram_bytes, sealed.count) == (2, SEALED_PING, 64, 1)
    result = b.open(KEEPALIVE, 0, 2.0)
    assert (result.opened, result.authenticated, result.confirmed) == ([], [1], [1])
    result = b.open(SEALED_PING, 64, 2.0)
    assert [(o.peer, o.frame) for o in result.opened] == [(1, Frame(TSMP_PING, 0))]
    assert b.open(SEALED_PING, 64, 2.0).opened == [] and b.drops["replay"] == 1


def test_super_segment_round_trip() -> None:
    a, b = pair()
    payload = bytes(range(248)) * 5 * 48
    packet = tcp_packet(A, 1, B, 2, sequence=5, flags=0x18, payload=payload)
    unfilled = packet[:36] + b"\0\0" + packet[38:]
    result = a.seal([Frame(unfilled, 1240)], 2.0)
    assert [(s.count, s.datagram_bytes) for s in result.sealed] == [(48, 1312)]
    assert result.attention == [2]
    opened = b.open(result.sealed[0].datagrams, 1312, 2.0).opened
    assert [o.frame.segment_bytes for o in opened] == [1240]
    assert opened[0].frame.packet[40:] == payload and opened[0].frame.packet[33] == 0x18


def test_others_are_classified() -> None:
    core = make()
    stun = bytes.fromhex("000100142112a442000102030405060708090a0b802200087461696c6e6f6465802800048aabad90")
    assert core.open(stun, 0, 1.0).others == [(Other.STUN, stun)]
    assert core.open(bytes([1, 0, 0, 0]) + bytes(144), 0, 1.0).others[0][0] is Other.HANDSHAKE
    core.open(b"\7", 0, 1.0)
    core.open(b"", 0, 1.0)
    assert dict(core.drops) == {"short": 1}


def test_misuse_is_an_exception_not_a_crash() -> None:
    core = make()
    for bad in ({"mtu_bytes": 0}, {"mtu_bytes": 70000}):
        with pytest.raises(ValueError):
            make(**bad)
    with pytest.raises(RuntimeError):
        make(kernel="avx9")
    with pytest.raises(KeyError):
        core.set_allowed_ips(5, [])
    with pytest.raises(KeyError):
        core.install_session(5, 1, 2, K1, K2, True, 1.0)
    core.add_peer(5)
    with pytest.raises(ValueError):
        core.install_session(5, 1, 2, K1[:31], K2, True, 1.0)
    with pytest.raises(TypeError):
        core.seal([Frame(None)], 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        core.open("text", 0, 1.0)
    with pytest.raises(BufferError):
        core.open(memoryview(bytes(64))[::2], 0, 1.0)
    assert core.route(b"") is None
    core.remove_peer(404)


def test_buffers_are_released_also_after_errors() -> None:
    a, _ = pair()
    held = bytearray(udp_packet(A, 1, B, 2, b"x"))
    with pytest.raises(TypeError):
        a.seal([Frame(held), Frame(None)], 1.0)  # type: ignore[arg-type]
    a.seal([Frame(held)], 1.0)
    held.extend(b"still resizable")


def test_two_threads_are_refused_or_served_but_never_mixed() -> None:
    a, b = pair()
    frames = [Frame(tcp_packet(A, 1, B, 2, sequence=1, payload=bytes(60000)), 1240)] * 20
    refused: list[BaseException] = []
    sealed: list[bytes] = []

    def work() -> None:
        for _ in range(10):
            try:
                sealed.extend(s.datagrams for s in a.seal(frames, 2.0).sealed)
            except RuntimeError as err:
                refused.append(err)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(b.open(d, 1312, 2.0).authenticated == [1] for d in sealed)
    assert b.drops["replay"] == b.drops["auth"] == 0


def test_w20_truncated_inner_headers() -> None:
    a, b = pair()
    short_tcp = bytes.fromhex("45000016000000004006") + bytes(2) + A + B + b"\0\1"
    long_ihl = b"\x4f" + bytes.fromhex("00001400000000400600") + b"\0" + A + B
    six = bytes.fromhex("6000000000082c40") + bytes.fromhex("fd7a" + "00" * 13 + "01") * 2 + b"\6\0\0\1\0\0\0\1"
    for packet in (short_tcp, long_ihl, six):
        for sealed in a.seal_to(2, [packet], 2.0):
            opened = b.open(sealed.datagrams, 0, 2.0).opened
            assert [bytes(o.frame.packet) for o in opened] == [packet]
