"""Which STUN servers to ask, and when (tailscale: net/netcheck/netcheck.go, makeProbePlan)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.netcheck.report import RETRY_DEFAULT_S, RETRY_FIRST_S, Report
from tsd.tailcfg.derpmap import DERPMap, DERPNode, DERPRegion

_INCREMENTAL_REGIONS = 3

Resolved = Mapping[str, Sequence[IPAddress]]


class Probe(NamedTuple):
    """One STUN request: `delay_s` after the start, to `target`, on behalf of a region and family."""

    delay_s: float
    region_id: int
    family: int
    target: AddrPort


def hosts_to_resolve(derp_map: DERPMap) -> list[str]:
    """Names that must be looked up before a plan is made; nodes with literal addresses need none."""
    nodes = [node for region in derp_map for node in region.nodes or ()]
    names = [node.host_name for node in nodes if node.effective_stun_port and not _literals(node)]
    return list(dict.fromkeys(name for name in names if name and _ip(name) is None))


def full_plan(derp_map: DERPMap, resolved: Resolved, *, has_v4: bool, has_v6: bool) -> list[Probe]:
    """Every region, three tries a family at 0, 100 and 200 ms."""
    probes: list[Probe] = []
    for region in derp_map:
        if not region.no_measure_no_home:
            delays = [RETRY_FIRST_S * attempt for attempt in range(3)]
            probes += _region_probes(region, resolved, 4, delays, has_v4)
            probes += _region_probes(region, resolved, 6, delays, has_v6)
    return sorted(probes)


def incremental_plan(
    derp_map: DERPMap, resolved: Resolved, last: Report, home: int, *, has_v4: bool, has_v6: bool
) -> list[Probe]:
    """The three fastest regions of the last report and always the home region."""
    had_v6 = bool(last.region_v6_latency_s)
    had_both = has_v6 and bool(last.region_v4_latency_s) and had_v6
    probes: list[Probe] = []
    for rank, region in enumerate(_by_latency(derp_map, last, home)):
        is_home, is_fast = region.region_id == home, rank < 2
        if rank >= _INCREMENTAL_REGIONS and not is_home:
            continue
        do_v4, do_v6 = has_v4, has_v6
        if had_both and not is_home and not is_fast:
            do_v4, do_v6 = rank % 2 == 0, rank % 2 != 0
        if not is_home and not is_fast and not had_v6:
            do_v6 = False
        delays = _delays(4 if is_home else 2 if is_fast else 1, last.region_latency_s.get(region.region_id, 0.0))
        probes += _region_probes(region, resolved, 4, delays, do_v4)
        probes += _region_probes(region, resolved, 6, delays if had_v6 else delays[:1], do_v6)
    return sorted(probes)


def _delays(tries: int, latency_s: float) -> list[float]:
    step = latency_s * 1.2 or RETRY_DEFAULT_S
    return [n * step + (n * 0.05 if n > 1 else 0.0) for n in range(tries)]


def _by_latency(derp_map: DERPMap, last: Report, home: int) -> list[DERPRegion]:
    regions = [
        r
        for r in derp_map
        if r.region_id == home or (not r.no_measure_no_home and not r.avoid and r.region_id in last.region_latency_s)
    ]
    return sorted(regions, key=lambda r: last.region_latency_s.get(r.region_id, 1e9))


def _region_probes(
    region: DERPRegion, resolved: Resolved, family: int, delays: Sequence[float], is_family_up: bool
) -> list[Probe]:
    nodes = region.nodes or ()
    probes: list[Probe] = []
    for attempt, delay_s in enumerate(delays):
        node = nodes[attempt % len(nodes)] if nodes else None
        if node is None or not (is_family_up or node.is_test_node):
            continue
        target = stun_target(node, family, resolved)
        if target is not None:
            probes.append(Probe(delay_s, region.region_id, family, target))
    return probes


def stun_target(node: DERPNode, family: int, resolved: Resolved) -> AddrPort | None:
    """Where a node answers STUN for a family; None when it does not."""
    port = node.effective_stun_port
    if not port:
        return None
    if node.stun_test_ip:
        ip = _ip(node.stun_test_ip)
        return AddrPort(ip, port) if ip is not None and ip.version == family else None
    text = node.ipv4 if family == 4 else node.ipv6
    if text:
        ip = _ip(text)
        return AddrPort(ip, port) if ip is not None and ip.version == family else None
    host = _ip(node.host_name)
    candidates = [host] if host is not None else resolved.get(node.host_name, ())
    return next((AddrPort(ip, port) for ip in candidates if ip.version == family), None)


def _literals(node: DERPNode) -> bool:
    return bool(node.stun_test_ip) or (_ip(node.ipv4) is not None or _ip(node.ipv6) is not None)


def _ip(text: str) -> IPAddress | None:
    try:
        return parse_ip(text)
    except DecodeError:
        return None
