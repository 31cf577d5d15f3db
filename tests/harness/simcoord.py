"""`tsd coord` on a host of the simulated internet, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harness.jumploop import LoopClock
from harness.simnet import Host, SimNet, SimUdp
from tsd.base.addr import AddrPort
from tsd.base.entropy import Entropy, SeededEntropy
from tsd.base.errors import ControlError
from tsd.coord.server import CoordServer
from tsd.coord.settings import Settings
from tsd.coord.stun import StunServer
from tsd.transport.dial import Connection


class SimStun(StunServer):
    """Our STUN responder on a simulated UDP port."""

    def __init__(self, net: SimNet, host: Host) -> None:
        super().__init__()
        self._net = net
        self._host = host
        self._socket: SimUdp | None = None

    async def listen(self, host: str, port: int) -> AddrPort:
        self._socket = SimUdp(self._net, self._host, port, self._answer)
        return self._socket.local

    def _answer(self, datagram: bytes, _size: int, source: AddrPort) -> None:
        reply = self.responder.respond(bytes(datagram), source)
        if reply is not None and self._socket is not None:
            self._socket.send(reply, 0, source)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


async def sim_dial(host: str, port: int, *, tls: Any, proxy: Any, timeout_s: float) -> Connection:
    """The `Dial` of a `ControlClient` on a simulated host."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.open_connection(host, port, ssl=tls)
    except OSError as err:
        raise ControlError(f"cannot connect to {host}:{port}: {err}") from None


@asynccontextmanager
async def coord_on_host(
    net: SimNet, host: Host, state: Path, *, clock: LoopClock, entropy: Entropy | None = None, **options: Any
) -> AsyncIterator[CoordServer]:
    """Control on port 8080, relay (plain) on 3340, STUN on 3478 of `host`; `options` are fields of `Settings`."""
    with net.on(host):
        settings = Settings(
            state=state,
            listen=AddrPort(host.ip, 8080),
            derp_listen=AddrPort(host.ip, 3340),
            stun_listen=AddrPort(host.ip, 3478),
            is_simulated=True,
            **options,
        )
        server = CoordServer(settings, clock=clock, entropy=entropy or SeededEntropy("coord"), stun=SimStun(net, host))
        await server.start()
    try:
        yield server
    finally:
        await server.close()
