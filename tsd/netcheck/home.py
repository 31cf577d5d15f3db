"""The choice of the home region, sticky on purpose (tailscale: net/netcheck, addReportHistoryAndSetPreferredDERP).

Beyond upstream, a region whose relay cannot be reached although its STUN answers is passed over (F17).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tsd.netcheck.report import HISTORY_S, HOME_MIN_GAIN_S, RELAY_ALIVE_S, RELAY_FRAME_S, Report

LastHeard = Callable[[int], float]


class HomeChooser:
    """Keeps the reports of the last five minutes; `home` is the last choice, 0 for none."""

    def __init__(self) -> None:
        self.home = 0
        self._history: list[Report] = []

    def choose(
        self,
        report: Report,
        started: float,
        *,
        last_heard: LastHeard,
        scores: Mapping[int, float] | None = None,
        unreachable: Collection[int] = (),
        forced: int = 0,
    ) -> int:
        """Settles `report.preferred_derp`. `last_heard(region)` is when its relay last sent us a frame."""
        now = report.now
        self._history = [r for r in self._history if now - r.now <= HISTORY_S] + [report]
        latency = self._usable(report, scores or {}, unreachable)
        best = self._best_recent(scores or {})
        choice = min(latency, key=lambda region: (best[region], region), default=0)
        if choice and self.home not in (0, choice) and self.home not in unreachable:
            choice = self._stick(choice, best[choice], latency, started, now, last_heard)
        if forced and (forced in report.region_latency_s or _is_heard(last_heard(forced), started, now)):
            choice = forced
        if not choice and self.home and now - last_heard(self.home) < RELAY_ALIVE_S:
            choice = self.home
        report.preferred_derp = choice
        self.home = choice or self.home
        return choice

    def forget(self, region: int) -> None:
        """The region left the relay map."""
        if self.home == region:
            self.home = 0

    def _stick(
        self, choice: int, best: float, latency: Mapping[int, float], started: float, now: float, last_heard: LastHeard
    ) -> int:
        old = latency.get(self.home, 0.0)
        if not old and not _is_heard(last_heard(self.home), started, now):
            return choice
        is_small_gain = old - best < HOME_MIN_GAIN_S or best > old / 3 * 2
        return self.home if is_small_gain else choice

    def _usable(self, report: Report, scores: Mapping[int, float], unreachable: Collection[int]) -> dict[int, float]:
        scaled = {region: s * (scores.get(region, 0) or 1) for region, s in report.region_latency_s.items()}
        reachable = {region: s for region, s in scaled.items() if region not in unreachable}
        return reachable or scaled

    def _best_recent(self, scores: Mapping[int, float]) -> dict[int, float]:
        best: dict[int, float] = {}
        for report in self._history:
            for region, latency_s in report.region_latency_s.items():
                best[region] = min(best.get(region, 1e9), latency_s)
        return {region: latency_s * (scores.get(region, 0) or 1) for region, latency_s in best.items()}


def _is_heard(at: float, started: float, now: float) -> bool:
    return at > started or at > now - RELAY_FRAME_S
