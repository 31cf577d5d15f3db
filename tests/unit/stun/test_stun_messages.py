"""STUN codec against the captured vectors."""

from ipaddress import IPv4Address, IPv6Address

import pytest

from tsd.base.addr import AddrPort
from tsd.base.errors import DecodeError
from tsd.stun.messages import decode_reply, decode_request, encode_reply, encode_request, is_stun
from tsd.stun.responder import StunResponder

TXID = bytes(range(12))
REQUEST = bytes.fromhex("000100142112a442000102030405060708090a0b802200087461696c6e6f6465802800048aabad90")
REPLY_V4 = bytes.fromhex("0101000c2112a442000102030405060708090a0b00200008000183bbea12d547")
REPLY_V6 = bytes.fromhex("010100182112a442000102030405060708090a0b00200014000283bb0113a9fa000102030405060708090a0a")
V4 = AddrPort(IPv4Address("203.0.113.5"), 41641)
V6 = AddrPort(IPv6Address("2001:db8::1"), 41641)


def test_request_vector():
    assert encode_request(TXID) == REQUEST
    assert decode_request(REQUEST) == TXID
    assert is_stun(REQUEST) and is_stun(REPLY_V4)


@pytest.mark.parametrize(("address", "reply"), [(V4, REPLY_V4), (V6, REPLY_V6)])
def test_reply_vectors(address, reply):
    assert encode_reply(TXID, address) == reply
    assert decode_reply(reply) == (TXID, address)
    assert decode_reply(reply + b"junk") == (TXID, address)


def test_client_unmaps_a_mapped_reply():
    mapped = AddrPort(IPv6Address("::ffff:203.0.113.5"), 41641)
    assert len(encode_reply(TXID, mapped)) == 32
    attribute = bytes.fromhex("00200014000283bb") + bytes(
        a ^ b for a, b in zip(mapped.ip.packed, b"\x21\x12\xa4\x42" + TXID, strict=True)
    )
    raw = bytes.fromhex("010100182112a442") + TXID + attribute
    assert decode_reply(raw) == (TXID, V4)


def test_plain_mapped_address_is_a_fallback():
    attribute = bytes.fromhex("00010008" + "0001a2a9" + "cb007105")
    raw = bytes.fromhex("0101000c2112a442") + TXID + attribute
    assert decode_reply(raw) == (TXID, V4)


def test_responder_answers_only_the_dialect():
    responder = StunResponder()
    assert responder.respond(REQUEST, V4) == REPLY_V4
    assert responder.respond(REQUEST[:20], V4) is None
    assert responder.respond(REQUEST[:-1] + b"\0", V4) is None
    assert responder.respond(REPLY_V4, V4) is None
    assert responder.respond(b"", V4) is None
    assert responder.replies == 1 and sum(responder.drops.values()) == 4


def test_w01_legacy_ipv6_reply_and_every_cut():
    mask = b"\x21\x12\xa4\x42" + TXID
    port = bytes(a ^ b for a, b in zip((41641).to_bytes(2, "big"), mask, strict=False))
    xored = bytes(a ^ b for a, b in zip(V6.ip.packed, mask, strict=True))
    plain = bytes.fromhex("00010014") + b"\0\2" + (1).to_bytes(2, "big") + IPv6Address("2001:db8::9").packed
    other = bytes.fromhex("802b0014") + plain[4:]
    legacy = bytes.fromhex("80200014") + b"\0\2" + port + xored
    raw = bytes.fromhex("010100482112a442") + TXID + plain + other + legacy
    assert decode_reply(raw) == (TXID, V6)
    for cut in range(len(raw)):
        with pytest.raises(DecodeError):
            decode_reply(raw[:cut])
    for length in (3, 4, 5, 0xFFFF):
        broken = raw[:20] + bytes.fromhex("8020") + length.to_bytes(2, "big") + legacy[4:]
        with pytest.raises(DecodeError):
            decode_reply(broken)
    for family in (0, 7):
        with pytest.raises(DecodeError):
            decode_reply(raw[:68] + bytes.fromhex("80200014") + bytes([0, family]) + legacy[6:])
