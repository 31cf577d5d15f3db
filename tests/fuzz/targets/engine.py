"""Fuzz targets: a whole engine fed with map messages and with packets, and the small texts of the protocols."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

from harness.fedstream import Bench
from harness.loneengine import DERP_MAP, Keys, LoneEngine, peer_json
from tsd.base import keys
from tsd.base.addr import AddrPort, parse_ip, parse_number, parse_prefix
from tsd.base.errors import DecodeError, TsdError
from tsd.dataplane.reference import ReferenceCore
from tsd.hull import Frame
from tsd.magicsock.types import DerpSource
from tsd.tailcfg.lenient import mended_text, without_nulls
from tsd.tailcfg.mapresponse import MapResponse, decode_map_response
from tsd.tailcfg.wire import time_ns, time_text
from tsd.transport import tls

_BENCH = Bench()
_SEND, _RECEIVE = b"a" * 32, b"b" * 32


class _Running:
    """One engine, started at the first input and put back in order after each."""

    def __init__(self) -> None:
        self._lone: LoneEngine | None = None

    async def get(self) -> LoneEngine:
        if self._lone is None:
            self._lone = LoneEngine()
            await self._lone.engine.start()
            self._lone.register()
            # One that knows us by another address: its packets are rewritten on their way.
            renames = {"SelfNodeV4MasqAddrForThisPeer": "100.64.9.9", "SelfNodeV6MasqAddrForThisPeer": "fd7a::9"}
            self._lone.first_map(peer_json(3), peer_json(4, **renames))
            self._lone.engine.reach._set_home(1)
        return self._lone


_RUNNING = _Running()


def fuzz_engine_map(data: bytes) -> None:
    """Whatever control says: refused as a whole, or taken; another peer stays reachable and status can be told."""

    async def run() -> None:
        lone = await _RUNNING.get()
        for is_first in (False, True):
            with contextlib.suppress(TsdError):
                lone.engine.on_map(decode_map_response(data), is_first)
            json.dumps(lone.backend.status())
            lone.backend.whois("100.64.0.3:1", "")
            lone.backend.watch(0xFFFF).close()
            lone.backend.user_metrics()
            lone.first_map(peer_json(3), peer_json(4, SelfNodeV4MasqAddrForThisPeer="100.64.9.9"), DERPMap=DERP_MAP)
            assert lone.routed("100.64.0.3") == 3
        lone.sent.clear()

    _quietly(lambda: _BENCH.run(run()))


def fuzz_engine_packets(data: bytes) -> None:
    """Packets from the host, from strangers, and, sealed, from a peer; cut at FF 00."""
    pieces = data.split(b"\xff\x00")[:20]

    async def run() -> None:
        lone = await _RUNNING.get()
        number = 3 + len(data) % 2
        plane, peer = lone.engine.plane, lone.engine.tailnet.peers.by_id(number)
        assert plane is not None and peer is not None
        sender = ReferenceCore()
        sender.add_peer(1)
        sender.set_allowed_ips(1, [ip_network("0.0.0.0/0"), ip_network("::/0")])
        sender.install_session(1, 7, 5, _SEND, _RECEIVE, True, 0.0)
        plane.core.install_session(peer.handle, 5, 7, _RECEIVE, _SEND, True, lone.clock.now())
        source = AddrPort(parse_ip("192.0.2.3"), 41641)
        relayed = DerpSource(1, Keys(number).node.public())
        for piece in pieces:
            lone.hull.tun.inject([piece])  # type: ignore[attr-defined]
            plane.datapath.from_host([Frame(piece, len(piece) % 1400)])
            plane.on_udp(memoryview(piece), len(piece) // 2, source)
            plane.datapath.from_derp([piece, piece[:40]], relayed)
            for sealed in sender.seal_to(1, [piece], 1.0):
                plane.on_udp(memoryview(sealed.datagrams), sealed.datagram_bytes, source)
        lone.hull.tun.take_delivered()  # type: ignore[attr-defined]
        lone.sent.clear()

    _quietly(lambda: _BENCH.run(run()))


def fuzz_lenient_json(data: bytes) -> None:
    """The second look at JSON: Unicode afterwards, unchanged where nothing was wrong, and no null that is not taken."""
    text = mended_text(data)
    text.decode()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    with contextlib.suppress(RecursionError):
        kept = without_nulls(value, MapResponse)
        assert without_nulls(kept, MapResponse) == kept


def fuzz_small_texts(data: bytes) -> None:
    """Keys, addresses, prefixes, numbers and times."""
    text = data.decode("latin-1")
    kinds: list[Callable[[str], Any]] = [keys.NodePublic.parse, keys.DiscoPublic.parse, keys.MachinePublic.parse]
    kinds += [keys.NodePrivate.parse, keys.MachinePrivate.parse, keys.LockPrivate.parse]
    kinds += [AddrPort.parse, parse_ip, parse_prefix]
    for parse in kinds:
        with contextlib.suppress(DecodeError):
            parse(text)
    number = parse_number(text, 65535)
    assert number is None or str(number) == text.lstrip("0") or number == 0
    at_ns = time_ns(text)
    if at_ns is not None and at_ns >= 0:
        assert time_ns(time_text(at_ns)) == at_ns


def fuzz_certificate(data: bytes) -> None:
    """A relay's certificate chain, cut at FF FE."""
    chain = data.split(b"\xff\xfe")[:5]
    tls.meta_key(chain)
    for name in ("relay.example", "sha256-raw:" + "0" * 64):
        with contextlib.suppress(TsdError):
            tls.verify_peer(chain, "relay.example", name, False, 1.8e9)


def _quietly(work: Callable[[], None]) -> None:
    logging.disable(logging.CRITICAL)
    try:
        work()
    finally:
        logging.disable(logging.NOTSET)
