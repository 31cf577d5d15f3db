"""Verdicts about the daemon itself: does it run, is it logged in, is its key good, is it alone."""

from __future__ import annotations

from collections.abc import Iterator

from tsctl.doctor.facts import ABSENT, DENIED, REFUSED, SILENT, Facts
from tsctl.doctor.verdict import NOTE, Check, Finding, Skipped
from tsd.localapi.schema import NEEDS_LOGIN, NEEDS_MACHINE_AUTH, RUNNING, STARTING, STOPPED

DAY_S = 86400.0
SOON_DAYS = 7


def need_daemon(facts: Facts) -> None:
    if not facts.daemon.answers:
        raise Skipped("no daemon answers")


def need_running(facts: Facts) -> None:
    need_daemon(facts)
    if facts.daemon.state != RUNNING:
        raise Skipped("the node is not connected")


def daemon(facts: Facts) -> Iterator[Finding]:
    if facts.daemon.answers:
        return
    path, trouble = facts.daemon.socket, facts.daemon.trouble
    others = [p for p in facts.box.processes if p.socket and p.socket != path and p.is_here]
    if trouble == ABSENT and others:
        other = others[0]
        cause = f"nothing is at {path}, but {other.name} runs as process {other.pid} with the socket {other.socket}"
        yield Finding("hull", cause, f"tsctl --socket={other.socket} doctor")
    elif trouble == ABSENT:
        cause = f"the daemon is not running: there is no socket at {path}"
        yield Finding("hull", cause, "systemctl start tsd, or as this user: tsd; another socket: tsctl --socket=PATH")
    elif trouble == REFUSED:
        cause = f"the daemon has died: nobody listens at {path}"
        yield Finding("hull", cause, "systemctl restart tsd; why it died: journalctl -u tsd")
    elif trouble == DENIED:
        yield Finding("hull", f"no permission to open {path}", "sudo tsctl doctor")
    elif trouble == SILENT:
        who = f" (process {facts.daemon.pid})" if facts.daemon.pid else ""
        cause = f"the daemon{who} takes connections at {path} but does not answer"
        yield Finding("engine", cause, "restart it (systemctl restart tsd) and report it with its log")
    else:
        fix = "name the daemon's own socket with --socket=PATH"
        yield Finding("hull", f"what answers at {path} is not the daemon: {facts.daemon.trouble_text}", fix)


def state(facts: Facts) -> Iterator[Finding]:
    need_daemon(facts)
    name, status = facts.daemon.state, facts.daemon.status
    if name == NEEDS_LOGIN:
        url = str(status.get("AuthURL") or "")
        if not url and "no-control" in facts.daemon.warnings and facts.control is not None:
            raise Skipped("the login waits for the control server")
        refused = (facts.daemon.warnings.get("login-state") or {}).get("Args") or {}
        why = f"; the last attempt failed: {refused['Error']}" if refused.get("Error") else ""
        why = f"; the last attempt failed: {refused['error']}" if refused.get("error") else why
        yield Finding("control", f"not logged in{why}", f"open {url}" if url else "tsctl up")
    elif name == STOPPED:
        yield Finding("engine", "the node is stopped by `tsctl down`", "tsctl up")
    elif name == NEEDS_MACHINE_AUTH:
        yield Finding("control", "this machine waits for an admin's approval", "approve it at the control server")
    elif name not in (RUNNING, STARTING):
        yield Finding("engine", f"the daemon is in state {name or 'unknown'}", "see the warnings below and its log")


def key(facts: Facts) -> Iterator[Finding]:
    need_daemon(facts)
    own = facts.daemon.status.get("Self") or {}
    until_s = parse_time(str(own.get("KeyExpiry") or ""))
    if until_s is None:
        return
    left_days = (until_s - facts.now_s) / DAY_S
    fix = "tsctl up --force-reauth, or switch key expiry off for this machine at the control server"
    if left_days < 0:
        yield Finding("control", f"this node's key expired on {own['KeyExpiry']}", fix)
    elif left_days < SOON_DAYS:
        left = f"{left_days:.0f} days" if left_days >= 2 else f"{left_days * 24:.0f} hours"
        yield Finding("control", f"this node's key expires in {left} ({own['KeyExpiry']})", fix)


def parse_time(text: str) -> float | None:
    """Seconds since 1970 of an RFC 3339 time; None for none, and for Go's zero time."""
    from datetime import datetime

    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.timestamp() if found.year > 1 and found.tzinfo is not None else None


def alone(facts: Facts) -> Iterator[Finding]:
    if not facts.box.is_linux:
        raise Skipped("only on Linux")
    many = [process for process in facts.box.processes if process.is_here]
    if len(many) < 2:
        return
    names = ", ".join(f"{p.name} ({p.pid}, {p.socket or 'socket unknown'})" for p in many)
    fix = "nothing, if two tailnets are meant; else stop one. This look is at " + facts.daemon.socket
    yield Finding("hull", f"{len(many)} daemons run in this network: {names}", fix, NOTE)


def versions(facts: Facts) -> Iterator[Finding]:
    need_daemon(facts)
    theirs, ours = str(facts.daemon.status.get("Version") or ""), facts.daemon.client_version
    if not facts.daemon.is_tsd:
        yield Finding("engine", f"the daemon is tailscaled {theirs}, not tsd: only part can be looked at", "", NOTE)
    elif _core(theirs) != _core(ours) and _core(ours) != "0.0.0":  # a source tree that was not installed
        cause = f"tsctl is {ours} but the running daemon is {theirs}"
        yield Finding("hull", cause, "systemctl restart tsd, so that the installed version runs", NOTE)


def _core(version: str) -> str:
    return version.partition("-")[0].partition("+")[0]


CHECKS = (
    Check("daemon", "a daemon answers on the socket", daemon),
    Check("state", "the node is logged in and running", state, ("wantrunning-false", "login-state")),
    Check("key", "the node's key is good for a week", key, ("key-expired",)),
    Check("alone", "no second daemon", alone),
    Check("versions", "tsctl and daemon are of one version", versions),
)
