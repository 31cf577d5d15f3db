"""A finding, a check, and how they are shown. Words: cause, then fix, in one line, with the layer it belongs to.

Layers are those of the daemon's warnings: hull (this operating system), network, control, engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tsctl.doctor.facts import Facts

FAULT, NOTE = "fault", "note"
"""A fault makes the exit status 1; a note is worth knowing."""


@dataclass
class Finding:
    layer: str
    cause: str
    fix: str = ""
    """Empty when the cause says it, or nothing needs to be done."""
    severity: str = FAULT
    check: str = ""

    def line(self) -> str:
        fix = f". Fix: {self.fix}" if self.fix else ""
        return f"{self.severity:<5}  {self.layer:<7}  {self.check}: {self.cause.rstrip('.')}{fix}"


class Skipped(Exception):
    """The check cannot be made; the text says why."""


@dataclass
class Check:
    """`judge` yields findings, or raises Skipped. `covers`: warnings of the daemon that say the same thing."""

    name: str
    about: str
    judge: Callable[[Facts], Iterable[Finding]]
    covers: tuple[str, ...] = ()


@dataclass
class Verdict:
    """`skipped` maps a check to why it was not made."""

    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        return all(finding.severity != FAULT for finding in self.findings)


def judge(facts: Facts, checks: Iterable[Check]) -> Verdict:
    verdict = Verdict()
    covered: set[str] = set()
    for check in checks:
        try:
            found = list(check.judge(facts))
        except Skipped as why:
            verdict.skipped[check.name] = str(why)
            continue
        for finding in found:
            finding.check = finding.check or check.name
        verdict.findings += found
        if found:
            covered.update(check.covers)
        else:
            verdict.passed.append(check.name)
    verdict.findings += _of_the_daemon(facts, covered)
    return verdict


_NOT_FAULTS = ("warming-up", "update-available", "test-warnable")


def _of_the_daemon(facts: Facts, covered: set[str]) -> list[Finding]:
    """The daemon's own warnings, which name their remedy, unless a check has said it already."""
    found = []
    for code, warning in sorted(facts.daemon.warnings.items()):
        if code not in covered and code not in _NOT_FAULTS:
            severity = NOTE if warning.get("Severity") == "low" else FAULT
            layer = str(warning.get("Layer") or "engine")
            found.append(Finding(layer, str(warning.get("Text") or code), "", severity, f"health {code}"))
    return found


def as_json(verdict: Verdict) -> dict[str, Any]:
    def finding(one: Finding) -> dict[str, str]:
        return {"check": one.check, "severity": one.severity, "layer": one.layer, "cause": one.cause, "fix": one.fix}

    return {
        "ok": verdict.is_well,
        "findings": [finding(one) for one in verdict.findings],
        "passed": verdict.passed,
        "skipped": verdict.skipped,
    }


def as_lines(verdict: Verdict) -> list[str]:
    ordered = sorted(verdict.findings, key=lambda one: one.severity != FAULT)
    faults = sum(one.severity == FAULT for one in ordered)
    lines = [one.line() for one in ordered]
    if verdict.passed:
        lines.append(f"ok     {len(verdict.passed)} checks: {', '.join(verdict.passed)}")
    by_reason: dict[str, list[str]] = {}
    for name, why in verdict.skipped.items():
        by_reason.setdefault(why, []).append(name)
    lines += [f"skip   {', '.join(names)}: {why}" for why, names in by_reason.items()]
    lines.append("All is well." if not faults else f"{faults} {'thing is' if faults == 1 else 'things are'} wrong.")
    return lines
