"""A whole engine without a network: memory hull, recorded UDP, and a test that plays the coordination server.

What control would say goes in by `map` and `register`; datagrams that the engine sends pile up in `sent`. Nothing
leaves the process: relays cannot be dialled, host names do not resolve unless `names` has them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.clock import Clock, ManualClock
from tsd.base.entropy import SeededEntropy
from tsd.base.errors import ControlError
from tsd.base.keys import DiscoPrivate, NodePrivate
from tsd.dataplane.reference import ReferenceCore
from tsd.engine.control.hostinfo import HostFacts
from tsd.engine.engine import Engine, EngineOptions
from tsd.hull import Hull, StateStore
from tsd.localapi.engine_backend import EngineBackend
from tsd.tailcfg.derpmap import DERPNode, DERPRegion
from tsd.tailcfg.mapresponse import decode_map_response
from tsd.tailcfg.register import RegisterResponse
from tsd.tailcfg.user import Login, User
from tsd.transport.derp import DerpOptions
from tsd.transport.derp_dial import DerpError
from tsplatform.memory.hull import build_memory_hull

OWN = ip_address("100.64.0.1")
DERP_MAP = {
    "Regions": {
        "1": {
            "RegionID": 1,
            "RegionCode": "lab",
            "Nodes": [{"Name": "1a", "RegionID": 1, "HostName": "relay.example", "IPv4": "192.0.2.1", "IPv6": "none"}],
        }
    }
}
FILTER = [{"SrcIPs": ["*"], "DstPorts": [{"IP": "*", "Ports": {"First": 0, "Last": 65535}}]}]
FACTS = HostFacts("linux", "6.1", "host", "x86_64")


class Keys:
    """Keys of the peer with a number, always the same."""

    def __init__(self, number: int) -> None:
        self.node = NodePrivate.generate(SeededEntropy(f"node {number}"))
        self.disco = DiscoPrivate.generate(SeededEntropy(f"disco {number}"))


def peer_json(number: int, **changes: Any) -> dict[str, Any]:
    """Node `number`, 100.64.0.<number>; a change to None takes the field away."""
    keys = Keys(number)
    node: dict[str, Any] = {
        "ID": number,
        "StableID": f"n{number}",
        "Name": f"n{number}.tail.example.",
        "User": 7,
        "Key": str(keys.node.public()),
        "DiscoKey": str(keys.disco.public()),
        "Addresses": [f"100.64.0.{number}/32", f"fd7a:115c:a1e0::{number:x}/128"],
        "AllowedIPs": [f"100.64.0.{number}/32", f"fd7a:115c:a1e0::{number:x}/128"],
        "Endpoints": [f"192.0.2.{number}:41641"],
        "HomeDERP": 1,
        "Cap": 100,
        "Hostinfo": {"OS": "linux", "Hostname": f"n{number}"},
        "Created": "2026-01-01T00:00:00Z",
        "Online": True,
        "MachineAuthorized": True,
    }
    return {name: value for name, value in (node | changes).items() if value is not None}


class RecordedUdp:
    """A UDP socket that only keeps what was sent. `refuse` makes sends to a family fail."""

    def __init__(self, owner: LoneEngine, family: int, port: int, on_batch: Callable[..., None]) -> None:
        self.port = port or 41641
        self.on_batch = on_batch
        self._owner = owner
        self._family = family

    def send(self, datagrams: bytes, datagram_bytes: int, to: AddrPort) -> bool:
        self._owner.sent.append((to, bytes(datagrams)))
        return True

    def close(self) -> None:
        self._owner.sockets.pop(self._family, None)


class LoneEngine:
    """`async with lone_engine() as lone:`; `lone.backend` is the LocalAPI's view of it."""

    def __init__(self, *, store: StateStore | None = None, clock: Clock | None = None, **options: Any) -> None:
        self.sent: list[tuple[AddrPort, bytes]] = []
        self.sockets: dict[int, RecordedUdp] = {}
        self.names: dict[str, list[IPAddress]] = {}
        self.dials: list[tuple[str, int]] = []
        self.clock = clock or ManualClock()
        self.hull: Hull = build_memory_hull(OWN, underlay=[ip_address("192.0.2.100")])
        if store is not None:
            self.hull.store = store
        self.key = Keys(1).node
        entropy = SeededEntropy("lone engine")
        self.engine = Engine(
            EngineOptions(
                version="test",
                hull=self.hull,
                clock=self.clock,
                entropy=entropy,
                new_core=ReferenceCore,
                open_udp=self._open_udp,
                derp=lambda key: DerpOptions(key, self.clock, entropy, lambda sock: None, connect=self._no_relay),
                resolve_host=self._resolve,
                measure_https=self._no_https,
                control_dial=options.pop("control_dial", self._no_control),
                facts=FACTS,
                **options,
            )
        )
        self.backend = EngineBackend(self.engine)

    def _open_udp(self, family: int, port: int, on_batch: Any, on_error: Any) -> RecordedUdp:
        made = self.sockets[family] = RecordedUdp(self, family, port, on_batch)
        return made

    async def _no_relay(self, node: DERPNode, protocol: Any) -> asyncio.Transport:
        raise DerpError("no relays here")

    async def _resolve(self, name: str) -> list[IPAddress]:
        if name not in self.names:
            raise OSError(f"no address for {name}")
        return self.names[name]

    async def _no_https(self, region: DERPRegion) -> float | None:
        return None

    async def _no_control(self, host: str, port: int, **_: Any) -> Any:
        self.dials.append((host, port))
        raise ControlError(f"cannot connect to {host}:{port}: unreachable (TCP)")

    # --- what control says

    def register(self) -> None:
        """Control accepted our key; no control client is involved."""
        self.engine.account.edit_prefs({"WantRunning": True, "WantRunningSet": True})
        response = RegisterResponse(
            user=User(id=7), login=Login(id=7, login_name="lab@example.com"), machine_authorized=True
        )
        self.engine.on_login_done(response, self.key)

    def map(self, is_first: bool = False, **message: Any) -> None:
        """One map message, by Go's names, through the decoder. Raises what the engine raises."""
        self.engine.on_map(decode_map_response(json.dumps(message).encode()), is_first)

    def first_map(self, *peers: dict[str, Any], **more: Any) -> None:
        """A whole network map: ourselves, `peers`, a relay, a filter that lets everything in."""
        node = peer_json(1, Key=str(self.key.public()), Endpoints=None, DiscoKey=None)
        base = {"Node": node, "DERPMap": DERP_MAP, "Domain": "example.com", "PacketFilter": FILTER}
        base |= {"DNSConfig": {"Proxied": True, "Domains": ["tail.example"]}, "Peers": list(peers)}
        base |= {"UserProfiles": [{"ID": 7, "LoginName": "lab@example.com", "DisplayName": "Lab"}]}
        self.map(is_first=True, **{name: value for name, value in (base | more).items() if value is not None})

    # --- looking

    def peer_ids(self) -> list[int]:
        return sorted(peer.node.id for peer in self.engine.tailnet.peers)

    def routed(self, address: str) -> int | None:
        """ID of the peer that the core routes an address to."""
        assert self.engine.plane is not None
        handle = self.engine.plane.core.route(parse_ip(address).packed)
        peer = self.engine.tailnet.peers.by_handle(handle) if handle is not None else None
        return peer.node.id if peer is not None else None


@asynccontextmanager
async def lone_engine(*, is_up: bool = True, **options: Any) -> AsyncIterator[LoneEngine]:
    """Started; with `is_up` also logged in, with a home relay."""
    lone = LoneEngine(**options)
    await lone.engine.start()
    try:
        if is_up:
            lone.register()
            lone.first_map()
            lone.engine.reach._set_home(1)
            await asyncio.sleep(0)
        yield lone
    finally:
        await lone.engine.close()
        await asyncio.sleep(0)
        logging.getLogger("tsd").debug("engine closed")
