"""A coordination server in a few lines, made of tsd's own server-side pieces, for tests of the client side.

The test scripts the answers by assigning `on_register` and `on_map`; the double keeps what it was sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from tsd.base.entropy import SeededEntropy
from tsd.base.keys import MachinePrivate
from tsd.tailcfg.mapresponse import KEEP_ALIVE
from tsd.transport.control_server import accept_control
from tsd.transport.frontdoor import FrontDoor, Upgrade
from tsd.transport.h2 import Http2Request, Http2Server
from tsd.transport.zstd import compress

EARLY = b'{"nodeKeyChallenge":"chalpub:' + b"11" * 32 + b'"}'
Json = dict[str, Any]


class ControlDouble:
    """`async with ControlDouble() as server:`, then talk to `server.url`."""

    def __init__(self, *, early_payload: bytes | None = EARLY) -> None:
        self.static = MachinePrivate.generate(SeededEntropy("control double"))
        self.early_payload = early_payload
        self.connections: list[Http2Server] = []
        self.handshakes = 0
        self.registrations: list[Json] = []
        self.polls: list[Json] = []
        self.updates: list[Json] = []
        self.posts: list[tuple[str, bytes]] = []
        self.on_register: Callable[[Json], Awaitable[Json | tuple[int, str, dict[str, str]]]] = self._accept
        self.on_map: Callable[[Json], AsyncIterator[bytes | Json]] = self._one_map
        self.map_status: tuple[int, str, dict[str, str]] | None = None
        self.update_status = 200
        self._port = 0

    async def _accept(self, request: Json) -> Json:
        return {"User": {"ID": 1}, "Login": {"ID": 1, "LoginName": "u@example.com"}, "MachineAuthorized": True}

    async def _one_map(self, request: Json) -> AsyncIterator[bytes | Json]:
        yield {"Node": node_json(1, request["NodeKey"])}
        await asyncio.Event().wait()

    async def __aenter__(self) -> ControlDouble:
        app = web.Application()
        app.router.add_get("/{prefix:.*}key", self._key)
        app.router.add_head("/ping", self._ping)
        self.pings = 0
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await self.start()
        return self

    async def start(self) -> None:
        """Also after `stop`, on the same port."""
        self.door = FrontDoor(self._runner.server, {"tailscale-control-protocol": self._upgrade})
        self._port = (await self.door.listen("127.0.0.1", self._port)).port

    async def stop(self) -> None:
        await self.door.close()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _key(self, request: web.Request) -> web.Response:
        return web.json_response({"publicKey": str(self.static.public())})

    async def _ping(self, request: web.Request) -> web.Response:
        self.pings += 1
        return web.Response()

    async def _upgrade(self, upgrade: Upgrade) -> None:
        self.handshakes += 1
        stream = accept_control(
            upgrade, self.static, entropy=SeededEntropy(self.handshakes), early_payload=self.early_payload
        )
        if stream is None:
            return
        server = Http2Server(stream, self._serve)
        self.connections.append(server)
        await server.serve()

    async def _serve(self, request: Http2Request) -> None:
        body = await request.body()
        if request.path == "/machine/register":
            self.registrations.append(json.loads(body))
            answer = await self.on_register(json.loads(body))
            if isinstance(answer, tuple):
                await respond(request, answer)
            else:
                await request.respond(200, json.dumps(answer).encode())
        elif request.path == "/machine/map":
            await self._serve_map(request, json.loads(body))
        else:
            self.posts.append((request.path, body))
            await request.respond(200, b"{}")

    async def _serve_map(self, request: Http2Request, asked: Json) -> None:
        if not asked.get("Stream"):
            self.updates.append(asked)
            await request.respond(self.update_status)
            return
        self.polls.append(asked)
        if self.map_status is not None:
            await respond(request, self.map_status)
            return
        request.start(200)
        async for message in self.on_map(asked):
            raw = message if isinstance(message, bytes) else json.dumps(message).encode()
            await request.send(frame(raw, is_compressed=asked.get("Compress") == "zstd"))


async def respond(request: Http2Request, answer: tuple[int, str, dict[str, str]]) -> None:
    status, text, headers = answer
    request.start(status, list(headers.items()))
    await request.send(text.encode())


def frame(raw: bytes, *, is_compressed: bool) -> bytes:
    payload = compress(raw) if is_compressed else raw
    return len(payload).to_bytes(4, "little") + payload


def node_json(number: int, key: str = "", **changes: Any) -> Json:
    node = {
        "ID": number, "StableID": f"n{number}", "Name": f"n{number}.tn.example.", "User": 1,
        "Key": key or f"nodekey:{number:064x}", "Addresses": [f"100.64.0.{number}/32"],
        "MachineAuthorized": True,
    }  # fmt: skip
    return node | changes


KEEP_ALIVE_MESSAGE = KEEP_ALIVE
