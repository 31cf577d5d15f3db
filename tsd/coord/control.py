"""Requests inside a control connection: register, map polls and updates, replies of nodes to our pings.

Spec: control.md sections 3-5 (tailscale: control/controlclient/direct.go). Everything that a small tailnet does not
need (tokens, device attributes, tailnet lock) is answered 501, which clients take calmly.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tsd.base.errors import ControlError, DecodeError
from tsd.base.keys import MachinePublic
from tsd.base.log import fields
from tsd.coord.state.config import MIN_CAPABILITY_VERSION
from tsd.coord.state.coordinator import Coordinator
from tsd.coord.state.records import Moment, NodeRecord
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import RegisterRequest, RegisterResponse
from tsd.tailcfg.wire import decode_json, encode_json
from tsd.transport.h2 import Http2Request
from tsd.transport.zstd import compress

log = logging.getLogger("tsd.coord.control")

T = TypeVar("T")

MAX_BODY_BYTES = 1 << 20
QUEUED_FRAMES = 256
_COMPRESSED_KEPT = 64
_LENGTH = struct.Struct("<I")


class Host(Protocol):
    """What the requests need from the server around them."""

    coordinator: Coordinator

    def moment(self) -> Moment: ...
    def drain(self) -> None:
        """Deliver what the coordinator has put out."""


@dataclass(slots=True)
class Poll:
    """Frames on their way to one map stream; None ends it."""

    is_compressed: bool
    frames: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(QUEUED_FRAMES))
    is_over: bool = False

    def put(self, frame: bytes | None) -> None:
        """A client that does not read gets cut off; it will come back for a full map."""
        if self.is_over:
            return
        if frame is None or self.frames.full():
            self.is_over = True
            while self.frames.full():
                self.frames.get_nowait()
            frame = None
        self.frames.put_nowait(frame)


class ControlRequests:
    """All control connections of a server share one of these."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._tokens = itertools.count(1)
        self._registers: dict[int, asyncio.Future[RegisterResponse]] = {}
        self._polls: dict[int, Poll] = {}
        self._replies: dict[str, asyncio.Future[bytes]] = {}
        self._compressed: dict[bytes, bytes] = {}

    def handler(self, machine: MachinePublic) -> Callable[[Http2Request], asyncio.Future[None]]:
        """The HTTP/2 handler of one connection, which speaks for one machine key."""
        text = str(machine)
        return lambda request: asyncio.ensure_future(self._handle(text, request))

    # Outputs of the coordinator

    def answer_register(self, token: int, response: RegisterResponse) -> None:
        future = self._registers.get(token)
        if future is not None and not future.done():
            future.set_result(response)

    def send_frame(self, session: int, frame: bytes) -> None:
        poll = self._polls.get(session)
        if poll is not None:
            poll.put(frame)

    def end_session(self, session: int) -> None:
        poll = self._polls.get(session)
        if poll is not None:
            poll.put(None)

    def end_all(self) -> None:
        for poll in self._polls.values():
            poll.put(None)

    def expect_reply(self, token: str) -> asyncio.Future[bytes]:
        """What a node will POST to /c2n/<token>."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies[token] = future
        future.add_done_callback(lambda _done: self._replies.pop(token, None))
        return future

    # Requests

    async def _handle(self, machine: str, request: Http2Request) -> None:
        if request.path == "/machine/register":
            await self._register(machine, request)
        elif request.path == "/machine/map":
            await self._map(machine, request)
        elif request.path.startswith("/c2n/"):
            await self._reply(request)
        elif request.path.startswith("/machine/"):
            await request.body(MAX_BODY_BYTES)
            await request.respond(501, b"not implemented by this coordination server\n", "text/plain")
        else:
            await request.respond(404, b"not found\n", "text/plain")

    async def _register(self, machine: str, request: Http2Request) -> None:
        if request.method != "POST":
            raise ControlError("register wants POST", status=405)
        asked = _decode(await request.body(MAX_BODY_BYTES), RegisterRequest)
        _check_version(asked.version)
        token = next(self._tokens)
        future: asyncio.Future[RegisterResponse] = asyncio.get_running_loop().create_future()
        self._registers[token] = future
        try:
            self._host.coordinator.register(token, machine, asked, self._host.moment())
            self._host.drain()
            response = await future
        finally:
            del self._registers[token]
            self._host.coordinator.cancel_register(token)
        if response.error:
            log.info(fields("register refused", reason=response.error))
        await request.respond(200, encode_json(response))

    async def _map(self, machine: str, request: Http2Request) -> None:
        if request.method != "POST":
            raise ControlError("map wants POST", status=405)
        asked = _decode(await request.body(MAX_BODY_BYTES), MapRequest)
        _check_version(asked.version)
        node = self._host.coordinator.find(machine, asked.node_key)
        if node is None:
            raise ControlError("node not found", status=404)
        if asked.stream:
            await self._stream(node, asked, request)
            return
        if asked.omit_peers:
            self._host.coordinator.update(node, asked, self._host.moment())
            self._host.drain()
            await request.respond(200)
            return
        frame = self._host.coordinator.map_once(node, asked, self._host.moment())
        self._host.drain()
        await request.respond(200, _framed(frame, asked.compress == "zstd", compress))

    async def _stream(self, node: NodeRecord, asked: MapRequest, request: Http2Request) -> None:
        session = next(self._tokens)
        poll = Poll(asked.compress == "zstd")
        self._polls[session] = poll
        try:
            self._host.coordinator.open_poll(session, node, asked, self._host.moment())
            self._host.drain()
            request.start(200, [("content-type", "application/json")])
            while (frame := await poll.frames.get()) is not None:
                await request.send(_framed(frame, poll.is_compressed, self._compress))
        finally:
            del self._polls[session]
            self._host.coordinator.close_poll(session, self._host.moment())
            self._host.drain()

    def _compress(self, frame: bytes) -> bytes:
        """Once per distinct frame: a change goes to many polls with the same bytes."""
        known = self._compressed.get(frame)
        if known is None:
            if len(self._compressed) >= _COMPRESSED_KEPT:
                self._compressed.clear()
            known = self._compressed[frame] = compress(frame)
        return known

    async def _reply(self, request: Http2Request) -> None:
        body = await request.body(MAX_BODY_BYTES)
        future = self._replies.get(request.path.removeprefix("/c2n/"))
        if future is not None and not future.done():
            future.set_result(body)
        await request.respond(200)


def _framed(frame: bytes, is_compressed: bool, pack: Callable[[bytes], bytes]) -> bytes:
    payload = pack(frame) if is_compressed else frame
    return _LENGTH.pack(len(payload)) + payload


def _check_version(version: int) -> None:
    if version < MIN_CAPABILITY_VERSION:
        raise ControlError(
            f"unsupported client: capability version {version}, at least {MIN_CAPABILITY_VERSION} is needed "
            "(Tailscale 1.80 or newer)",
            status=400,
        )


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return decode_json(raw, kind)
    except DecodeError as err:
        raise ControlError(str(err), status=400) from None
