"""Trouble by dice: a simulated tailnet where something happens every few seconds, all of it from the seed.

To read a failing seed: `pytest "tests/sim/test_sim_chaos.py::test_much_trouble_by_dice[104]"`; the failure lists the
last events, and how each node stands.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from harness.simcoord import CONTROL_PORT, RELAY_PORT, STUN_PORT
from harness.simnat import Nat
from harness.simnet import Host
from harness.simnode import SimNode
from harness.simtailnet import SimTailnet
from tsd.engine.account.states import State

KINDS = "PAEFHXB"


class Chaos:
    """`run` for a while, then `calm`: everything is plugged in, awake and reachable again (addresses stay new)."""

    def __init__(self, net: SimTailnet, nodes: list[SimNode]) -> None:
        self.net = net
        self.nodes = nodes
        self.dice = random.Random(net.seed)
        self.log: list[str] = []
        self._busy: dict[str, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._addresses = self._names = 0
        self._servers = [net.coord.host, *(relay.host for relay in net.relays)]
        self._auth_key = net.coord.key(reusable=True, expiry_s=None)

    async def run(self, seconds: float, pause_s: tuple[float, float] = (2.0, 30.0)) -> None:
        """Events at random moments, each on a node that has no other trouble, and pings between random pairs."""
        end = self.net.loop.time() + seconds
        pinging = asyncio.create_task(self._ping(end))
        events: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *[self.node_event] * 12,
            self.relay_cut,
            self.control_cut,
            self.coord_restart,
        ]
        while self.net.loop.time() < end:
            await asyncio.sleep(self.dice.uniform(*pause_s))
            task = asyncio.create_task(self.dice.choice(events)())
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))
        await pinging
        await asyncio.gather(*self._tasks)

    async def calm(self) -> None:
        for node in self.nodes:
            host = node.host
            host.link.loss = host.link.reorder = host.link.duplicate = 0.0
            if not host.is_running:
                host.resume()
            if not host.is_plugged:
                host.plug(True)
        for host in self._servers:
            host.blocked.clear()

    async def _ping(self, end: float) -> None:
        while self.net.loop.time() < end:
            a, b = self.dice.sample(self.nodes, 2)
            if a.is_up and b.is_up and a.host.is_running:
                asyncio.ensure_future(a.ping(b, self.dice.choice(("TSMP", "disco", "ICMP")), 3.0))  # noqa: RUF006
            await asyncio.sleep(self.dice.uniform(0.1, 2.0))

    def _note(self, text: str) -> None:
        self.log.append(f"{self.net.loop.time():10.2f} {text}")

    # -- the whole net -----------------------------------------------------------------------------------------

    async def relay_cut(self) -> None:
        host = self.dice.choice(self._servers)
        await self._cut(host, f"relay on {host.name}", ("tcp", RELAY_PORT), ("udp", STUN_PORT))

    async def control_cut(self) -> None:
        await self._cut(self.net.coord.host, "control", ("tcp", CONTROL_PORT))

    async def _cut(self, host: Host, what: str, *ports: tuple[str, int]) -> None:
        seconds = self.dice.choice((3.0, 20.0, 90.0, 200.0))
        self._note(f"{what} cut for {seconds:.0f} s")
        host.blocked |= dict.fromkeys(ports)
        await asyncio.sleep(seconds)
        for port in ports:
            host.blocked.pop(port, None)

    async def coord_restart(self) -> None:
        if "coord" in self._busy:
            return
        self._busy["coord"] = None
        seconds = self.dice.choice((0.0, 1.0, 15.0, 100.0))
        self._note(f"coord restarts, {seconds:.0f} s away")
        await self.net.coord.stop()
        await asyncio.sleep(seconds)
        await self.net.coord.start()
        del self._busy["coord"]

    # -- one node ----------------------------------------------------------------------------------------------

    async def node_event(self) -> None:
        node = self.dice.choice(self.nodes)
        if node.name in self._busy:
            return
        self._busy[node.name] = None
        event: Callable[[SimNode], Awaitable[None]] = self.dice.choice(
            (
                self.roam,
                self.roam,
                self.nat,
                self.nap,
                self.stop,
                self.cable,
                self.bad_line,
                self.restart,
                self.set_clock,
                self.relogin,
                self.down,
                self.expire,
                self.rename,
            )
        )
        await event(node)
        del self._busy[node.name]

    async def roam(self, node: SimNode) -> None:
        kind = self.dice.choice(KINDS)
        self._addresses += 1
        outside, inside = f"192.0.2.{self._addresses}", f"10.200.{self._addresses}.2"
        self._note(f"{node.name} roams to a {kind}")
        node.host.link.udp_blocked = kind == "B"
        has_nat = kind not in "PB"
        nat = Nat.of(kind, outside) if has_nat else None
        node.host.roam(inside if has_nat and kind != "F" else outside, nat=nat)

    async def nat(self, node: SimNode) -> None:
        if node.host.nat is not None and node.host.nat.mapping != "none":
            self._note(f"NAT of {node.name} reboots")
            node.host.nat.reboot()

    async def nap(self, node: SimNode) -> None:
        seconds = self.dice.choice((5.0, 60.0, 250.0))
        self._note(f"{node.name} sleeps for {seconds:.0f} s")
        node.host.suspend()
        await asyncio.sleep(seconds)
        node.host.resume()

    async def stop(self, node: SimNode) -> None:
        seconds = self.dice.choice((1.0, 15.0, 150.0))
        self._note(f"{node.name} is frozen for {seconds:.0f} s")
        node.host.freeze()
        await asyncio.sleep(seconds)
        node.host.resume()

    async def cable(self, node: SimNode) -> None:
        seconds = self.dice.choice((1.0, 20.0, 120.0))
        self._note(f"{node.name} is unplugged for {seconds:.0f} s")
        node.host.plug(False)
        await asyncio.sleep(seconds)
        node.host.plug(True)

    async def bad_line(self, node: SimNode) -> None:
        share = self.dice.choice((0.02, 0.1, 0.4))
        self._note(f"line of {node.name} loses {share:.0%}")
        link = node.host.link
        link.loss = link.reorder = link.duplicate = share
        await asyncio.sleep(self.dice.uniform(5, 60))
        link.loss = link.reorder = link.duplicate = 0.0

    async def restart(self, node: SimNode) -> None:
        seconds = self.dice.choice((0.0, 2.0, 30.0))
        self._note(f"{node.name} restarts, {seconds:.0f} s away")
        await node.stop()
        await asyncio.sleep(seconds)
        await node.start()

    async def set_clock(self, node: SimNode) -> None:
        node.clock.wrong_s = self.dice.choice((0.0, -86400.0, 3600.0, -3.0))
        self._note(f"clock of {node.name} is wrong by {node.clock.wrong_s:.0f} s")

    async def relogin(self, node: SimNode) -> None:
        """As `tsctl up --force-reauth`: another node key."""
        self._note(f"{node.name} logs in anew")
        await self._log_in(node)

    async def down(self, node: SimNode) -> None:
        seconds = self.dice.choice((0.0, 10.0, 100.0))
        self._note(f"{node.name} is down for {seconds:.0f} s")
        await node.run(node.backend.edit_prefs({"WantRunning": False, "WantRunningSet": True}))
        await asyncio.sleep(seconds)
        await node.run(node.backend.edit_prefs({"WantRunning": True, "WantRunningSet": True}))

    async def expire(self, node: SimNode) -> None:
        """The administrator expires the key; its user logs in again."""
        if "coord" in self._busy:
            return
        self._note(f"{node.name} is expired")
        self.net.coord.change("expire", self._number(node))
        await asyncio.sleep(self.dice.choice((1.0, 60.0)))
        await self._log_in(node)

    async def rename(self, node: SimNode) -> None:
        if "coord" not in self._busy:
            self._names += 1
            self._note(f"{node.name} is renamed")
            self.net.coord.change("rename", self._number(node), f"name{self._names}")

    def _number(self, node: SimNode) -> str:
        """By its machine key: node keys and names change."""
        machine = str(node.engine.profiles.machine_key().public())
        found = [one for one in self.net.coord.change("list_nodes") if one["machineKey"] == machine]
        return str(found[-1]["id"])

    async def _log_in(self, node: SimNode) -> None:
        """The user stays until it worked: a daemon that ends before that knows nothing of the auth key afterwards."""
        old = node.engine.account.prefs.node_key
        await node.up(self._auth_key)

        def is_done() -> bool:
            return node.state is State.RUNNING and node.engine.account.prefs.node_key != old

        await self.net.until(is_done, 900, f"{node.name} logged in")


def is_direct_by_table(a: SimNode, b: SimNode) -> bool:
    """What the table of NAT kinds says about two hosts as they stand now."""
    return (
        kind_of(b)
        in {"P": "PAEFHX", "A": "PAEFHX", "E": "PAEF", "F": "PAEF", "H": "PA", "X": "PAX", "B": ""}[kind_of(a)]
    )


def kind_of(node: SimNode) -> str:
    nat = node.host.nat
    if node.host.link.udp_blocked:
        return "B"
    if nat is None:
        return "P"
    return {
        ("EIM", "ADF"): "A",
        ("EIM", "APDF"): "E",
        ("none", "APDF"): "F",
        ("APDM", "APDF"): "H",
        ("APDM", "EIF"): "X",
    }[nat.mapping, nat.filtering]
