"""Settings of the coordinator, fixed at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network

from tsd.coord.state.addresses import DEFAULT_V4, DEFAULT_V6
from tsd.tailcfg.derpmap import DERPMap
from tsd.tailcfg.dns import Resolver

SIZE_LIMIT_NODES = 500
MIN_CAPABILITY_VERSION = 113


@dataclass(frozen=True, slots=True)
class CoordConfig:
    """`node_expiry_s` 0 means that keys of user-owned nodes never expire."""

    public_url: str = "http://127.0.0.1:8080"
    base_domain: str = "tsd.internal"
    prefix_v4: IPv4Network | None = DEFAULT_V4
    prefix_v6: IPv6Network | None = DEFAULT_V6
    derp_map: DERPMap = field(default_factory=lambda: DERPMap(regions={}))
    resolvers: tuple[Resolver, ...] = ()
    split_dns: dict[str, tuple[Resolver, ...]] = field(default_factory=dict)
    default_user: str = "admin"
    node_expiry_s: float = 0.0
    ephemeral_timeout_s: float = 120.0
    offline_grace_s: float = 5.0
    keepalive_s: float = 50.0
    flush_delay_s: float = 0.02
    save_delay_s: float = 30.0
