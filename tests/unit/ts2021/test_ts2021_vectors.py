"""Handshake and records against vectors computed independently, and one taken from a real headscale."""

import pytest

from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ProtocolError
from tsd.base.keys import MachinePrivate, MachinePublic, clamp
from tsd.ts2021.handshake import ClientHandshake, accept_initiation, error_frame
from tsd.ts2021.records import EarlyPayloadReader, RecordReader, RecordWriter, early_frame

MACHINE = MachinePrivate(clamp(bytes(range(0x01, 0x21))))
MACHINE_EPHEMERAL = bytes(range(0x21, 0x41))
CONTROL = MachinePrivate(clamp(bytes(range(0x41, 0x61))))
CONTROL_EPHEMERAL = bytes(range(0x61, 0x81))

INITIATION = bytes.fromhex(
    "00910100605869aff450549732cbaaed5e5df9b30a6da31cb0e5742bad5ad4a1a768f1a67b822e8514e6389169bdfd10afecae5bded9cda3f0"
    "157ac1d03cd3620b3bb73a8622af140d231efc6396f1c80598dc7289c50e831342d4c8605e6d5bccc41fba65"
)
RESPONSE = bytes.fromhex(
    "020030244fe3b963e899dd295baffce248d3530f3a9a7479ba063002680ebfe7adad497cc147989eb24756280c2216d1f9d8e5"
)
HASH = "321714d20086399690b1ca68b173c01de3145831416fd3a049c6db8a2eb99214"
CLIENT_TO_SERVER = "9d8a0c9bfad81a7ac34484c53c3b9e730edd3c0249faac7826a8cf9f4b9713b1"
SERVER_TO_CLIENT = "5c591b6bc88039fb598c45334d246af59501be8061e51f3950afafc7d1fb28cb"

LIVE_CONTROL = MachinePrivate.parse("privkey:b07b8735e5410cfbc4c4569379e6423b53b0221ab9543eb3239c1078ae5b5944")
LIVE_INITIATION_TAIL = (
    "fe40ef746aec4c5c4ed2a3721dc3a9148dc572590d0f1c2fc493fe430ac1dba30b386d80affdcd28aab92d9ce3a19c70f3d9"
)
LIVE_RESPONSE = bytes.fromhex(
    "020030a511716118c14e9509acf2967b30f1ffe5bf9f13b408adb8df665cb4600a955e9773560bc43f6325365ee6442158af60"
)
LIVE_RECORDS = [
    "0400154a41007f47a60562c63a544eb406c2a3ba079aec24",
    "040014a5128366af1467adf35c084e19d43b958d3f4099",
    "04006f54578ad2a84221cd1a8ca94cc63ee3c89024bb8de499689109ff31a1b2c2e0dd3f6131b8d17932d8dba690d45cc4fc87f3cf61d2a1"
    "bec6cb558928610a6282901d4162b5068b5c1eeaf32fc10634a4f61a8e750d7af7d93a316debb1857f268d36f58104653e6299343b3806dfee2a",
    "04003d25b956ea967fa1991208f034f1c54cec2f9b1326ca9d7d61179f5292e48f4103cdcf039edcf118c398395e29cf7367375d0502a757"
    "2843a9077d3eea39",
]
LIVE_EARLY = b'{"nodeKeyChallenge":"chalpub:2372db361963ad70cd89c8ce3f235f2531b2b1474f11e504b4006209614df802"}'


def client(control: MachinePublic | None = None, version: int = 145) -> ClientHandshake:
    return ClientHandshake(
        MACHINE, control or CONTROL.public(), protocol_version=version, entropy=lambda count: MACHINE_EPHEMERAL[:count]
    )


def test_both_roles_match_the_vector() -> None:
    handshake = client()
    assert handshake.initiation == INITIATION
    response, server_keys = accept_initiation(CONTROL, INITIATION, entropy=lambda count: CONTROL_EPHEMERAL[:count])
    assert response == RESPONSE
    keys = handshake.finish(response)
    assert keys.handshake_hash.hex() == server_keys.handshake_hash.hex() == HASH
    assert keys.send.hex() == server_keys.receive.hex() == CLIENT_TO_SERVER
    assert keys.receive.hex() == server_keys.send.hex() == SERVER_TO_CLIENT
    assert server_keys.peer == MACHINE.public()
    assert (keys.protocol_version, server_keys.protocol_version) == (145, 145)
    assert CLIENT_TO_SERVER not in repr(keys)


def test_live_headscale_vector() -> None:
    handshake = client(LIVE_CONTROL.public())
    assert LIVE_INITIATION_TAIL in handshake.initiation.hex()
    keys = handshake.finish(LIVE_RESPONSE)
    assert keys.handshake_hash.hex() == "4bfdd25efdf70a5d1a83361582cd2a4c0764ab788b3deac3343a9905a95eeae1"
    assert keys.send.hex() == "4a57ebf0d9a1f8f90bd1a17b23e829e18ad5b5d45269a15664238301a42e5aa5"
    reader, early = RecordReader(keys.receive), EarlyPayloadReader()
    settings = b""
    for byte in bytes.fromhex("".join(LIVE_RECORDS)):
        settings += early.receive(reader.receive(bytes([byte])))
    assert early.payload == LIVE_EARLY
    assert settings[:9].hex() == "000024040000000000"
    assert not reader.is_mid_record


def test_record_vectors() -> None:
    writer = RecordWriter(bytes.fromhex(CLIENT_TO_SERVER))
    assert writer.seal_record(b"hello").hex() == "04001507243be7982fab9bbb554647607dd6488c8e819717"
    assert writer.seal_record(b"").hex() == "040010bc667e34bbedec96fa18b406937d479d"
    for _ in range(254):
        writer.seal_record(b"")
    assert writer.seal_record(b"x").hex() == "0400110c49e67b0420ba72ab6ad65eb0ea62bc40"


def test_early_payload_vector() -> None:
    sealed = (
        "04007866cb70ea66541235ed6fb2a8cff33aeccba67e51fd074e667c8d6485f6a5b5de5d153152c6452b704ae662dfb91f4941bccb95688e"
        "aa296dc78f0ccb3886515ba0a000d22218ede392e68c53e1eb2288821613562ce791000ec2be184a2b6ed4e4b0508694acda58acd7575c07"
        "9f300483a202a7a8087eb6"
    )
    payload = b'{"nodeKeyChallenge":"chalpub:883186b800b41d5cf0429695da9b3cc4f328ebcd184a6e482fa578c103f06c77"}'
    assert RecordWriter(bytes.fromhex(SERVER_TO_CLIENT)).seal(early_frame(payload)).hex() == sealed
    plain = RecordReader(bytes.fromhex(SERVER_TO_CLIENT)).receive(bytes.fromhex(sealed))
    early = EarlyPayloadReader()
    assert early.receive(plain + b"PRI") == b"PRI"
    assert early.payload == payload


def test_without_early_payload_nothing_is_swallowed() -> None:
    early = EarlyPayloadReader()
    assert early.receive(b"") == b""
    assert early.receive(b"\x00") == b"\x00"
    assert early.receive(b"\xff\xff") == b"\xff\xff"
    near_miss = EarlyPayloadReader()
    assert near_miss.receive(b"\xff\xff\xffT") == b""
    assert near_miss.receive(b"X") == b"\xff\xff\xffTX"
    with pytest.raises(ProtocolError):
        EarlyPayloadReader().receive(b"\xff\xff\xffTS\xff\xff\xff\xff")


@pytest.mark.parametrize("length", [0, 1, 4077, 4078, 100_000])
def test_streams_of_any_length(length: int) -> None:
    plaintext = SeededEntropy(length)(length)
    sealed = RecordWriter(bytes(32)).seal(plaintext)
    reader = RecordReader(bytes(32))
    assert b"".join(reader.receive(sealed[at : at + 1000]) for at in range(0, len(sealed), 1000)) == plaintext


def test_w15_record_limit() -> None:
    full = RecordWriter(bytes(32)).seal_record(bytes(4077))
    assert len(full) == 4096
    assert RecordReader(bytes(32)).receive(full) == bytes(4077)
    reader = RecordReader(bytes(32))
    with pytest.raises(ProtocolError, match="limit"):
        reader.receive(b"\x04" + (4094).to_bytes(2, "big"))
    with pytest.raises(ProtocolError, match="limit"):
        reader.receive(b"")
    cut = RecordReader(bytes(32))
    assert cut.receive(full[:100]) == b""
    assert cut.is_mid_record


@pytest.mark.parametrize("frame", [b"\x03\x00\x01x", b"\x04\x00\x00", b"\x04\x00\x10" + bytes(16), b"\x04\x00\x01x"])
def test_bad_records_kill_the_stream(frame: bytes) -> None:
    reader = RecordReader(bytes(32))
    with pytest.raises(ProtocolError):
        reader.receive(frame)


@pytest.mark.parametrize("position", [0, 2, 4, 5, 40, 90, 100])
def test_tampered_initiation_is_refused(position: int) -> None:
    tampered = bytearray(INITIATION)
    tampered[position] ^= 1
    with pytest.raises(ProtocolError):
        accept_initiation(CONTROL, bytes(tampered), entropy=lambda count: bytes(range(count)))


def test_bad_responses() -> None:
    for response in (b"", RESPONSE[:-1], RESPONSE[:-1] + b"\0", b"\x04" + RESPONSE[1:]):
        with pytest.raises(ProtocolError):
            client().finish(response)
    with pytest.raises(ProtocolError, match="too old"):
        client().finish(error_frame("too old"))


def test_low_order_point_is_refused() -> None:
    with pytest.raises(ProtocolError):
        client().finish(b"\x02\x00\x30" + bytes(32) + bytes(16))
