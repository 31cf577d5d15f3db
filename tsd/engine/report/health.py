"""What is wrong with this node now, and the tracker that knows it.

Codes, severities, dependencies and delays are those of tailscale: tsconst/health.go and health/warnings.go, so that
GUIs and scripts recognise them; the texts are our own: what happened, why it matters, how to put it right. `layer`
says where to look: in the engine, in the hull (this operating system), on the network, or at the coordination server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from tsd.base.clock import Clock
from tsd.engine.account import gojson
from tsd.engine.report.warnables import WARNABLES, Layer, Warnable

Severity = Literal["high", "medium", "low"]

__all__ = ["Health", "Layer", "Warnable", "Warning"]

WARMING_UP = "warming-up"
CONTROL_PREFIX = "control-health."


@dataclass(frozen=True, slots=True)
class Warning:
    """One thing that is broken."""

    warnable: Warnable
    args: Mapping[str, str]
    since_s: float
    since_wall_ns: int

    @property
    def text(self) -> str:
        return self.warnable.text_for(self.args)


class Health:
    """Warnings by code. `on_change` is called when what users see may have changed, `on_wait` when it will by time."""

    def __init__(self, clock: Clock, on_change: Callable[[], None] | None = None) -> None:
        self._clock = clock
        self._broken: dict[str, Warning] = {}
        self._control: dict[str, dict[str, Any]] = {}
        self._warnables: dict[str, Warnable] = dict(WARNABLES)
        self._shown: tuple[str, ...] = ()
        self.on_change = on_change
        self.on_wait: Callable[[], None] = lambda: None

    def register(self, warnable: Warnable) -> None:
        """Add a code that a hull or a later room brings along."""
        self._warnables[warnable.code] = warnable

    def set(self, code: str, **args: object) -> None:
        """Mark `code` as broken; `set(..., derp_region_id=1)` fills the argument `derp-region-id`. Idempotent."""
        named = {name.replace("_", "-"): str(value) for name, value in args.items()}
        before = self._broken.get(code)
        if before is not None and dict(before.args) == named:
            return
        since = (before.since_s, before.since_wall_ns) if before else (self._clock.now(), self._clock.wall_ns())
        self._broken[code] = Warning(self._warnables[code], named, *since)
        self._changed()
        if before is None and self._warnables[code].visible_after_s:
            self.on_wait()

    def clear(self, *codes: str) -> None:
        was_broken = [code for code in codes if self._broken.pop(code, None) is not None]
        if was_broken:
            self._changed()

    def set_if(self, code: str, is_broken: bool, **args: object) -> None:
        if is_broken:
            self.set(code, **args)
        else:
            self.clear(code)

    def set_control_messages(self, messages: Mapping[str, Mapping[str, Any]]) -> None:
        """All DisplayMessages in force now (Go-shaped: Title, Text, Severity, ImpactsConnectivity, PrimaryAction)."""
        told = {message_id: dict(message) for message_id, message in messages.items()}
        if told != self._control:
            self._control = told
            self._changed()

    def is_broken(self, code: str) -> bool:
        """Whether it is marked, visible or not."""
        return code in self._broken

    def argument(self, code: str, name: str) -> str:
        """What a broken `code` was set with; "" when there is none."""
        found = self._broken.get(code)
        return found.args.get(name, "") if found is not None else ""

    def next_deadline(self) -> float | None:
        """When a warning becomes visible by waiting; call `on_deadline` then."""
        now = self._clock.now()
        times = [w.since_s + w.warnable.visible_after_s for w in self._broken.values()]
        return min((at for at in times if at > now), default=None)

    def on_deadline(self) -> None:
        self._changed()

    # --- what users see ----------------------------------------------------------------------------------------

    def visible(self) -> list[Warning]:
        """Oldest first, without those that follow from another one."""
        now = self._clock.now()
        shown = [
            w
            for w in self._broken.values()
            if now >= w.since_s + w.warnable.visible_after_s and self._is_root_cause(w.warnable)
        ]
        return sorted(shown, key=lambda w: (w.since_s, w.warnable.code))

    def texts(self) -> list[str]:
        """Status' Health list; a state text that has no meaning beside it (warming up) is left out."""
        out = [w.text for w in self.visible() if w.warnable.code != WARMING_UP]
        return out + [_control_text(message) for _, message in sorted(self._control.items())]

    def state(self) -> dict[str, Any]:
        """Notify's Health: `{"Warnings": {code: UnhealthyState}}`."""
        warnings = {w.warnable.code: _unhealthy(w) for w in self.visible()}
        for message_id, message in sorted(self._control.items()):
            code = CONTROL_PREFIX + message_id
            warnings[code] = _control_unhealthy(code, message)
        return {"Warnings": warnings or None}

    def _is_root_cause(self, warnable: Warnable) -> bool:
        return not any(
            code in self._broken and self._is_root_cause(self._broken[code].warnable) for code in warnable.depends_on
        )

    def _changed(self) -> None:
        etags = tuple(warning["ETag"] for warning in (self.state()["Warnings"] or {}).values())
        if etags != self._shown:
            self._shown = etags
            if self.on_change is not None:
                self.on_change()


def rfc3339(wall_ns: int) -> str:
    """Go's RFC3339Nano in UTC."""
    seconds, nanoseconds = divmod(wall_ns, 1_000_000_000)
    whole = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = f".{nanoseconds:09d}".rstrip("0") if nanoseconds else ""
    return f"{whole}{fraction}Z"


def _unhealthy(warning: Warning) -> dict[str, Any]:
    warnable = warning.warnable
    depends_on = [*warnable.depends_on] + ([WARMING_UP] if warnable.code != WARMING_UP else [])
    out: dict[str, Any] = {
        "WarnableCode": warnable.code,
        "Severity": warnable.severity,
        "Title": warnable.title,
        "Text": warning.text,
        "BrokenSince": rfc3339(warning.since_wall_ns),
    }
    if warning.args:
        out["Args"] = dict(warning.args)
    if depends_on:
        out["DependsOn"] = depends_on
    if warnable.impacts_connectivity:
        out["ImpactsConnectivity"] = True
    out["Layer"] = warnable.layer
    return _with_etag(out)


def _control_unhealthy(code: str, message: Mapping[str, Any]) -> dict[str, Any]:
    severity = message.get("Severity")
    out: dict[str, Any] = {
        "WarnableCode": code,
        "Severity": severity if severity in ("high", "low") else "medium",
        "Title": message.get("Title", ""),
        "Text": message.get("Text", ""),
    }
    if message.get("ImpactsConnectivity"):
        out["ImpactsConnectivity"] = True
    action = message.get("PrimaryAction")
    if action:
        out["PrimaryAction"] = {"URL": action.get("URL", ""), "Label": action.get("Label", "")}
    out["Layer"] = "control"
    return _with_etag(out)


def _control_text(message: Mapping[str, Any]) -> str:
    title, text = message.get("Title", ""), message.get("Text", "")
    action = message.get("PrimaryAction")
    tail = f" {action.get('Label', '')}: {action.get('URL', '')}" if action else ""
    return (f"{title}: {text}" if title else text) + tail


def _with_etag(state: dict[str, Any]) -> dict[str, Any]:
    state["ETag"] = hashlib.sha256(gojson.dumps(state)).hexdigest()
    return state
