"""The map stream: length-prefixed, perhaps compressed JSON in the body of one HTTP/2 response."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from tsd.base.errors import ControlError, DecodeError
from tsd.base.log import fields
from tsd.tailcfg.mapresponse import KEEP_ALIVE, MapResponse, decode_in_slices
from tsd.transport.h2 import Http2Response, StreamLost
from tsd.transport.zstd import decompress

log = logging.getLogger("tsd.transport.map_stream")

WATCHDOG_S = 120.0
MAX_FRAME_BYTES = 64 << 20

KEEP_ALIVE_RESPONSE = MapResponse(keep_alive=True)


class MapStream:
    """Iterate over it for messages; close it in any case. Raises `ControlError`, also after 120 s of silence."""

    def __init__(self, answer: Http2Response, *, is_compressed: bool, watchdog_s: float = WATCHDOG_S) -> None:
        self._answer = answer
        self._chunks = answer.chunks()
        self._is_compressed = is_compressed
        self._watchdog_s = watchdog_s
        self._buffer = bytearray()
        self._keep_alive_frame = b""
        self.received_bytes = 0

    def __aiter__(self) -> AsyncIterator[MapResponse]:
        return self

    async def __anext__(self) -> MapResponse:
        frame = await self._frame()
        if frame is None:
            raise StopAsyncIteration
        if frame == self._keep_alive_frame:
            return KEEP_ALIVE_RESPONSE
        try:
            plain = decompress(frame) if self._is_compressed else frame
            if plain == KEEP_ALIVE:
                self._keep_alive_frame = frame
                return KEEP_ALIVE_RESPONSE
            return await decode_map_response_sliced(plain)
        except DecodeError as err:
            raise ControlError(f"a map message from the server does not parse: {err}") from None

    async def close(self) -> None:
        """End the poll at the server too; idempotent."""
        self._answer.close()
        with contextlib.suppress(RuntimeError, ControlError):
            await self._chunks.aclose()  # type: ignore[attr-defined]

    async def _frame(self) -> bytes | None:
        """None at a clean end of the stream."""
        if not await self._fill(4):
            return None
        length = int.from_bytes(self._buffer[:4], "little")
        if not 0 < length <= MAX_FRAME_BYTES:
            raise ControlError(f"map message of {length} bytes announced, limit is {MAX_FRAME_BYTES}")
        if not await self._fill(4 + length):
            raise ControlError("the map stream ended within a message")
        frame = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return frame

    async def _fill(self, count: int) -> bool:
        while len(self._buffer) < count:
            try:
                async with asyncio.timeout(self._watchdog_s):
                    chunk = await anext(self._chunks, None)
            except TimeoutError:
                raise ControlError(f"the server was silent for {self._watchdog_s:.0f} s on the map stream") from None
            except StreamLost as err:
                raise ControlError(f"the map stream broke off: {err}") from None
            if chunk is None:
                return False
            self.received_bytes += len(chunk)
            self._buffer += chunk
        return True


async def decode_map_response_sliced(plain: bytes) -> MapResponse:
    """Decode without holding the loop for long. Raises `DecodeError`."""
    problems: list[str] = []
    slices = decode_in_slices(plain, problems)
    while True:
        try:
            next(slices)
        except StopIteration as done:
            response: MapResponse = done.value
            break
        await asyncio.sleep(0)
    for problem in problems[:5]:
        log.warning(fields("map message", reason=problem))
    return response
