"""Fuzz targets: STUN, disco and DERP parsers, and the machines that feed on them."""

from __future__ import annotations

import contextlib
from ipaddress import IPv4Address

from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import DiscoPrivate, NodePrivate
from tsd.derp import frames
from tsd.derp.bundle import bundles, unbundle
from tsd.derp.client import DerpClientMachine
from tsd.derp.frames import ClientInfo, FrameSplitter
from tsd.derp.server import DerpRouter
from tsd.disco import messages
from tsd.disco.box import DiscoKeyring, is_disco, sender_of
from tsd.magicsock.magicsock import Magicsock
from tsd.magicsock.types import DerpSource, PeerPaths
from tsd.netcheck.netcheck import NetcheckMachine
from tsd.stun.messages import decode_reply, decode_request
from tsd.stun.responder import StunResponder

SOURCE = AddrPort(IPv4Address("192.0.2.1"), 7)
_ENTROPY = SeededEntropy(9)
_A, _B = NodePrivate.generate(_ENTROPY), NodePrivate.generate(_ENTROPY)
_DISCO_A, _DISCO_B = DiscoPrivate.generate(_ENTROPY), DiscoPrivate.generate(_ENTROPY)


def fuzz_stun(data: bytes) -> None:
    for decode in (decode_reply, decode_request):
        with contextlib.suppress(DecodeError):
            decode(data)
    StunResponder().respond(data, SOURCE)
    NetcheckMachine(entropy=SeededEntropy(1)).receive_stun(data, SOURCE, 1.0)


def fuzz_derp_bundle(data: bytes) -> None:
    found = unbundle(data)
    if found is not None:
        again = bundles(bytes(found[0]), found[1])
        # Only what was bundled is longer than one datagram.
        assert sum(len(piece) - 6 * (len(piece) > found[1]) for piece in again) == len(found[0])


def fuzz_disco_plaintext(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        message = messages.decode(data)
        if not isinstance(message, messages.Unknown):
            assert messages.decode(message.encode()) == message


def fuzz_disco_envelope(data: bytes) -> None:
    """As it comes, and with a known sender put into it."""
    sock = Magicsock(_A, _DISCO_A, entropy=SeededEntropy(2))
    sock.set_peer(1, PeerPaths(_B.public(), _DISCO_B.public(), (SOURCE,), 1), 1.0)
    known = data[:6] + _DISCO_B.public().raw + data[38:]
    for datagram in (data, known):
        with contextlib.suppress(DecodeError):
            sender_of(datagram)
        sock.receive_disco(datagram, SOURCE, 1.0)
        sock.receive_disco(datagram, DerpSource(1, _B.public()), 1.0)
    assert not sock.take_outputs()


def fuzz_magicsock(data: bytes) -> None:
    """The bytes are a plaintext that a known peer sealed."""
    sock = Magicsock(_A, _DISCO_A, entropy=SeededEntropy(3))
    sock.set_peer(1, PeerPaths(_B.public(), _DISCO_B.public(), (), 1), 1.0)
    datagram = DiscoKeyring(_DISCO_B).seal_to(_DISCO_A.public().raw, bytes(24), data)
    assert is_disco(datagram)
    sock.receive_disco(datagram, SOURCE, 1.0)
    sock.receive_disco(datagram, DerpSource(1, _B.public()), 1.0)
    sock.route(1, 1.0)
    sock.on_deadline(9.0)
    sock.take_outputs()


def fuzz_derp_stream(data: bytes) -> None:
    """Any cut of a stream gives the same frames."""
    try:
        whole = FrameSplitter().feed(data)
    except ProtocolError:
        return
    splitter = FrameSplitter()
    step = data[0] % 9 + 1 if data else 1
    assert [f for i in range(0, len(data), step) for f in splitter.feed(data[i : i + step])] == whole


def fuzz_derp_client(data: bytes) -> None:
    client = DerpClientMachine(_A, entropy=SeededEntropy(4), server_key=_B.public())
    client.start(1.0)
    client.receive(frames.seal_server_info(_B, _A.public(), frames.ServerInfo(), bytes(24)), 1.0)
    client.receive(data, 2.0)
    client.on_deadline(99.0)
    client.take_outputs()


def fuzz_derp_server(data: bytes) -> None:
    """To one client that has logged in and one that has not."""
    router = DerpRouter(_B, entropy=SeededEntropy(5))
    known, stranger = router.connect(SOURCE, 1.0), router.connect(SOURCE, 1.0)
    router.receive(known, frames.seal_client_info(_A, _B.public(), ClientInfo(), bytes(24)), 1.0)
    for connection in (known, stranger):
        router.receive(connection, data, 2.0)
        router.take(connection, 2.0)
    router.on_deadline(99.0)
    router.take_outputs()


def fuzz_derp_login(data: bytes) -> None:
    for decode in (frames.ClientInfo.decode, frames.ServerInfo.decode, frames.decode_server_key):
        with contextlib.suppress(DecodeError):
            decode(data)
    with contextlib.suppress(DecodeError):
        frames.open_client_info(_B, data)
