"""A look at the underlay: STUN to the relays' servers, then HTTPS when UDP is dead (tailscale: net/netcheck).

Sans-IO: the engine sends `SendStun` from the sockets that carry the data plane, so that the addresses found are
those that peers need, and measures HTTPS when `HttpsWanted` says so. One look at a time. ICMP probing is not done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from tsd.base.addr import AddrPort, IPAddress
from tsd.base.entropy import Entropy
from tsd.base.errors import DecodeError
from tsd.base.log import DropCounter
from tsd.base.machine import Deadline
from tsd.netcheck.home import HomeChooser, LastHeard
from tsd.netcheck.plan import Probe, full_plan, incremental_plan
from tsd.netcheck.report import ENOUGH_REGIONS, FULL_INTERVAL_S, HTTPS_PHASE_S, STUN_PHASE_S, Report
from tsd.stun.messages import TXID_BYTES, decode_reply, encode_request
from tsd.tailcfg.derpmap import DERPMap


class SendStun(Struct, frozen=True):
    """Send from the UDP socket of the address's family."""

    address: AddrPort
    datagram: bytes


class HttpsWanted(Struct, frozen=True):
    """No UDP answer at all: measure these regions by HTTPS and call `https_measured` for each."""

    regions: tuple[int, ...]


class ReportReady(Struct, frozen=True):
    report: Report


Output = SendStun | HttpsWanted | ReportReady


class _Sent(NamedTuple):
    probe: Probe
    at: float


class NetcheckMachine:
    """Produces reports; keeps the last one and the home choice."""

    def __init__(self, *, entropy: Entropy) -> None:
        self.drops = DropCounter()
        self.last: Report | None = None
        self.chooser = HomeChooser()
        self.forced_home = 0
        self._entropy = entropy
        self._outputs: list[Output] = []
        self._report: Report | None = None
        self._map = DERPMap()
        self._started = 0.0
        self._is_full = False
        self._last_full = -1e9
        self._plan: list[Probe] = []
        self._sent: dict[bytes, _Sent] = {}
        self._stop_at = 0.0
        self._https: set[int] = set()
        self._in_https = False
        self._last_heard: LastHeard = lambda region: -1e9
        self._unreachable: Collection[int] = ()

    @property
    def is_running(self) -> bool:
        return self._report is not None

    def start(
        self,
        derp_map: DERPMap,
        now: float,
        *,
        resolved: Mapping[str, Sequence[IPAddress]],
        has_v4: bool = True,
        has_v6: bool = False,
        os_has_ipv6: bool = False,
        last_heard: LastHeard | None = None,
        unreachable: Collection[int] = (),
        full: bool = False,
        no_udp: bool = False,
    ) -> None:
        """Begin a look; ignored while one runs. `resolved` answers `plan.hosts_to_resolve`. `unreachable` are regions
        whose relay cannot be connected; `no_udp` goes to HTTPS at once."""
        if self._report is not None:
            return
        self._map, self._started = derp_map, now
        self._report = Report(now=now, os_has_ipv6=os_has_ipv6)
        self._last_heard = last_heard or (lambda region: -1e9)
        self._unreachable = unreachable
        self._sent.clear()
        self._https.clear()
        self._in_https = False
        self._is_full = full or self.last is None or not self.last.udp or now - self._last_full >= FULL_INTERVAL_S
        self._plan = [] if no_udp else self._make_plan(resolved, has_v4, has_v6)
        self._stop_at = now + STUN_PHASE_S
        self._advance(now)

    def receive_stun(self, datagram: bytes, source: AddrPort, now: float) -> None:
        """A STUN datagram from a data socket; requests and strangers are ignored."""
        try:
            txid, seen = decode_reply(datagram)
        except DecodeError as err:
            self.drops.add(err.reason)
            return
        sent = self._sent.pop(txid, None)
        if sent is None or self._report is None:
            self.drops.add("unknown transaction")
            return
        self._note(self._report, sent, seen, now)
        self._advance(now)

    def send_failed(self, address: AddrPort) -> None:
        """The kernel has no way to `address`: its probes are given up."""
        self._sent = {txid: s for txid, s in self._sent.items() if s.probe.target != address}
        self._plan = [probe for probe in self._plan if probe.target != address]

    def send_succeeded(self, family: int) -> None:
        """At least the kernel took a probe of this family."""
        if self._report is not None:
            if family == 4:
                self._report.ipv4_can_send = True
            else:
                self._report.ipv6_can_send = True

    def https_measured(self, region_id: int, latency_s: float | None, now: float) -> None:
        """An answer to `HttpsWanted`; None: unreachable."""
        if self._report is None or region_id not in self._https:
            return
        self._https.discard(region_id)
        if latency_s is not None:
            self._report.region_latency_s[region_id] = latency_s
        if not self._https:
            self._finish(now)

    def next_deadline(self) -> Deadline | None:
        if self._report is None:
            return None
        due = self._started + self._plan[0].delay_s if self._plan and not self._in_https else self._stop_at
        return Deadline(min(due, self._stop_at), "netcheck")

    def on_deadline(self, now: float) -> None:
        if self._report is not None:
            self._advance(now)

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _make_plan(self, resolved: Mapping[str, Sequence[IPAddress]], has_v4: bool, has_v6: bool) -> list[Probe]:
        if self._is_full or self.last is None:
            return full_plan(self._map, resolved, has_v4=has_v4, has_v6=has_v6)
        home = self.chooser.home
        return incremental_plan(self._map, resolved, self.last, home, has_v4=has_v4, has_v6=has_v6)

    def _advance(self, now: float) -> None:
        report = self._report
        if report is None:
            return
        if not self._in_https:
            while self._plan and self._started + self._plan[0].delay_s <= now:
                probe = self._plan.pop(0)
                if self._would_help(report, probe):
                    self._send(probe, now)
            self._plan = [probe for probe in self._plan if self._would_help(report, probe)]
            if now < self._stop_at and (self._plan or self._sent_help(report)):
                return
            if not report.udp and self._begin_https(now):
                return
        elif now < self._stop_at and self._https:
            return
        self._finish(now)

    def _send(self, probe: Probe, now: float) -> None:
        txid = self._entropy(TXID_BYTES)
        self._sent[txid] = _Sent(probe, now)
        self._outputs.append(SendStun(probe.target, encode_request(txid)))

    def _would_help(self, report: Report, probe: Probe) -> bool:
        by_family = report.region_v4_latency_s if probe.family == 4 else report.region_v6_latency_s
        if probe.region_id in by_family:
            return False
        if probe.region_id not in report.region_latency_s:
            return True
        return not by_family if probe.family == 6 else report.mapping_varies is None

    def _sent_help(self, report: Report) -> bool:
        return any(self._would_help(report, sent.probe) for sent in self._sent.values())

    def _note(self, report: Report, sent: _Sent, seen: AddrPort, now: float) -> None:
        probe = sent.probe
        report.udp = True
        report.add(probe.region_id, probe.family, max(1e-6, now - sent.at))
        if probe.family == 6:
            report.ipv6 = report.ipv6_can_send = True
        else:
            report.ipv4 = report.ipv4_can_send = True
        if not _is_ours(seen, probe):
            self.drops.add("the server's proxy, not us")
        elif probe.family == 6:
            report.global_v6[seen] = report.global_v6.get(seen, 0) + 1
        else:
            known = bool(report.global_v4)
            report.global_v4[seen] = report.global_v4.get(seen, 0) + 1
            if len(report.global_v4) > 1:
                report.mapping_varies = True
            elif known and report.mapping_varies is None and len(report.region_v4_latency_s) > 1:
                report.mapping_varies = False
        if len(report.region_latency_s) >= ENOUGH_REGIONS:
            rest = max(report.region_latency_s.values()) * (2 if self._is_full else 1)
            self._stop_at = min(self._stop_at, now + rest)

    def _begin_https(self, now: float) -> bool:
        wanted = [r.region_id for r in self._map if r.derp_nodes and not r.no_measure_no_home]
        if not wanted:
            return False
        self._in_https = True
        self._https = set(wanted)
        self._stop_at = now + HTTPS_PHASE_S
        self._outputs.append(HttpsWanted(tuple(wanted)))
        return True

    def _finish(self, now: float) -> None:
        report = self._report
        if report is None:
            return
        self._report = None
        report.now = now
        if self._is_full:
            self._last_full = now
        home = self._map.home_params
        self.chooser.choose(
            report,
            self._started,
            last_heard=self._last_heard,
            scores=home.region_score if home is not None else None,
            unreachable=self._unreachable,
            forced=self.forced_home,
        )
        self.last = report
        self._outputs.append(ReportReady(report))


def _is_ours(seen: AddrPort, probe: Probe) -> bool:
    """Whether a server can have seen us there. One in a container may see the proxy in front of it: an address of the
    other family, or a private one though the server is on the internet (TS#17565)."""
    if seen.ip.version != probe.family or not seen.port or seen.ip.is_unspecified or seen.ip.is_multicast:
        return False
    return seen.ip.is_global or not probe.target.ip.is_global
