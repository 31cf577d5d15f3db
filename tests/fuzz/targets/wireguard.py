"""Fuzz targets: WireGuard handshake messages, with and without a valid MAC1."""

from __future__ import annotations

from harness.wgnode import WgNode, pair
from tsd.wireguard.cookie import MacStamp

_LENGTHS = {1: 148, 2: 92, 3: 64}


def fuzz_wireguard(data: bytes) -> None:
    """The first byte chooses a message type whose length is then forced; the device must stay silent."""
    wire = pair()
    node: WgNode = wire.b
    now, wall_ns = wire.clock.now(), wire.clock.wall_ns()
    node.wg.receive(data, "raw", now, wall_ns)
    kind = data[0] % 3 + 1 if data else 1
    body = (bytes((kind, 0, 0, 0)) + data[1:]).ljust(_LENGTHS[kind], b"\0")[: _LENGTHS[kind]]
    node.wg.receive(body, "shaped", now, wall_ns)
    node.wg.receive(MacStamp(node.private.public().raw).stamp(body[:-32], 0.0), "stamped", now, wall_ns)
    assert node.wg.take_outputs() == [] and sum(node.wg.drops.values()) == 3
