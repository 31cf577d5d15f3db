"""DNS over HTTPS (RFC 8484) to public resolvers, and over HTTP to an exit node's PeerAPI.

HTTP/2 over TLS 1.3 for the first, at addresses that are known beforehand; HTTP/1.1 inside the tunnel for the second.
One connection per resolver, closed after ten idle seconds (tailscale: net/dns/resolver/forwarder.go, sendDoH).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from urllib.parse import urlsplit

import h11

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.errors import ControlError
from tsd.base.tasks import Tasks
from tsd.dns import publicdns
from tsd.engine.names.exchange import Dialing
from tsd.engine.names.tlsstream import TlsStream
from tsd.engine.names.upstreams import Upstream
from tsd.hull import Stream
from tsd.transport.h2 import Http2Client

log = logging.getLogger(__name__)

IDLE_S = 10.0
CONNECT_S = 5.0
STAGGER_S = 0.25
HTTPS_PORT = 443
MEDIA_TYPE = "application/dns-message"
MAX_REPLY_BYTES = 65535
_CHUNK_BYTES = 64 << 10


def tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    return context


class HttpsResolvers:
    """Questions over HTTP. What tests replace: where a URL is reached, on which port, and whom TLS trusts."""

    def __init__(
        self,
        dialer: Dialing,
        addresses_of: Callable[[str], tuple[IPAddress, ...]] = publicdns.addresses_of,
        new_context: Callable[[], ssl.SSLContext] = tls_context,
        port: int = HTTPS_PORT,
    ) -> None:
        self._dialer = dialer
        self._addresses_of = addresses_of
        self._new_context = new_context
        self._context: ssl.SSLContext | None = None
        self._port = port
        self._clients: dict[str, _Client] = {}
        self._closing = Tasks(log)

    async def ask(self, upstream: Upstream, query: bytes) -> bytes:
        """Raises OSError or TimeoutError."""
        if upstream.kind == "peer":
            return await _ask_peer(self._dialer, upstream, query)
        client = self._clients.get(upstream.url)
        if client is None or client.is_gone:
            client = self._clients[upstream.url] = _Client(upstream.url, lambda: self._connect(upstream.url))
        client.keep(IDLE_S, lambda: self._drop(upstream.url))
        return await client.ask(query)

    def close(self) -> None:
        for url in list(self._clients):
            self._drop(url)

    def _drop(self, url: str) -> None:
        client = self._clients.pop(url, None)
        if client is not None:
            self._closing.spawn(client.close())

    async def _connect(self, url: str) -> Http2Client:
        """The first of the provider's addresses that accepts."""
        host = urlsplit(url).hostname or ""
        self._context = self._context or self._new_context()
        async with asyncio.timeout(CONNECT_S):
            stream = await _first([AddrPort(ip, self._port) for ip in self._addresses_of(url)], self._dialer)
            tls = TlsStream(stream, self._context, host)
            try:
                await tls.handshake()
            except BaseException:
                tls.close()
                raise
        if tls.protocol != "h2":
            tls.close()
            raise ConnectionError(f"{host} does not speak HTTP/2")
        return Http2Client(tls, host)


class _Client:
    """One connection, made with the first question; questions that come meanwhile wait for it."""

    def __init__(self, url: str, connect: Callable[[], Coroutine[None, None, Http2Client]]) -> None:
        self._path = urlsplit(url).path or "/"
        self._connecting = asyncio.ensure_future(connect())
        self._idle: asyncio.TimerHandle | None = None
        self._asking = 0

    @property
    def is_gone(self) -> bool:
        task = self._connecting
        return task.done() and (task.cancelled() or task.exception() is not None or task.result().is_closed)

    def keep(self, seconds: float, drop: Callable[[], None]) -> None:
        if self._idle is not None:
            self._idle.cancel()
        again = lambda: self.keep(seconds, drop) if self._asking else drop()  # noqa: E731
        self._idle = asyncio.get_running_loop().call_later(seconds, again)

    async def ask(self, query: bytes) -> bytes:
        headers = (("content-type", MEDIA_TYPE), ("accept", MEDIA_TYPE))
        self._asking += 1
        try:
            client = await asyncio.shield(self._connecting)
            response = await client.request("POST", self._path, headers, query)
            _check(response.status, response.headers.get("content-type", ""))
            return await response.read(MAX_REPLY_BYTES)
        except ControlError as err:
            raise ConnectionError(str(err)) from None
        finally:
            self._asking -= 1

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._connecting.cancel()
        for made in await asyncio.gather(self._connecting, return_exceptions=True):
            if isinstance(made, Http2Client):
                await made.close()


async def _first(targets: list[AddrPort], dialer: Dialing) -> Stream:
    """Each next address a little later than the one before, or when that failed. Raises OSError."""
    failure: BaseException = OSError("no known address")
    running: set[asyncio.Task[Stream]] = set()
    waiting = list(targets)
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(dialer.dial_ip(waiting.pop(0), CONNECT_S)))
            timeout = STAGGER_S if waiting else None
            done, running = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                problem = task.exception()
                if problem is None:
                    return task.result()
                failure = problem
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_close_late)
    raise failure


def _close_late(task: asyncio.Task[Stream]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


def _check(status: int, media_type: str) -> None:
    if status != 200:
        raise ConnectionError(f"HTTP status {status}")
    if media_type.partition(";")[0].strip() != MEDIA_TYPE:
        raise ConnectionError(f"unexpected content type {media_type[:100]!r}")


async def _ask_peer(dialer: Dialing, upstream: Upstream, query: bytes) -> bytes:
    stream = await dialer.dial_ip(upstream.target, CONNECT_S)
    try:
        return await _post(stream, upstream, query)
    except h11.ProtocolError as err:
        raise ConnectionError(f"not HTTP: {err}") from None
    finally:
        await stream.close()


async def _post(stream: Stream, upstream: Upstream, query: bytes) -> bytes:
    client = h11.Connection(h11.CLIENT)
    headers = [
        ("Host", str(upstream.target)),
        ("Content-Type", MEDIA_TYPE),
        ("Accept", MEDIA_TYPE),
        ("Content-Length", str(len(query))),
        ("Connection", "close"),
    ]
    target = urlsplit(upstream.url).path or "/"
    head = client.send(h11.Request(method="POST", target=target, headers=headers)) or b""
    body = client.send(h11.Data(data=query)) or b""
    await stream.write(head + body + (client.send(h11.EndOfMessage()) or b""))
    reply = bytearray()
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(await stream.read(_CHUNK_BYTES))
        elif isinstance(event, h11.Response):
            media_type = next((value for name, value in event.headers if name == b"content-type"), b"")
            _check(event.status_code, media_type.decode("latin-1"))
        elif isinstance(event, h11.Data):
            reply += event.data
            if len(reply) > MAX_REPLY_BYTES:
                raise ConnectionError("the answer is larger than a DNS message")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(reply)
        else:
            raise ConnectionError("no HTTP response")
