"""A client that sends bytes and reads one HTTP answer at a time: for tests that need to be impolite."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

HOST = "Host: local-tailscaled.sock\r\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, path: str) -> RawClient:
        return cls(*await asyncio.open_unix_connection(path))

    async def send(self, raw: bytes | str) -> None:
        self.writer.write(raw.encode() if isinstance(raw, str) else raw)
        await self.writer.drain()

    async def read_head(self) -> tuple[int, dict[str, str]]:
        raw = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5.0)).decode()
        first, *lines = raw.split("\r\n")[:-2]
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines)

    async def read_chunk(self) -> bytes:
        size = int(await asyncio.wait_for(self.reader.readline(), 5.0), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), 5.0)
        return data[:-2]

    async def read_answer(self, *, is_head: bool = False) -> Answer:
        status, headers = await self.read_head()
        body = b""
        if is_head or status == 204:
            return Answer(status, headers, b"")
        if headers.get("Transfer-Encoding") == "chunked":
            while piece := await self.read_chunk():
                body += piece
        else:
            body = await asyncio.wait_for(self.reader.readexactly(int(headers["Content-Length"])), 5.0)
        return Answer(status, headers, body)

    async def call(self, method: str, name: str, body: bytes = b"", headers: str = HOST) -> Answer:
        length = f"Content-Length: {len(body)}\r\n" if body or method not in ("GET", "HEAD", "DELETE") else ""
        await self.send(f"{method} /localapi/v0/{name} HTTP/1.1\r\n{headers}{length}\r\n".encode() + body)
        return await self.read_answer(is_head=method == "HEAD")

    async def is_closed(self) -> bool:
        return await asyncio.wait_for(self.reader.read(1), 5.0) == b""

    def close(self) -> None:
        self.writer.close()
