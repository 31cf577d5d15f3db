"""One node of a simulated tailnet: a real engine over the userspace stack, on a host of the simulated internet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import tsnative
from harness.simcoord import RELAY_PORT, sim_dial
from harness.simnet import Host, SimUdp
from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError, HullError, TsdError
from tsd.base.keys import NodePrivate
from tsd.engine.account.states import State
from tsd.engine.control.hostinfo import HostFacts
from tsd.engine.engine import Engine, EngineOptions
from tsd.engine.path.sockets import OnBatch, OnError, Udp
from tsd.engine.peers import Peer
from tsd.hull import Hull, Stream
from tsd.localapi.engine_backend import EngineBackend
from tsd.magicsock.types import PathInfo
from tsd.tailcfg.derpmap import DERPNode, DERPRegion
from tsd.transport.derp import DerpError, DerpOptions
from tsd.transport.derp_dial import text_of
from tsplatform.links import LinkWatcher
from tsplatform.memory.hull import RecordingDns
from tsplatform.state_file import MemoryStore
from tsplatform.underlay import HostUnderlay
from tsplatform.userspace.hull import NetstackRouter
from tsplatform.userspace.tun import NetstackTun

if TYPE_CHECKING:
    from harness.simtailnet import SimTailnet

T = TypeVar("T")

DIAL_TIMEOUT_S = 1.5


class SimLinks(LinkWatcher):
    """The real link monitor, looking at a simulated host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        super().__init__(read=host.link_state)

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._host.link_listeners.append(on_change)
        return lambda: self._host.link_listeners.remove(on_change)

    def clocks_s(self) -> tuple[float, float]:
        return self._host.clocks_s()


class SimUnderlay(HostUnderlay):
    def protect(self, sock: Any) -> None:
        raise AssertionError("a simulation opens a host socket")


class LoopTimer:
    """A pace timer on the loop."""

    def __init__(self, on_fire: Callable[[], None]) -> None:
        self._on_fire = on_fire
        self._handle: asyncio.TimerHandle | None = None

    def start(self, delay_s: float) -> None:
        self.close()
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._on_fire)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


async def connect_relay(node: DERPNode, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
    """`DerpOptions.connect` of simulated hosts."""
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(factory, node.host_name, node.derp_port or RELAY_PORT)
    except OSError as err:
        raise DerpError(f"{node.host_name}: {text_of(err)}") from None
    return transport  # type: ignore[return-value]


class SimNode:
    """`engine` is a new one after each `start`; store and cache outlive it. Calls run on the node's host."""

    def __init__(
        self, tailnet: SimTailnet, host: Host, *, store: Any = None, port: int = 41641, **options: Any
    ) -> None:
        self.tailnet = tailnet
        self.host = host
        self.name = host.name
        self.clock = type(tailnet.clock)(tailnet.loop)
        self.store = store or MemoryStore()
        self.netmap_cache = MemoryStore()
        self.engine: Engine
        self.backend: EngineBackend
        self.starts = 0
        self._port = port
        self._options = options
        self.is_up = False
        self._addresses: dict[int, IPAddress] = {}

    # -- the daemon --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.starts += 1
        with self.tailnet.net.on(self.host):
            self.engine = Engine(self._engine_options())
            self.backend = EngineBackend(self.engine)
        self.is_up = True
        await self.run(self.engine.start())

    async def stop(self) -> None:
        """SIGTERM, or SIGKILL as far as others can tell. The kernel closes what is left open."""
        if self.is_up:
            self.is_up = False
            await self.run(self.engine.close())
            self.host.cut_streams()
            await asyncio.sleep(0)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def join(self, auth_key: str, **prefs: Any) -> None:
        """As `tsctl up --auth-key`; returns when the node is Running."""
        if not self.is_up:
            await self.start()
        await self.up(auth_key, **prefs)
        await self.tailnet.until(lambda: self.state is State.RUNNING, what=f"{self.name} Running")

    async def up(self, auth_key: str = "", **prefs: Any) -> None:
        wanted = {"ControlURL": self.tailnet.coord.server.url, "Hostname": self.name, "WantRunning": True, **prefs}
        update = self.engine.account.prefs.to_go() | wanted
        await self.run(self.backend.start({"UpdatePrefs": update, "AuthKey": auth_key}))
        await self.run(self.backend.login_interactive())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something on this node's host."""
        with self.tailnet.net.on(self.host):
            task = self.tailnet.loop.create_task(work)
        return await task

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call something on this node's host."""
        with self.tailnet.net.on(self.host):
            return function(*args)

    # -- what a test asks --------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.engine.account.state

    @property
    def ip4(self) -> IPAddress:
        return self._address(4)

    @property
    def ip6(self) -> IPAddress:
        return self._address(6)

    def _address(self, family: int) -> IPAddress:
        """As last told by control; outlives a restart."""
        own = self.engine.tailnet.own_addresses
        self._addresses |= {ip.version: ip for ip in own}
        return self._addresses[family]

    @property
    def home(self) -> int:
        return self.engine.reach.home

    @property
    def health(self) -> list[str]:
        return self.engine.health.texts()

    def peer(self, other: SimNode) -> Peer | None:
        return self.engine.tailnet.peers.by_address(other.ip4)

    def sees(self, other: SimNode) -> bool:
        has_address = bool(other._addresses or other.engine.tailnet.own_addresses)
        return has_address and self.peer(other) is not None

    def path(self, other: SimNode) -> PathInfo:
        peer = self.peer(other)
        assert peer is not None and self.engine.plane is not None
        return self.engine.plane.magicsock.path(peer.handle, self.tailnet.loop.time())

    def is_direct(self, other: SimNode) -> bool:
        return self.path(other).cur_addr is not None

    async def ping(self, other: SimNode | IPAddress, kind: str = "disco", timeout_s: float = 5.0) -> dict[str, Any]:
        """The result of one ping; `Err` is "timeout" when nothing came back."""
        ip = other if not isinstance(other, SimNode) else other.ip4
        try:
            async with asyncio.timeout(timeout_s):
                return await self.run(self.engine.ping(str(ip), kind))
        except (TimeoutError, TsdError) as err:
            return {"Err": str(err) or "timeout", "Endpoint": "", "DERPRegionID": 0, "LatencySeconds": timeout_s}

    async def reaches(self, other: SimNode, timeout_s: float = 30.0) -> float:
        """TSMP pings until one is answered; the seconds that took."""
        began = self.tailnet.loop.time()
        while self.tailnet.loop.time() - began < timeout_s:
            if not (await self.ping(other, "TSMP", timeout_s=2.0))["Err"]:
                return self.tailnet.loop.time() - began
            await asyncio.sleep(0.05)
        raise AssertionError(f"{self.name} does not reach {other.name} within {timeout_s:.0f} s")

    async def connect(self, other: SimNode, port: int, timeout_s: float = 10.0) -> Stream:
        return await self.run(self.engine.options.hull.net.connect(AddrPort(other.ip4, port), timeout_s))

    # -- composition -------------------------------------------------------------------------------------------

    def _engine_options(self) -> EngineOptions:
        net, clock = self.tailnet.net, self.clock
        entropy = self.tailnet.entropy(f"{self.name} {self.starts}")

        def open_udp(family: int, port: int, on_batch: OnBatch, on_error: OnError) -> Udp:
            try:
                return SimUdp(net, self.host, family, port, on_batch, on_error)
            except OSError as err:
                raise HullError(f"bind UDP port {port}", str(err), errno=err.errno or 0) from None

        def derp(node_key: NodePrivate) -> DerpOptions:
            no_socket = SimUnderlay(links).protect
            return DerpOptions(
                node_key, clock, entropy, no_socket, plain_http=True, connect=connect_relay, new_timer=LoopTimer
            )

        links = SimLinks(self.host)
        underlay = SimUnderlay(links)
        tun = NetstackTun(entropy=entropy, clock=clock, protect=underlay.protect)
        hull = Hull("userspace", tun, tun, NetstackRouter(tun), RecordingDns(), self.store, links, underlay)
        return EngineOptions(
            **{
                "version": "0-sim",
                "netmap_cache": self.netmap_cache,
                "hull": hull,
                "clock": clock,
                "entropy": entropy,
                "new_core": self.tailnet.new_core or tsnative.load,
                "open_udp": open_udp,
                "derp": derp,
                "resolve_host": self._resolve,
                "measure_https": self._measure_https,
                "control_dial": sim_dial,
                "wanted_port": self._port,
                "facts": HostFacts("linux", "6.1", self.name, "x86_64"),
                **self._options,
            }
        )

    async def _resolve(self, name: str) -> list[IPAddress]:
        try:
            return [parse_ip(name)]
        except DecodeError:
            pass
        try:
            return [self.tailnet.net.resolve(name)]
        except ValueError:
            raise OSError(f"{name}: no such name") from None

    async def _measure_https(self, region: DERPRegion) -> float | None:
        for node in region.derp_nodes:
            try:
                async with asyncio.timeout(5.0):
                    reader, writer = await asyncio.open_connection(node.host_name, node.derp_port or RELAY_PORT)
                    began = self.clock.now()
                    writer.write(b"GET /derp/latency-check HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n\r\n")
                    await reader.readuntil(b"\r\n\r\n")
                    took_s = self.clock.now() - began
                    writer.transport.abort()
                    return took_s
            except (OSError, EOFError):
                continue
        return None
