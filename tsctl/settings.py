"""`tsctl set` (only what is mentioned changes) and `tsctl get`."""

from __future__ import annotations

import os
import sys
from typing import Any

from tsctl import context as ctx
from tsctl.goflags import Command, Failure, Flag, Parsed, UsageError, help_text
from tsctl.prefflags import SET_SETTINGS, Prefs, Setting, flags_of, masked, needs_forwarding, resolve_exit_node
from tsctl.risk import LOSE_SSH, confirm_lose_ssh

_HIDDEN = (
    Flag("sync", "keep syncing with control", True, is_hidden=True),
    Flag("remote-config", "let control edit the settings", False, is_hidden=True),
)


def set_command(context: ctx.Context) -> Command:
    flags = (*flags_of(SET_SETTINGS), Flag("accept-risk", f"skip the question about {LOSE_SSH}, or all"), *_HIDDEN)
    command = Command("set", "Change single settings; what is not mentioned stays", None, flags=flags)

    def run(parsed: Parsed) -> None:
        status = context.client.status()
        if not [name for name in parsed.mentioned if name != "accept-risk"]:
            sys.stderr.write(help_text("tsctl set", command, shows_defaults=False))
            return
        _set(context, parsed, status)

    command.run = run
    return command


def _set(context: ctx.Context, parsed: Parsed, status: dict[str, Any]) -> None:
    values = dict(parsed.values)
    if "exit-node" in parsed.mentioned:
        values["exit-node"] = resolve_exit_node(parsed.text("exit-node"), status)
    for setting in SET_SETTINGS:
        if setting.name in parsed.mentioned and setting.name != "exit-node" and "routes" not in setting.name:
            setting.write({}, values[setting.name])
    prefs = context.client.prefs()
    if "ssh" in parsed.mentioned and parsed.flag("ssh") != bool(prefs.get("RunSSH")):
        confirm_lose_ssh(parsed.text("accept-risk"), "Changing --ssh would cut the SSH connection you are using.")
    wanted = dict(prefs)
    names: list[str] = []
    for setting in SET_SETTINGS:
        if setting.name in parsed.mentioned:
            setting.write(wanted, values[setting.name])
            names += [name for name in setting.prefs if name not in names]
    for flag, pref in (("sync", "Sync"), ("remote-config", "RemoteConfig")):
        if flag in parsed.mentioned:
            wanted[pref] = parsed.flag(flag)
            names.append(pref)
    _warn_router(context, parsed)
    context.client.call("POST", "check-prefs", wanted)
    context.client.call("PATCH", "prefs", masked(wanted, names))
    if "netfilter-mode" in parsed.mentioned and parsed.text("netfilter-mode") == "nodivert":
        print_firewall_wiring(context)
    wished = [name for name in parsed.mentioned if name in _MAY_BE_IDLE and parsed.values[name]]
    idle = without_effect(context) if wished else ""
    if any(f"--{name}" in idle for name in wished):
        ctx.note(idle)
    elif "webclient" in parsed.mentioned and parsed.flag("webclient"):
        addresses = ctx.own_addresses(status)
        ctx.out(f"\nWeb interface now running at {addresses[0] if addresses else 'this node'}:5252")


_MAY_BE_IDLE = ("ssh", "webclient", "advertise-connector", "auto-update", "relay-server-port", "report-posture")


def without_effect(context: ctx.Context) -> str:
    """The daemon's word on settings that it only keeps; "" when there is none."""
    found = context.client.status(with_peers=False).get("Health") or []
    return next((str(text) for text in found if "without effect" in str(text)), "")


def _warn_router(context: ctx.Context, parsed: Parsed) -> None:
    offers = ("advertise-connector", "advertise-exit-node", "advertise-routes")
    if needs_forwarding({name: parsed.values[name] if name in parsed.mentioned else "" for name in offers}):
        print_forwarding_warnings(context)


def print_firewall_wiring(context: ctx.Context) -> None:
    """Nothing when the daemon has no chains (yet), or is not ours."""
    try:
        found = context.client.get("firewall-wiring")
    except Failure:
        return
    lines = (found or {}).get("Lines") if isinstance(found, dict) else None
    if lines:
        ctx.out("Nothing leads to the firewall chains of tsd by itself. These lines do:")
        for line in lines:
            ctx.out(f"  {line}")


def print_forwarding_warnings(context: ctx.Context) -> None:
    """What the daemon says against forwarding for others; the field prints it on standard output."""
    for name in ("check-ip-forwarding", "check-udp-gro-forwarding"):
        try:
            found = context.client.get(name)
        except Failure as failure:
            ctx.out(f"Warning: {failure.text}")
            continue
        if isinstance(found, dict) and found.get("Warning"):
            ctx.out(f"Warning: {found['Warning']}")


def get_command(context: ctx.Context) -> Command:
    flags = (
        Flag("json", "print JSON", False),
        Flag("set-flags", "print the flags of `tsctl set` that make it so", False),
    )

    def run(parsed: Parsed) -> None:
        prefs, status = context.client.prefs(), context.client.status()
        if len(parsed.args) > 1:
            words = " ".join(ctx.quoted(word) for word in parsed.args)
            raise UsageError(f"too many arguments: [{words}]")
        wanted = parsed.args[0] if parsed.args else "all"
        if wanted == "all":
            values = {one.name: one.read(prefs, status) for one in SET_SETTINGS}
            if values["netfilter-backend"] == "auto":
                del values["netfilter-backend"]  # scripts of the field do not know it
            _show_all(values, parsed)
            return
        _show_one(wanted, prefs, status, parsed)

    return Command("get", "Show settings", run, flags=flags, usage="[flags] [name or all]", max_args=-1)


def _show_one(name: str, prefs: Prefs, status: dict[str, Any], parsed: Parsed) -> None:
    hidden = {"sync": bool(prefs.get("Sync")), "remote-config": bool(prefs.get("RemoteConfig"))}
    found: Setting | None = next((one for one in SET_SETTINGS if one.name == name), None)
    if found is None and name not in hidden:
        raise UsageError(f"unknown setting {ctx.quoted(name)}; see `tsctl set --help` for the settings there are")
    value = hidden[name] if found is None else found.read(prefs, status)
    if parsed.flag("json"):
        ctx.out(ctx.to_json({name: value}))
    elif parsed.flag("set-flags"):
        ctx.out(flag_text(name, value))
    else:
        ctx.out(plain_text(value))


def _show_all(values: dict[str, bool | str], parsed: Parsed) -> None:
    if parsed.flag("json"):
        ctx.out(ctx.to_json(values))
    elif parsed.flag("set-flags"):
        ctx.out(" ".join(flag_text(name, value) for name, value in values.items()))
    else:
        rows = [["NAME", "VALUE"], *([name, plain_text(value)] for name, value in values.items())]
        for line in ctx.table(rows):
            ctx.out(line)


def plain_text(value: bool | str) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else value


def flag_text(name: str, value: bool | str) -> str:
    """A flag as it is typed into a shell."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--{name}=false"
    return f"--{name}={shell_quoted(value)}"


def shell_quoted(text: str) -> str:
    is_plain = text.isascii() and all(c.isalnum() or c in "@%+=:,./-_" for c in text)
    return text if is_plain else "'" + text.replace("'", "'\"'\"'") + "'"


def user_name() -> str:
    return os.environ.get("USER", "")


COMMANDS = {"set": set_command, "get": get_command}
