"""A whole tailnet in virtual time: `tsd coord` and any number of real engines on the simulated internet.

    def test_something(tmp_path):
        async def scenario(net: SimTailnet) -> None:
            a, b = await net.nodes("P", "E")
            ...
        run_sim(scenario, tmp_path, seed=1)

Everything random comes from the seed; `TSD_SIM_SEED` replays another one. A failure shows the seed and the last
datagrams as a sequence diagram.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from harness.simcoord import SimCoord, SimRelay
from harness.simloop import SimLoop
from harness.simnat import CLASSES, Nat
from harness.simnet import Host, Link, SimNet
from harness.simnode import SimNode
from tsd.base.entropy import SeededEntropy
from tsd.dataplane.pump import Core
from tsd.tailcfg.derpmap import DERPMap
from tsd.tailcfg.wire import encode_json

T = TypeVar("T")

POLL_S = 0.02
COORD_IP = "198.51.100.1"


class HostClock:
    """The `tsd.base.clock.Clock` of a host: boot time, and a wall clock that somebody may set wrong."""

    WALL_START_NS = 1_790_000_000_000_000_000

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.wrong_s = 0.0

    def now(self) -> float:
        return self._loop.time()

    def wall_ns(self) -> int:
        return self.WALL_START_NS + int((self._loop.time() - 1000.0 + self.wrong_s) * 1e9)


class SimTailnet:
    """`relays` further regions (901, 902, ...) stand on hosts of their own beside the coordination server's (900)."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        relays: int = 0,
        policy: str = "",
        new_core: Callable[[], Core] | None = None,
        **settings: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.seed = seed
        self.net = SimNet(loop, seed)
        self.clock = HostClock(loop)
        self.members: dict[str, SimNode] = {}
        self.new_core = new_core
        self.relays = [self._relay(901 + index) for index in range(relays)]
        self._settings = settings
        if relays:
            regions = {relay.region_id: relay.region() for relay in self.relays}
            path = self._settings["derp_map_file"] = folder / "derpmap.json"
            path.write_bytes(encode_json(DERPMap(regions=regions)))
        if policy:
            path = self._settings["policy_file"] = folder / "policy.hujson"
            path.write_text(policy)
        host = self.net.host("coord", COORD_IP, "2001:db8:c::1", link=Link(latency_s=0.01))
        self.coord = SimCoord(
            self.net, host, folder / "coord", clock=self.clock, entropy=self.entropy("coord"), **self._settings
        )

    def entropy(self, name: str) -> SeededEntropy:
        return SeededEntropy(f"{self.seed}/{name}")

    def _relay(self, region: int) -> SimRelay:
        host = self.net.host(f"r{region}", f"198.51.100.{region - 890}", link=Link(latency_s=0.02))
        return SimRelay(self.net, host, region, clock=self.clock, entropy=self.entropy(f"relay {region}"))

    async def start(self) -> None:
        for relay in self.relays:
            await relay.start()
        await self.coord.start()

    async def close(self) -> None:
        for member in list(self.members.values()):
            await member.stop()
        await self.coord.stop()
        for relay in self.relays:
            await relay.close()

    # -- members -----------------------------------------------------------------------------------------------

    def host(self, kind: str, name: str = "", *, v6: bool = False, link: Link | None = None) -> Host:
        """A host of a NAT class of `harness.simnat`, "B" for one whose UDP is blocked; each in a LAN of its own."""
        number = len(self.net.hosts)
        public, more = f"203.0.113.{number}", [f"2001:db8:{number:x}::2"] if v6 else []
        wire = link or Link(latency_s=0.005 + 0.001 * number)
        wire.udp_blocked = wire.udp_blocked or kind == "B"
        nat: Nat | None = None
        if kind in CLASSES and CLASSES[kind][0]:
            nat = Nat.of(kind, public)
        inner = f"10.{number}.0.2" if nat is not None and nat.mapping != "none" else public
        return self.net.host(name or f"{kind.lower()}{number}", inner, *more, nat=nat, link=wire)

    def add(self, host: Host, **options: Any) -> SimNode:
        """A node that is not started yet."""
        made = self.members[host.name] = SimNode(self, host, **options)
        return made

    async def nodes(self, *kinds: str, **options: Any) -> list[SimNode]:
        """One node of each kind, all of them up with one reusable key."""
        made = [self.add(self.host(kind), **options) for kind in kinds]
        await self.bring_up(made)
        return made

    async def bring_up(self, nodes: list[SimNode], **key_options: Any) -> None:
        key = self.coord.key(**({"reusable": True} | key_options))
        await asyncio.gather(*(node.join(key) for node in nodes))
        await self.until(lambda: all(node.sees(other) for node in nodes for other in nodes if other is not node))

    # -- waiting -----------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "") -> float:
        """Wait in virtual time; returns how long it took."""
        began = self.loop.time()
        while not condition():
            took_s = self.loop.time() - began
            if took_s > timeout_s:
                raise AssertionError(f"not within {timeout_s:.0f} s: {what or condition}")
            await asyncio.sleep(max(POLL_S, took_s / 100))
        return self.loop.time() - began

    async def every(self, period_s: float, seconds: float, action: Callable[[int], Any]) -> None:
        """Call `action` with a running number at a steady pace; awaits what it returns."""
        for index in range(round(seconds / period_s)):
            result = action(index)
            if isinstance(result, Awaitable):
                await result
            await asyncio.sleep(period_s)

    def assert_no_storm(self) -> None:
        """What no scenario may lead to: pings or handshakes by the hundred."""
        seconds = self.loop.time() - 1000.0
        for node in self.members.values():
            allowed = 100 + 1.5 * seconds * max(1, len(self.members) - 1)
            for what in ("disco ping", "disco pong", "wg init", "wg resp"):
                sent = self.net.trace.sent(node.name, what)
                assert sent < allowed, f"{node.name} sent {sent} x {what} in {seconds:.0f} s"


class _Errors(logging.Handler):
    """Keeps what was logged as an error: no scenario may lead to one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        self._formatter = logging.Formatter("%(name)s: %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self._formatter.format(record))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        logging.getLogger().addHandler(self)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(self)


Scenario = Callable[[SimTailnet], Coroutine[Any, Any, T]]


def run_sim(scenario: Scenario[T], folder: Path, seed: int = 1, **options: Any) -> T:
    """Run a scenario to its end in virtual time. `options` are those of `SimTailnet`."""
    seed = int(os.environ.get("TSD_SIM_SEED", seed))
    errors = _Errors()

    async def main() -> T:
        net = SimTailnet(folder, seed, **options)
        try:
            await net.start()
            result = await scenario(net)
            net.assert_no_storm()
            await net.close()
            assert not errors.texts, "errors were logged:\n" + "\n".join(errors.texts[:5])
        except BaseException as err:
            err.add_note(f"seed {seed}; the last datagrams, at {net.loop.time():.3f}:\n{net.net.trace.diagram()}")
            raise
        return result

    with errors.listening(), asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main())
