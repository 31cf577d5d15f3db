"""Fuzz targets: the control protocol's parsers, client and server side."""

from __future__ import annotations

from typing import Any

from tsd.base.entropy import SeededEntropy
from tsd.base.errors import DecodeError, ProtocolError
from tsd.base.keys import MachinePrivate
from tsd.engine.control.c2n import parse
from tsd.http2.machine import Http2Machine
from tsd.netmap import snapshot
from tsd.netmap.netmap import Netmap, apply
from tsd.routes.derive import RouteWishes, derive
from tsd.tailcfg.mapresponse import decode_map_response
from tsd.tailcfg.node import Node
from tsd.tailcfg.register import RegisterResponse
from tsd.tailcfg.wire import decode_json, encode_json
from tsd.transport.frontdoor import _parse_head
from tsd.transport.zstd import decompress
from tsd.ts2021.handshake import ClientHandshake, accept_initiation
from tsd.ts2021.records import EarlyPayloadReader, RecordReader

_STATIC = MachinePrivate.generate(SeededEntropy("fuzz control"))
_MACHINE = MachinePrivate.generate(SeededEntropy("fuzz machine"))


def fuzz_map_response(data: bytes) -> None:
    """Whatever parses can be applied, planned and encoded again."""
    try:
        message = decode_map_response(data)
    except DecodeError:
        return
    encode_json(message)
    start = Netmap(Node(id=1, name="self.tn.example.", addresses=("100.64.0.1/32",)))
    netmap, _ = apply(start, message, wall_ns=0)
    derive(netmap, RouteWishes(accept_routes=True))
    for node in (netmap.self_node, *netmap.peers.values()):
        _ = (node.hostinfo, node.node_key, node.disco, node.home_region, node.is_expired(0))


def fuzz_netmap_snapshot(data: bytes) -> None:
    """A saved netmap is read as a message of control, or refused; what was read can be saved again."""
    steps = snapshot.decode(data)
    try:
        while True:
            next(steps)
    except DecodeError:
        return
    except StopIteration as done:
        found: snapshot.Snapshot = done.value
    netmap, _ = apply(None, found.message, wall_ns=0, is_first=True)
    assert found.saved_ns is not None and netmap.self_node.key == found.node_key
    for _ in snapshot.encode(netmap, found.about):
        pass


def fuzz_register_response(data: bytes) -> None:
    try:
        encode_json(decode_json(data, RegisterResponse))
    except DecodeError:
        pass


def fuzz_ts2021_handshake(data: bytes) -> None:
    entropy = SeededEntropy(1)
    for initiation in (data, b"\x00\x91\x01\x00\x60" + data.ljust(96, b"\0")[:96]):
        try:
            accept_initiation(_STATIC, initiation, entropy=entropy)
        except ProtocolError:
            pass
    client = ClientHandshake(_MACHINE, _STATIC.public(), protocol_version=145, entropy=entropy)
    for response in (data, b"\x02\x00\x30" + data.ljust(48, b"\0")[:48]):
        try:
            client.finish(response)
        except ProtocolError:
            pass


def fuzz_ts2021_records(data: bytes) -> None:
    reader = RecordReader(bytes(32))
    try:
        for at in range(0, len(data), 7):
            reader.receive(data[at : at + 7])
    except ProtocolError:
        pass


def fuzz_ts2021_early(data: bytes) -> None:
    whole, pieces = EarlyPayloadReader(), EarlyPayloadReader()
    outcomes: list[Any] = []
    for early, parts in ((whole, [data]), (pieces, [data[at : at + 1] for at in range(len(data))])):
        try:
            outcomes.append((b"".join(early.receive(part) for part in parts), early.payload))
        except ProtocolError:
            outcomes.append(None)
    assert outcomes[0] == outcomes[1]


def fuzz_http2(data: bytes) -> None:
    """Both roles survive anything, before and after the preface."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    for is_client, head in ((True, preface[24:]), (False, preface), (False, b"")):
        machine = Http2Machine(is_client=is_client)
        if is_client:
            machine.open_stream([(":method", "GET"), (":scheme", "https"), (":authority", "h"), (":path", "/")])
        machine.receive(head + data)
        machine.take_events()
        machine.take_bytes()
        machine.close()


def fuzz_zstd(data: bytes) -> None:
    for frame in (data, b"\x28\xb5\x2f\xfd" + data):
        try:
            assert len(decompress(frame, 1 << 20)) <= 1 << 20
        except DecodeError:
            pass


def fuzz_upgrade_head(data: bytes) -> None:
    _parse_head(data)


def fuzz_c2n(data: bytes) -> None:
    try:
        parse(data.decode("latin-1"))
    except DecodeError:
        pass
