"""Debug actions of the LocalAPI over a real engine: netmap as JSON, counters, kicks (tailscale: ipn/localapi)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tsd.engine import metrics, status
from tsd.engine.engine import Engine
from tsd.engine.metrics import Gauges
from tsd.localapi.backend import Json
from tsd.tailcfg.wire import to_go

_JSON, _TEXT = "application/json", "text/plain"

_KNOBS = {
    "DisableUPnP": "debug-disable-upnp",
    "KeepFullWGConfig": "keep-full-wg-config",
    "RandomizeClientPort": "randomize-client-port",
    "OneCGNAT": "one-cgnat",
    "ForceBackgroundSTUN": "debug-always-stun",
    "DisableDeltaUpdates": "disable-delta-updates",
    "PeerMTUEnable": "peer-mtu-enable",
    "SilentDisco": "silent-disco",
    "ProbeUDPLifetime": "probe-udp-lifetime",
}


class DebugActions:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def run(self, action: str, body: bytes) -> tuple[str, bytes]:
        """(content type, body). Raises KeyError for an unknown action, ValueError for a body that does not decode."""
        handlers = {
            "rebind": self._rebind,
            "restun": self._restun,
            "break-tcp-conns": self._reconnect,
            "break-derp-conns": self._break_derp,
            "force-netmap-update": self._reconnect,
            "clear-netmap-cache": self._nothing,
            "pick-new-derp": self._restun,
            "derp-set-homeless": self._nothing,
            "derp-unset-homeless": self._nothing,
        }
        if action in handlers:
            handlers[action]()
            return _TEXT, b"done\n"
        if action == "force-prefer-derp":
            self._engine.reach.netcheck.forced_home = int(body or b"0")
            self._restun()
            return _TEXT, b"done\n"
        documents = {
            "current-netmap": self.netmap,
            "control-knobs": self._control_knobs,
            "peer-disco-keys": self._disco_keys,
            "statedir": lambda: "",
            "peer-relay-servers": list,
        }
        return _JSON, json.dumps(documents[action](), indent="\t").encode() + b"\n"

    def _rebind(self) -> None:
        self._engine.reach.rebind("asked for")

    def _restun(self) -> None:
        self._engine.reach.look("asked for")

    def _reconnect(self) -> None:
        if self._engine.control is not None:
            self._engine.control.reconnect()

    def _break_derp(self) -> None:
        if self._engine.plane is not None:
            self._engine.plane.derp.link_changed()

    def _nothing(self) -> None:
        return None

    def self_node(self) -> Json | None:
        netmap = self._engine.tailnet.netmap
        return None if netmap is None else status.go_node(netmap.self_node, netmap.magic_suffix)

    def netmap(self) -> Json | None:
        """netmap.NetworkMap as Go decodes it."""
        netmap = self._engine.tailnet.netmap
        if netmap is None:
            return None
        suffix = netmap.magic_suffix
        key = self._engine.account.node_key
        return {
            "Cached": False,
            "SelfNode": status.go_node(netmap.self_node, suffix),
            "AllCaps": sorted(netmap.self_node.cap_map or {}),
            "NodeKey": str(key.public()) if key is not None else netmap.self_node.key,
            "MachineKey": netmap.self_node.machine or "mkey:" + "0" * 64,
            "Peers": [status.go_node(node, suffix) for node in netmap.sorted_peers()],
            "DNS": to_go(netmap.dns),
            "PacketFilter": None,
            "PacketFilterRules": to_go(list(netmap.filter_rules())),
            "SSHPolicy": to_go(netmap.ssh_policy) if netmap.ssh_policy is not None else None,
            "CollectServices": netmap.collect_services,
            "DERPMap": to_go(netmap.derp_map) if netmap.derp_map is not None else None,
            "DisplayMessages": None,
            "TKAEnabled": netmap.is_locked,
            "TKAHead": "",
            "Domain": netmap.domain,
            "DomainAuditLogID": netmap.audit_log_id,
            "UserProfiles": {str(user_id): to_go(profile) for user_id, profile in sorted(netmap.users.items())},
        }

    def _control_knobs(self) -> Json:
        netmap = self._engine.tailnet.netmap
        node = netmap.self_node if netmap is not None else None
        return {name: node is not None and node.has_cap(attribute) for name, attribute in _KNOBS.items()}

    def _disco_keys(self) -> Json:
        return {str(peer.node_key): str(peer.node.disco_key or "") for peer in self._engine.tailnet.peers}

    def gauges(self) -> Gauges:
        engine = self._engine
        node = engine.account.self_node
        return Gauges(
            advertised_routes=len(engine.account.prefs.advertise_routes),
            approved_routes=len(node.primary_routes or ()) if node is not None else 0,
            health_warnings=len(engine.health.visible()),
            home_derp_region=engine.reach.home,
        )

    def user_metrics(self) -> str:
        plane = self._engine.plane
        traffic = plane.datapath.traffic if plane is not None else metrics.Traffic()
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
        gauges: dict[str, Any] = {"tsd_peers": len(engine.tailnet.peers)}
        return metrics.client_metrics(counters, gauges)
