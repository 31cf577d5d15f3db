"""`tsctl down`, `logout`, `switch`, `wait`."""

from __future__ import annotations

import time

from tsctl import context as ctx
from tsctl.client import Unreachable
from tsctl.goflags import DURATION, Command, Failure, Flag, Parsed, UsageError
from tsctl.risk import LOSE_SSH, confirm_lose_ssh
from tsd.base.notify import Mask
from tsd.localapi.schema import NEEDS_LOGIN, RUNNING, STARTING, STATE_NAMES, STOPPED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SWITCH_POLL_S = 0.1
SWITCH_TIMEOUT_S = 60.0


def _reason_header(parsed: Parsed) -> dict[str, str]:
    reason = parsed.text("reason")
    if not reason:
        return {}
    from base64 import b64encode

    return {"X-Tailscale-Reason": b64encode(reason.encode()).decode()}


def down_command(context: ctx.Context) -> Command:
    flags = (
        Flag("reason", "why, for the log of the tailnet"),
        Flag("accept-risk", f"skip the question about {LOSE_SSH}, or all"),
    )

    def run(parsed: Parsed) -> None:
        confirm_lose_ssh(parsed.text("accept-risk"), "Going down would cut the SSH connection you are using.")
        try:
            status = context.client.status()
        except Unreachable as error:
            raise Failure(f"error fetching current status: {error.text}") from None
        if status.get("BackendState") == STOPPED:
            ctx.note("tsd was already stopped.")
            return
        context.client.call(
            "PATCH", "prefs", {"WantRunning": False, "WantRunningSet": True}, headers=_reason_header(parsed)
        )

    return Command("down", "Disconnect from the tailnet", run, flags=flags)


def logout_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        context.client.call("POST", "logout", b"", expect=(204,), headers=_reason_header(parsed))

    flags = (Flag("reason", "why, for the log of the tailnet"),)
    return Command("logout", "Disconnect and expire this node's key", run, flags=flags)


def switch_command(context: ctx.Context) -> Command:
    flags = (Flag("list", "list the profiles", False), Flag("json", "with --list: print JSON", False))

    def run(parsed: Parsed) -> None:
        if parsed.flag("list"):
            _list_profiles(context, parsed.flag("json"))
        elif len(parsed.args) == 2 and parsed.args[0] == "remove":
            _remove(context, parsed.args[1])
        elif len(parsed.args) == 1:
            _switch(context, parsed.args[0])
        else:
            raise UsageError("usage: tsctl switch NAME (see tsctl switch --help)")

    return Command(
        "switch",
        "Switch to another login profile",
        run,
        flags=flags,
        usage="[flags] [remove] <ID or name>",
        max_args=-1,
    )


def _profiles(context: ctx.Context) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    current = context.client.get("profiles/current")
    found = context.client.get("profiles/")
    return current or {}, [one for one in found or [] if isinstance(one, dict)]


def _tailnet(profile: dict[str, Any]) -> str:
    network = profile.get("NetworkProfile") or {}
    return str(network.get("DisplayName") or network.get("DomainName") or "")


def _account(profile: dict[str, Any]) -> str:
    return str((profile.get("UserProfile") or {}).get("LoginName") or profile.get("Name") or "")


def _list_profiles(context: ctx.Context, as_json: bool) -> None:
    current, profiles = _profiles(context)
    if as_json:
        rows = [
            {
                "id": profile.get("ID"),
                "nickname": profile.get("Name"),
                "tailnet": _tailnet(profile),
                "account": _account(profile),
                "selected": profile.get("ID") == current.get("ID"),
            }
            for profile in profiles
        ]
        ctx.out(ctx.to_json(rows))
        return
    table = [["ID", "Tailnet", "Account"]]
    for profile in profiles:
        mark = "*" if profile.get("ID") == current.get("ID") else ""
        table.append([str(profile.get("ID")), _tailnet(profile), str(profile.get("Name") or "") + mark])
    for line in ctx.table(table):
        ctx.out(line)


def _names(profile: dict[str, Any]) -> tuple[str, ...]:
    """What a profile may be called by, the surest first."""
    network = profile.get("NetworkProfile") or {}
    found = (profile.get("ID"), network.get("DomainName"), profile.get("Name"), network.get("DisplayName"))
    return tuple(str(name or "") for name in found)


def _find(context: ctx.Context, word: str) -> tuple[dict[str, Any], dict[str, Any]]:
    current, profiles = _profiles(context)
    for kind in range(len(_names(current))):
        for profile in profiles:
            if word and _names(profile)[kind] == word:
                return current, profile
    raise Failure(f"No profile named {ctx.quoted(word)}; `tsctl switch --list` shows them")


def _path_part(profile: dict[str, Any]) -> str:
    from urllib.parse import quote

    return quote(str(profile["ID"]), safe="")


def _switch(context: ctx.Context, word: str) -> None:
    current, profile = _find(context, word)
    if profile.get("ID") == current.get("ID"):
        ctx.out(f"Already on account {ctx.quoted(word)}")
        return
    ctx.out(f"Switching to account {ctx.quoted(word)}")
    context.client.call("POST", f"profiles/{_path_part(profile)}", b"", expect=(204,))
    deadline = time.monotonic() + SWITCH_TIMEOUT_S
    while time.monotonic() < deadline:
        status = context.client.status(with_peers=False)
        state = status.get("BackendState")
        if state in (RUNNING, STARTING):
            if state == RUNNING:
                ctx.out("Success.")
                return
        elif state == NEEDS_LOGIN:
            ctx.out("Logged out.\nTo log in, run:\n  tsctl up")
            return
        elif state == STOPPED:
            ctx.require_running(status)
        time.sleep(SWITCH_POLL_S)
    raise Failure("the other profile did not come up in time; look at `tsctl status`")


def _remove(context: ctx.Context, word: str) -> None:
    current, profile = _find(context, word)
    if profile.get("ID") == current.get("ID"):
        ctx.out(f"Already on account {ctx.quoted(word)}")
        return
    context.client.call("DELETE", f"profiles/{_path_part(profile)}", expect=(204,))


def wait_command(context: ctx.Context) -> Command:
    flags = (Flag("timeout", "how long to wait; 0 for ever", 0.0, kind=DURATION),)

    def run(parsed: Parsed) -> None:
        if parsed.args:
            raise UsageError(f"unexpected arguments: [{' '.join(ctx.quoted(word) for word in parsed.args)}]")
        limit_s = parsed.seconds("timeout")
        _wait(context, time.monotonic() + limit_s if limit_s > 0 else None)

    return Command("wait", "Wait until the node is running", run, flags=flags, max_args=-1)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()


def _check_time(deadline: float | None, state: str) -> None:
    left_s = _left(deadline)
    if left_s is not None and left_s <= 0:
        raise Failure(f"timed out; state: {state}")


def _wait(context: ctx.Context, deadline: float | None) -> None:
    state = "no daemon"
    while True:
        _check_time(deadline, state)
        try:
            status = context.client.status(with_peers=False)
            state = str(status.get("BackendState"))
            if state != RUNNING:
                _wait_for_running(context, deadline, state)
            status = context.client.status(with_peers=False)
            addresses = ctx.own_addresses(status)
            if addresses and (not status.get("TUN") or _host_has(addresses)):
                return
        except (Unreachable, EOFError):
            pass
        time.sleep(SWITCH_POLL_S)


def _wait_for_running(context: ctx.Context, deadline: float | None, state: str) -> None:
    stream = context.client.stream(f"watch-ipn-bus?mask={int(Mask.INITIAL_STATE)}")
    try:
        while True:
            _check_time(deadline, state)
            notify = stream.next_json(_left(deadline))
            number = notify.get("State") if notify else None
            if isinstance(number, int) and 0 <= number < len(STATE_NAMES):
                state = STATE_NAMES[number]
                if state == RUNNING:
                    return
    finally:
        stream.close()


def _host_has(addresses: list[str]) -> bool:
    """Whether one of the addresses is on a local interface: binding to it works."""
    import socket

    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
                return True
        except OSError:
            continue
    return False


COMMANDS = {"down": down_command, "logout": logout_command, "switch": switch_command, "wait": wait_command}
