"""Probes from this machine: how far a connection comes, by layer; STUN; full-sized packets. Standard library only.

Sockets carry the daemon's bypass mark where that is allowed, so that an exit node does not carry the question.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from email.utils import mktime_tz, parsedate_tz
from typing import Any
from urllib.parse import urlsplit

from tsctl.doctor.facts import ControlFacts, PathFacts, Reached, RelayFacts
from tsctl.stunprobe import DEFAULT_DERP_PORT, StunResult, probe_stun, stun_targets
from tsd.localapi.schema import CAPABILITY_VERSION

LIMIT_S = 4.0
PING_LIMIT_S = 3.0
WIREGUARD_BYTES = 32
"""What a packet of the tailnet grows by as a datagram."""
MOST_RELAYS, MOST_PATHS = 6, 2
PATH_TRIES = 3
"""A relay's answer may come first: full-sized packets vanish when none of so many comes and each small one does."""
_SO_MARK = 36
_CERTIFICATE = {9: "not-yet-valid", 10: "expired", 62: "other-name", 64: "other-name"}


class Blocked(Exception):
    """`reached` says where it ended."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(reason)
        self.reached = Reached(stage, reason)


def at_once(*works: Callable[[], None]) -> None:
    """Run all in threads; an exception in one is that one's affair."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 4 * LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def reason_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {LIMIT_S:.0f} s"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def connect(host: str, port: int, mark: int = 0) -> socket.socket:
    """Raises Blocked with dns or tcp."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Blocked("dns", f"{host}: {reason_of(error)}") from None
    last: Exception = OSError("no address")
    for family, kind, _, _, address in found[:3]:
        sock = socket.socket(family, kind)
        sock.settimeout(LIMIT_S)
        try:
            if mark:
                mark_socket(sock, mark)
            sock.connect(address)
            return sock
        except OSError as error:
            last = error
            sock.close()
    raise Blocked("tcp", f"{host}:{port}: {reason_of(last)}")


def mark_socket(sock: socket.socket, mark: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MARK, mark)
    except OSError:
        return  # only root may


def ask_resolver(server: str, name: str, limit_s: float = 2.0) -> str:
    """One question over UDP; why no answer came, or ""."""
    labels = b"".join(bytes([len(label)]) + label for label in name.encode("idna").split(b"."))
    query = b"\x2a\x2a\x01\x00\0\x01\0\0\0\0\0\0" + labels + b"\0\0\x01\0\x01"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(limit_s)
        try:
            sock.connect((server, 53))
            sock.send(query)
            sock.recv(4096)
        except TimeoutError:
            return f"no answer within {limit_s:.0f} s"
        except OSError as error:
            return reason_of(error)
    return ""


# --- the control server


def probe_control(url: str, environ: Mapping[str, str], mark: int = 0) -> ControlFacts:
    """Ask for the server's key, as every client does first."""
    facts = ControlFacts(url)
    try:
        head, body, received_s = _ask_key(facts, environ, mark, verify=True)
    except Blocked as blocked:
        facts.reached = blocked.reached
        if facts.certificate:
            _read_clock_unverified(facts, environ, mark)
        return facts
    _note_clock(facts, head, received_s)
    status = head.split(" ", 2)[1] if head.startswith("HTTP/1.") else ""
    if status == "200" and '"publicKey"' in body:
        facts.reached = Reached("ok")
    else:
        what = f"it answers {head.splitlines()[0][:80]!r} where a control server gives its key" if head else "no answer"
        facts.reached = Reached("http", what)
    return facts


def _ask_key(facts: ControlFacts, environ: Mapping[str, str], mark: int, *, verify: bool) -> tuple[str, str, float]:
    split = urlsplit(facts.url)
    host, is_tls = split.hostname or "", split.scheme == "https"
    port = split.port or (443 if is_tls else 80)
    path = f"{split.path.rstrip('/')}/key?v={CAPABILITY_VERSION}"
    proxy = proxy_of(split.scheme, host, port, environ)
    facts.proxy = f"{proxy[0]}:{proxy[1]}" if proxy else ""
    sock = _to_proxy(proxy, host, port, mark) if proxy else connect(host, port, mark)
    with sock:
        wire = _tls(sock, host, facts, verify=verify) if is_tls else sock
        authority = f"[{host}]" if ":" in host else host
        request = f"GET {path} HTTP/1.1\r\nHost: {authority}:{port}\r\nConnection: close\r\n\r\n"
        try:
            wire.sendall(request.encode())
            raw = _read_all(wire)
        except OSError as error:
            raise Blocked("http", reason_of(error)) from None
    head, _, body = raw.decode("utf-8", "replace").partition("\r\n\r\n")
    return head, body, time.time()


def proxy_of(scheme: str, host: str, port: int, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The HTTP proxy that the daemon's environment names for this host."""
    text = environ.get(f"{scheme.upper()}_PROXY") or environ.get(f"{scheme}_proxy") or ""
    excepted = (environ.get("NO_PROXY") or environ.get("no_proxy") or "").lower().split(",")
    names = (host.lower(), f"{host.lower()}:{port}", "*")
    if not text or any(one.strip() in names or _is_below(host.lower(), one.strip()) for one in excepted if one.strip()):
        return None
    split = urlsplit(text if "://" in text else f"http://{text}")
    return (split.hostname, split.port or 80) if split.hostname else None


def _is_below(host: str, domain: str) -> bool:
    return host.endswith("." + domain.lstrip("."))


def _to_proxy(proxy: tuple[str, int], host: str, port: int, mark: int) -> socket.socket:
    try:
        sock = connect(*proxy, mark)
    except Blocked as blocked:
        raise Blocked("proxy", blocked.reached.reason) from None
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        line = sock.recv(4096).split(b"\r\n")[0].decode("latin-1")
    except OSError as error:
        sock.close()
        raise Blocked("proxy", reason_of(error)) from None
    if " 200" not in line[:13]:
        sock.close()
        raise Blocked("proxy", f"it answers {line[:80]!r}")
    return sock


def _tls(sock: socket.socket, host: str, facts: ControlFacts, *, verify: bool) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        facts.certificate = _CERTIFICATE.get(error.verify_code, "unknown-issuer")
        raise Blocked("tls", f"the certificate does not count: {error.verify_message}") from None
    except OSError as error:
        raise Blocked("tls", reason_of(error)) from None


def _read_all(wire: socket.socket) -> bytes:
    parts = []
    while piece := wire.recv(65536):
        parts.append(piece)
        if sum(map(len, parts)) > 1 << 20:
            break
    return b"".join(parts)


def _read_clock_unverified(facts: ControlFacts, environ: Mapping[str, str], mark: int) -> None:
    """The certificate may be refused because our clock is wrong: ask what time the server thinks it is."""
    try:
        head, _, received_s = _ask_key(facts, environ, mark, verify=False)
    except Blocked:
        return
    _note_clock(facts, head, received_s)


def _note_clock(facts: ControlFacts, head: str, received_s: float) -> None:
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        parsed = parsedate_tz(value.strip()) if name.lower() == "date" else None
        if parsed is not None:
            facts.clock_offset_s = received_s - mktime_tz(parsed)


# --- relays


def probe_relays(derp_map: dict[str, Any], home: str, mark: int = 0) -> RelayFacts:
    """The home relay and a few more over TLS; all STUN servers of the map."""
    facts = RelayFacts(home)
    regions = [one for one in (derp_map.get("Regions") or {}).values() if isinstance(one, dict) and one.get("Nodes")]
    regions.sort(key=lambda one: (one.get("RegionCode") != home, int(one.get("RegionID") or 0)))
    chosen = [one for one in regions if not one.get("Avoid") or one.get("RegionCode") == home][:MOST_RELAYS]
    at_once(lambda: _stun(facts, derp_map, mark), *(_relay_probe(facts, region, mark) for region in chosen))
    return facts


def _stun(facts: RelayFacts, derp_map: dict[str, Any], mark: int) -> None:
    targets = stun_targets(derp_map)
    result: StunResult = probe_stun(targets, prepare=lambda sock: mark_socket(sock, mark) if mark else None)
    facts.stun_targets = len(targets)
    facts.stun_answers = len(result.latency_s)
    v4 = result.global_counts[4]
    facts.mapping_varies = len(v4) > 1 if sum(v4.values()) > 1 else None
    facts.public_addresses = [*v4, *result.global_counts[6]]


def _relay_probe(facts: RelayFacts, region: dict[str, Any], mark: int) -> Callable[[], None]:
    def probe() -> None:
        code = str(region.get("RegionCode") or region.get("RegionID"))
        facts.reached[code] = Reached("tcp", f"no answer within {2 * LIMIT_S:.0f} s")
        nodes = [node for node in region["Nodes"] if isinstance(node, dict) and not node.get("STUNOnly")]
        for node in nodes[:2]:
            facts.reached[code] = _reach_relay(node, mark)
            if facts.reached[code].is_ok:
                return
        if not nodes:
            del facts.reached[code]

    return probe


def _reach_relay(node: dict[str, Any], mark: int) -> Reached:
    """A TLS handshake; its certificate may be pinned, so it is not judged here."""
    name = str(node.get("HostName") or "")
    given = [str(node.get(family) or "") for family in ("IPv4", "IPv6")]
    host = next((one for one in given if one and one != "none"), name)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with connect(host, int(node.get("DERPPort") or DEFAULT_DERP_PORT), mark) as sock:
            context.wrap_socket(sock, server_hostname=name).close()
    except Blocked as blocked:
        return blocked.reached
    except (OSError, ValueError) as error:
        return Reached("tls", reason_of(error))
    return Reached("ok")


# --- paths


def probe_paths(
    peers: list[dict[str, Any]], ping: Callable[[str, int], dict[str, Any] | None], mtu_bytes: int
) -> list[PathFacts]:
    """Peers with a live direct path, asked small and full-sized; `ping(address, size)` is None: no answer in time."""
    found = []
    active = [peer for peer in peers if peer.get("CurAddr") and peer.get("Active") and peer.get("TailscaleIPs")]
    for peer in active[:MOST_PATHS]:
        address, name = str(peer["TailscaleIPs"][0]), str(peer.get("DNSName") or "").partition(".")[0]
        endpoint, is_direct = _direct(ping(address, 0))
        if not is_direct:
            continue
        for _ in range(PATH_TRIES):
            full_ok = _direct(ping(address, mtu_bytes + WIREGUARD_BYTES))[1]
            is_direct = full_ok or _direct(ping(address, 0))[1]
            if full_ok or not is_direct:
                break
        if is_direct:
            found.append(PathFacts(name or address, endpoint, True, full_ok))
    return found


def _direct(answer: dict[str, Any] | None) -> tuple[str, bool]:
    endpoint = str((answer or {}).get("Endpoint") or "")
    return endpoint, bool(endpoint)
