"""What the user and control wish of routing, in one value: prefs, the exit node chosen by us, node attributes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tsd.engine.account.prefs import Prefs
from tsd.netmap.netmap import Netmap
from tsd.routes.exitnode import exit_node_trouble, suggest
from tsd.routes.rules import RouteWishes
from tsd.tailcfg.node import Node

if TYPE_CHECKING:
    from tsd.engine.engine import Engine

CAP_NO_CGNAT_DROP = "disable-linux-cgnat-drop-rule"
CAP_ONE_CGNAT = "one-cgnat?v={}"


def wishes_of(prefs: Prefs) -> RouteWishes:
    """The prefs that routing and names depend on."""
    return RouteWishes(
        accept_routes=prefs.route_all,
        accept_dns=prefs.corp_dns,
        exit_node_id=prefs.exit_node_id,
        exit_node_ip=prefs.exit_node_ip,
        exit_node_allow_lan=prefs.exit_node_allow_lan_access,
        advertise_routes=prefs.advertise_routes,
        shields_up=prefs.shields_up,
        snat_subnet_routes=not prefs.no_snat,
        stateful_filtering=prefs.no_stateful_filtering is False,
        netfilter_mode=prefs.netfilter_mode,
        netfilter_kind=prefs.netfilter_kind,
        auto_exit_node=prefs.auto_exit_node,
    )


class Wishes:
    """One per tailnet; remembers the exit node that was chosen for `--exit-node=auto:any`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._auto_id = ""

    def now(self, netmap: Netmap | None) -> RouteWishes:
        wishes = wishes_of(self._engine.account.prefs)
        if netmap is None:
            return wishes
        if wishes.auto_exit_node:
            found = self.suggested_exit_node(netmap)
            self._auto_id = found.stable_id if found is not None else ""
            wishes = replace(wishes, exit_node_id=self._auto_id, exit_node_ip=None)
        if netmap.self_node.has_cap(CAP_NO_CGNAT_DROP):
            wishes = replace(wishes, keeps_cgnat_open=True)
        for value in (True, False):
            if netmap.self_node.has_cap(CAP_ONE_CGNAT.format("true" if value else "false")):
                wishes = replace(wishes, one_cgnat=value)
        return wishes

    def tell(self, netmap: Netmap, wishes: RouteWishes) -> None:
        """Why nothing leaves this machine, when that is so."""
        trouble = exit_node_trouble(netmap, wishes)
        self._engine.health.set_if("exit-node-gone", bool(trouble), error=trouble)

    def suggested_exit_node(self, netmap: Netmap) -> Node | None:
        return suggest(netmap, _latency_s(self._engine.reach.net_info.derp_latency or {}), self._auto_id)


def _latency_s(by_family: dict[str, float]) -> dict[int, float]:
    """Of each region the better family; keys are such as "7-v4"."""
    best: dict[int, float] = {}
    for name, seconds in by_family.items():
        number = name.partition("-")[0]
        if number.isdigit():
            best[int(number)] = min(seconds, best.get(int(number), seconds))
    return best
