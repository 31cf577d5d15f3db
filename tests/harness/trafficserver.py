"""A server for tests of a TCP path, on 127.0.0.1 and all else: what a connection does is its first line.

`echo`                 everything comes back; half-close is answered with half-close
`hash [SECONDS]`       reads until the end (after so long without reading), answers the SHA-256 in hex
`send BYTES SEED`      sends that stream (`stream_of`), then ends
`reset [BYTES]`        sends so many bytes, then a RST
`peer`                 answers the client's address as seen here, then waits for the end
`watch NAME`, `ended NAME`   waits for the end; asks how that one ended: open, eof, reset
`count`                answers how many connections are open besides this one
UDP on the same port: `dns` + anything is answered with three times as many bytes, all else is echoed.
`python -m harness.trafficserver PORT`
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import sys

_LINGER_RESET = struct.pack("ii", 1, 0)
_PIECE_BYTES = 256 << 10


def stream_of(seed: str, count: int) -> bytes:
    """The same bytes for the same seed."""
    return hashlib.shake_128(seed.encode()).digest(count)


class TrafficServer:
    def __init__(self) -> None:
        self.open_count = 0
        self.endings: dict[str, str] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_count += 1
        try:
            words = (await reader.readline()).decode().split()
            if words:
                await self._do(words, reader, writer)
                if writer.can_write_eof() and not writer.is_closing():
                    writer.write_eof()
                    await writer.drain()
        except (ConnectionError, BrokenPipeError):
            pass
        finally:
            self.open_count -= 1
            writer.close()

    async def _do(self, words: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match words:
            case ["echo"]:
                while data := await reader.read(_PIECE_BYTES):
                    writer.write(data)
                    await writer.drain()
            case ["hash", *pause]:
                await asyncio.sleep(float(pause[0]) if pause else 0.0)
                writer.write(await digest_of(reader))
            case ["send", count, seed]:
                writer.write(stream_of(seed, int(count)))
            case ["reset", *count]:
                writer.write(stream_of("reset", int(count[0]) if count else 0))
                await writer.drain()
                reset(writer)
            case ["peer"]:
                host, port = writer.get_extra_info("peername")[:2]
                writer.write(f"{host.removeprefix('::ffff:')}:{port}\n".encode())
                await reader.read()
            case ["watch", name]:
                await self._watch(name, reader)
            case ["ended", name]:
                writer.write(self.endings.get(name, "unknown").encode())
            case ["count"]:
                writer.write(str(self.open_count - 1).encode())
            case _:
                writer.write(b"what?")

    async def _watch(self, name: str, reader: asyncio.StreamReader) -> None:
        self.endings[name] = "open"
        try:
            while await reader.read(_PIECE_BYTES):
                pass
            self.endings[name] = "eof"
        except ConnectionError:
            self.endings[name] = "reset"


async def digest_of(reader: asyncio.StreamReader) -> bytes:
    digest = hashlib.sha256()
    while data := await reader.read(_PIECE_BYTES):
        digest.update(data)
    return digest.hexdigest().encode()


def reset(writer: asyncio.StreamWriter) -> None:
    """End with a RST instead of a FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
    writer.transport.abort()


class Datagrams(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._transport.sendto(data * 3 if data.startswith(b"dns") else data, addr)  # type: ignore[attr-defined]


async def main(port: int) -> None:
    sock = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(Datagrams, local_addr=("127.0.0.1", port))
    await (await asyncio.start_server(TrafficServer().serve, sock=sock, limit=1 << 20)).serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
