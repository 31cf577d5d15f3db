"""STUN as a client needs it here (RFC 8489 binding requests), and the probes over real sockets that netcheck makes.

Also TLS probes for hosts whose UDP is blocked. Blocking sockets and threads: this runs in the CLI, for a few seconds.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from binascii import crc32
from collections.abc import Callable
from typing import Any

MAGIC = 0x2112A442
BINDING_REQUEST, BINDING_SUCCESS = 0x0001, 0x0101
MAPPED_ADDRESS, XOR_MAPPED_ADDRESS, XOR_MAPPED_ADDRESS_OLD = 0x0001, 0x0020, 0x8020
SOFTWARE, FINGERPRINT, FINGERPRINT_MASK = 0x8022, 0x8028, 0x5354554E
SOFTWARE_NAME = b"tailnode"
DEFAULT_STUN_PORT, DEFAULT_DERP_PORT = 3478, 443
TRIES = 3
TRY_INTERVAL_S = 0.4
LAST_WAIT_S = 1.2


def stun_request(transaction: bytes) -> bytes:
    """With SOFTWARE and FINGERPRINT: DERP servers stay silent without them (tailscale: `net/stun/stun.go`)."""
    software = struct.pack("!HH", SOFTWARE, len(SOFTWARE_NAME)) + SOFTWARE_NAME
    message = struct.pack("!HHI", BINDING_REQUEST, len(software) + 8, MAGIC) + transaction + software
    return message + struct.pack("!HHI", FINGERPRINT, 4, crc32(message) ^ FINGERPRINT_MASK)


def stun_answer(datagram: bytes) -> tuple[bytes, str, int] | None:
    """(transaction, address, port) of a binding success; None for anything else."""
    if len(datagram) < 20:
        return None
    kind, length, magic = struct.unpack_from("!HHI", datagram)
    if kind != BINDING_SUCCESS or magic != MAGIC or length > len(datagram) - 20:
        return None
    transaction = datagram[8:20]
    plain: tuple[str, int] | None = None
    position, end = 20, 20 + length
    while position + 4 <= end:
        attribute, size = struct.unpack_from("!HH", datagram, position)
        value = datagram[position + 4 : min(position + 4 + size, end)]
        if attribute in (XOR_MAPPED_ADDRESS, XOR_MAPPED_ADDRESS_OLD):
            found = _address(value, datagram[4:20])
            if found is not None:
                return transaction, *found
        elif attribute == MAPPED_ADDRESS and plain is None:
            plain = _address(value, bytes(16))
        position += 4 + (size + 3) // 4 * 4
    return None if plain is None else (transaction, *plain)


def _address(value: bytes, mask: bytes) -> tuple[str, int] | None:
    family = {1: (socket.AF_INET, 4), 2: (socket.AF_INET6, 16)}.get(value[1]) if len(value) >= 4 else None
    if family is None or len(value) < 4 + family[1]:
        return None
    port = int.from_bytes(value[2:4], "big") ^ int.from_bytes(mask[:2], "big")
    raw = bytes(a ^ b for a, b in zip(value[4 : 4 + family[1]], mask, strict=False))
    return socket.inet_ntop(family[0], raw), port


class Target:
    """One DERP node, as an address of one family to probe."""

    def __init__(self, region_id: int, family: int, address: str, port: int) -> None:
        self.region_id = region_id
        self.family = family
        self.address = address
        self.port = port


class StunResult:
    def __init__(self) -> None:
        self.latency_s: dict[tuple[int, int], float] = {}
        self.global_counts: dict[int, dict[str, int]] = {4: {}, 6: {}}
        self.can_send: dict[int, bool] = {4: False, 6: False}

    def note(self, target: Target, rtt_s: float, address: str, port: int) -> None:
        key = (target.region_id, target.family)
        self.latency_s[key] = min(rtt_s, self.latency_s.get(key, rtt_s))
        if (":" in address) != (target.family == 6):
            return  # a server behind a proxy of its own saw that one
        shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        counts = self.global_counts[target.family]
        counts[shown] = counts.get(shown, 0) + 1


def stun_targets(derp_map: dict[str, Any]) -> list[Target]:
    """The nodes to probe: at most three of a region, each family that it has."""
    found: list[Target] = []
    for region in _regions(derp_map):
        nodes = [node for node in region.get("Nodes") or [] if isinstance(node, dict)]
        for node in nodes[:3]:
            port = node.get("STUNPort") or DEFAULT_STUN_PORT
            if not isinstance(port, int) or port < 0:
                continue
            for family in (4, 6):
                address = node_address(node, family)
                if address:
                    found.append(Target(int(region["RegionID"]), family, address, port))
    return found


def _regions(derp_map: dict[str, Any]) -> list[dict[str, Any]]:
    found = derp_map.get("Regions") or {}
    return [one for one in found.values() if isinstance(one, dict) and isinstance(one.get("RegionID"), int)]


def node_address(node: dict[str, Any], family: int) -> str:
    """The address of a node in one family; "" when it has none ("none" in the map switches a family off)."""
    given = str(node.get("STUNTestIP") or node.get("IPv4" if family == 4 else "IPv6") or "")
    if given:
        wanted = ":" in given
        return given if given != "none" and wanted == (family == 6) else ""
    host = str(node.get("HostName") or "")
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    try:
        return str(socket.getaddrinfo(host, None, kind, socket.SOCK_DGRAM)[0][4][0]) if host else ""
    except (OSError, UnicodeError):
        return ""


def probe_stun(
    targets: list[Target],
    bind_address: str = "",
    bind_port: int = 0,
    prepare: Callable[[socket.socket], None] = lambda sock: None,
) -> StunResult:
    """Ask every target a few times and listen until all have answered or it is no use any more.

    `prepare` gets the sockets first, to keep them out of an exit node.
    """
    result = StunResult()
    sockets = {family: _udp_socket(family, bind_address, bind_port) for family in (4, 6)}
    for made in filter(None, sockets.values()):
        prepare(made)
    pending: dict[bytes, tuple[Target, float]] = {}
    try:
        for attempt in range(TRIES):
            for target in targets:
                if (target.region_id, target.family) not in result.latency_s:
                    _send(sockets[target.family], target, pending, result)
            wait_s = TRY_INTERVAL_S if attempt < TRIES - 1 else LAST_WAIT_S
            _listen(sockets, pending, result, wait_s, len({(one.region_id, one.family) for one in targets}))
    finally:
        for sock in sockets.values():
            if sock is not None:
                sock.close()
    return result


def _udp_socket(family: int, bind_address: str, bind_port: int) -> socket.socket | None:
    kind, any_address = (socket.AF_INET, "0.0.0.0") if family == 4 else (socket.AF_INET6, "::")
    try:
        sock = socket.socket(kind, socket.SOCK_DGRAM)
    except OSError:
        return None
    try:
        if family == 6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        wants_this = bool(bind_address) and (":" in bind_address) == (family == 6)
        sock.bind((bind_address if wants_this else any_address, bind_port))
        sock.setblocking(False)
    except OSError:
        sock.close()
        return None
    return sock


def _send(
    sock: socket.socket | None, target: Target, pending: dict[bytes, tuple[Target, float]], result: StunResult
) -> None:
    if sock is None:
        return
    transaction = os.urandom(12)
    pending[transaction] = (target, time.monotonic())
    try:
        sock.sendto(stun_request(transaction), (target.address, target.port))
        result.can_send[target.family] = True
    except (OSError, OverflowError):
        pending.pop(transaction)


def _listen(
    sockets: dict[int, socket.socket | None],
    pending: dict[bytes, tuple[Target, float]],
    result: StunResult,
    wait_s: float,
    wanted: int,
) -> None:
    deadline = time.monotonic() + wait_s
    live = [sock for sock in sockets.values() if sock is not None]
    while live and len(result.latency_s) < wanted and (left_s := deadline - time.monotonic()) > 0:
        for sock in select.select(live, [], [], left_s)[0]:
            try:
                datagram = sock.recv(2048)
            except OSError:
                continue
            found = stun_answer(datagram)
            asked = pending.pop(found[0], None) if found is not None else None
            if found is not None and asked is not None:
                result.note(asked[0], time.monotonic() - asked[1], found[1], found[2])


def probe_tls(derp_map: dict[str, Any], timeout_s: float = 3.0) -> dict[int, float]:
    """Seconds of a TLS handshake with each region's first node: the answer when UDP does not work."""
    import threading

    found: dict[int, float] = {}

    def probe(region: dict[str, Any]) -> None:
        nodes = [node for node in region.get("Nodes") or [] if isinstance(node, dict) and not node.get("STUNOnly")]
        if nodes:
            took_s = _tls_handshake_s(nodes[0], timeout_s)
            if took_s is not None:
                found[int(region["RegionID"])] = took_s

    threads = [threading.Thread(target=probe, args=(region,), daemon=True) for region in _regions(derp_map)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s + 0.5
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _tls_handshake_s(node: dict[str, Any], timeout_s: float) -> float | None:
    """Latency only, nothing is sent: the certificate does not matter (it may be pinned, or a test's)."""
    import ssl

    address = node_address(node, 4) or node_address(node, 6) or str(node.get("HostName") or "")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        port = int(node.get("DERPPort") or DEFAULT_DERP_PORT)
        with socket.create_connection((address, port), timeout_s) as sock:
            started = time.monotonic()
            with context.wrap_socket(sock, server_hostname=str(node.get("HostName") or "")):
                return (time.monotonic() - started) / 2
    except (OSError, ValueError):
        return None
