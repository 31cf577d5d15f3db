"""Flags of `tsd coord` as values, checked; what the server tells clients about itself follows from them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import msgspec

from tsd.base.addr import AddrPort
from tsd.base.errors import ConfigError, DecodeError
from tsd.coord.state.addresses import DEFAULT_V4, DEFAULT_V6
from tsd.coord.state.naming import is_domain
from tsd.tailcfg.derpmap import DERPMap, DERPNode, DERPRegion, problems
from tsd.tailcfg.wire import decode_json

REGION_ID = 900
DEFAULT_LISTEN = "127.0.0.1:8080"
DEFAULT_DERP_PORT = 3340
DEFAULT_STUN_PORT = 3478


def _split_url(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as err:
        raise ConfigError(f"--url {url!r}: {err}") from None


def default_state_folder() -> Path:
    """Where the state is when no flag says so."""
    named = os.environ.get("TSD_COORD_STATE")
    if named:
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/tsd-coord")
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return Path(base) / "tsd-coord"


@dataclass(frozen=True, slots=True)
class Settings:
    """`derp_listen` or `stun_listen` None: not offered. `advertise` is the address that clients find the relay at.

    `is_simulated`: a relay without TLS and a store without a thread, as simulated networks in virtual time need them.
    """

    state: Path
    listen: AddrPort
    derp_listen: AddrPort | None
    stun_listen: AddrPort | None
    url: str = ""
    advertise: str = ""
    policy_file: Path | None = None
    base_domain: str = "tsd.internal"
    prefix_v4: IPv4Network | None = DEFAULT_V4
    prefix_v6: IPv6Network | None = DEFAULT_V6
    tls_cert: Path | None = None
    tls_key: Path | None = None
    derp_map_file: Path | None = None
    verify_clients: bool = True
    node_expiry_s: float = 0.0
    ephemeral_timeout_s: float = 120.0
    resolvers: tuple[str, ...] = field(default_factory=tuple)
    split_dns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_simulated: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together")
        if not is_domain(self.base_domain):
            raise ConfigError(f"--base-domain {self.base_domain!r} must be a domain name in lower case")
        if self.url:
            parts = _split_url(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise ConfigError(
                    f"--url {self.url!r} must be like http://192.0.2.1:8080 or https://host, without a path"
                )
        if self.derp_listen is None and self.derp_map_file is None:
            raise ConfigError("clients need a relay: give --derp-listen or --derp-map")
        if self.derp_listen is not None and not self.relay_host:
            raise ConfigError(f"clients cannot reach a relay at {self.derp_listen.ip}: give --advertise ADDRESS")

    @property
    def relay_host(self) -> str:
        """Name or literal address of relay and STUN for clients, "" when it cannot be told."""
        if self.advertise:
            return self.advertise
        if self.derp_listen is not None and not self.derp_listen.ip.is_unspecified:
            return str(self.derp_listen.ip)
        host = _split_url(self.url).hostname if self.url else None
        return host or ""

    def public_url(self, bound: AddrPort) -> str:
        """What clients put into --login-server."""
        if self.url:
            return self.url.rstrip("/")
        scheme = "https" if self.tls_cert is not None else "http"
        if bound.ip.is_unspecified and self.relay_host:
            host = f"[{self.relay_host}]" if ":" in self.relay_host else self.relay_host
            return f"{scheme}://{host}:{bound.port}"
        return f"{scheme}://{bound}"

    def derp_map(self, derp_port: int, stun_port: int, pin: str) -> DERPMap:
        """The own region (900), with what --derp-map adds."""
        regions: dict[int, DERPRegion | None] = {}
        if self.derp_map_file is not None:
            regions.update(load_derp_map(self.derp_map_file).regions or {})
        if derp_port:
            regions[REGION_ID] = DERPRegion(
                region_id=REGION_ID,
                region_code="tsd",
                region_name="tsd coord",
                nodes=(relay_node(self.relay_host, derp_port, stun_port, pin),),
            )
        return DERPMap(regions=regions)


def relay_node(host: str, derp_port: int, stun_port: int, pin: str) -> DERPNode:
    """A literal address spares clients the DNS lookup, and the other family is ruled out."""
    try:
        version: int = ip_address(host).version
    except ValueError:
        version = 0
    return DERPNode(
        name=f"{REGION_ID}a",
        region_id=REGION_ID,
        host_name=host,
        cert_name=pin,
        ipv4={4: host, 6: "none"}.get(version, ""),
        ipv6={4: "none", 6: host}.get(version, ""),
        derp_port=derp_port,
        stun_port=stun_port or -1,
    )


def load_derp_map(path: Path) -> DERPMap:
    """Raises `ConfigError` naming the region and node that is wrong."""
    try:
        found = decode_json(path.read_bytes(), DERPMap)
    except OSError as err:
        raise ConfigError(f"{path}: {err.strerror}") from None
    except (DecodeError, msgspec.MsgspecError) as err:
        raise ConfigError(f"{path}: {err}") from None
    faults = problems(found)
    if faults:
        raise ConfigError(f"{path}: {faults[0]}")
    if not found.is_usable:
        raise ConfigError(f"{path}: no region has a node that relays")
    return found


def parse_listen(text: str, flag: str, default_port: int) -> AddrPort:
    """`ADDRESS:PORT`, `:PORT` (all addresses) or `ADDRESS`. Raises `ConfigError`."""
    wanted = text.strip()
    if wanted.startswith(":") and wanted[1:].isdecimal():
        wanted = "0.0.0.0" + wanted
    elif wanted.startswith("localhost"):
        wanted = "127.0.0.1" + wanted.removeprefix("localhost")
    for candidate in (wanted, f"{wanted}:{default_port}", f"[{wanted}]:{default_port}"):
        try:
            return AddrPort.parse(candidate)
        except DecodeError:
            continue
    raise ConfigError(f"{flag} {text!r} must be ADDRESS:PORT with a literal address, like 127.0.0.1:{default_port}")


def parse_prefixes(v4: str, v6: str) -> tuple[IPv4Network | None, IPv6Network | None]:
    """ "none" leaves a family out. Raises `ConfigError`."""
    try:
        first = None if v4 == "none" else IPv4Network(v4)
    except ValueError as err:
        raise ConfigError(f"--prefix-v4 {v4!r}: {err}") from None
    try:
        second = None if v6 == "none" else IPv6Network(v6)
    except ValueError as err:
        raise ConfigError(f"--prefix-v6 {v6!r}: {err}") from None
    if first is None and second is None:
        raise ConfigError("a tailnet needs an IPv4 or an IPv6 prefix")
    return first, second


def parse_resolvers(texts: Iterable[str]) -> tuple[str, ...]:
    """Resolvers for all names. Raises `ConfigError`."""
    found = tuple(texts)
    for text in found:
        if not is_resolver(text):
            raise ConfigError(f"--dns {text!r} must be an address, or ZONE=ADDRESS like corp.example=192.0.2.53")
    return found


def is_resolver(text: str) -> bool:
    """An address, with or without a port, or a DNS-over-HTTPS URL."""
    if text.startswith(("https://", "http://")):
        return bool(urlsplit(text).hostname)
    try:
        ip_address(text)
    except ValueError:
        try:
            AddrPort.parse(text)
        except DecodeError:
            return False
    return True


def parse_zones(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Resolvers by zone, of `corp.example=192.0.2.53`. Raises `ConfigError`."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        zone, _, address = text.partition("=")
        zone = zone.strip(".").lower()
        if not is_domain(zone) or not is_resolver(address):
            raise ConfigError(f"--dns {text!r} must be an address, or ZONE=ADDRESS like corp.example=192.0.2.53")
        found[zone] = (*found.get(zone, ()), address)
    return found


def parse_duration(text: str, flag: str) -> float:
    """Seconds of `90s`, `15m`, `24h`, `7d`, or of several in a row. Raises `ConfigError`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    total, digits = 0.0, ""
    for char in text.strip():
        if char in "0123456789":
            digits += char
        elif char in units and digits and len(digits) < 9:
            total, digits = total + int(digits) * units[char], ""
        else:
            digits = "x"
            break
    if digits or not text.strip() or total > 86400 * 36500:
        raise ConfigError(f"{flag} {text!r} must be a duration like 90s, 15m, 24h or 7d")
    return total
