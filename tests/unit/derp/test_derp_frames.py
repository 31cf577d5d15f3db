"""DERP frame codec against the captured vectors."""

import pytest

from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import NodePrivate
from tsd.derp import frames
from tsd.derp.frames import ClientInfo, FrameSplitter, RawFrame, ServerInfo


def k(first: int) -> bytes:
    return bytes((first + i) & 0xFF for i in range(32))


SERVER, CLIENT, OTHER = NodePrivate(k(0xE0)), NodePrivate(k(0)), NodePrivate(k(0x20))
SERVER_KEY = bytes.fromhex("010000002844455250f09f9491736845d54e87de09d6bb114aa7042c50a4a015bd9901d1a0026f5956533a1519")
CLIENT_INFO = bytes.fromhex(
    "02000000688f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f4242424242424242424242424242424242424242"
    "42424242b49a62710333b2f973dd9b743715efabd4829ca2986e82e36a7d35fd7749231f78d3ba9901f2ce1056fb910dcdbefd83"
)
SERVER_INFO = bytes.fromhex(
    "0300000035434343434343434343434343434343434343434343434343db6b62c0b479569af6387ac1ba7673ff8c97581a5559028f7862eb34c1"
)
SEND_HI = bytes.fromhex("0400000022358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd1662546869")
RECV_HI = bytes.fromhex("05000000228f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f6869")


def test_login_vectors():
    assert frames.encode_server_key(SERVER.public()) == SERVER_KEY
    assert frames.decode_server_key(SERVER_KEY[5:] + b"future") == SERVER.public()
    assert frames.seal_client_info(CLIENT, SERVER.public(), ClientInfo(), b"\x42" * 24) == CLIENT_INFO
    assert frames.open_client_info(SERVER, CLIENT_INFO[5:]) == (CLIENT.public(), ClientInfo())
    assert frames.seal_server_info(SERVER, CLIENT.public(), ServerInfo(), b"\x43" * 24) == SERVER_INFO
    assert frames.open_server_info(CLIENT, SERVER.public(), SERVER_INFO[5:]) == ServerInfo()


def test_packet_and_notice_vectors():
    assert frames.send_packet(OTHER.public().raw, b"hi") == SEND_HI
    assert frames.recv_packet(CLIENT.public().raw, b"hi") == RECV_HI
    gone = bytes.fromhex("08000000218f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f01")
    assert frames.encode_peer_gone(CLIENT.public().raw, 1) == gone
    assert frames.decode_peer_gone(gone[5:]) == (CLIENT.public(), 1)
    assert frames.decode_peer_gone(gone[5:-1]) == (CLIENT.public(), 0)
    restarting = bytes.fromhex("1500000008000005dc00001388")
    assert frames.decode_restarting(restarting[5:]) == (1.5, 5.0)


def test_send_packets_frames_a_batch():
    dst = OTHER.public().raw
    raw = frames.send_packets(dst, b"aabbc", 2)
    assert FrameSplitter().feed(raw) == [RawFrame(4, dst + p) for p in (b"aa", b"bb", b"c")]
    assert frames.send_packets(dst, b"hi", 0) == SEND_HI
    assert frames.send_packets(dst, b"hi", 2) == SEND_HI


def test_w14_splitter_takes_any_cut_and_refuses_giants():
    stream = SEND_HI + frames.frame(0xEE, b"12345") + frames.frame(5) + RECV_HI
    whole = FrameSplitter().feed(stream)
    assert [f.kind for f in whole] == [4, 0xEE, 5, 5]
    for step in (1, 2, 3, 7, 50):
        splitter = FrameSplitter()
        pieces = [f for i in range(0, len(stream), step) for f in splitter.feed(stream[i : i + step])]
        assert pieces == whole
    with pytest.raises(ProtocolError):
        FrameSplitter().feed(b"\x05\xff\xff\xff\xff")
    with pytest.raises(ProtocolError):
        FrameSplitter().feed(b"\x03" + (1 + (1 << 20)).to_bytes(4, "big"))


def test_bad_logins_are_decode_errors():
    for raw in (b"", bytes(32), bytes(60), CLIENT_INFO[5:-1]):
        with pytest.raises(DecodeError):
            frames.open_client_info(SERVER, raw)
    for raw in (b"[1]", b"{", b"[" * 5000, b"\xff"):
        with pytest.raises(DecodeError):
            ClientInfo.decode(raw)
    assert ClientInfo.decode(b'{"Version":2,"canAckPings":1}') == ClientInfo(2, False)
    assert ServerInfo.decode(b'{"TokenBucketBytesPerSecond":5,"version":"x"}') == ServerInfo(0, 5)
