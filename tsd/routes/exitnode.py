"""Which exit node to suggest, and to take for `--exit-node=auto:any`. Pure.

Rules: tailscale: ipn/ipnlocal (suggestExitNode): nodes that control marks as suggestible, the nearest home relay first,
then the highest priority of a location. Where control marks none (servers other than the field's), every node that
offers to be one counts. A choice stays as long as it is a candidate: moving costs every connection.
"""

from __future__ import annotations

from collections.abc import Mapping

from tsd.netmap.netmap import Netmap
from tsd.routes.rules import DEFAULT_V4, DEFAULT_V6, RouteWishes, exit_node_of
from tsd.tailcfg.node import Node

CAP_SUGGESTED = "suggest-exit-node"
_FAR_S = 1e6


def offers_exit(node: Node) -> bool:
    routes = node.routed_ips
    return str(DEFAULT_V4) in routes and str(DEFAULT_V6) in routes


def candidates(netmap: Netmap) -> list[Node]:
    """Online nodes that may be taken without asking, the marked ones if there are any."""
    offering = [n for n in netmap.peers.values() if n.online is not False and not n.expired and offers_exit(n)]
    return [n for n in offering if n.has_cap(CAP_SUGGESTED)] or offering


def suggest(netmap: Netmap, latency_s: Mapping[int, float], current_id: str = "") -> Node | None:
    """None when there is nothing to choose from."""
    found = candidates(netmap)
    if not found:
        return None
    for node in found:
        if node.stable_id == current_id:
            return node
    return min(found, key=lambda node: (latency_s.get(node.home_region, _FAR_S), -_priority(node), node.id))


def exit_node_trouble(netmap: Netmap, wishes: RouteWishes) -> str:
    """Why the chosen exit node cannot be used now; "" when it can, or none was chosen."""
    if not wishes.wants_exit_node:
        return ""
    node = exit_node_of(netmap, wishes)
    if node is None:
        chosen = wishes.exit_node_id or wishes.exit_node_ip
        return f"The exit node {chosen} is not in the tailnet" if chosen else "No exit node is online to choose from"
    name = node.base_name or node.stable_id
    if not offers_exit(node):
        return f"{name} does not offer to be an exit node any more, or is not approved as one"
    if node.expired:
        return f"The key of the exit node {name} has expired"
    return f"The exit node {name} is offline" if node.online is False else ""


def _priority(node: Node) -> int:
    location = node.hostinfo.location if node.hostinfo is not None else None
    return location.priority if location is not None else 0
