"""The engine's insides for people and programs that debug: the netmap in Go's shape, counters, health.

Shapes: tailscale: types/netmap/netmap.go (the compiled packet filter is left out), wgengine metrics. Used by the
LocalAPI and by calls of the coordination server; everything is read when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tsd.engine.path.datapath import Traffic
from tsd.engine.report import metrics
from tsd.engine.report.metrics import Gauges
from tsd.engine.report.status import Json, go_node
from tsd.netmap.netmap import Netmap
from tsd.tailcfg.wire import to_go

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

NO_TKA_HEAD = "A" * 52
"""The all-zero hash; Go does not decode an empty one."""


def go_netmap(netmap: Netmap, node_key: str) -> Json:
    """netmap.NetworkMap as Go decodes it."""
    suffix = netmap.magic_suffix
    return {
        "Cached": False,
        "SelfNode": go_node(netmap.self_node, suffix),
        "AllCaps": sorted(set(netmap.self_node.cap_map or {}) | set(netmap.self_node.capabilities or ())),
        "NodeKey": node_key,
        "MachineKey": netmap.self_node.machine or "mkey:" + "0" * 64,
        "Peers": [go_node(node, suffix) for node in netmap.sorted_peers()],
        "DNS": to_go(netmap.dns),
        "PacketFilter": None,
        "PacketFilterRules": to_go(list(netmap.filter_rules())),
        "SSHPolicy": to_go(netmap.ssh_policy) if netmap.ssh_policy is not None else None,
        "CollectServices": netmap.collect_services,
        "DERPMap": to_go(netmap.derp_map) if netmap.derp_map is not None else None,
        "DisplayMessages": to_go(netmap.display_messages) or None,
        "TKAEnabled": netmap.is_locked,
        "TKAHead": (netmap.tka.head if netmap.tka is not None else "") or NO_TKA_HEAD,
        "Domain": netmap.domain,
        "DomainAuditLogID": netmap.audit_log_id,
        "UserProfiles": {str(user_id): to_go(profile) for user_id, profile in sorted(netmap.users.items())},
    }


class Inspection:
    """Read-only views of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def self_node(self) -> Json | None:
        netmap = self._engine.tailnet.netmap
        return None if netmap is None else go_node(netmap.self_node, netmap.magic_suffix)

    def netmap(self, other: Netmap | None = None) -> Json | None:
        """The netmap in force, or `other` as it would show here."""
        netmap = other if other is not None else self._engine.tailnet.netmap
        if netmap is None:
            return None
        key = self._engine.account.node_key
        return go_netmap(netmap, str(key.public()) if key is not None else netmap.self_node.key)

    def gauges(self) -> Gauges:
        engine = self._engine
        node = engine.account.self_node
        return Gauges(
            advertised_routes=len(engine.account.prefs.advertise_routes),
            approved_routes=len(node.primary_routes or ()) if node is not None else 0,
            health_warnings=len(engine.health.visible()),
            home_derp_region=engine.reach.home,
        )

    def pump_manner(self) -> str:
        """Who moves the packets of a device, to be put behind the pump's name."""
        plane = self._engine.plane
        if plane is None or self._engine.options.hull.tun.is_userspace:
            return ""
        return ", own threads" if plane.fast is not None else ", event loop"

    def user_metrics(self) -> str:
        plane = self._engine.plane
        traffic = plane.traffic() if plane is not None else Traffic()
        return metrics.user_metrics(traffic, self.gauges())

    def client_metrics(self) -> str:
        engine, plane = self._engine, self._engine.plane
        counters: dict[str, int] = {}
        rooms: dict[str, Mapping[str, int]] = {"netcheck": engine.reach.netcheck.drops}
        if plane is not None:
            rooms |= {
                "core": plane.core.drops,
                "wireguard": plane.wireguard.drops,
                "disco": plane.magicsock.drops,
                "derp": plane.derp.drops,
                "inbound": plane.datapath.traffic.inbound_drops,
                "outbound": plane.datapath.traffic.outbound_drops,
            }
        for room, drops in rooms.items():
            for reason, count in drops.items():
                counters[metrics.metric_name("tsd", room, "drops", reason)] = count
        if plane is not None and plane.fast is not None:
            for name, count in plane.fast.counters.items():
                counters[metrics.metric_name("tsd", "pump", name)] = count
        gauges: dict[str, Any] = {"tsd_peers": len(engine.tailnet.peers)}
        return metrics.client_metrics(counters, gauges)
