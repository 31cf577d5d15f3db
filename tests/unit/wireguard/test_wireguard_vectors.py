"""Handshake messages byte for byte: computed vectors, and two handshakes captured with a real node."""

from __future__ import annotations

from tsd.base.keys import clamp, x25519, x25519_public
from tsd.wireguard import handshake
from tsd.wireguard.cookie import CookieGuard, MacStamp, mac1_key
from tsd.wireguard.handshake import Identity
from tsd.wireguard.messages import CookieReply, Initiation, Response
from tsd.wireguard.tai64n import Tai64nSource, decode_s, encode


def key(start: int) -> bytes:
    return clamp(bytes(range(start, start + 32)))


def identity(private: bytes) -> Identity:
    return Identity(private, x25519_public(private))


S_I, S_R = identity(key(0x00)), identity(key(0x20))
INIT = bytes.fromhex(
    "010000001111111179a631eede1bf9c98f12032cdeadd0e7a079398fc786b88cc846ec89af85a51af0225eb421886af8f54fb31289d49dcd"
    "82b0f6f3279d40d7cff913fece0c64ad226eef3320755b393b72f16842c8d7ee78a74e937e3f2a828ff4ecc11547a9c7d1ee1b22fedf3178"
    "ecbaddb3daae645ff1ba771d78f29971857550e800000000000000000000000000000000"
)
RESP = bytes.fromhex(
    "020000002222222211111111675dd574ed7789310b3d2e7681f3790b466c773b1521fecf36577958371ea52f3e676cdd223c411760a40437"
    "97ce52d27dd993b78b2f057ede39d1aecfdc6cfb00000000000000000000000000000000"
)
STAMP = bytes.fromhex("400000006553f10a00000000")
PSK = bytes(32)


def test_constants() -> None:
    assert handshake.CHAINING_KEY.hex() == "60e26daef327efc02ec335e2a025d2d016eb4206f87277f52d38d1988b78cd36"
    assert handshake.INITIAL_HASH.hex() == "2211b361081ac566691243db458ad5322d9c6c662293e8b70ee19c65ba079ef3"
    assert S_I.public.hex() == "8f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f"


def test_computed_handshake() -> None:
    shared = x25519(S_I.private, S_R.public)
    message, pending = handshake.create_initiation(S_I, S_R.public, shared, key(0x40), 0x11111111, STAMP)
    assert MacStamp(S_R.public).stamp(message.encode(), 0.0) == INIT
    half = handshake.read_initiation(S_R, Initiation.decode(INIT))
    assert half.static == S_I.public
    assert handshake.read_timestamp(half, shared) == STAMP
    response, responder_keys = handshake.create_response(half, key(0x60), PSK, 0x22222222)
    assert MacStamp(S_I.public).stamp(response.encode(), 0.0) == RESP
    initiator_keys = handshake.read_response(S_I, pending, Response.decode(RESP), PSK)
    assert initiator_keys == responder_keys
    assert [k.hex() for k in initiator_keys] == [
        "8c467a49ee5feffc8b390fba6ff460b5d66abf66f5e4bf9e0a5612b256498238",
        "eb356022624730ae787d7fccc635655d1b1b1fb7d81f299043b0ce85e3a3a4b4",
    ]


def test_cookie_vector() -> None:
    reply = CookieReply.decode(
        bytes.fromhex(
            "0300000011111111c0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d744eec54e987a5c31248c0b168315edabd89316bac0e0"
            "ddcaa97b8828f4f86bda"
        )
    )
    macs = MacStamp(S_R.public)
    assert not macs.consume(reply, 0.0), "nothing was sent yet"
    assert macs.stamp(INIT[:-32], 0.0) == INIT
    assert macs.consume(reply, 10.0)
    assert macs.stamp(INIT[:-32], 129.0)[-16:].hex() == "49eaa8ead899924aedcb809c740394ab"
    assert macs.stamp(INIT[:-32], 131.0)[-16:] == bytes(16), "the cookie is too old"
    assert reply.receiver_index == 0x11111111


def test_cookie_guard_round_trip() -> None:
    guard = CookieGuard(S_R.public, lambda count: bytes(range(0xC0, 0xC0 + count)))
    assert guard.is_mac1_valid(INIT) and not guard.is_mac1_valid(INIT[:-17] + b"\0" + INIT[-16:])
    assert not guard.is_mac2_valid(INIT, b"here", 0.0)
    reply = CookieReply.decode(guard.reply(INIT, b"here", 0.0))
    macs = MacStamp(S_R.public)
    macs.stamp(INIT[:-32], 0.0)
    assert macs.consume(reply, 0.0)
    assert not macs.consume(reply, 0.0), "a reply counts once"
    stamped = macs.stamp(INIT[:-32], 1.0)
    assert guard.is_mac2_valid(stamped, b"here", 2.0)
    assert not guard.is_mac2_valid(stamped, b"there", 2.0)
    assert not guard.is_mac2_valid(stamped, b"here", 121.0), "the secret rotates"
    assert len(mac1_key(S_R.public)) == 32


def test_live_handshake_as_initiator() -> None:
    ours = identity(bytes.fromhex("60d14269ee48d5e2d5de6be8b300689aa6a1e1561b9647b99c5ff1e146b83174"))
    peer = bytes.fromhex("294af3aaaa36ee69b83728866fe96b2c881c6044b28b3a845f4e2f488df44c1f")
    stamp = bytes.fromhex("400000006b0d96410a000000")
    shared = x25519(ours.private, peer)
    message, pending = handshake.create_initiation(ours, peer, shared, key(0x40), 0x11111111, stamp)
    assert MacStamp(peer).stamp(message.encode(), 0.0).hex() == (
        "010000001111111179a631eede1bf9c98f12032cdeadd0e7a079398fc786b88cc846ec89af85a51ac13476ee6b62fc0e2cc29ff569a78cca"
        "f9071b16933a0f0a38f8f05b62ce61d9fabb936c66e5ff2da7bb390593b35def669ebb6f4a2588f5da0c85d8f81095061349b56e05f18b2d"
        "fd30ae258f6f348d37c68fd262b90085e3086e8a00000000000000000000000000000000"
    )
    response = bytes.fromhex(
        "02000000184ab39b11111111e95e41f63191b37f1177b8cc29971f7d1c29dac93ae98a22fe6209a678b8f154119f00f62cc5cbc130c97db7"
        "a09fe893777ec0c08b0f154dc400a1ff0c52867f00000000000000000000000000000000"
    )
    keys = handshake.read_response(ours, pending, Response.decode(response), PSK)
    assert keys.initiator_to_responder.hex() == "73f41b9a7b58d1830d66956aa1aa3ae60ed392e7fa448a31dee60e8d6b8072a8"
    assert keys.responder_to_initiator.hex() == "8c1858c00231097d1ce9485b6849abe017d71127e747e68e38a71f8586168ddb"
    assert CookieGuard(ours.public, bytes).is_mac1_valid(response)


def test_live_handshake_as_responder() -> None:
    ours = identity(bytes.fromhex("9892f8a7adc331ff2794e56232d7ce45951ab90f298f5336d561bfd4a2b1d67b"))
    initiation = bytes.fromhex(
        "010000004e59845782a416a845d1ef2ab249fc5ac5ce795f7f67fda85c3f788af8e2f3ead052567fb844e8a6d9216abc6de871ddf614ebdb"
        "5e3f1ad7cad15f68826db36ab884c2c780f0e13a0357719e3e54663500d0b7b5d1c78c392d954f45599ef6f0b70c11809c2d821c79966872"
        "939f87f78fcefd406303b6b123d28b1fef10a16500000000000000000000000000000000"
    )
    half = handshake.read_initiation(ours, Initiation.decode(initiation))
    assert half.static.hex() == "294af3aaaa36ee69b83728866fe96b2c881c6044b28b3a845f4e2f488df44c1f"
    stamp = handshake.read_timestamp(half, x25519(ours.private, half.static))
    assert stamp.hex() == "400000006b0d96712a000000"


def test_tai64n_never_goes_back() -> None:
    assert encode(1_700_000_000_000_000_000).hex() == "400000006553f10a00000000"
    assert decode_s(encode(1_700_000_000_123_456_789)) == 1_700_000_000
    source = Tai64nSource()
    stamps = [source.stamp(wall) for wall in (10**18, 10**18, 10**18 + 1, 10**17, -5, 10**18 + 990_000_000, 10**18)]
    stamps += [source.stamp(10**18) for _ in range(200)]
    assert stamps == sorted(set(stamps))
    restored = Tai64nSource(source.last_ns)
    assert restored.stamp(0) > stamps[-1]
    assert all(stamp[11] == stamp[10] == stamp[9] == 0 for stamp in stamps)
