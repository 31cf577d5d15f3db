"""What the host and the filter should be, derived from the netmap and the user's wishes. Pure.

The same inputs always give an equal plan, so that "nothing to do" is a comparison.
"""

from __future__ import annotations

from tsd.netmap.netmap import Netmap
from tsd.routes.planner import Planner
from tsd.routes.rules import Plan, RouteWishes, addresses_of, peer_prefixes

__all__ = ["Plan", "RouteWishes", "addresses_of", "derive", "peer_prefixes"]


def derive(netmap: Netmap, wishes: RouteWishes) -> Plan:
    """The whole plan from scratch. Where deltas come in, keep a `Planner` instead."""
    return Planner().plan(netmap, wishes)
