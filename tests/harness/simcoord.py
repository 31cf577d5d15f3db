"""`tsd coord`, and further relays, on hosts of the simulated internet, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harness.jumploop import LoopClock
from harness.simnet import Host, SimNet, SimUdp
from tsd.base.addr import AddrPort
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy, SeededEntropy
from tsd.base.errors import ControlError
from tsd.base.keys import NodePrivate
from tsd.coord.derp import DerpServer
from tsd.coord.server import CoordServer
from tsd.coord.settings import Settings
from tsd.coord.stun import StunServer
from tsd.tailcfg.derpmap import DERPNode, DERPRegion
from tsd.transport.dial import Connection

CONTROL_PORT, RELAY_PORT, STUN_PORT = 8080, 3340, 3478


class SimStun(StunServer):
    """Our STUN responder on a simulated UDP port, for each address family of its host."""

    def __init__(self, net: SimNet, host: Host) -> None:
        super().__init__()
        self._net = net
        self._host = host
        self._sockets: dict[int, SimUdp] = {}

    async def listen(self, host: str, port: int) -> AddrPort:
        for family in sorted({ip.version for ip in self._host.addresses}):
            self._sockets[family] = SimUdp(self._net, self._host, family, port, self._answer)
        return next(iter(self._sockets.values())).local

    def _answer(self, datagram: Any, _size: int, source: AddrPort) -> None:
        reply = self.responder.respond(bytes(datagram), source)
        if reply is not None and source.ip.version in self._sockets:
            self._sockets[source.ip.version].send(reply, 0, source)

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()


class SimRelay:
    """A DERP region of its own (plain, with STUN) that admits everybody."""

    def __init__(self, net: SimNet, host: Host, region_id: int, *, clock: Clock, entropy: Entropy) -> None:
        self.host = host
        self.region_id = region_id
        self._net = net
        self.server = DerpServer(NodePrivate.generate(entropy), clock=clock, entropy=entropy, admit=lambda key: True)
        self._stun = SimStun(net, host)

    async def start(self) -> None:
        with self._net.on(self.host):
            await self.server.listen(str(self.host.ip), RELAY_PORT, None)
            await self._stun.listen(str(self.host.ip), STUN_PORT)

    async def close(self) -> None:
        await self.server.close()
        self._stun.close()

    def region(self) -> DERPRegion:
        v4, v6 = self.host.address(4), self.host.address(6)
        node = DERPNode(
            name=f"{self.region_id}a",
            region_id=self.region_id,
            host_name=str(self.host.ip),
            ipv4=str(v4) if v4 else "none",
            ipv6=str(v6) if v6 else "none",
            derp_port=RELAY_PORT,
            stun_port=STUN_PORT,
        )
        return DERPRegion(self.region_id, f"r{self.region_id}", f"relay {self.region_id}", nodes=(node,))


async def sim_dial(host: str, port: int, *, tls: Any, proxy: Any, timeout_s: float) -> Connection:
    """The `Dial` of a `ControlClient` on a simulated host."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.open_connection(host, port, ssl=tls)
    except OSError as err:
        raise ControlError(f"cannot connect to {host}:{port}: {err}") from None


class SimCoord:
    """Control on port 8080, relay (plain) on 3340, STUN on 3478 of `host`; `options` are fields of `Settings`."""

    def __init__(
        self, net: SimNet, host: Host, state: Path, *, clock: Clock, entropy: Entropy | None = None, **options: Any
    ) -> None:
        self.host = host
        self._net = net
        self._clock = clock
        self._entropy = entropy or SeededEntropy("coord")
        self._settings = Settings(
            state=state,
            listen=AddrPort(host.ip, CONTROL_PORT),
            derp_listen=AddrPort(host.ip, RELAY_PORT),
            stun_listen=AddrPort(host.ip, STUN_PORT),
            is_simulated=True,
            **options,
        )
        self.server: CoordServer

    async def start(self) -> None:
        with self._net.on(self.host):
            stun = SimStun(self._net, self.host)
            self.server = CoordServer(self._settings, clock=self._clock, entropy=self._entropy, stun=stun)
            await self.server.start()

    async def stop(self) -> None:
        """SIGTERM. The process is gone afterwards, and with it every connection."""
        await self.server.close()
        self.host.cut_streams()
        await asyncio.sleep(0)

    def key(self, **options: Any) -> str:
        """A new auth key."""
        made = self.server.administration.create_key(self.server.moment(), **options)
        self.server.drain()
        return str(made["key"])

    def change(self, verb: str, *args: Any) -> Any:
        """A verb of `Administration` that takes the moment last."""
        result = getattr(self.server.administration, verb)(*args, self.server.moment())
        self.server.drain()
        return result


@asynccontextmanager
async def coord_on_host(
    net: SimNet, host: Host, state: Path, *, clock: LoopClock, entropy: Entropy | None = None, **options: Any
) -> AsyncIterator[CoordServer]:
    coord = SimCoord(net, host, state, clock=clock, entropy=entropy, **options)
    await coord.start()
    try:
        yield coord.server
    finally:
        await coord.stop()
