"""`tsctl netcheck`: this host's network as the DERP map's servers see it.

Probes run here, not in the daemon, so that it works with tailscaled's socket as well. Only what the router does for us
is known by the daemon alone: it keeps the mapping.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from tsctl import context as ctx
from tsctl.goflags import DURATION, Command, Failure, Flag, Parsed, UsageError
from tsctl.stunprobe import StunResult, probe_stun, probe_tls, stun_targets
from tsd.localapi.schema import format_duration

_FLAGS = (
    Flag("format", "empty, json or json-line"),
    Flag("every", "repeat at this interval", 0.0, kind=DURATION),
    Flag("verbose", "say more", False),
    Flag("bind-address", "send from this address"),
    Flag("bind-port", "send from this UDP port", 0),
)
_ROUTER = ("UPnP", "PMP", "PCP")


def netcheck_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        if parsed.text("format") not in ("", "json", "json-line"):
            raise UsageError(f"unknown output format {ctx.quoted(parsed.text('format'))}; one of json, json-line")
        if not 0 <= parsed.number("bind-port") <= 65535:
            raise UsageError("--bind-port is not a port number")
        derp_map = context.client.get("derpmap")
        if not derp_map or not derp_map.get("Regions"):
            raise Failure("no DERP map: the node has not been connected to a tailnet yet")
        while True:
            mapping = _port_mapping(context)
            report = _report(derp_map, parsed) | {name: mapping[name] for name in _ROUTER}
            _show(report, derp_map, parsed.text("format"), mapping["External"])
            if parsed.seconds("every") <= 0:
                return
            time.sleep(parsed.seconds("every"))

    return Command("netcheck", "Look at this host's network as seen from the relays", run, flags=_FLAGS)


def _report(derp_map: dict[str, Any], parsed: Parsed) -> dict[str, Any]:
    result = probe_stun(stun_targets(derp_map), parsed.text("bind-address"), parsed.number("bind-port"))
    report = _stun_report(result)
    if not report["UDP"]:
        for region, latency_s in probe_tls(derp_map).items():
            report["RegionLatency"][str(region)] = _ns(latency_s)
    best = min(report["RegionLatency"].items(), key=lambda item: (item[1], int(item[0])), default=None)
    report["PreferredDERP"] = int(best[0]) if best else 0
    return report


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _stun_report(result: StunResult) -> dict[str, Any]:
    by_family = {
        family: {str(region): _ns(took_s) for (region, its), took_s in result.latency_s.items() if its == family}
        for family in (4, 6)
    }
    merged: dict[str, int] = {}
    for latencies in by_family.values():
        for region, took_ns in latencies.items():
            merged[region] = min(took_ns, merged.get(region, took_ns))
    v4, v6 = result.global_counts[4], result.global_counts[6]
    return {
        "Now": _now(),
        "UDP": bool(v4 or v6),
        "IPv6": bool(v6),
        "IPv4": bool(v4),
        "IPv6CanSend": result.can_send[6],
        "IPv4CanSend": result.can_send[4],
        "OSHasIPv6": os_has_ipv6(),
        "ICMPv4": False,
        "MappingVariesByDestIP": len(v4) > 1 if sum(v4.values()) > 1 else None,
        **dict.fromkeys(_ROUTER),
        "PreferredDERP": 0,
        "RegionLatency": merged,
        "RegionV4Latency": by_family[4],
        "RegionV6Latency": by_family[6],
        "GlobalV4Counters": v4 or None,
        "GlobalV6Counters": v6 or None,
        "GlobalV4": max(v4, key=lambda one: v4[one], default=""),
        "GlobalV6": max(v6, key=lambda one: v6[one], default=""),
        "CaptivePortal": None,
    }


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"


def os_has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return os.path.exists("/proc/net/if_inet6")
    return True


def _port_mapping(context: ctx.Context) -> dict[str, Any]:
    """As the daemon tells; a tailscaled does not."""
    try:
        told = context.client.call("POST", "debug?action=port-mapping").json()
    except (Failure, ValueError):
        told = None
    return dict.fromkeys((*_ROUTER, "External")) | (told if isinstance(told, dict) else {})


def _show(report: dict[str, Any], derp_map: dict[str, Any], form: str, mapped: str | None) -> None:
    if form:
        ctx.note("# Warning: this JSON format may still change")
        ctx.out(ctx.to_json(report, "\t" if form == "json" else None))
        return
    names = {str(one["RegionID"]): one for one in derp_map["Regions"].values() if one and "RegionID" in one}
    best = names.get(str(report["PreferredDERP"]))
    varies = report["MappingVariesByDestIP"]
    ctx.out("\nReport:")
    ctx.out(f"\t* Time: {report['Now']}")
    ctx.out(f"\t* UDP: {'true' if report['UDP'] else 'false'}")
    ctx.out(f"\t* IPv4: {'yes, ' + report['GlobalV4'] if report['GlobalV4'] else '(no addr found)'}")
    ctx.out(f"\t* IPv6: {_ipv6_text(report)}")
    ctx.out(f"\t* MappingVariesByDestIP: {'' if varies is None else str(varies).lower()}")
    ctx.out(f"\t* PortMapping: {_port_mapping_text(report, mapped)}")
    ctx.out(f"\t* Nearest DERP: {best.get('RegionName') if best else 'unknown (no response to latency probes)'}")
    if report["RegionLatency"]:
        ctx.out("\t* DERP latency:")
    for region, took_ns in sorted(report["RegionLatency"].items(), key=lambda item: item[1]):
        known = names.get(region, {})
        took = format_duration(round(took_ns / 1e5) / 1e4)
        ctx.out(f"\t\t- {known.get('RegionCode') or region:>3}: {took:<7} ({known.get('RegionName', '')})")


def _port_mapping_text(report: dict[str, Any], mapped: str | None) -> str:
    if all(report[name] is None for name in _ROUTER):
        return "not checked"
    found = ", ".join(name for name in _ROUTER if report[name])
    return f"{found} ({mapped} leads here)" if mapped else found or "no"


def _ipv6_text(report: dict[str, Any]) -> str:
    if report["IPv6"]:
        return f"yes, {report['GlobalV6']}"
    if report["IPv6CanSend"]:
        return "(no addr found)"
    return "no, but OS has support" if report["OSHasIPv6"] else "no, unavailable in OS"


COMMANDS = {"netcheck": netcheck_command}
