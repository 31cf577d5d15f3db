"""The whole coordination server in virtual time: it must need neither threads nor real sockets."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from harness.jumploop import LoopClock
from harness.simcoord import coord_on_host, sim_dial
from harness.simloop import SimLoop
from harness.simnet import SimNet
from tsd.base.entropy import SeededEntropy
from tsd.base.keys import DiscoPrivate, MachinePrivate, NodePrivate
from tsd.tailcfg.hostinfo import Hostinfo
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import RegisterAuth, RegisterRequest
from tsd.transport.control import ControlClient


def test_an_hour_of_a_quiet_poll_passes_in_a_moment(tmp_path: Path) -> None:
    frames: list[bool] = []

    async def node(net: SimNet, url: str, key: str, clock: LoopClock) -> None:
        entropy = SeededEntropy("node")
        client = ControlClient(
            url, MachinePrivate.generate(entropy), entropy=entropy, clock=clock, environ={}, dial=sim_dial
        )
        node_key = str(NodePrivate.generate(entropy).public())
        auth = RegisterAuth(auth_key=key)
        answer = await client.register(RegisterRequest(node_key=node_key, auth=auth, hostinfo=Hostinfo(hostname="n")))
        assert answer.machine_authorized
        disco = str(DiscoPrivate.generate(entropy).public())
        stream = await client.poll(MapRequest(node_key=node_key, disco_key=disco, stream=True, compress="zstd"))
        async for message in stream:
            frames.append(message.keep_alive)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        net, clock = SimNet(loop, 1), LoopClock(loop)
        loop.net = net
        server_host, node_host = net.host("coord", "198.51.100.1"), net.host("node", "198.51.100.2")
        async with coord_on_host(net, server_host, tmp_path / "state", clock=clock, ephemeral_timeout_s=60.0) as server:
            made = server.administration.create_key(server.moment(), ephemeral=True)
            server.drain()
            with net.on(node_host):
                task = asyncio.create_task(node(net, server.url, made["key"], clock))
            await asyncio.sleep(3600)
            assert server.administration.list_nodes(server.moment())[0]["online"]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            node_host.cut_streams()
            await asyncio.sleep(100)
            assert server.administration.list_nodes(server.moment()) == []

    started_s = time.process_time()
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())
    assert frames[0] is False and 60 <= frames.count(True) <= 75
    assert time.process_time() - started_s < 10
