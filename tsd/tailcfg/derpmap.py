"""The DERP map: relay regions and their nodes (tailscale: tailcfg/derpmap.go)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from tsd.tailcfg.wire import Wire, always

DEFAULT_DERP_PORT = 443
DEFAULT_STUN_PORT = 3478
_LAST_PORT = 65535


class DERPNode(Wire, frozen=True, gc=False):
    """One relay server. Ports: 0 means the default, -1 for STUN means none."""

    name: str = always("")
    region_id: int = always(0)
    host_name: str = always("")
    cert_name: str = ""
    ipv4: str = ""
    ipv6: str = ""
    stun_port: int = 0
    stun_only: bool = False
    derp_port: int = 0
    insecure_for_tests: bool = False
    stun_test_ip: str = ""
    can_port80: bool = msgspec.field(default=False, name="CanPort80")

    @property
    def effective_derp_port(self) -> int:
        return self.derp_port or DEFAULT_DERP_PORT

    @property
    def effective_stun_port(self) -> int:
        """0 when the node offers no STUN."""
        return 0 if self.stun_port < 0 else self.stun_port or DEFAULT_STUN_PORT

    @property
    def is_test_node(self) -> bool:
        """Probed even when the host seems to have no default route."""
        return bool(self.stun_test_ip) or self.ipv4 == "127.0.0.1"


class DERPRegion(Wire, frozen=True, gc=False):
    """Relay servers that are meshed; clients of one region reach each other through any of its nodes."""

    region_id: int = always(0)
    region_code: str = always("")
    region_name: str = always("")
    latitude: float = 0.0
    longitude: float = 0.0
    avoid: bool = False
    no_measure_no_home: bool = False
    nodes: tuple[DERPNode, ...] | None = always(None)

    @property
    def derp_nodes(self) -> tuple[DERPNode, ...]:
        """The nodes that relay, in the order of preference."""
        return tuple(node for node in self.nodes or () if not node.stun_only)


class DERPHomeParams(Wire, frozen=True, gc=False):
    region_score: dict[int, float] | None = None


class DERPMap(Wire, frozen=True, gc=False):
    """All regions by ID. `regions` None (in a delta) means: keep those you have."""

    home_params: DERPHomeParams | None = None
    regions: dict[int, DERPRegion | None] | None = always(None)
    omit_default_regions: bool = msgspec.field(default=False, name="omitDefaultRegions")

    def __iter__(self) -> Iterator[DERPRegion]:
        """Regions in ascending order of ID; null entries left out."""
        found = self.regions or {}
        return iter([region for _, region in sorted(found.items()) if region is not None])

    def region(self, region_id: int) -> DERPRegion | None:
        return (self.regions or {}).get(region_id)

    @property
    def is_usable(self) -> bool:
        """Whether at least one node can relay."""
        return any(region.derp_nodes for region in self)


def merge_derp_map(old: DERPMap | None, new: DERPMap) -> DERPMap:
    """Apply a map from a delta: absent parts keep their old value (tailscale: control/controlclient/map.go)."""
    regions, omit = new.regions, new.omit_default_regions
    if regions is None and old is not None:
        regions, omit = old.regions, old.omit_default_regions
    clean = {key: _sound(key, region) for key, region in (regions or {}).items() if region is not None and key > 0}
    home = new.home_params
    previous = old.home_params if old is not None else None
    if home is None or (home.region_score is None and previous is not None):
        home = previous
    return DERPMap(home_params=home, regions=dict(clean), omit_default_regions=omit)


def _sound(key: int, region: DERPRegion) -> DERPRegion:
    """What everybody may rely on: a region's key in the map is its ID, and its nodes have ports that exist."""
    nodes = region.nodes and tuple(
        node if -1 <= node.stun_port <= _LAST_PORT else replace(node, stun_port=-1)
        for node in region.nodes
        if 0 <= node.derp_port <= _LAST_PORT
    )
    return region if region.region_id == key and nodes == region.nodes else replace(region, region_id=key, nodes=nodes)


def problems(derp_map: DERPMap) -> list[str]:
    """What makes nodes of this map unusable, one line each, with the region and node named."""
    found: list[str] = []
    for key, region in sorted((derp_map.regions or {}).items()):
        if region is None:
            continue
        if region.region_id != key:
            found.append(f"DERP region {key}: RegionID is {region.region_id}")
        for node in region.nodes or ():
            found += [f"DERP region {key} node {node.name!r}: {reason}" for reason in _node_problems(node)]
    return found


def _node_problems(node: DERPNode) -> Iterator[str]:
    if not node.host_name:
        yield "HostName is empty"
    if "/" in node.host_name or " " in node.host_name:
        yield f"HostName {node.host_name!r} is not a host name (write it without a scheme or path)"
    if not 0 <= node.derp_port <= _LAST_PORT:
        yield f"DERPPort {node.derp_port} is out of range"
    if not -1 <= node.stun_port <= _LAST_PORT:
        yield f"STUNPort {node.stun_port} is out of range"
