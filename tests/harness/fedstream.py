"""Streams that give prepared bytes and keep what is written: foreign bytes for servers and clients, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tsd.base.addr import AddrPort, parse_ip

_LOOPBACK = AddrPort(parse_ip("127.0.0.1"), 40000)


class FedStream:
    """A `hull.Stream` (and the host stream of the proxies): `data` in pieces of `step` bytes, then the end."""

    def __init__(self, data: bytes, step: int = 97, remote: AddrPort = _LOOPBACK) -> None:
        self.local, self.remote = _LOOPBACK, remote
        self.written = bytearray()
        self.is_closed = False
        self._data = data
        self._step = step

    async def read(self, limit: int = 65536) -> bytes:
        piece, self._data = self._data[: min(limit, self._step)], self._data[min(limit, self._step) :]
        return piece

    async def write(self, data: bytes | memoryview) -> None:
        self.written += data

    async def write_eof(self) -> None: ...

    def abort(self) -> None:
        self.is_closed = True

    async def close(self) -> None:
        self.is_closed = True

    close_now = abort


class FedReader(asyncio.StreamReader):
    """A reader whose stream has ended already."""

    def __init__(self, data: bytes) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.feed_data(data)
        self.feed_eof()


class DeafWriter:
    """Takes everything; stands for an `asyncio.StreamWriter`."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    async def wait_closed(self) -> None: ...


class Bench:
    """One event loop for many short runs. A run that needs longer than `limit_s` hangs, which is a fault."""

    def __init__(self, limit_s: float = 20.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._limit_s = limit_s
        self.escaped: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda loop, context: self.escaped.append(context))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result; raises what the work raises, and what tasks that nobody waited for raised."""
        result = self._loop.run_until_complete(asyncio.wait_for(work, self._limit_s))
        if self.escaped:
            context, self.escaped[:] = self.escaped[0], []
            raise context.get("exception") or AssertionError(context["message"])
        return result
