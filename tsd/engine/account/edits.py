"""Masked edits of prefs: which fields change, what else changes with them, and which results are refused.

tailscale: ipn/prefs.go `MaskedPrefs`, ipn/ipnlocal/local.go (`EditPrefs`, `CheckPrefs`). A PATCH body of the Go CLI
carries every field; only those whose `<Name>Set` is true count, and a counted null is the zero value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tsd.base.errors import ConfigError
from tsd.base.login_url import parse_login_server
from tsd.engine.account import gojson
from tsd.engine.account.prefs import FIELDS, Prefs, PrefsError

# Fields that MaskedPrefs can set; `Config` (the identity) is not the user's to edit.
_EDITABLE = tuple(name for name in FIELDS if name != "Config")


@dataclass(frozen=True, slots=True)
class MaskedPrefs:
    """The fields that an edit touches, by Go name, with the values to be read."""

    values: Mapping[str, Any]
    auto_update: Mapping[str, Any]

    @classmethod
    def from_go(cls, raw: Any) -> MaskedPrefs:
        """Raises `PrefsError` for wrong types; unknown keys are ignored and the case of keys does not matter."""
        body = gojson.folded(raw, "prefs")
        values: dict[str, Any] = {}
        for name in _EDITABLE:
            if name != "AutoUpdate" and gojson.boolean(body.get(f"{name.lower()}set"), f"{name}Set"):
                values[name] = body.get(name.lower())
        mask = gojson.folded(body.get("autoupdateset"), "AutoUpdateSet")
        wanted = gojson.folded(body.get("autoupdate"), "AutoUpdate")
        auto_update = {
            name: wanted.get(name)
            for name in ("check", "apply")
            if gojson.boolean(mask.get(f"{name}set"), "AutoUpdateSet")
        }
        return cls(values, auto_update)

    @property
    def is_empty(self) -> bool:
        return not self.values and not self.auto_update

    def touches(self, name: str) -> bool:
        """Whether the edit sets the Go field `name`."""
        return name in self.values or (name == "AutoUpdate" and bool(self.auto_update))

    def touched(self) -> list[str]:
        """Go names of the edited fields, in the order of Prefs."""
        return [name for name in _EDITABLE if self.touches(name)]


def apply_edits(prefs: Prefs, masked: MaskedPrefs) -> Prefs:
    """Only the masked fields change, nothing is judged and nothing else follows."""
    changes: dict[str, Any] = {}
    for name, raw in masked.values.items():
        changes.update(FIELDS[name].read(raw, name))
    if "check" in masked.auto_update:
        changes["auto_update_check"] = gojson.boolean(masked.auto_update["check"], "AutoUpdate.Check")
    if "apply" in masked.auto_update:
        changes["auto_update_apply"] = gojson.opt_boolean(masked.auto_update["apply"], "AutoUpdate.Apply")
    return replace(prefs, **changes)


def edit(prefs: Prefs, raw: Any, context: EditContext | None = None) -> Prefs:
    """An edit as a LocalAPI client asks for it: mask, side effects, judgement. Raises `PrefsError`."""
    masked = raw if isinstance(raw, MaskedPrefs) else MaskedPrefs.from_go(raw)
    situation = context if context is not None else EditContext()
    if masked.touches("InternalExitNodePrior"):
        raise PrefsError("can't set Internal fields: InternalExitNodePrior is kept by the daemon")
    if situation.is_config_locked and not masked.is_empty:
        raise PrefsError(
            "can't reconfigure tsd when using a config file; config file is locked"
            ' (edit the file given to --config, or set "Locked": false in it)'
        )
    edited = replace(_with_side_effects(apply_edits(prefs, masked), masked), egg=prefs.egg)
    check(edited, situation)
    return edited


def _with_side_effects(prefs: Prefs, masked: MaskedPrefs) -> Prefs:
    changes: dict[str, Any] = {}
    if masked.touches("ExitNodeID") or masked.touches("ExitNodeIP"):
        if not masked.touches("AutoExitNode"):
            changes["auto_exit_node"] = ""
        if masked.touches("ExitNodeID") and not masked.touches("ExitNodeIP"):
            changes["exit_node_ip"] = None
        if masked.touches("ExitNodeIP") and not masked.touches("ExitNodeID") and prefs.exit_node_ip is not None:
            changes["exit_node_id"] = ""
    if masked.touches("ExitNodeID") and not prefs.exit_node_id:
        changes["internal_exit_node_prior"] = ""
    return replace(prefs, **changes) if changes else prefs


@dataclass(frozen=True, slots=True)
class EditContext:
    """What the judgement of an edit depends on besides the prefs; the engine fills it in."""

    is_config_locked: bool = False
    is_funnel_on: bool = False
    ssh_refusal: str = ""
    exit_node_refusal: str = ""


def check(prefs: Prefs, context: EditContext) -> None:
    """Raises `PrefsError` with one line for each thing that cannot be."""
    wrong: list[str] = []
    try:
        parse_login_server(prefs.control_url_or_default)
    except ConfigError as err:
        wrong.append(str(err))
    if prefs.run_ssh and context.ssh_refusal:
        wrong.append(context.ssh_refusal)
    if prefs.advertises_exit_node and prefs.wants_exit_node:
        wrong.append("Cannot advertise an exit node and use an exit node at the same time.")
    if prefs.shields_up and context.is_funnel_on:
        wrong.append("Cannot enable shields-up when Funnel is enabled.")
    if context.exit_node_refusal:
        wrong.append(f"exit node cannot be changed: {context.exit_node_refusal}")
    if wrong:
        raise PrefsError("\n".join(wrong))
