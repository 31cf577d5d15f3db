"""PeerAPI: the small HTTP service that every node offers to its peers on the overlay.

Routes and access rules: tailscale: ipn/ipnlocal/peerapi.go. Serves the hello page (whose HEAD is the peerapi ping)
and DNS over HTTP; files are refused with the reason, everything else is 404. HTTP/1.1 by h11 over a `hull.Stream`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

import h11

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.entropy import Entropy
from tsd.base.log import fields
from tsd.hull import OverlayNet, Stream

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 10
IDLE_S = 60.0
LINGER_S = 2.0
"""For a sender that is answered before it has sent all, to see that."""
_FILES = "/v0/put/"
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is asking: the peer that owns the source address."""

    name: str
    login: str
    is_same_user: bool
    may_use_dns: bool


class PeerApiHost(Protocol):
    """What PeerAPI needs from the engine."""

    def self_name(self) -> str: ...

    def own_addresses(self) -> list[IPAddress]: ...

    def identify(self, source: IPAddress) -> Caller | None: ...

    async def resolve_dns(self, query: bytes) -> bytes: ...


@dataclass(slots=True)
class _Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass(slots=True)
class _Response:
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: list[tuple[str, str]] = field(default_factory=list)


def candidate_ports(ip: IPAddress, entropy: Entropy) -> list[int]:
    """Ports to try, in order: five derived from the address, then 0 (tailscale: ipn/ipnlocal/peerapi.go)."""
    tail = ip.packed[-3:]
    ports = []
    for attempt in range(_TRIES):
        material = bytes([(tail[0] + attempt) & 0xFF]) + tail[1:]
        ports.append(0x8000 | (zlib.crc32(material) & 0xFFFF))
    return [*ports, 0]


class PeerApi:
    """Listens on each own address; `ports` tells which port each address got."""

    def __init__(self, net: OverlayNet, host: PeerApiHost, entropy: Entropy) -> None:
        self._net = net
        self._host = host
        self._entropy = entropy
        self.ports: dict[IPAddress, int] = {}

    async def serve(self, addresses: list[IPAddress]) -> None:
        """Listen on exactly these addresses from now on."""
        for ip in [ip for ip in self.ports if ip not in addresses]:
            self._net.unlisten(AddrPort(ip, self.ports.pop(ip)))
        for ip in addresses:
            if ip not in self.ports:
                port = await self._listen(ip)
                if port:
                    self.ports[ip] = port

    async def _listen(self, ip: IPAddress) -> int:
        for port in candidate_ports(ip, self._entropy):
            try:
                return await self._net.listen(AddrPort(ip, port), self._serve_stream)
            except OSError as err:
                log.debug(fields("peerapi port not free", endpoint=AddrPort(ip, port), reason=err))
        log.warning(fields("peerapi has no port", endpoint=ip))
        return 0

    async def _serve_stream(self, stream: Stream) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            while True:
                request = await asyncio.wait_for(_read_request(connection, stream), IDLE_S)
                if request is None:
                    break
                response = await self._answer(request, stream.remote.ip)
                await _write_response(connection, stream, request, response)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    await _linger(connection, stream)
                    break
                connection.start_next_cycle()
        except (h11.ProtocolError, OSError, TimeoutError) as err:
            log.debug(fields("peerapi connection ended", endpoint=stream.remote, reason=err))
        finally:
            await stream.close()

    async def _answer(self, request: _Request, source: IPAddress) -> _Response:
        refused = self._refusal(request)
        if refused:
            return _Response(403, refused.encode() + b"\n")
        caller = self._host.identify(source)
        if caller is None:
            return _Response(403, b"unknown peer\n")
        try:
            url = urlsplit(request.target)
        except ValueError:
            return _Response(400, b"bad request target\n")
        if url.path == "/dns-query":
            return await self._dns(request, url.query, caller)
        if url.path == "/":
            return self._hello(caller)
        if url.path.startswith(_FILES):
            return _Response(403, b"this node takes no files: Taildrop is not part of tsd\n")
        return _Response(404, b"404 page not found\n")

    def _refusal(self, request: _Request) -> str:
        """Browsers must not be tricked into using us: only our own addresses and the word "peer" are hosts."""
        if "referer" in request.headers or "origin" in request.headers:
            return "unexpected Referer or Origin"
        host = request.headers.get("host", "")
        name = host.rsplit(":", 1)[0].strip("[]") if not host.endswith("]") else host.strip("[]")
        if name == "peer" or name in {str(ip) for ip in self._host.own_addresses()}:
            return ""
        return f"bad Host {host!r}"

    def _hello(self, caller: Caller) -> _Response:
        from html import escape  # its table of entities takes long to load

        text = (
            "<!doctype html><title>Hello</title><h1>Hello, "
            f"{escape(caller.login or caller.name)}</h1>"
            f"This is {escape(self._host.self_name())}, and you are {escape(caller.name)}.\n"
        )
        return _Response(200, text.encode(), "text/html; charset=utf-8")

    async def _dns(self, request: _Request, query_string: str, caller: Caller) -> _Response:
        if not caller.may_use_dns:
            return _Response(403, b"DNS access denied\n")
        wire = _dns_question(request, query_string)
        if wire is None:
            return _Response(400, b"want GET ?dns=... or POST application/dns-message\n")
        try:
            reply = await asyncio.wait_for(self._host.resolve_dns(wire), 5.0)
        except (TimeoutError, OSError) as err:
            return _Response(500, f"{err}\n".encode())
        return _Response(200, reply, "application/dns-message")


def _dns_question(request: _Request, query_string: str) -> bytes | None:
    if request.method == "GET":
        try:
            encoded = parse_qs(query_string).get("dns", [""])[0]
            return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)) or None
        except (binascii.Error, ValueError):
            return None
    if request.method == "POST" and request.headers.get("content-type") == "application/dns-message":
        return request.body or None
    return None


async def _read_request(connection: h11.Connection, stream: Stream) -> _Request | None:
    request: _Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.read(65536))
        elif isinstance(event, h11.Request):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            request = _Request(event.method.decode(), event.target.decode("latin-1"), headers)
            if request.target.startswith(_FILES):
                return request
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise h11.RemoteProtocolError("body too large", 413)
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            request.body = bytes(body)
            return request
        else:
            return None


async def _linger(connection: h11.Connection, stream: Stream) -> None:
    """Closing at once while the other end still sends would take the answer away from it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S if connection.their_state is h11.SEND_BODY else 0):
            while await stream.read(65536):
                pass


async def _write_response(connection: h11.Connection, stream: Stream, request: _Request, response: _Response) -> None:
    headers = [
        ("Content-Type", response.content_type),
        ("Content-Length", str(len(response.body))),
        ("X-Content-Type-Options", "nosniff"),
        *response.headers,
    ]
    raw = connection.send(h11.Response(status_code=response.status, headers=headers)) or b""
    if request.method != "HEAD":
        raw += connection.send(h11.Data(data=response.body)) or b""
    raw += connection.send(h11.EndOfMessage()) or b""
    await stream.write(raw)


async def head(connect: Callable[[AddrPort], Awaitable[Stream]], remote: AddrPort, timeout_s: float = 10.0) -> int:
    """HEAD / of a peer's PeerAPI: the HTTP status. Raises OSError or TimeoutError."""

    async def ask() -> int:
        stream = await connect(remote)
        try:
            client = h11.Connection(h11.CLIENT)
            request = h11.Request(method="HEAD", target="/", headers=[("Host", str(remote))])
            await stream.write((client.send(request) or b"") + (client.send(h11.EndOfMessage()) or b""))
            while True:
                event = client.next_event()
                if event is h11.NEED_DATA:
                    client.receive_data(await stream.read(65536))
                elif isinstance(event, h11.Response):
                    return event.status_code
                else:
                    raise ConnectionError("no HTTP response")
        except h11.RemoteProtocolError as err:
            raise ConnectionError(f"not HTTP: {err}") from None
        finally:
            await stream.close()

    return await asyncio.wait_for(ask(), timeout_s)
