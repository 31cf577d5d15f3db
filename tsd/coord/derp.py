"""The embedded relay: sockets and HTTP routes around `tsd.derp.server`.

Spec: tailscale: cmd/derper, derp/derpserver/handler.go. TLS with a self-signed certificate that the DERP map pins, and
the relay's key inside the chain, so that clients may start without waiting (fast start). No mesh, no websockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from tsd.base.addr import AddrPort
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.keys import NodePrivate, NodePublic
from tsd.base.log import fields
from tsd.derp.server import ClientJoined, ClientLeft, Closed, DerpRouter, Writable
from tsd.transport.certificates import meta_certificate, pin_of, self_signed
from tsd.transport.frontdoor import FrontDoor, Upgrade

log = logging.getLogger("tsd.coord.derp")

READ_BYTES = 256 << 10
HIGH_WATER_BYTES = 512 << 10
_CHALLENGE = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z")
_NO_CACHE = {"Cache-Control": "no-cache, no-store, must-revalidate, no-transform, max-age=0"}


@dataclass(frozen=True, slots=True)
class RelayCertificate:
    """`pin` goes into the DERP map as CertName; "" for a certificate that clients verify by name."""

    context: ssl.SSLContext
    pin: str


def load_certificate(folder: Path, names: list[str], server: NodePublic, wall_s: float) -> RelayCertificate:
    """The relay's certificate from `folder`, made at the first start and whenever `names` changed or files are damaged.

    The part that carries the relay's key is short-lived and made anew at every start.
    """
    certificate, key = folder / "derp.crt", folder / "derp.key"
    wanted = " ".join(names)
    note = folder / "derp.names"
    if not _is_usable(certificate, key, note, wanted):
        pem, key_pem = self_signed(names, wall_s)
        _write_private(key, key_pem)
        _write_private(certificate, pem)
        _write_private(note, wanted.encode())
    leaf = certificate.read_bytes()
    chain = folder / "derp.chain"
    _write_private(chain, leaf + meta_certificate(server, wall_s))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(chain, key)
    return RelayCertificate(context, pin_of(leaf))


def _is_usable(certificate: Path, key: Path, note: Path, wanted: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        return note.read_text() == wanted
    except (OSError, ValueError):  # SSLError is an OSError, text that is none a ValueError
        return False


def _write_private(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(path.suffix + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    fresh.replace(path)


@dataclass(slots=True)
class _Connection:
    writer: asyncio.StreamWriter
    is_full: bool = False


class DerpServer:
    def __init__(
        self, private: NodePrivate, *, clock: Clock, entropy: Entropy, admit: Callable[[NodePublic], bool]
    ) -> None:
        self.router = DerpRouter(private, entropy=entropy, admit=lambda key, _remote: admit(key))
        self.public = private.public()
        self._clock = clock
        self._connections: dict[int, _Connection] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._runner: web.AppRunner | None = None
        self._door: FrontDoor | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> AddrPort:
        """Raises OSError."""
        self._runner = web.AppRunner(_routes(), access_log=None)
        await self._runner.setup()
        self._door = FrontDoor(self._runner.server, {"derp": self._serve})
        return await self._door.listen(host, port, tls)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._door is not None:
            await self._door.close()
        for task in list(self._tasks):
            task.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    def revoke(self, key: NodePublic) -> None:
        """The node is gone: so are its relay connections."""
        self.router.revoke(key, self._clock.now())
        self._drain()

    async def _serve(self, upgrade: Upgrade) -> None:
        if upgrade.target.partition("?")[0] != "/derp":
            upgrade.refuse(404, "not found")
            return
        if upgrade.headers.get("derp-fast-start") != "1":
            upgrade.accept("DERP", {"Derp-Version": "2", "Derp-Public-Key": self.public.raw.hex()})
        writer = upgrade.writer
        writer.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        connection = self.router.connect(upgrade.remote, self._clock.now())
        self._connections[connection] = _Connection(writer)
        self._drain()
        try:
            while connection in self._connections:
                data = await upgrade.reader.read(READ_BYTES)
                if not data:
                    break
                self.router.receive(connection, data, self._clock.now())
                self._drain()
        finally:
            self._connections.pop(connection, None)
            self.router.disconnect(connection, self._clock.now())
            self._drain()

    def _drain(self) -> None:
        for output in self.router.take_outputs():
            match output:
                case Writable(connection):
                    self._write(connection)
                case Closed(connection, reason):
                    log.debug(fields("relay client closed", reason=reason))
                    gone = self._connections.pop(connection, None)
                    if gone is not None:
                        gone.writer.close()
                case ClientJoined(_, key):
                    log.debug(fields("relay client joined", peer=key.short()))
                case ClientLeft(key):
                    log.debug(fields("relay client left", peer=key.short()))
        self._arm()

    def _write(self, number: int) -> None:
        """Straight to the socket while it takes bytes; a task waits for it otherwise."""
        connection = self._connections.get(number)
        if connection is None or connection.is_full or connection.writer.is_closing():
            return
        writer = connection.writer
        while pending := self.router.take(number, self._clock.now()):
            writer.write(pending)
            if writer.transport.get_write_buffer_size() > HIGH_WATER_BYTES:
                connection.is_full = True
                task = asyncio.get_running_loop().create_task(self._wait_for_room(number, connection))
                self._tasks[task] = None
                task.add_done_callback(lambda done: self._tasks.pop(done, None))
                return

    async def _wait_for_room(self, number: int, connection: _Connection) -> None:
        try:
            await connection.writer.drain()
        except OSError:
            return
        connection.is_full = False
        self._write(number)

    def _arm(self) -> None:
        deadline = self.router.next_deadline()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer_at = deadline.at
            delay = max(0.0, deadline.at - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.router.on_deadline(max(self._timer_at, self._clock.now()))
        self._drain()


def _routes() -> web.Application:
    app = web.Application()
    app.router.add_get("/derp/probe", _probe)
    app.router.add_get("/derp/latency-check", _probe)
    app.router.add_get("/generate_204", _generate_204)
    app.router.add_get("/derp", _upgrade_required)
    app.router.add_get("/robots.txt", _robots)
    app.router.add_get("/", _home)
    return app


async def _probe(_request: web.Request) -> web.Response:
    return web.Response(headers={"Access-Control-Allow-Origin": "*"})


async def _generate_204(request: web.Request) -> web.Response:
    headers = dict(_NO_CACHE)
    challenge = request.headers.get("X-Tailscale-Challenge", "")
    if _CHALLENGE.match(challenge):
        headers["X-Tailscale-Response"] = f"response {challenge}"
    return web.Response(status=204, headers=headers)


async def _upgrade_required(_request: web.Request) -> web.Response:
    return web.Response(status=426, text="DERP requires connection upgrade\n", headers={"Upgrade": "DERP"})


async def _robots(_request: web.Request) -> web.Response:
    return web.Response(text="User-agent: *\nDisallow: /\n")


async def _home(_request: web.Request) -> web.Response:
    return web.Response(text="This is a relay (DERP) of a tsd tailnet.\n")
