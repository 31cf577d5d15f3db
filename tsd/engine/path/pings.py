"""The four kinds of ping that `tsctl ping` and the coordination server ask for, and TSMP that peers send us.

disco (magicsock, the path), TSMP (inside the tunnel, no IP stack of the peer), ICMP (the peer's stack) and peerapi
(the peer's PeerAPI). Result shape: tailscale: ipn/ipnstate/ipnstate.go, PingResult.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.keys import DiscoPublic
from tsd.base.log import fields
from tsd.engine import peerapi
from tsd.engine.peers import Peer
from tsd.hull import Frame, Stream
from tsd.packet import tsmp
from tsd.packet.build import icmp_echo_request
from tsd.packet.constants import TSMP
from tsd.packet.parse import Packet

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
NO_PATH_PATIENCE_S = 4.0
NO_PATH_RETRY_S = 0.25
PROBES_MAX = 256


class DiscoReply(Struct, frozen=True):
    """How a disco ping came back: by UDP from `endpoint`, or by a relay."""

    latency_s: float
    endpoint: AddrPort | None
    derp_region: int


class PingHost(Protocol):
    """What pings need from the engine."""

    def peer_for(self, ip: IPAddress) -> Peer | None:
        """The peer that an address routes to."""

    def is_own(self, ip: IPAddress) -> bool: ...

    def own_address_for(self, ip: IPAddress) -> IPAddress | None:
        """Our overlay address of the same family."""

    def is_expired(self, peer: Peer) -> bool: ...

    def derp_code(self, region: int) -> str: ...

    def send(self, frames: list[Frame]) -> None: ...

    def deliver(self, frames: list[Frame]) -> None:
        """To this host, as if they came from the overlay."""

    def disco_ping(self, peer: Peer, size: int) -> asyncio.Future[DiscoReply]: ...

    async def connect(self, remote: AddrPort) -> Stream: ...

    def own_peerapi_port(self, ip: IPAddress) -> int: ...

    def learn_disco_key(self, handle: int, disco_key: DiscoPublic) -> None: ...


class Pings:
    """Outstanding TSMP and ICMP pings by token; replies are taken out of the packet flow by `intercept`."""

    def __init__(self, host: PingHost, clock: Clock, entropy: Entropy) -> None:
        self._host = host
        self._clock = clock
        self._entropy = entropy
        self._tsmp: dict[bytes, asyncio.Future[int]] = {}
        self._icmp: dict[bytes, asyncio.Future[None]] = {}
        self._probes: dict[bytes, Callable[[], None]] = {}
        self.on_icmp_waiting: Callable[[bool], None] = lambda waiting: None
        """ICMP replies must be shown to `intercept` while one is waited for."""

    async def ping(self, ip: IPAddress, kind: str, size: int = 0) -> dict[str, Any]:
        """Waits for the reply without limit: the caller cancels. Never raises for an unreachable peer."""
        result = _blank(ip)
        if self._host.is_own(ip):
            return result | {"Err": f"{ip} is local Tailscale IP", "IsLocalIP": True}
        peer = self._host.peer_for(ip)
        if peer is None:
            return result | {"Err": "no matching peer"}
        if self._host.is_expired(peer):
            return result | {"Err": "peer's node key has expired"}
        answer = await self._by_kind(kind, ip, peer, size)
        if answer.get("Err"):
            return result | answer
        return result | {"NodeIP": str(ip), "NodeName": peer.short_name} | answer

    async def _by_kind(self, kind: str, ip: IPAddress, peer: Peer, size: int) -> dict[str, Any]:
        if kind == "disco":
            return await self._ping_disco(peer, size)
        if kind == "TSMP":
            return await self._ping_tsmp(ip)
        if kind == "ICMP":
            return await self._ping_icmp(ip)
        if kind == "peerapi":
            return await self._ping_peerapi(peer)
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def _ping_disco(self, peer: Peer, size: int) -> dict[str, Any]:
        """A peer that just joined has no path yet: try for a while before saying why it cannot be asked."""
        until = self._clock.now() + NO_PATH_PATIENCE_S
        while True:
            try:
                reply = await self._host.disco_ping(peer, size)
                break
            except OSError as err:
                if self._clock.now() >= until:
                    return {"Err": str(err)}
                await asyncio.sleep(NO_PATH_RETRY_S)
        return {
            "LatencySeconds": reply.latency_s,
            "Endpoint": "" if reply.endpoint is None else str(reply.endpoint),
            "DERPRegionID": reply.derp_region,
            "DERPRegionCode": self._host.derp_code(reply.derp_region) if reply.derp_region else "",
        }

    async def _ping_tsmp(self, ip: IPAddress) -> dict[str, Any]:
        own = self._host.own_address_for(ip)
        if own is None:
            return {"Err": f"no own IPv{ip.version} address"}
        token = self._entropy(tsmp.PING_BYTES)
        port, latency_s = await self._round_trip(self._tsmp, token, tsmp.ping(own.packed, ip.packed, token))
        return {"LatencySeconds": latency_s, "PeerAPIPort": port} if port else {"LatencySeconds": latency_s}

    async def _ping_icmp(self, ip: IPAddress) -> dict[str, Any]:
        own = self._host.own_address_for(ip)
        if own is None:
            return {"Err": f"no own IPv{ip.version} address"}
        token = self._entropy(4)
        identifier, sequence = int.from_bytes(token[:2], "big"), int.from_bytes(token[2:], "big")
        request = icmp_echo_request(own.packed, ip.packed, identifier, sequence)
        _, latency_s = await self._round_trip(self._icmp, token, request)
        return {"LatencySeconds": latency_s}

    async def _round_trip(self, waiting: dict[bytes, Any], token: bytes, packet: bytes) -> tuple[Any, float]:
        waiting[token] = reply = asyncio.get_running_loop().create_future()
        self.on_icmp_waiting(bool(self._icmp))
        started = self._clock.now()
        try:
            self._host.send([Frame(packet)])
            return await reply, self._clock.now() - started
        finally:
            waiting.pop(token, None)
            self.on_icmp_waiting(bool(self._icmp))

    async def _ping_peerapi(self, peer: Peer) -> dict[str, Any]:
        remote = peerapi_address(peer)
        if remote is None:
            return {"Err": "peer has no PeerAPI"}
        started = self._clock.now()
        try:
            status = await peerapi.head(self._host.connect, remote, TIMEOUT_S)
        except (OSError, TimeoutError) as err:
            return {"Err": f"peerapi of {remote}: {err or 'timeout'}"}
        if status != 200:
            return {"Err": f"peerapi of {remote}: HTTP status {status}"}
        return {
            "NodeName": peer.node.name,
            "LatencySeconds": self._clock.now() - started,
            "PeerAPIURL": f"http://{remote}",
        }

    def probe(self, ip: IPAddress, on_pong: Callable[[], None]) -> bytes | None:
        """A TSMP ping for the caller to send as it likes; None without an own address of the family."""
        own = self._host.own_address_for(ip)
        if own is None:
            return None
        token = self._entropy(tsmp.PING_BYTES)
        if len(self._probes) >= PROBES_MAX:
            del self._probes[next(iter(self._probes))]
        self._probes[token] = on_pong
        return tsmp.ping(own.packed, ip.packed, token)

    def intercept(self, handle: int, packet: Packet) -> bool:
        """Whether an inbound packet was for us alone: TSMP, or the reply to one of our ICMP pings."""
        if packet.proto == TSMP:
            self._take_tsmp(handle, packet)
            return True
        if self._icmp and packet.is_icmp_answer and len(packet.transport) >= 8:
            waiting = self._icmp.get(bytes(packet.transport[4:8]))
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
                return True
        return False

    def _take_tsmp(self, handle: int, packet: Packet) -> None:
        message = tsmp.read(packet)
        if isinstance(message, tsmp.Ping):
            pong = tsmp.pong_to(packet, self._host.own_peerapi_port(packet.dst_ip))
            if pong is not None:
                self._host.send([Frame(pong)])
        elif isinstance(message, tsmp.Pong):
            passed = self._probes.pop(message.token, None)
            if passed is not None:
                passed()
            waiting = self._tsmp.get(message.token)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.peerapi_port)
        elif isinstance(message, tsmp.DiscoAdvertisement):
            self._host.learn_disco_key(handle, message.disco_key)
        elif isinstance(message, tsmp.Rejected):
            self._take_refusal(packet, message)

    def _take_refusal(self, packet: Packet, message: tsmp.Rejected) -> None:
        """A peer drops what we send on purpose: who waits for an answer need not wait any longer."""
        reason = tsmp.REASON_TEXTS.get(message.reason, "unknown")
        target = AddrPort(packet.src_ip, message.dport)
        log.debug(fields("refused by a peer", endpoint=target, reason=reason, proto=message.proto))
        told = tsmp.unreachable_for(packet, message)
        if told is not None:
            self._host.deliver([Frame(told)])


def peerapi_address(peer: Peer) -> AddrPort | None:
    """Where a peer's PeerAPI listens: IPv4 when it has it, else IPv6."""
    hostinfo = peer.node.hostinfo
    if hostinfo is None:
        return None
    for version in (4, 6):
        port = hostinfo.service_port(f"peerapi{version}")
        ip = next((ip for ip in peer.addresses if ip.version == version), None)
        if port and ip is not None:
            return AddrPort(ip, port)
    return None


def _blank(ip: IPAddress) -> dict[str, Any]:
    return {
        "IP": str(ip),
        "NodeIP": "",
        "NodeName": "",
        "Err": "",
        "LatencySeconds": 0.0,
        "Endpoint": "",
        "PeerRelay": "",
        "DERPRegionID": 0,
        "DERPRegionCode": "",
    }
