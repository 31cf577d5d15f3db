"""The control protocol's client: `/key`, the ts2021 connection, registration, map poll and lite updates.

One Noise connection carries everything and is opened anew when needed. This is mechanism only: what to send, when to
retry and what to do with the answers is `tsd.engine.control.session`'s business. Every failure is a `ControlError`
whose text names the layer that failed.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence

from tsd.base.addr import IPAddress
from tsd.base.clock import Clock, SystemClock
from tsd.base.entropy import Entropy, system_entropy
from tsd.base.errors import ConfigError, ControlError, DecodeError, ProtocolError
from tsd.base.keys import MachinePrivate, MachinePublic, NodePublic
from tsd.base.log import fields
from tsd.base.login_url import LoginServer, parse_login_server
from tsd.http2.machine import Headers
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import OverTLSPublicKeys, RegisterRequest, RegisterResponse
from tsd.tailcfg.wire import CAPABILITY_VERSION, decode_json, encode_json
from tsd.transport.control_text import HandshakeRefused, is_upgraded, key_refusal, retry_after_s, upgrade_refusal
from tsd.transport.dial import Connection, Dial, HostDial, unverified_context, verified_context
from tsd.transport.h2 import Http2Client, Http2Response, StreamLost
from tsd.transport.http import HttpResponse, exchange, upgrade
from tsd.transport.map_stream import MapStream
from tsd.transport.noise_stream import NoiseStream
from tsd.transport.proxy_env import ProxySettings
from tsd.ts2021.constants import HANDSHAKE_HEADER, RESPONSE_BYTES, TYPE_ERROR, UPGRADE_PATH, UPGRADE_PROTOCOL
from tsd.ts2021.handshake import ClientHandshake

log = logging.getLogger("tsd.transport.control")

TLS_HEAD_START_S = 0.5
CONNECT_TIMEOUT_S = 10.0
LIVENESS_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
MAX_REGISTER_BYTES = 1 << 20
MAX_KEY_BYTES = 64 << 10
MAX_RETRY_AFTER_S = 3600.0
MAX_MAP_RETRY_AFTER_S = 300.0


class ControlClient:
    """Talks to one login server as one machine. Close it; it may be used again afterwards."""

    def __init__(
        self,
        login_server: str,
        machine: MachinePrivate,
        *,
        entropy: Entropy = system_entropy,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        dial: Dial | None = None,
        capability_version: int = CAPABILITY_VERSION,
    ) -> None:
        """Raises `ConfigError` for a URL or proxy that cannot work."""
        self.server: LoginServer = parse_login_server(login_server)
        self.capability_version = capability_version
        self.early_payload: bytes | None = None
        self._machine = machine
        self._entropy = entropy
        self._clock = clock or SystemClock()
        self._proxies = ProxySettings.from_environ(environ or {})
        self._proxies.check()
        self._dial = dial or HostDial(clock=self._clock)
        self._server_key: MachinePublic | None = None
        self._http2: Http2Client | None = None
        self._local_ip: IPAddress | None = None
        self._connecting = asyncio.Lock()

    # -- requests -----------------------------------------------------------------------------------------------

    async def fetch_key(self) -> MachinePublic:
        """The server's Noise key, asked for once and then remembered."""
        if self._server_key is not None:
            return self._server_key
        url = f"{self.server.url}/key"
        response = await self.fetch("GET", f"{url}?v={self.capability_version}", limit_bytes=MAX_KEY_BYTES)
        if response.status != 200:
            raise key_refusal(url, response)
        try:
            key = MachinePublic.parse(decode_json(response.body, OverTLSPublicKeys).publicKey)
        except DecodeError:
            raise key_refusal(url, response) from None
        if key.is_zero:
            raise ControlError(f"{url} has no Noise key: the server is too old (HTTP)", status=200)
        self._server_key = key
        return key

    async def register(
        self, request: RegisterRequest, *, timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> RegisterResponse:
        """POST /machine/register. `timeout_s` None for a followup, which the server holds until the visit."""
        response = await self.post(
            "/machine/register",
            encode_json(request),
            _lb_headers(request.node_key, request.old_node_key),
            limit_bytes=MAX_REGISTER_BYTES,
            timeout_s=timeout_s,
        )
        self._check("register", response, MAX_RETRY_AFTER_S)
        try:
            return decode_json(response.body, RegisterResponse)
        except DecodeError as err:
            raise ControlError(f"the answer to register does not parse: {err.reason}", status=200) from None

    async def poll(self, request: MapRequest) -> MapStream:
        """Open the map stream. Close the previous one first: headscale would serve both."""
        answer = await self._open("POST", "/machine/map", encode_json(request), _lb_headers(request.node_key))
        if answer.status != 200:
            body = await answer.read(MAX_KEY_BYTES)
            self._check("map", HttpResponse(answer.status, answer.headers, body), MAX_MAP_RETRY_AFTER_S)
        return MapStream(answer, is_compressed=request.compress == "zstd")

    async def update(self, request: MapRequest) -> None:
        """A lite update: tell the server about us. The body of the answer means nothing."""
        headers = _lb_headers(request.node_key)
        response = await self.post("/machine/map", encode_json(request), headers)
        self._check("map update", response, MAX_MAP_RETRY_AFTER_S)

    async def post(
        self,
        path: str,
        body: bytes,
        headers: Headers = (),
        *,
        method: str = "POST",
        limit_bytes: int = MAX_REGISTER_BYTES,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> HttpResponse:
        """Any request over Noise; the status is the caller's business."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._open(method, path, body, headers)
                return HttpResponse(answer.status, answer.headers, await answer.read(limit_bytes))
        except TimeoutError:
            await self.disconnect()
            raise ControlError(f"no answer to {path} within {timeout_s:.0f} s (HTTP)") from None

    async def fetch(
        self, method: str, url: str, body: bytes = b"", *, timeout_s: float = 15.0, limit_bytes: int = 1 << 20
    ) -> HttpResponse:
        """An ordinary request outside Noise, with verified TLS for https."""
        target = parse_url(url)
        is_tls = target.scheme == "https"
        proxy = self._proxies.proxy_for(target.host, target.port, is_tls=is_tls)
        tls = await asyncio.to_thread(verified_context) if is_tls else None
        connection = await self._dial(target.host, target.port, tls=tls, proxy=proxy, timeout_s=CONNECT_TIMEOUT_S)
        headers = [("Host", target.authority), ("User-Agent", "tsd"), ("Accept", "*/*")]
        path = target.path
        if proxy is not None and not is_tls:
            path = f"http://{target.authority}{target.path}"
            headers += [("Proxy-Authorization", proxy.authorization)] if proxy.authorization else []
        try:
            async with asyncio.timeout(timeout_s):
                return await exchange(connection, method, path, headers, body, limit_bytes=limit_bytes)
        except TimeoutError:
            raise ControlError(f"no answer from {target.authority} within {timeout_s:.0f} s (HTTP)") from None

    async def check(self, local: Collection[IPAddress]) -> None:
        """The network changed: drop the connection when its own address is not among `local`, or it does not answer."""
        connection = self._http2
        if connection is None or connection.is_closed:
            return
        is_gone = bool(local) and self._local_ip is not None and self._local_ip not in local
        if is_gone or not await connection.is_alive(LIVENESS_TIMEOUT_S):
            log.info(fields("control connection is dead", reason="address gone" if is_gone else "no answer"))
            if self._http2 is connection:
                await self.disconnect()

    async def disconnect(self) -> None:
        """Drop the connection; the next request opens a new one."""
        connection, self._http2 = self._http2, None
        if connection is not None:
            await connection.close()

    close = disconnect

    @property
    def is_connected(self) -> bool:
        return self._http2 is not None and not self._http2.is_closed

    def forget_key(self) -> None:
        """Fetch the server's key anew at the next connection (it may have been replaced)."""
        self._server_key = None

    # -- connection ---------------------------------------------------------------------------------------------

    async def _open(self, method: str, path: str, body: bytes, headers: Headers) -> Http2Response:
        connection = await self._connection()
        try:
            return await connection.request(method, path, headers, body)
        except StreamLost as err:
            raise ControlError(f"lost the connection to {self.server.host}: {err} (HTTP/2)") from None

    async def _connection(self) -> Http2Client:
        async with self._connecting:
            if self._http2 is None or self._http2.is_closed:
                key = await self.fetch_key()
                stream = await self._race(key)
                self._http2, self._local_ip = Http2Client(stream, self.server.authority), stream.local_ip
            return self._http2

    async def _race(self, key: MachinePublic) -> NoiseStream:
        """Plain first, TLS half a second later or at once when plain fails; the first whole handshake wins."""
        plain_port, tls_port = self.server.plain_port, self.server.tls_port
        attempts: list[asyncio.Task[NoiseStream]] = []
        errors: dict[str, ControlError] = {}
        try:
            if plain_port is not None:
                attempts.append(asyncio.create_task(self._attempt(key, plain_port, is_tls=False), name="plain"))
            if attempts and tls_port is not None:
                await asyncio.wait(attempts, timeout=TLS_HEAD_START_S)
            if tls_port is not None and not (attempts and attempts[0].done() and attempts[0].exception() is None):
                attempts.append(asyncio.create_task(self._attempt(key, tls_port, is_tls=True), name="tls"))
            waiting = list(attempts)
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in waiting if task in done]:
                    waiting.remove(task)
                    error = task.exception()
                    if error is None:
                        attempts.remove(task)
                        return task.result()
                    if not isinstance(error, ControlError):
                        raise error
                    errors[task.get_name()] = error
        finally:
            await _discard(attempts)
        raise self._verdict(errors)

    def _verdict(self, errors: Mapping[str, ControlError]) -> ControlError:
        """The failure of the way that the URL names."""
        own, other = ("tls", "plain") if self.server.scheme == "https" else ("plain", "tls")
        if any(isinstance(error, HandshakeRefused) for error in errors.values()):
            self.forget_key()
        return errors.get(own) or errors[other]

    async def _attempt(self, key: MachinePublic, port: int, *, is_tls: bool) -> NoiseStream:
        host = self.server.host
        proxy = self._proxies.proxy_for(host, port, is_tls=is_tls)
        tls: ssl.SSLContext | None = unverified_context() if is_tls else None
        connection = await self._dial(host, port, tls=tls, proxy=proxy, timeout_s=CONNECT_TIMEOUT_S)
        authority = self.server.host_header(port, is_tls=is_tls)
        target, headers = f"{self.server.path}{UPGRADE_PATH}", [("Host", authority)]
        if proxy is not None and not is_tls:
            target = f"http://{authority}{target}"
            headers += [("Proxy-Authorization", proxy.authorization)] if proxy.authorization else []
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await self._handshake(connection, key, target, headers)
        except TimeoutError:
            connection[1].close()
            raise ControlError(f"{authority} accepts connections but does not answer (HTTP)") from None
        except BaseException:
            connection[1].close()
            raise

    async def _handshake(
        self, connection: Connection, key: MachinePublic, target: str, headers: list[tuple[str, str]]
    ) -> NoiseStream:
        handshake = ClientHandshake(self._machine, key, protocol_version=self.capability_version, entropy=self._entropy)
        encoded = base64.b64encode(handshake.initiation).decode()
        answer = await upgrade(connection, target, [*headers, (HANDSHAKE_HEADER, encoded)], UPGRADE_PROTOCOL)
        if not is_upgraded(answer):
            raise upgrade_refusal(self.server.host, answer)
        frame, leftover = await _read_response(connection, answer.leftover)
        try:
            keys = handshake.finish(frame)
        except ProtocolError as err:
            raise HandshakeRefused(
                f"the server does not have the key that it names under /key, or something on the way changes its"
                f" answers: {err} (Noise)"
            ) from None
        log.debug(fields("control connection up", host=self.server.host, server_key=key.short()))
        return NoiseStream(*connection, keys, leftover=leftover, expects_early_payload=True)

    def _check(self, what: str, response: HttpResponse, retry_cap_s: float) -> None:
        """Raises `ControlError` unless the status is 200."""
        if response.status == 200:
            return
        wait_s = 0.0
        if response.status == 429:
            header = response.headers.get("retry-after", "")
            is_capped = retry_cap_s == MAX_MAP_RETRY_AFTER_S
            wait_s = retry_after_s(header, self._clock.wall_ns(), self._entropy, cap_s=retry_cap_s, is_capped=is_capped)
        reason = f": {response.text}" if response.text else ""
        text = f"the server refused {what} with status {response.status}{reason}"
        raise ControlError(text, status=response.status, retry_after_s=wait_s)


def parse_url(url: str) -> LoginServer:
    """Any http(s) URL in the same shape; `path` keeps query and trailing slash. Raises `ControlError`."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    if not separator or scheme.lower() not in ("http", "https"):
        raise ControlError(f"not an http URL: {url!r}", retryable=False)
    try:
        base = parse_login_server(f"{scheme}://{authority}")
    except ConfigError as err:
        raise ControlError(f"not an http URL: {url!r} ({err})", retryable=False) from None
    return LoginServer(base.scheme, base.host, base.port, "/" + path if slash else "/", None, None)


async def _read_response(connection: Connection, leftover: bytes) -> tuple[bytes, bytes]:
    """The response frame (51 bytes, or an error frame) and what follows it."""
    reader, _ = connection
    buffer = bytearray(leftover)

    async def fill(count: int) -> None:
        while len(buffer) < count:
            try:
                chunk = await reader.read(4096)
            except OSError:
                chunk = b""
            if not chunk:
                raise HandshakeRefused
            buffer.extend(chunk)

    await fill(3)
    length = RESPONSE_BYTES if buffer[0] != TYPE_ERROR else 3 + int.from_bytes(buffer[1:3], "big")
    await fill(length)
    return bytes(buffer[:length]), bytes(buffer[length:])


async def _discard(attempts: Sequence[asyncio.Task[NoiseStream]]) -> None:
    for task in attempts:
        task.cancel()
    for late in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(late, NoiseStream):
            late.close()


def _lb_headers(*node_keys: str) -> list[tuple[str, str]]:
    """Hints for load balancers: old key, then the new one."""
    unique = dict.fromkeys(key for key in reversed(node_keys) if key and key != str(NodePublic.zero()))
    return [("ts-lb", key) for key in unique]


ControlClientFactory = Callable[[str, MachinePrivate], ControlClient]
