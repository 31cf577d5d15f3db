"""NAT-PMP and PCP bytes, against vectors taken from real clients and routers."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest

from tsd.portmap import pxp

OWN = IPv4Address("192.168.1.2")
NONCE = bytes(range(1, 13))
PCP_MAP = (
    "0201000000001c2000000000000000000000ffffc0a80102010203040506"
    "0708090a0b0c11000000a2a9000000000000000000000000ffff00000000"
)


def test_requests_to_the_byte() -> None:
    assert bytes(2) == pxp.PMP_ADDRESS_REQUEST
    assert pxp.pmp_map_request(41641, 0, 7200).hex() == "00010000a2a9000000001c20"
    assert pxp.pcp_announce_request(OWN).hex() == "020000000000000000000000000000000000ffffc0a80102"
    assert pxp.pcp_map_request(OWN, NONCE, 41641, 0, IPv4Address(0), 7200).hex() == PCP_MAP


def test_nat_pmp_answers() -> None:
    mapping = pxp.decode(bytes.fromhex("00810000000003e8a2a9a2a900001c20"))
    assert mapping == pxp.PmpMapping(0, 1000, 41641, 41641, 7200)
    address = pxp.decode(bytes.fromhex("00800000000003e8cb007105"))
    assert address == pxp.PmpAddress(0, 1000, IPv4Address("203.0.113.5"))
    assert pxp.decode(bytes.fromhex("00800000000003e800000000")) == pxp.PmpAddress(0, 1000, None)


def pcp_answer(
    result: int = 0, *, nonce: bytes = NONCE, port: int = 5000, epoch_s: int = 9, life_s: int = 7200
) -> bytes:
    head = bytes((2, 0x81, 0, result)) + life_s.to_bytes(4) + epoch_s.to_bytes(4) + bytes(12)
    mapped = bytes(10) + b"\xff\xff" + IPv4Address("203.0.113.5").packed
    return head + nonce + bytes((17, 0, 0, 0)) + (41641).to_bytes(2) + port.to_bytes(2) + mapped


def test_pcp_answers() -> None:
    outside = IPv4Address("203.0.113.5")
    assert pxp.decode(pcp_answer()) == pxp.PcpMapping(0, 9, NONCE, 41641, 5000, outside, 7200)
    assert pxp.decode(pcp_answer(8)[:24]) == pxp.PcpAnnounce(8, 9)


@pytest.mark.parametrize("length", [0, 1, 3, 11, 13, 15, 17])
def test_a_cut_nat_pmp_answer_is_none(length: int) -> None:
    assert pxp.decode(bytes.fromhex("00810000000003e8a2a9a2a900001c2000")[:length]) is None


@pytest.mark.parametrize("length", [4, 23, 24, 36, 59])
def test_w24_a_cut_pcp_answer_is_none(length: int) -> None:
    assert pxp.decode(pcp_answer()[:length]) is None


def test_requests_and_strangers_are_no_answers() -> None:
    assert pxp.decode(bytes.fromhex(PCP_MAP)) is None
    assert pxp.decode(bytes((7, 0x81, 0, 0)) + bytes(60)) is None
