"""Disco envelope and messages against the captured vectors."""

from ipaddress import IPv4Address

import pytest

from tsd.base.addr import AddrPort
from tsd.base.errors import DecodeError
from tsd.base.keys import DiscoPrivate, NodePrivate
from tsd.disco.box import DiscoKeyring, is_disco, sender_of
from tsd.disco.messages import (
    AllocateRequest,
    AllocateResponse,
    CallMeMaybe,
    CallMeMaybeVia,
    Ping,
    Pong,
    RelayBind,
    RelayEndpoint,
    Unknown,
    decode,
)


def k(first: int) -> bytes:
    return bytes(range(first, first + 32))


TXID = bytes(range(1, 13))
NODE_KEY = NodePrivate(k(0)).public().raw
WHERE = AddrPort(IPv4Address("203.0.113.5"), 41641)
LAN = AddrPort(IPv4Address("192.168.1.2"), 41641)
PING = bytes.fromhex(
    "5453f09f92ac493e82fc74464a59268817623d2053c5eb8e2cc4a988b4fee179ec6b010d531dc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1"
    "d2d3d4d5d6d741c5fa56601ff5852b76f5566ebce1b71fdaaef72b5889853be7179c27091f2c82cfd0da6e3241f5168ec4962cf7a28f8142"
    "7b27418b7aee3e2445c33cce"
)
PONG = bytes.fromhex(
    "5453f09f92ac605a725d2a4adfeeb1a29e17edd621c1b7593ee8cdbc44ac6c4ab6e2f805d23ce0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1"
    "f2f3f4f5f6f77ac322c9b82726730a13ff0cb7d86304253ca7771226834c94a08f417238926f9a2eddc30e8bb522be5798182f0039bd"
)
RELAY = RelayEndpoint(k(1), (k(2), k(3)), 7, 9, 30 * 10**9, 300 * 10**9, (WHERE, LAN))


def rings() -> tuple[DiscoKeyring, DiscoKeyring]:
    return DiscoKeyring(DiscoPrivate(k(0x80))), DiscoKeyring(DiscoPrivate(k(0xA0)))


def test_ping_and_pong_vectors():
    a, b = rings()
    assert a.seal_to(b.public.raw, bytes(range(0xC0, 0xD8)), Ping(TXID, NODE_KEY).encode()) == PING
    assert b.seal_to(a.public.raw, bytes(range(0xE0, 0xF8)), Pong(TXID, WHERE).encode()) == PONG
    assert is_disco(PING) and sender_of(PING) == a.public.raw
    assert decode(b.open_from(a.public.raw, PING)) == Ping(TXID, NODE_KEY)
    assert decode(a.open_from(b.public.raw, PONG)) == Pong(TXID, WHERE)
    assert len(PING) == 124 and len(PONG) == 110


def test_live_pong_vector():
    ours = DiscoKeyring(DiscoPrivate.parse("privkey:c05ee77eb5628424d1c7458f5f40142f0f2dfc1c7ef1c763a5dc3299bbc54453"))
    peer = bytes.fromhex("8114fc792761adee2f311c3afe6fda532d9096ad676b66de9f9fb87aa138c62c")
    raw = bytes.fromhex(
        "5453f09f92ac8114fc792761adee2f311c3afe6fda532d9096ad676b66de9f9fb87aa138c62c29dab77bd89a194e14f881ef5cc78eb3744b"
        "44a792df2c83b7462317fda2ccd2d0131632c664574614728a38d8ce28ba288dfafeb7fea1aa5636e3fabab77c13481346537b65ceea"
    )
    assert decode(ours.open_from(peer, raw)) == Pong(TXID, AddrPort(IPv4Address("10.98.0.40"), 41703))


def test_call_me_maybe_vector():
    raw = bytes.fromhex("030000000000000000000000ffffcb007105a2a900000000000000000000ffffc0a80102a2a9")
    assert CallMeMaybe((WHERE, LAN)).encode() == raw
    assert decode(raw) == CallMeMaybe((WHERE, LAN))
    assert decode(raw + b"x") == CallMeMaybe()
    assert decode(b"\x03\x01" + raw[2:]) == CallMeMaybe()


@pytest.mark.parametrize(
    "message",
    [
        Ping(TXID),
        Ping(TXID, NODE_KEY, 40),
        RelayBind(4, 9, 1, k(5), k(6)),
        CallMeMaybeVia(RELAY),
        AllocateRequest((k(2), k(3)), 4),
        AllocateResponse(4, RELAY),
    ],
)
def test_round_trips_and_cuts(message):
    raw = message.encode()
    assert decode(raw) == message
    for cut in range(2, 14):
        with pytest.raises(DecodeError):
            decode(raw[:cut])


def test_unknown_type_and_trailing_bytes():
    assert decode(b"\x77\x00abc") == Unknown(0x77)
    assert decode(Pong(TXID, WHERE).encode() + b"more") == Pong(TXID, WHERE)


def test_foreign_and_low_order_keys_are_decode_errors():
    a, _ = rings()
    with pytest.raises(DecodeError):
        a.open_from(DiscoPrivate(k(0x10)).public().raw, PING)
    with pytest.raises(DecodeError):
        a.open_from(bytes(32), PING)
    with pytest.raises(DecodeError):
        a.seal_to(bytes(32), bytes(24), b"x")
    with pytest.raises(DecodeError):
        sender_of(b"TS")
