"""HTTPS latency and captive portals against small servers on loopback."""

import asyncio

import pytest

from harness.derpd import DerpServer
from tsd.base.clock import SystemClock
from tsd.base.entropy import system_entropy
from tsd.base.keys import NodePrivate
from tsd.tailcfg.derpmap import DERPMap, DERPNode, DERPRegion
from tsd.transport import netprobe
from tsd.transport.derp import DerpOptions

OPTIONS = DerpOptions(NodePrivate.generate(system_entropy), SystemClock(), system_entropy, lambda sock: None)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The machine may be busy; what ends by its time limit has a test in virtual time."""
    for limit in ("PROBE_TIMEOUT_S", "PORTAL_TIMEOUT_S"):
        monkeypatch.setattr(netprobe, limit, 60.0)


async def test_https_latency_and_dead_regions():
    server = DerpServer(with_meta=False)
    await server.start()
    latency = await netprobe.https_latency(server.map().regions[900], OPTIONS)
    assert latency is not None and 0 < latency < 60
    wrong = server.map(cert_name="sha256-raw:" + "0" * 64)
    assert await netprobe.https_latency(wrong.regions[900], OPTIONS) is None
    await server.stop()
    assert await netprobe.https_latency(server.map().regions[900], OPTIONS) is None


@pytest.mark.parametrize(
    ("response", "captive"),
    [
        ("204 No Content\r\nX-Tailscale-Response: response ts_relay.test", False),
        ("204 No Content", True),
        ("302 Found\r\nLocation: http://login", True),
        (None, None),
    ],
)
async def test_captive_portal(monkeypatch, response, captive):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if response is not None:
            writer.write(f"HTTP/1.1 {response}\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    real = netprobe.dial

    async def dial(node, options):
        return await real(DERPNode(host_name=node.host_name, ipv4=node.ipv4, derp_port=port), options)

    monkeypatch.setattr(netprobe, "dial", dial)
    node = DERPNode(name="1a", host_name="relay.test", ipv4="127.0.0.1", can_port80=True)
    derp_map = DERPMap(regions={1: DERPRegion(region_id=1, nodes=(node,))})
    assert await netprobe.captive_portal(derp_map, OPTIONS) is captive
    assert await netprobe.captive_portal(DERPMap(regions={}), OPTIONS) is None
    server.close()
