"""One request as a handler sees it, and what a handler gives back. Endpoint tables are tuples of `Endpoint`.

A handler is `async def name(call: Call) -> Response | None`; None means that it streamed or took over the connection.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from tsd.localapi import permissions
from tsd.localapi.backend import ApiError, Json, LocalBackend
from tsd.localapi.connection import Body, Connection
from tsd.localapi.http1 import RequestHead, chunk, response_head
from tsd.localapi.permissions import Caller
from tsd.localapi.schema import parse_bool

PRETTY_LIMIT_BYTES = 128 * 1024
CHUNKED_FROM_BYTES = 2048
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"


@dataclass(slots=True)
class Response:
    status: int = 200
    body: bytes = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()


def text(status: int, line: str, content_type: str = TEXT) -> Response:
    return Response(status, line.encode() + b"\n", content_type)


def compact(value: object, *, newline: bool = True, status: int = 200) -> Response:
    body = msgspec.json.encode(value) + (b"\n" if newline else b"")
    return Response(status, body, JSON)


def pretty(value: object) -> Response:
    """Tab-indented like Go's; very large bodies stay compact (the indenting encoder is slow)."""
    raw = msgspec.json.encode(value)
    if len(raw) < PRETTY_LIMIT_BYTES:
        raw = json.dumps(value, indent="\t", ensure_ascii=False).encode()
    return Response(200, raw + b"\n", JSON)


def empty(status: int = 204) -> Response:
    return Response(status)


def json_error(status: int, message: str, key: str = "error") -> Response:
    return compact({key: message}, status=status)


@dataclass(slots=True)
class Call:
    head: RequestHead
    path: str
    query: dict[str, str]
    body: Body
    backend: LocalBackend
    caller: Caller
    daemon_uid: int
    connection: Connection
    common_headers: tuple[tuple[str, str], ...]
    status_answer: Callable[[bool], Response]
    form: dict[str, str] = field(default_factory=dict)
    has_taken_over: bool = False

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def can_write(self) -> bool:
        return permissions.may_write(self.caller, self.daemon_uid, self.backend.operator_user())

    def value(self, name: str) -> str:
        """A query parameter, or a field of an urlencoded body."""
        return self.form.get(name, self.query.get(name, ""))

    def flag(self, name: str, default: bool) -> bool:
        parsed = parse_bool(self.value(name))
        return default if parsed is None else parsed

    async def read_form(self) -> None:
        if self.head.get("Content-Type").startswith("application/x-www-form-urlencoded"):
            raw = await self.body.read(1 << 20)
            self.form = dict(parse_qsl(raw.decode("utf-8", "replace"), keep_blank_values=True))

    async def read_json(self, complaint: str = "") -> Any:
        """The body decoded; raises ApiError(400) with `complaint` or the decoder's words."""
        raw = await self.body.read()
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, complaint or f"request body is not JSON: {error}") from None

    async def read_object(self, complaint: str = "") -> Json:
        value = await self.read_json(complaint)
        if not isinstance(value, dict):
            raise ApiError(400, complaint or "request body must be a JSON object")
        return value

    def start_stream(self, content_type: str, length: int = -1) -> Stream:
        """Send the head now; `length` when the size is known (some clients refuse chunked file bodies)."""
        self.has_taken_over = True
        return Stream(self, content_type, length)

    def take_over(self, status: int, headers: tuple[tuple[str, str], ...]) -> Connection:
        """Answer with a bare head (101) and hand over the raw connection."""
        self.has_taken_over = True
        self.connection.write(response_head(status, (*headers, *self.common_headers)))
        return self.connection


class Stream:
    """A response without a known end, flushed line by line."""

    def __init__(self, call: Call, content_type: str, length: int) -> None:
        self._connection = call.connection
        self._is_chunked = call.head.minor_version >= 1 and length < 0
        framing = ("Transfer-Encoding", "chunked") if self._is_chunked else ("Connection", "close")
        headers = [("Content-Type", content_type), *call.common_headers, framing]
        if length >= 0:
            headers.append(("Content-Length", str(length)))
        self._connection.write(response_head(200, headers))

    async def send(self, data: bytes) -> None:
        """One piece, on the wire when this returns. Raises ClientGone."""
        if data:
            self._connection.write(chunk(data) if self._is_chunked else data)
            await self._connection.drain()

    async def send_json(self, value: object) -> None:
        await self.send(msgspec.json.encode(value) + b"\n")

    def finish(self) -> None:
        if self._is_chunked:
            self._connection.write(chunk(b""))


Handler = Callable[[Call], Awaitable[Response | None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path below /localapi/v0/. A name that ends in `/` serves everything under it.

    `needs_write` is looked at before the method, unless `method_first`.
    """

    name: str
    handler: Handler
    needs_write: bool = False
    denied: str = "access denied"
    methods: tuple[str, ...] = ()
    wrong_method: tuple[int, str] = (405, "unsupported method")
    method_first: bool = False

    def refusal(self, call: Call) -> Response | None:
        checks = (self._wrong_method, self._denied) if self.method_first else (self._denied, self._wrong_method)
        for check in checks:
            if (refused := check(call)) is not None:
                return refused
        return None

    def _denied(self, call: Call) -> Response | None:
        return text(403, self.denied) if self.needs_write and not call.can_write else None

    def _wrong_method(self, call: Call) -> Response | None:
        if not self.methods or call.method in self.methods:
            return None
        return text(*self.wrong_method)


write_by_post = partial(Endpoint, needs_write=True, methods=("POST",))
read_by_writer = partial(Endpoint, needs_write=True, methods=("GET",))
