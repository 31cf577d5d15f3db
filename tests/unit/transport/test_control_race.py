"""Plain against TLS: who starts when, who wins, and what is said when both fail."""

import asyncio
import time
from typing import Any

import pytest

from harness.control_double import ControlDouble
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ControlError
from tsd.base.keys import MachinePrivate
from tsd.tailcfg.register import RegisterRequest
from tsd.transport.control import ControlClient
from tsd.transport.dial import HostDial

REGISTER = RegisterRequest(node_key="nodekey:" + "ab" * 32)


class Roads:
    """Leads every dial to one real port; each scheme can be blocked or refused."""

    def __init__(self, server: ControlDouble, *, plain: str = "open", tls: str = "open") -> None:
        self._port = int(server.url.rpartition(":")[2])
        self.modes = {False: plain, True: tls}
        self.tried: list[tuple[str, int, bool, float]] = []
        self.started = time.monotonic()

    async def __call__(self, host: str, port: int, *, tls: Any = None, **_: Any) -> Any:
        self.tried.append((host, port, tls is not None, time.monotonic() - self.started))
        mode = self.modes[tls is not None]
        if mode == "blocked":
            await asyncio.Event().wait()
        if mode == "refused":
            raise ControlError(f"refused {'TLS' if tls is not None else 'plain'}")
        return await HostDial()("127.0.0.1", self._port)


def client_on(roads: Roads, url: str, server: ControlDouble) -> ControlClient:
    client = ControlClient(url, MachinePrivate.generate(SeededEntropy(1)), environ={}, dial=roads)
    client._server_key = server.static.public()
    return client


async def test_plain_alone_when_it_works() -> None:
    async with ControlDouble() as server:
        roads = Roads(server)
        client = client_on(roads, "https://control.example:8443", server)
        await client.register(REGISTER)
        assert [(port, is_tls) for _, port, is_tls, _ in roads.tried] == [(80, False)]
        await client.close()


async def test_tls_starts_half_a_second_later_when_plain_hangs() -> None:
    async with ControlDouble() as server:
        roads = Roads(server, plain="blocked")
        client = client_on(roads, "https://control.example:8443", server)
        await client.register(REGISTER)
        assert [(port, is_tls) for _, port, is_tls, _ in roads.tried] == [(80, False), (8443, True)]
        assert 0.45 <= roads.tried[1][3] - roads.tried[0][3] < 3
        await client.close()


async def test_tls_starts_at_once_when_plain_fails() -> None:
    async with ControlDouble() as server:
        roads = Roads(server, plain="refused")
        client = client_on(roads, "https://control.example", server)
        await client.register(REGISTER)
        assert roads.tried[1][3] - roads.tried[0][3] < 0.4
        await client.close()


async def test_private_hosts_have_no_tls_road() -> None:
    async with ControlDouble() as server:
        roads = Roads(server, plain="refused")
        with pytest.raises(ControlError, match="refused plain"):
            await client_on(roads, "http://192.168.7.7:8080", server).register(REGISTER)
        assert len(roads.tried) == 1


@pytest.mark.parametrize(("url", "text"), [("https://h", "refused TLS"), ("http://h", "refused plain")])
async def test_both_failing_tells_of_the_road_in_the_url(url: str, text: str) -> None:
    async with ControlDouble() as server:
        with pytest.raises(ControlError, match=text):
            await client_on(Roads(server, plain="refused", tls="refused"), url, server).register(REGISTER)
