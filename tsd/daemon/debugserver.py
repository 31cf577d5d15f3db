"""`--debug=[address]:port`: the daemon's metrics over plain HTTP, for whoever collects them.

Paths as the field has them (tailscale: cmd/tailscaled/debug.go): `/debug/metrics` has the counters of the engine,
`/metrics` those that `tsctl metrics` shows. Read-only; there are no profiles and nothing can be changed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

HEAD_LIMIT_BYTES = 8192
HEAD_TIMEOUT_S = 10.0
_HEADERS = "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\nConnection: close\r\n"


class DebugServer:
    """One request per connection."""

    def __init__(self, pages: Mapping[str, Callable[[], str]]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None

    async def start(self, listen: str) -> str:
        """Where it listens. Raises `OSError`."""
        host, _, port = listen.rpartition(":")
        self._server = await asyncio.start_server(
            self._serve, host.strip("[]") or None, int(port), limit=HEAD_LIMIT_BYTES
        )
        address = self._server.sockets[0].getsockname()
        return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_TIMEOUT_S)
            writer.write(self._answer(head))
            await asyncio.wait_for(writer.drain(), HEAD_TIMEOUT_S)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, TimeoutError, RuntimeError):
            pass
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "bad request\n")
        method, target = words[0], words[1].partition(b"?")[0].decode("ascii", "replace")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET and HEAD\n")
        page = self._pages.get(target)
        if page is None:
            status, body = "404 Not Found", "".join(f"{path}\n" for path in self._pages)
        else:
            status, body = "200 OK", page()
        return _response(status, body, is_head=method == b"HEAD")


def _response(status: str, text: str, *, is_head: bool = False) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\n{_HEADERS}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + (b"" if is_head else body)
