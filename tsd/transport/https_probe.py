"""Latency of a relay by HTTPS, for networks where UDP is dead (tailscale: net/netcheck, measureHTTPSLatency)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from tsd.base.errors import ProtocolError
from tsd.tailcfg.derpmap import DERPNode, DERPRegion
from tsd.transport import tls

TIMEOUT_S = 5.0
_REQUEST = "GET /derp/latency-check HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"


async def measure_region(region: DERPRegion, protect: Callable[[socket.socket], None]) -> float | None:
    """Seconds from request to the answer's first line on a finished TLS connection; None: no node answered."""
    for node in region.derp_nodes:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await _measure(node, protect)
        except (OSError, TimeoutError, ProtocolError):
            continue
    return None


async def _measure(node: DERPNode, protect: Callable[[socket.socket], None]) -> float:
    context = tls.client_context(verify=tls.needs_chain_check(node.cert_name, node.insecure_for_tests))
    target = node.ipv4 or node.host_name
    sock = await _connected(target, node.effective_derp_port, protect)
    reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname=node.host_name)
    try:
        chain = tls.peer_chain(writer.get_extra_info("ssl_object"))
        tls.verify_peer(chain, node.host_name, node.cert_name, node.insecure_for_tests, time.time())
        started = time.monotonic()
        writer.write(_REQUEST.format(host=node.host_name).encode())
        if not await reader.readline():
            raise ConnectionError("relay closed the connection")
        return time.monotonic() - started
    finally:
        writer.close()


async def _connected(host: str, port: int, protect: Callable[[socket.socket], None]) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(f"no address for {host}")
    for family, kind, proto, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        sock.setblocking(False)
        try:
            protect(sock)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as err:
            sock.close()
            failure = err
        except BaseException:
            sock.close()
            raise
    raise failure
