"""One HTTP/1.1 exchange on a fresh connection, by h11: `/key`, liveness pings, and the head of an upgrade.

No pooling, no redirects, no cookies. Everything else that tsd serves or asks in HTTP goes through aiohttp.
"""

from __future__ import annotations

from collections.abc import Sequence

import h11
from msgspec import Struct

from tsd.base.errors import ControlError, reason_of
from tsd.transport.dial import Connection

Headers = Sequence[tuple[str, str]]
READ_BYTES = 64 << 10


class HttpResponse(Struct, frozen=True):
    """Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The first line of a short textual body, for messages."""
        return self.body[:300].decode("utf-8", "replace").strip().partition("\n")[0]


class UpgradeAnswer(Struct, frozen=True):
    """The head of an answer to an upgrade request, and what was read behind it."""

    status: int
    headers: dict[str, str]
    leftover: bytes


async def exchange(
    connection: Connection,
    method: str,
    target: str,
    headers: Headers,
    body: bytes = b"",
    *,
    limit_bytes: int = 1 << 20,
) -> HttpResponse:
    """Send, read the whole answer, close. Raises `ControlError`."""
    reader, writer = connection
    client = h11.Connection(h11.CLIENT)
    try:
        length = [("Content-Length", str(len(body)))] if body or method not in ("GET", "HEAD") else []
        head = _request(method, target, [*headers, *length, ("Connection", "close")])
        writer.write(b"".join(_sent(client.send(event)) for event in (head, h11.Data(data=body), h11.EndOfMessage())))
        status, found, chunks = 0, {}, bytearray()
        while True:
            event = await _next_event(client, reader)
            if isinstance(event, h11.Response):
                status, found = event.status_code, _header_dict(event)
            elif isinstance(event, h11.Data):
                chunks += event.data
                if len(chunks) > limit_bytes:
                    raise ControlError(f"answer is larger than {limit_bytes} bytes (HTTP)", status=status)
            elif isinstance(event, h11.EndOfMessage):
                return HttpResponse(status, found, bytes(chunks))
    finally:
        writer.close()


async def upgrade(connection: Connection, target: str, headers: Headers, protocol: str) -> UpgradeAnswer:
    """POST an upgrade and read the head of the answer; the connection stays open. Raises `ControlError`."""
    reader, writer = connection
    client = h11.Connection(h11.CLIENT)
    wanted = [("Upgrade", protocol), ("Connection", "upgrade"), ("Content-Length", "0")]
    head = _request("POST", target, [*headers, *wanted])
    writer.write(_sent(client.send(head)) + _sent(client.send(h11.EndOfMessage())))
    while True:
        event = await _next_event(client, reader)
        if isinstance(event, h11.InformationalResponse) and event.status_code != 101:
            continue
        if isinstance(event, h11.InformationalResponse | h11.Response):
            leftover, _ = client.trailing_data
            return UpgradeAnswer(event.status_code, _header_dict(event), bytes(leftover))


def _request(method: str, target: str, headers: Headers) -> h11.Request:
    """Raises `ControlError` for a URL that cannot be written into a request."""
    try:
        return h11.Request(method=method, target=target, headers=list(headers))
    except (h11.LocalProtocolError, UnicodeError):
        raise ControlError(f"cannot ask for {target[:100]!r}: not a URL (HTTP)", retryable=False) from None


def _sent(data: bytes | None) -> bytes:
    return data or b""


def _header_dict(event: h11.Response | h11.InformationalResponse) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}


async def _next_event(client: h11.Connection, reader: object) -> object:
    while True:
        try:
            event = client.next_event()
        except h11.RemoteProtocolError as err:
            if client.trailing_data == (b"", True):
                raise ControlError("the server closed the connection without an answer (HTTP)") from None
            raise ControlError(f"the server does not speak HTTP: {err} (HTTP)") from None
        if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            raise ControlError("the server closed the connection without an answer (HTTP)")
        if event is not h11.NEED_DATA:
            return event
        try:
            client.receive_data(await reader.read(READ_BYTES))  # type: ignore[attr-defined]
        except OSError as err:
            raise ControlError(f"connection lost while waiting for an answer: {reason_of(err)} (HTTP)") from None
        except h11.RemoteProtocolError as err:
            raise ControlError(f"the server closed the connection without an answer: {err} (HTTP)") from None
