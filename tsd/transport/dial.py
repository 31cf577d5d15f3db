"""TCP and TLS connections to named hosts, with failures put in plain words that name the layer.

Addresses of both families are raced (RFC 8305 in its simplest form). A proxy is used by CONNECT for TLS; for plain
HTTP the connection to the proxy itself is returned and the caller writes the absolute form.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from tsd.base.clock import Clock, SystemClock
from tsd.base.errors import ControlError, reason_of
from tsd.transport.host import Resolve, resolve_host
from tsd.transport.proxy_env import Proxy

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Protect = Callable[[socket.socket], None]

DIAL_TIMEOUT_S = 10.0
DNS_TIMEOUT_S = 6.0
STAGGER_S = 0.25
STREAM_LIMIT_BYTES = 256 << 10


class Dial(Protocol):
    """How `ControlClient` gets its connections; tests and simulations bring their own. Raises `ControlError`."""

    async def __call__(
        self, host: str, port: int, *, tls: ssl.SSLContext | None, proxy: Proxy | None, timeout_s: float
    ) -> Connection: ...


class HostDial:
    """Dials with the host's sockets, each passed to `protect` before it connects."""

    def __init__(
        self, protect: Protect | None = None, clock: Clock | None = None, resolve: Resolve = resolve_host
    ) -> None:
        self._protect = protect
        self._resolve = resolve
        self._clock = clock or SystemClock()

    async def __call__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        proxy: Proxy | None = None,
        timeout_s: float = DIAL_TIMEOUT_S,
    ) -> Connection:
        layer = "TCP"
        try:
            async with asyncio.timeout(timeout_s):
                sock = await self._socket(host, port, proxy, needs_tunnel=tls is not None)
                layer = "TLS"
                return await self._streams(sock, host, port, tls)
        except TimeoutError:
            where = via(host, port, proxy)
            raise ControlError(f"no answer from {where} within {timeout_s:.0f} s ({layer})") from None

    async def _socket(self, host: str, port: int, proxy: Proxy | None, *, needs_tunnel: bool) -> socket.socket:
        if proxy is None:
            return await self._connect(host, port)
        sock = await self._connect(proxy.host, proxy.port, what="proxy ")
        if needs_tunnel:
            try:
                await open_tunnel(sock, host, port, proxy)
            except BaseException:
                sock.close()
                raise
        return sock

    async def _connect(self, host: str, port: int, what: str = "") -> socket.socket:
        try:
            async with asyncio.timeout(DNS_TIMEOUT_S):
                found = await self._resolve(host)
        except TimeoutError:
            raise ControlError(f"cannot resolve {what}{host}: no answer in {DNS_TIMEOUT_S:.0f} s (DNS)") from None
        except (OSError, ValueError) as err:
            raise ControlError(f"cannot resolve {what}{host}: {reason_of(err)} (DNS)") from None
        families = {4: socket.AF_INET, 6: socket.AF_INET6}
        addresses = _interleave([(families[ip.version], (str(ip), port)) for ip in found])
        try:
            return await _race(addresses, self._protect)
        except OSError as err:
            raise ControlError(f"cannot connect to {what}{host}:{port}: {_os_reason(err)} (TCP)") from None

    async def _streams(self, sock: socket.socket, host: str, port: int, tls: ssl.SSLContext | None) -> Connection:
        try:
            name = host if tls is not None else None
            return await asyncio.open_connection(sock=sock, limit=STREAM_LIMIT_BYTES, ssl=tls, server_hostname=name)
        except ssl.SSLCertVerificationError as err:
            sock.close()
            raise ControlError(await self._explain_certificate(err, host, port)) from None
        except ssl.SSLError as err:
            sock.close()
            raise ControlError(f"{host}:{port} does not speak TLS: {err.reason or err} (TLS)") from None
        except OSError as err:
            sock.close()
            raise ControlError(f"TLS with {host}:{port} failed: {_os_reason(err)} (TLS)") from None
        except BaseException:
            sock.close()
            raise

    async def _explain_certificate(self, err: ssl.SSLCertVerificationError, host: str, port: int) -> str:
        code = err.verify_code
        if code in (9, 10):
            window = await self._validity(host, port)
            clock = datetime.fromtimestamp(self._clock.wall_ns() // 10**9, UTC)
            wrong = "not yet valid" if code == 9 else "expired"
            return (
                f"certificate of {host} is {wrong}: this machine's clock says {clock:%Y-%m-%d %H:%M} UTC{window};"
                f" set the clock if it is wrong (TLS)"
            )
        if code in (18, 19, 20, 21):
            return (
                f"certificate of {host} is not signed by an authority that this machine trusts;"
                f" set SSL_CERT_FILE to its CA, or use http:// on a private network (TLS)"
            )
        return f"certificate of {host} was refused: {err.verify_message} (TLS)"

    async def _validity(self, host: str, port: int) -> str:
        """When the certificate is valid, asked for on a second, unverified connection; "" if that fails."""
        from cryptography import x509  # for this text only, and slow to load

        context = unverified_context()
        try:
            sock = await self._connect(host, port)
            _, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname=host)
            der = writer.get_extra_info("ssl_object").getpeercert(True)
            writer.close()
            leaf = x509.load_der_x509_certificate(der)
        except (OSError, ControlError, ValueError):
            return ""
        return f", the certificate says {leaf.not_valid_before_utc:%Y-%m-%d} to {leaf.not_valid_after_utc:%Y-%m-%d}"


def verified_context() -> ssl.SSLContext:
    """Checks chain and name; trusts the system's authorities, or those of SSL_CERT_FILE. HTTP/1.1 only."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def unverified_context() -> ssl.SSLContext:
    """For ts2021, where Noise authenticates the server and TLS only passes firewalls."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


def via(host: str, port: int, proxy: Proxy | None) -> str:
    return f"{host}:{port}" if proxy is None else f"{host}:{port} by way of proxy {proxy}"


def _os_reason(err: OSError) -> str:
    return (reason_of(err) or type(err).__name__).lower()


Address = tuple[int, tuple[object, ...]]


def _interleave(addresses: Sequence[tuple[int, tuple[object, ...]]]) -> list[Address]:
    """Alternate families, starting with the resolver's first choice."""
    unique = list(dict.fromkeys(addresses))
    first_family = unique[0][0] if unique else 0
    preferred = [entry for entry in unique if entry[0] == first_family]
    others = [entry for entry in unique if entry[0] != first_family]
    mixed: list[Address] = []
    for index in range(max(len(preferred), len(others))):
        mixed += preferred[index : index + 1] + others[index : index + 1]
    return mixed


async def _race(addresses: list[Address], protect: Protect | None) -> socket.socket:
    """First socket that connects; each attempt gets a head start of `STAGGER_S`. Raises the first OSError."""
    errors: list[OSError] = []
    running: list[asyncio.Task[socket.socket]] = []
    queue = list(addresses)
    try:
        while queue or running:
            if queue:
                running.append(asyncio.create_task(_connect_one(*queue.pop(0), protect)))
            done, _ = await asyncio.wait(
                running, timeout=STAGGER_S if queue else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in [task for task in running if task in done]:
                running.remove(task)
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                errors.append(error)
    finally:
        for task in running:
            task.cancel()
        for late in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(late, socket.socket):
                late.close()
    raise errors[0] if errors else OSError("no address")


async def _connect_one(family: int, address: tuple[object, ...], protect: Protect | None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if protect is not None:
            protect(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def open_tunnel(sock: socket.socket, host: str, port: int, proxy: Proxy) -> None:
    """CONNECT on the bare socket: streams are made afterwards, so that TLS starts on a fresh pair."""
    loop = asyncio.get_running_loop()
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    auth = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
    answer = b""
    try:
        await loop.sock_sendall(sock, f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{auth}\r\n".encode())
        while b"\r\n\r\n" not in answer and len(answer) < 16384:
            chunk = await loop.sock_recv(sock, 4096)
            if not chunk:
                break
            answer += chunk
    except OSError as err:
        raise ControlError(f"proxy {proxy} broke off: {_os_reason(err)} (proxy)") from None
    status = answer.split(b"\r\n", 1)[0].decode("latin-1")
    if " 200" not in status[:13]:
        raise ControlError(f"proxy {proxy} refused to connect to {authority}: {status or 'no answer'} (proxy)")
