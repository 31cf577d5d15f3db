"""The daemon's own look-ups, of coordination server and relays: by the host, else straight from its upstreams.

With a device the host's resolver may be ourselves, and what it asks may have to go through an exit node that is away;
then nothing would ever bring us back. So an answer that does not come soon is asked for by sockets that never enter the
tunnel, from the resolvers that the host had before us.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.errors import DecodeError
from tsd.engine.names.exchange import Exchange, Protect
from tsd.engine.names.upstreams import plain_target
from tsd.hull import DatagramPort, Stream
from tsd.transport.host import Resolve, connect_host, resolve_host

PATIENCE_S = 1.5
_MOST_RESOLVERS = 3


class OwnLookup:
    """Call it with a name. Raises OSError."""

    def __init__(
        self, protect: Protect, base_resolvers: Callable[[], Sequence[str]], by_host: Resolve = resolve_host
    ) -> None:
        self._base_resolvers = base_resolvers
        self._by_host = by_host
        self._exchange = Exchange(_Straight(protect), protect)

    async def __call__(self, name: str) -> list[IPAddress]:
        asked = asyncio.ensure_future(self._by_host(name))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(asked)
        except socket.gaierror as err:
            if err.errno == socket.EAI_NONAME:
                raise
        except (OSError, TimeoutError):
            pass
        straight = asyncio.ensure_future(self._straight(name))
        try:
            return await _first([asked, straight])
        finally:
            for task in (asked, straight):
                task.cancel()

    async def _straight(self, name: str) -> list[IPAddress]:
        from tsd.dns import wire  # dnspython takes longer to import than the rest of the engine

        found: list[IPAddress] = []
        for resolver in self._base_resolvers()[:_MOST_RESOLVERS]:
            target = plain_target(resolver)
            if target is None:
                continue
            with contextlib.suppress(OSError, TimeoutError, DecodeError):
                questions = [wire.question(name, rdtype) for rdtype in ("A", "AAAA")]
                replies = await asyncio.gather(
                    *(self._exchange.ask(target, question, True) for question in questions), return_exceptions=True
                )
                for reply in replies:
                    if not isinstance(reply, BaseException):
                        found += [ip for ip in wire.addresses_in(reply.wire) if ip not in found]
                if found:
                    return found
        raise OSError(f"no address for {name}")


async def _first(tasks: list[asyncio.Future[list[IPAddress]]]) -> list[IPAddress]:
    """The first that succeeds. Raises what the first of them raised."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task.result()
    return tasks[0].result()


class _Straight:
    """`Dialing` by the host's sockets alone."""

    def __init__(self, protect: Protect) -> None:
        self._protect = protect

    async def open_datagram(self, ip: IPAddress) -> DatagramPort | None:
        return None

    async def dial_ip(self, remote: AddrPort, timeout_s: float = 10.0) -> Stream:
        return await connect_host(remote, timeout_s, self._protect)
