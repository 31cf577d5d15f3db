"""The host's resolver, as the proxies and the control client use it."""

from __future__ import annotations

import asyncio

import pytest

from tsd.base.addr import AddrPort, parse_ip
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import MachinePrivate
from tsd.transport.frontdoor import Upgrade
from tsd.transport.host import HostStream, connect_host, resolve_host
from tsd.transport.noise_stream import NoiseStream
from tsd.ts2021.handshake import TransportKeys


@pytest.mark.parametrize("name", ["127.0.0.1\0.example", "\0", "a..b", "a" * 64 + ".example", ".", "\udcff"])
async def test_what_is_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(OSError, match=r"not a host name|not known|No address|failure in name"):
        await resolve_host(name)


async def test_writing_to_a_connection_that_was_reset_is_no_fault_of_the_program() -> None:
    """uvloop raises RuntimeError from a writer whose connection has ended, until the reader has been asked."""

    async def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        HostStream(_reader, writer).abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    async with server:
        where = AddrPort(parse_ip("127.0.0.1"), server.sockets[0].getsockname()[1])
        stream = await connect_host(where)
        other_reader, other_writer = await asyncio.open_connection(str(where.ip), where.port)
        while not (stream._writer.is_closing() and other_writer.is_closing()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(ConnectionResetError):
            await stream.write(b"x")
        await stream.write_eof()
        noise = NoiseStream(
            other_reader,
            other_writer,
            TransportKeys(bytes(32), bytes(32), bytes(32), MachinePrivate.generate(SeededEntropy("m")).public(), 1),
        )
        noise.write(b"x")
        upgrade = Upgrade("GET", "/", {}, where, False, other_reader, other_writer)
        with pytest.raises(ConnectionResetError):
            upgrade.accept("x")
