"""The MSS clamp: what a SYN may say, its checksum, and that nothing else is touched; the C one says the same."""

from __future__ import annotations

import random
from itertools import product

import pytest

import tsnative
from tsd.packet.build import tcp_packet, udp_packet
from tsd.packet.checksum import transport_checksum
from tsd.packet.constants import TCP, TCP_ACK, TCP_SYN
from tsd.packet.mss import clamped

V4 = bytes((100, 64, 0, 1)), bytes((100, 64, 0, 2))
V6 = bytes(15) + b"\x01", bytes(15) + b"\x02"


def mss(value: int) -> bytes:
    return b"\x02\x04" + value.to_bytes(2, "big")


def syn(ends: tuple[bytes, bytes], options: bytes, flags: int = TCP_SYN) -> bytes:
    return tcp_packet(ends[0], 1000, ends[1], 80, sequence=7, flags=flags, options=options)


def is_sound(packet: bytes) -> bool:
    at = 20 if packet[0] >> 4 == 4 else 40
    source, target = (packet[12:16], packet[16:20]) if at == 20 else (packet[8:24], packet[24:40])
    segment = packet[at : at + 16] + bytes(2) + packet[at + 18 :]
    return transport_checksum(source, target, TCP, segment) == int.from_bytes(packet[at + 16 : at + 18], "big")


@pytest.mark.parametrize(("ends", "most"), [(V4, 1240), (V6, 1220)])
@pytest.mark.parametrize("flags", [TCP_SYN, TCP_SYN | TCP_ACK])
@pytest.mark.parametrize("before", [b"", b"\x01", b"\x04\x02", b"\x01\x01\x01"])
def test_a_syn_names_what_fits(ends: tuple[bytes, bytes], most: int, flags: int, before: bytes) -> None:
    options = before + mss(1460)
    packet = syn(ends, options + bytes(-len(options) % 4), flags)
    lowered = bytes(clamped(packet, 1280))
    assert lowered != packet and is_sound(lowered) and mss(most) in lowered
    assert bytes(clamped(lowered, 1280)) == lowered
    assert len(lowered) == len(packet) and sum(a != b for a, b in zip(lowered, packet, strict=True)) <= 4


def test_nothing_else_is_touched() -> None:
    for ends, options in product(
        (V4, V6), (mss(536), b"", b"\x01\x01\x01\x00", b"\x02\x03\x05\xb4", b"\x08\x00\x02\x04")
    ):
        packet = syn(ends, options)
        assert clamped(packet, 1280) is packet
    running = syn(V4, mss(1460), TCP_ACK)
    fragment = bytearray(syn(V4, mss(1460)))
    fragment[7] = 5
    for packet in (running, fragment, udp_packet(V4[0], 1, V4[1], 2, bytes(50)), b"", b"\x45", bytes(60)):
        assert clamped(packet, 1280) is packet


@pytest.mark.skipif(tsnative.native is None, reason="the native core is not built")
def test_c_and_python_agree_on_anything() -> None:
    assert tsnative.native is not None
    rng = random.Random(5)
    for _ in range(3000):
        ends = rng.choice((V4, V6))
        options = (
            rng.randbytes(4 * rng.randrange(0, 10))
            if rng.random() < 0.5
            else mss(rng.randrange(65536)) + b"\x01\x03\x03\x07"
        )
        packet = bytearray(syn(ends, options, rng.choice((TCP_SYN, TCP_SYN | TCP_ACK, TCP_ACK))))
        for _ in range(rng.randrange(3)):
            packet[rng.randrange(len(packet))] = rng.randrange(256)
        packet = packet[: rng.randrange(len(packet) + 1)] if rng.random() < 0.2 else packet
        assert tsnative.native.clamp_mss(bytes(packet), 1280) == bytes(clamped(packet, 1280)), packet.hex()
