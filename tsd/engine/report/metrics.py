"""Counters as Prometheus text: user metrics (stable names, tailscale: wgengine/magicsock, util/usermetric) and our own.

Every sample is read when asked for; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from tsd.engine.path.datapath import PathTraffic, Traffic

_PATHS = ("derp", "direct_ipv4", "direct_ipv6", "peer_relay_ipv4", "peer_relay_ipv6")
_DROP_REASONS = frozenset(
    {"acl", "multicast", "link_local_unicast", "too_short", "fragment", "unknown_protocol", "error"}
)
_NOTHING = PathTraffic()

_HELP = {
    "tailscaled_advertised_routes": ("gauge", "Routes that this node offers to others."),
    "tailscaled_approved_routes": ("gauge", "Offered routes that the coordination server approved."),
    "tailscaled_health_messages": ("gauge", "Health messages that stand now."),
    "tailscaled_home_derp_region_id": ("gauge", "Region of the home DERP."),
    "tailscaled_inbound_bytes_total": ("counter", "Bytes from peers, sealed, by path."),
    "tailscaled_inbound_dropped_packets_total": (
        "counter",
        "Packets of peers that were dropped.",
    ),
    "tailscaled_inbound_packets_total": ("counter", "Datagrams from peers, by path."),
    "tailscaled_outbound_bytes_total": ("counter", "Bytes to peers, sealed, by path."),
    "tailscaled_outbound_dropped_packets_total": (
        "counter",
        "Counts the number of packets dropped while being sent to other peers",
    ),
    "tailscaled_outbound_packets_total": ("counter", "Datagrams to peers, by path."),
}


class Gauges(Struct, frozen=True):
    advertised_routes: int = 0
    approved_routes: int = 0
    health_warnings: int = 0
    home_derp_region: int = 0


def user_metrics(traffic: Traffic, gauges: Gauges) -> str:
    """The families in alphabetical order, as the real thing prints them."""
    samples: dict[str, list[tuple[str, int]]] = {
        "tailscaled_advertised_routes": [("", gauges.advertised_routes)],
        "tailscaled_approved_routes": [("", gauges.approved_routes)],
        "tailscaled_health_messages": [('{type="warning"}', gauges.health_warnings)],
        "tailscaled_home_derp_region_id": [("", gauges.home_derp_region)],
        "tailscaled_inbound_bytes_total": _by_path(traffic, "rx_bytes"),
        "tailscaled_inbound_dropped_packets_total": _by_reason(traffic.inbound_drops),
        "tailscaled_inbound_packets_total": _by_path(traffic, "rx_packets"),
        "tailscaled_outbound_bytes_total": _by_path(traffic, "tx_bytes"),
        "tailscaled_outbound_dropped_packets_total": _by_reason(traffic.outbound_drops),
        "tailscaled_outbound_packets_total": _by_path(traffic, "tx_packets"),
    }
    return "".join(_family(name, *_HELP[name], rows) for name, rows in samples.items())


def client_metrics(counters: Mapping[str, int], gauges: Mapping[str, int]) -> str:
    """Our own counters by name: drops of every room, sizes of tables."""
    lines = [f"# TYPE {name} counter\n{name} {value}\n" for name, value in sorted(counters.items())]
    lines += [f"# TYPE {name} gauge\n{name} {value}\n" for name, value in sorted(gauges.items())]
    return "".join(lines)


def metric_name(*words: str) -> str:
    """Joined with underscores; characters that Prometheus refuses become underscores."""
    return "_".join("".join(c if c.isalnum() else "_" for c in word) for word in words)


def _by_path(traffic: Traffic, attribute: str) -> list[tuple[str, int]]:
    rows = []
    for path in _PATHS:
        of_path: PathTraffic = getattr(traffic, path, _NOTHING)
        rows.append((f'{{path="{path}"}}', int(getattr(of_path, attribute))))
    return rows


def _by_reason(drops: Mapping[str, int]) -> list[tuple[str, int]]:
    totals: dict[str, int] = {}
    for reason, count in drops.items():
        known = reason if reason in _DROP_REASONS else "error"
        totals[known] = totals.get(known, 0) + count
    return [(f'{{reason="{reason}"}}', count) for reason, count in sorted(totals.items())]


def _family(name: str, kind: str, help_text: str, rows: list[tuple[str, int]]) -> str:
    head = f"# TYPE {name} {kind}\n# HELP {name} {help_text}\n"
    return head + "".join(f"{name}{labels} {value}\n" for labels, value in rows)
