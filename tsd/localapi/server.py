"""The LocalAPI server: HTTP/1.1 over a Unix socket (tailscale: `ipn/ipnserver/server.go`, `ipn/localapi/localapi.go`).

Own small server because it needs peer credentials, the 101 takeover, exact header spelling and per-line flushes.
It accepts before the engine exists; requests then wait. `Tailscale-Version` is left out on purpose: the field's CLI
prints a warning when that header differs from its own version.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import time
from pathlib import Path
from urllib.parse import parse_qsl

from tsd.base.errors import ConfigError, TsdError
from tsd.base.log import fields
from tsd.localapi import permissions
from tsd.localapi.backend import ApiError, LocalBackend
from tsd.localapi.call import CHUNKED_FROM_BYTES, Call, Response, json_error, text
from tsd.localapi.connection import Body, ClientGone, Connection
from tsd.localapi.http1 import BadRequest, RequestHead, chunk, response_head
from tsd.localapi.schema import CAPABILITY_VERSION, LOCALAPI_HOST, LOCALAPI_PREFIX
from tsd.localapi.snapshots import StatusSnapshots
from tsd.localapi.table import find_endpoint

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
OUTER_HEADERS: tuple[tuple[str, str], ...] = ()
API_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; frame-ancestors 'none'; script-src 'none'; script-src-elem 'none'; script-src-attr 'none'",
    ),
    ("Tailscale-Cap", str(CAPABILITY_VERSION)),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)


class LocalApiServer:
    """Accepts on one socket, serves one engine."""

    def __init__(self, *, version_header: str = "") -> None:
        self._backend: asyncio.Future[LocalBackend] | None = None
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._path: Path | None = None
        self._inode = 0
        self._snapshots = StatusSnapshots()
        self._daemon_uid = os.geteuid()
        self._headers: tuple[tuple[str, str], ...] = API_HEADERS
        if version_header:
            self._headers = (*API_HEADERS[:2], ("Tailscale-Version", version_header), *API_HEADERS[2:])

    async def listen(self, path: str) -> None:
        """Bind and accept. Raises ConfigError when another daemon answers there or the place is not usable."""
        sock = bind_socket(path)
        self._path = Path(path)
        self._inode = self._path.stat().st_ino
        await self.adopt(sock)

    async def adopt(self, sock: socket.socket) -> None:
        """Accept on a socket that is bound and listening already."""
        loop = asyncio.get_running_loop()
        self._backend = self._backend or loop.create_future()
        self._server = await loop.create_unix_server(self._new_connection, sock=sock)

    def set_backend(self, backend: LocalBackend) -> None:
        """The engine exists now: waiting requests go on. May be called again with another one."""
        loop = asyncio.get_running_loop()
        if self._backend is None or self._backend.done():
            self._backend = loop.create_future()
        self._backend.set_result(backend)

    async def close(self) -> None:
        """Stop accepting, end the connections, remove the socket file if it is still ours."""
        if self._server is not None:
            self._server.close()
        for task, connection in list(self._tasks.items()):
            task.cancel()
            connection.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink(missing_ok=True)
            self._path = None

    def _new_connection(self) -> Connection:
        return _ServedConnection(self)

    def _accepted(self, connection: Connection) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            refusal = text(429, "too many connections to the local API")
            refusal.headers = (("Retry-After", "1"),)
            self._send(connection, None, refusal, keep_alive=False)
            connection.transport.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._tasks[task] = connection
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _serve(self, connection: Connection) -> None:
        sock = connection.transport.get_extra_info("socket")
        caller = permissions.caller_of(sock) if sock is not None else permissions.Caller()
        try:
            while True:
                head = await connection.read_head()
                if head is None or not await self._serve_one(connection, head, caller):
                    break
        except BadRequest as error:
            self._send(connection, None, text(error.status, error.reason), keep_alive=False)
        except ClientGone:
            pass
        finally:
            connection.transport.close()

    async def _serve_one(self, connection: Connection, head: RequestHead, caller: permissions.Caller) -> bool:
        """Answer one request; False when the connection is over."""
        body = Body(connection, head)
        call: Call | None = None
        try:
            refusal = _outer_check(head)
            if refusal is None:
                call = self._call(connection, head, body, caller, await self._wait_backend(connection, head))
                if head.method not in ("GET", "HEAD"):
                    self._snapshots.forget()
                response = await _dispatch(call)
            else:
                response = refusal
        except _OuterAnswer as outer:
            response = outer.response
        if call is not None and call.has_taken_over:
            return False
        if response is None:
            response = text(500, "no answer")
        is_reusable = head.keeps_alive and await body.discard()
        keep_alive = is_reusable and (not connection.is_eof or bool(connection.buffer))
        self._send(connection, head, response, keep_alive=keep_alive)
        await connection.drain()
        return keep_alive

    async def _wait_backend(self, connection: Connection, head: RequestHead) -> LocalBackend:
        path = head.target.partition("?")[0]
        waiting = self._backend
        assert waiting is not None
        if path == "/server-status":
            raise _OuterAnswer(await self._server_status(connection, head, waiting))
        if not path.startswith(LOCALAPI_PREFIX):
            raise _OuterAnswer(_front_page(path))
        if not waiting.done():
            async with connection.until_gone():
                return await asyncio.shield(waiting)
        return waiting.result()

    async def _server_status(
        self, connection: Connection, head: RequestHead, waiting: asyncio.Future[LocalBackend]
    ) -> Response:
        if head.method != "GET":
            return text(405, "only GET allowed")
        wants_wait = dict(parse_qsl(head.target.partition("?")[2])).get("wait") == "true"
        if waiting.done():
            return Response(200, b"{}\n", "application/json")
        if not wants_wait:
            return json_error(503, "backend not ready")
        connection.write(
            response_head(
                503,
                (("Content-Type", "application/json"), ("Transfer-Encoding", "chunked"), ("Connection", "close")),
            )
        )
        async with connection.until_gone():
            await asyncio.shield(waiting)
        connection.write(chunk(b"{}\n") + chunk(b""))
        raise ClientGone("server-status wait is over")

    def _call(
        self,
        connection: Connection,
        head: RequestHead,
        body: Body,
        caller: permissions.Caller,
        backend: LocalBackend,
    ) -> Call:
        path, _, query = head.target.partition("?")
        return Call(
            head=head,
            path=path.removeprefix(LOCALAPI_PREFIX),
            query=dict(reversed(parse_qsl(query, keep_blank_values=True))),
            body=body,
            backend=backend,
            caller=caller,
            daemon_uid=self._daemon_uid,
            connection=connection,
            common_headers=self._headers,
            status_answer=lambda with_peers: self._status(backend, with_peers),
        )

    def _status(self, backend: LocalBackend, with_peers: bool) -> Response:
        return self._snapshots.answer(backend, with_peers, asyncio.get_running_loop().time())

    def _send(self, connection: Connection, head: RequestHead | None, response: Response, *, keep_alive: bool) -> None:
        headers: list[tuple[str, str]] = list(response.headers)
        is_api = head is not None and head.target.startswith("/localapi/")
        headers += self._headers if is_api else OUTER_HEADERS
        if response.content_type:
            headers.append(("Content-Type", response.content_type))
        headers.append(("Date", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())))
        body = response.body
        is_old = head is None or head.minor_version == 0
        has_length = any(name == "Content-Length" for name, _ in response.headers)
        if len(body) > CHUNKED_FROM_BYTES and not is_old and not has_length:
            headers.append(("Transfer-Encoding", "chunked"))
            body = chunk(body) + chunk(b"")
        elif response.status not in (204, 304) and not has_length:
            headers.append(("Content-Length", str(len(body))))
        if not keep_alive:
            headers.append(("Connection", "close"))
        elif is_old:
            headers.append(("Connection", "keep-alive"))
        if head is not None and head.method == "HEAD":
            body = b""
        connection.write(response_head(response.status, headers) + body)


class _ServedConnection(Connection):
    def __init__(self, server: LocalApiServer) -> None:
        super().__init__()
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server._accepted(self)


class _OuterAnswer(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


def _front_page(path: str) -> Response:
    if path == "/":
        page = "<html><body><h1>tsd</h1>This is the local tsd daemon; talk to it with tsctl.</body></html>\n"
        return Response(200, page.encode(), "text/html; charset=utf-8")
    return text(404, "404 page not found")


def _outer_check(head: RequestHead) -> Response | None:
    """Methods, Host and browser headers that no local client of ours sends."""
    if head.method == "CONNECT":
        return text(405, "CONNECT is not served here")
    if head.minor_version >= 1 and not head.has("Host"):
        return text(400, f"missing Host header: send {LOCALAPI_HOST!r}")
    if head.get("Host") not in ("", LOCALAPI_HOST):
        return text(403, f"invalid localapi request: the Host header must be {LOCALAPI_HOST!r} or empty")
    for name in ("Referer", "Origin"):
        if head.has(name):
            return text(403, f"invalid localapi request: a {name} header is not allowed (no browsers here)")
    return None


async def _dispatch(call: Call) -> Response | None:
    """Run the endpoint; every failure becomes the answer it stands for."""
    endpoint = find_endpoint(call.path)
    if endpoint is None:
        return text(404, "404 page not found")
    refused = endpoint.refusal(call)
    if refused is not None:
        return refused
    try:
        await call.read_form()
        return await endpoint.handler(call)
    except ApiError as error:
        return text(error.status, str(error))
    except (BadRequest, ClientGone):
        raise
    except TsdError as error:
        return text(500, str(error))
    except Exception as error:
        log.exception(fields("local API call failed", path=endpoint.name))
        return text(500, f"internal error: {type(error).__name__}")


def bind_socket(path: str) -> socket.socket:
    """A listening Unix socket at `path`, replacing the file of a daemon that is gone. Raises ConfigError."""
    where = Path(path)
    if len(os.fsencode(path)) > 103:
        raise ConfigError(f"socket path is too long for a Unix socket (at most 103 bytes): {path}")
    try:
        where.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _remove_stale(where)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            os.chmod(path, 0o666 if permissions.has_peer_credentials() else 0o600)
            sock.listen(128)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
    return sock


def _remove_stale(where: Path) -> None:
    try:
        mode = where.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on {where}: something that is not a socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(where))
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None
        else:
            raise ConfigError(f"cannot listen on {where}: address already in use by a running daemon")
    where.unlink(missing_ok=True)
