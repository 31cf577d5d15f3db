"""Probes of netcheck that need TCP: HTTPS latency of a region, and captive portals.

Spec: tailscale: net/netcheck (measureHTTPSLatency), net/captivedetection. Used only when STUN finds nothing, or on
full reports. No redirects are followed.
"""

from __future__ import annotations

import asyncio

from tsd.base.errors import ProtocolError
from tsd.tailcfg.derpmap import DERPMap, DERPNode, DERPRegion
from tsd.transport import tls
from tsd.transport.derp import DerpError, DerpOptions, dial

PROBE_TIMEOUT_S = 5.0
PORTAL_TIMEOUT_S = 3.0
PORTAL_ENDPOINTS = 5
_HEAD_MAX_BYTES = 16 << 10


async def https_latency(region: DERPRegion, options: DerpOptions) -> float | None:
    """Seconds of one GET over an open TLS connection to the first relay that answers; None when none does."""
    for node in region.derp_nodes:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await _measure(node, options)
        except (DerpError, ProtocolError, OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError):
            continue
    return None


async def _measure(node: DERPNode, options: DerpOptions) -> float:
    sock = await dial(node, options)
    if options.plain_http:
        reader, writer = await asyncio.open_connection(sock=sock)
    else:
        verify = tls.needs_chain_check(node.cert_name, node.insecure_for_tests)
        context = tls.client_context(verify=verify)
        reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname=node.host_name)
    try:
        if not options.plain_http:
            chain = tls.peer_chain(writer.get_extra_info("ssl_object"))
            wall_s = options.clock.wall_ns() / 1e9
            tls.verify_peer(chain, node.host_name, node.cert_name, node.insecure_for_tests, wall_s)
        started = options.clock.now()
        await _get(reader, writer, node.host_name, "/derp/latency-check")
        return options.clock.now() - started
    finally:
        writer.transport.abort()


async def captive_portal(derp_map: DERPMap, options: DerpOptions) -> bool | None:
    """Whether something else answers in the place of relays on port 80; None when nobody answered at all."""
    nodes = [n for region in derp_map for n in region.derp_nodes if n.can_port80 and n.ipv4 not in ("", "none")]
    results = await asyncio.gather(*(_is_captive(node, options) for node in nodes[:PORTAL_ENDPOINTS]))
    known = [result for result in results if result is not None]
    return any(known) if known else None


async def _is_captive(node: DERPNode, options: DerpOptions) -> bool | None:
    challenge = f"ts_{node.host_name}"
    plain = DERPNode(name=node.name, host_name=node.host_name, ipv4=node.ipv4, ipv6="none", derp_port=80)
    try:
        async with asyncio.timeout(PORTAL_TIMEOUT_S):
            sock = await dial(plain, options)
            reader, writer = await asyncio.open_connection(sock=sock)
            try:
                path = f"/generate_204?t={options.clock.wall_ns() // 10**9}"
                head = await _get(reader, writer, node.ipv4, path, f"X-Tailscale-Challenge: {challenge}\r\n")
            finally:
                writer.transport.abort()
    except (DerpError, OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError):
        return None
    status, _, rest = head.partition("\r\n")
    answered = f"x-tailscale-response: response {challenge}".lower() in rest.lower()
    return status.split(" ")[1:2] != ["204"] or not answered


async def _get(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, path: str, extra: str = ""
) -> str:
    """The response's head. Raises IncompleteReadError when the stream ends first."""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: tsd\r\n{extra}Connection: close\r\n\r\n".encode())
    return (await reader.readuntil(b"\r\n\r\n"))[:_HEAD_MAX_BYTES].decode("latin-1")
