"""`tsctl doctor`: is it the engine or the hull? Looks at daemon, machine and network; names causes and fixes.

Works without a daemon and on tailscaled's socket, with what can be seen then. Exit status 1 when something is wrong.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from tsctl import context as ctx
from tsctl.client import ApiFailure, Unreachable
from tsctl.doctor import box, checks_daemon, checks_hull, checks_network, probes, verdict
from tsctl.doctor.facts import ABSENT, DENIED, FOREIGN, REFUSED, SILENT, DaemonFacts, Facts, NameFacts
from tsctl.goflags import Command, Failure, Flag, Parsed
from tsctl.misc import own_version
from tsd.base.notify import Mask
from tsd.localapi.schema import DEFAULT_CONTROL_URL, RUNNING, STATUS_PUMP

ANSWER_LIMIT_S = 6.0
SECOND_LOOK_S = 1.5
CHECKS = (*checks_daemon.CHECKS, *checks_hull.CHECKS, *checks_network.CHECKS)


def doctor_command(context: ctx.Context) -> Command:
    flags = (
        Flag("json", "print JSON", False),
        Flag("list", "list the checks and what they are about", False),
        Flag("network", "also probe the control server, relays and paths", True),
    )

    def run(parsed: Parsed) -> int:
        if parsed.flag("list"):
            for line in ctx.table([(check.name, check.about) for check in CHECKS]):
                ctx.out(line)
            return 0
        found = verdict.judge(gather(context, with_network=parsed.flag("network")), CHECKS)
        if parsed.flag("json"):
            ctx.out(ctx.to_json(verdict.as_json(found)))
        else:
            for line in verdict.as_lines(found):
                ctx.out(line)
        return 0 if found.is_well else 1

    details = (
        "Each line: fault or note, the layer it belongs to (hull is this machine, engine is tsd itself, network,\n"
        "control is the coordination server), the check, the cause and the fix. Run it as root to see everything.\n"
        "Exit status 1 when there is a fault."
    )
    return Command("doctor", "Find out what is wrong: engine or hull?", run, flags=flags, details=details)


def gather(context: ctx.Context, *, with_network: bool = True) -> Facts:
    facts = Facts(now_s=time.time())
    facts.daemon = daemon_facts(context)
    facts.box = box.look(facts.daemon.pid)
    works = [lambda: _name(facts)]
    if with_network and facts.box.is_same_network:
        works += [lambda: _control(facts), lambda: _relays(context, facts)]
    probes.at_once(*works)
    report, is_running = facts.daemon.report, facts.daemon.state == RUNNING
    if is_running and report.get("ControlConnected") is False and not report.get("ControlError"):
        time.sleep(SECOND_LOOK_S)  # it may have started just now
        facts.daemon.report = _report(context) or report
    if with_network and is_running:
        peers = ctx.peers_of(facts.daemon.status)
        facts.paths = probes.probe_paths(peers, lambda ip, size: _ping(context, ip, size), facts.daemon.mtu_bytes)
    return facts


# --- the daemon


def daemon_facts(context: ctx.Context) -> DaemonFacts:
    path = context.client.path
    facts = DaemonFacts(path, client_version=own_version())
    facts.trouble, facts.trouble_text, facts.pid = _knock(path)
    if facts.trouble:
        return facts
    try:
        facts.status = _get(context, "status")
        facts.prefs = _get(context, "prefs")
    except TimeoutError:
        facts.trouble = SILENT
        return facts
    except Failure as failure:
        facts.trouble, facts.trouble_text = FOREIGN, failure.text.splitlines()[0]
        return facts
    facts.is_tsd = STATUS_PUMP in facts.status
    facts.report = _report(context) if facts.is_tsd else {}
    facts.warnings = facts.report.get("Health") or _warnings(context)
    missing = list(facts.hull.get("Missing") or ())
    # tsd puts back what others remove: only what stays away is a fault of its own.
    if missing or facts.hull.get("Detours"):
        time.sleep(SECOND_LOOK_S)
        facts.missing_before = missing
        facts.report = _report(context)
    return facts


def _knock(path: str) -> tuple[str, str, int]:
    """(trouble, text, process that made the socket)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(ANSWER_LIMIT_S)
            sock.connect(path)
            if not hasattr(socket, "SO_PEERCRED"):
                return "", "", 0
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return "", "", int.from_bytes(raw[:4], "little")
        except FileNotFoundError:
            return ABSENT, "", 0
        except ConnectionRefusedError:
            return REFUSED, "", 0
        except PermissionError:
            return DENIED, "", 0
        except TimeoutError:
            return SILENT, "", 0
        except OSError as error:
            return FOREIGN, error.strerror or str(error), 0


def _get(context: ctx.Context, name: str) -> dict[str, Any]:
    found = context.client.call("GET", name, timeout_s=ANSWER_LIMIT_S).json()
    if not isinstance(found, dict):
        raise Failure(f"the answer to {name} is not an object")
    return found


def _report(context: ctx.Context) -> dict[str, Any]:
    try:
        found = context.client.call("POST", "debug?action=doctor", b"", timeout_s=ANSWER_LIMIT_S).json()
    except (Failure, TimeoutError):
        return {}
    return found if isinstance(found, dict) else {}


def _warnings(context: ctx.Context) -> dict[str, dict[str, Any]]:
    """With their codes and layers; from tailscaled, too."""
    try:
        stream = context.client.stream(f"watch-ipn-bus?mask={int(Mask.INITIAL_STATE | Mask.INITIAL_HEALTH)}")
        try:
            first = stream.next_json(ANSWER_LIMIT_S) or {}
        finally:
            stream.close()
    except (Failure, EOFError):
        return {}
    found = (first.get("Health") or {}).get("Warnings") or {}
    return {code: one for code, one in found.items() if isinstance(one, dict)}


# --- names, control server, relays, paths


def _name(facts: Facts) -> None:
    daemon = facts.daemon
    tailnet = daemon.status.get("CurrentTailnet") or {}
    name = str((daemon.status.get("Self") or {}).get("DNSName") or "").rstrip(".")
    if not (daemon.prefs.get("CorpDNS") and tailnet.get("MagicDNSEnabled") and name and daemon.has_device):
        return
    found = NameFacts(name, error="no answer in time")
    facts.name = found
    found.service_trouble = probes.ask_resolver(checks_hull.SERVICES[0], name)
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found.addresses, found.error = sorted({str(answer[4][0]) for answer in answers}), ""
    except (OSError, UnicodeError) as error:
        found.error = probes.reason_of(error)


def _control(facts: Facts) -> None:
    url = str(facts.daemon.prefs.get("ControlURL") or "")
    if not url and facts.daemon.answers:
        url = DEFAULT_CONTROL_URL
    if url:
        environ: Mapping[str, str] = facts.daemon.report.get("Environ", os.environ)
        facts.control = probes.probe_control(url, environ, _mark(facts))


def _mark(facts: Facts) -> int:
    return int(facts.daemon.hull.get("BypassMark") or 0)


def _relays(context: ctx.Context, facts: Facts) -> None:
    if not facts.daemon.answers:
        return
    try:
        # A client of its own: the other thread may be using the first one.
        derp_map = type(context.client)(context.client.path).call("GET", "derpmap", timeout_s=ANSWER_LIMIT_S).json()
    except (Failure, TimeoutError):
        return
    if isinstance(derp_map, dict) and derp_map.get("Regions"):
        home = str((facts.daemon.status.get("Self") or {}).get("Relay") or "")
        facts.relays = probes.probe_relays(derp_map, home, _mark(facts))


def _ping(context: ctx.Context, address: str, size: int) -> dict[str, Any] | None:
    name = f"ping?ip={address}&size={size}&type=disco"
    try:
        found = context.client.call("POST", name, b"", timeout_s=probes.PING_LIMIT_S).json()
    except (TimeoutError, ApiFailure, Unreachable):
        return None
    return found if isinstance(found, dict) else None


COMMANDS = {"doctor": doctor_command}
