"""What a look at the underlay found (tailscale: net/netcheck/netcheck.go, Report)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tsd.base.addr import AddrPort

REPORT_TIMEOUT_S = 5.0
STUN_PHASE_S = 3.0
HTTPS_PHASE_S = 5.0
RETRY_FIRST_S = 0.1
RETRY_DEFAULT_S = 0.2
FULL_INTERVAL_S = 300.0
ENOUGH_REGIONS = 3
HISTORY_S = 305.0
RELAY_FRAME_S = 8.0
RELAY_ALIVE_S = 120.0
HOME_MIN_GAIN_S = 0.010


@dataclass(slots=True)
class Report:
    """One finished (or growing) look; latencies in seconds by region."""

    now: float = 0.0
    udp: bool = False
    ipv4: bool = False
    ipv6: bool = False
    ipv4_can_send: bool = False
    ipv6_can_send: bool = False
    os_has_ipv6: bool = False
    mapping_varies: bool | None = None
    preferred_derp: int = 0
    region_latency_s: dict[int, float] = field(default_factory=dict)
    region_v4_latency_s: dict[int, float] = field(default_factory=dict)
    region_v6_latency_s: dict[int, float] = field(default_factory=dict)
    global_v4: dict[AddrPort, int] = field(default_factory=dict)
    """Addresses that servers saw us from, in order of discovery, with how many saw each."""
    global_v6: dict[AddrPort, int] = field(default_factory=dict)
    captive_portal: bool | None = None

    def add(self, region_id: int, family: int, latency_s: float) -> None:
        """Keeps the least of several measurements."""
        by_family = self.region_v4_latency_s if family == 4 else self.region_v6_latency_s
        for table in (self.region_latency_s, by_family):
            if latency_s < table.get(region_id, 1e9):
                table[region_id] = latency_s

    def derp_latency(self) -> dict[str, float]:
        """As NetInfo.DERPLatency wants it: "1-v4" -> seconds."""
        found = {f"{region}-v4": latency for region, latency in self.region_v4_latency_s.items()}
        return found | {f"{region}-v6": latency for region, latency in self.region_v6_latency_s.items()}
