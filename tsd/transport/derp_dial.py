"""TCP to a relay: literals of the map or DNS, both families racing, through an HTTP proxy where one is set.

Spec: tailscale: derp/derphttp (dialNode). What all DERP connections of one engine share lives here too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tsd.base.addr import IPAddress, parse_ip
from tsd.base.clock import Clock
from tsd.base.entropy import Entropy
from tsd.base.errors import ConfigError, ControlError, DecodeError, TsdError, reason_of
from tsd.base.keys import NodePrivate
from tsd.tailcfg.derpmap import DERPNode
from tsd.transport.dial import open_tunnel
from tsd.transport.finetimer import FineTimer, PaceTimer
from tsd.transport.host import Resolve, resolve_host
from tsd.transport.proxy_env import Proxy, ProxySettings

DIAL_TIMEOUT_S = 1.5
SECOND_FAMILY_DELAY_S = 0.2
QUEUE_BYTES = 1 << 20


class DerpError(TsdError):
    """A relay could not be reached or refused us; the text names the step."""


Connect = Callable[[DERPNode, Callable[[], asyncio.Protocol]], Awaitable[asyncio.Transport]]
"""Opens a stream to a node for a protocol, in place of sockets and TLS. Raises `DerpError`."""


@dataclass(frozen=True, slots=True)
class DerpOptions:
    """What all connections of one engine share; simulated networks bring their own `connect` and `new_timer`."""

    private: NodePrivate
    clock: Clock
    entropy: Entropy
    protect: Callable[[socket.socket], None]
    plain_http: bool = False
    prefer_ipv6: bool = False
    proxies: ProxySettings = field(default_factory=ProxySettings)
    queue_bytes: int = QUEUE_BYTES
    connect: Connect | None = None
    resolve: Resolve = resolve_host
    new_timer: Callable[[Callable[[], None]], PaceTimer] = FineTimer


async def dial(node: DERPNode, options: DerpOptions) -> socket.socket:
    """A TCP connection to a node, through the proxy that the environment names. Raises `DerpError`."""
    port = node.derp_port or (80 if options.plain_http else node.effective_derp_port)
    try:
        proxy = options.proxies.proxy_for(node.host_name, port, is_tls=not options.plain_http)
    except ConfigError as err:
        raise DerpError(str(err)) from None
    if proxy is None:
        return await _dial_direct(node, port, options)
    sock = await _dial_direct(DERPNode(host_name=proxy.host), proxy.port, options)
    return await _tunnel(sock, node, port, proxy)


async def _tunnel(sock: socket.socket, node: DERPNode, port: int, proxy: Proxy) -> socket.socket:
    try:
        await open_tunnel(sock, node.host_name, port, proxy)
    except ControlError as err:
        sock.close()
        raise DerpError(str(err)) from None
    except BaseException:
        sock.close()
        raise
    return sock


async def _dial_direct(node: DERPNode, port: int, options: DerpOptions) -> socket.socket:
    """Both families race, the second one starts later."""
    addresses = await _addresses(node, options)
    tasks = [asyncio.ensure_future(_dial_one(ip, port, i, options)) for i, ip in enumerate(addresses)]
    winner: socket.socket | None = None
    failures: list[str] = []
    try:
        for done in asyncio.as_completed(tasks):
            try:
                winner = await done
                return winner
            except (OSError, TimeoutError) as err:
                failures.append(text_of(err))
    finally:
        await _discard(tasks, winner)
    raise DerpError(f"{node.host_name}:{port}: {failures[0] if failures else 'no address'}")


async def _discard(tasks: list[asyncio.Task[socket.socket]], winner: socket.socket | None) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, socket.socket) and result is not winner:
            result.close()


async def _dial_one(ip: IPAddress, port: int, order: int, options: DerpOptions) -> socket.socket:
    await asyncio.sleep(order * SECOND_FAMILY_DELAY_S)
    sock = socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options.protect(sock)
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, (str(ip), port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _addresses(node: DERPNode, options: DerpOptions) -> list[IPAddress]:
    """At most one address per family: literals of the map, else DNS; "none" and the like turn a family off."""
    found: dict[int, IPAddress] = {}
    for family, text in ((4, node.ipv4), (6, node.ipv6)):
        ip = literal_ip(text)
        if ip is not None and ip.version == family:
            found[family] = ip
    wanted = [f for f, text in ((4, node.ipv4), (6, node.ipv6)) if not text]
    if not found and wanted:
        for ip in await _resolve(node.host_name, options.resolve):
            if ip.version in wanted:
                found.setdefault(ip.version, ip)
    order = (6, 4) if options.prefer_ipv6 else (4, 6)
    return [found[family] for family in order if family in found]


async def _resolve(host_name: str, resolve: Resolve) -> list[IPAddress]:
    literal = literal_ip(host_name)
    if literal is not None:
        return [literal]
    try:
        return await resolve(host_name)
    except OSError as err:
        raise DerpError(f"{host_name}: look-up failed: {text_of(err)}") from None


def literal_ip(text: str) -> IPAddress | None:
    try:
        return parse_ip(text)
    except DecodeError:
        return None


def text_of(err: BaseException) -> str:
    if isinstance(err, TimeoutError):
        return "timed out"
    return (reason_of(err) if isinstance(err, Exception) else "") or type(err).__name__
