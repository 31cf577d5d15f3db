"""Debug actions of the LocalAPI over a real engine: views as JSON, kicks (tailscale: ipn/localapi/debug.go)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tsd.engine.engine import Engine
from tsd.engine.report.doctor import doctor_facts
from tsd.localapi.backend import Json

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
    def __init__(self, engine: Engine, state_dir: str = "") -> None:
        self._engine = engine
        self._state_dir = state_dir

    async def run(self, action: str, body: bytes) -> tuple[str, bytes]:
        """(content type, body). Raises KeyError for an unknown action, ValueError for a body that does not decode."""
        handlers = {
            "rebind": self._rebind,
            "restun": self._restun,
            "rotate-disco-key": self._engine.rotate_disco_key,
            "break-tcp-conns": self._reconnect,
            "break-derp-conns": self._break_derp,
            "force-netmap-update": self._reconnect,
            "clear-netmap-cache": self._clear_cache,
            "pick-new-derp": self._restun,
            "derp-set-homeless": self._nothing,
            "derp-unset-homeless": self._nothing,
        }
        if action in handlers:
            handlers[action]()
            return _TEXT, b"done\n"
        if action == "force-prefer-derp":
            text = body.strip() or b"0"
            if not text.isdigit() or len(text) > 9:
                raise ValueError("want the number of a relay region, or 0")
            self._engine.reach.netcheck.forced_home = int(text)
            self._restun()
            return _TEXT, b"done\n"
        if action == "doctor":
            return _JSON, json.dumps(await doctor_facts(self._engine)).encode() + b"\n"
        documents: dict[str, Callable[[], Any]] = {
            "current-netmap": self._engine.inspection.netmap,
            "control-knobs": self._control_knobs,
            "port-mapping": self._port_mapping,
            "peer-disco-keys": self._disco_keys,
            "statedir": lambda: self._state_dir,
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

    def _clear_cache(self) -> None:
        for profile in self._engine.profiles.list():
            self._engine.recollection.forget(profile.id)

    def _nothing(self) -> None:
        return None

    def _control_knobs(self) -> Json:
        netmap = self._engine.tailnet.netmap
        node = netmap.self_node if netmap is not None else None
        return {name: node is not None and node.has_cap(attribute) for name, attribute in _KNOBS.items()}

    def _port_mapping(self) -> Json:
        """What the daemon's port mapper found; null: not looked for."""
        info = self._engine.reach.net_info
        mapped = self._engine.reach.portmapped
        return {"UPnP": info.upnp, "PMP": info.pmp, "PCP": info.pcp, "External": str(mapped) if mapped else ""}

    def _disco_keys(self) -> Json:
        return {str(peer.node_key): str(peer.node.disco_key or "") for peer in self._engine.tailnet.peers}
