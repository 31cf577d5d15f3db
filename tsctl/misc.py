"""Small commands: metrics, version, bugreport, serve status."""

from __future__ import annotations

import os
import sys

from tsctl import context as ctx
from tsctl.goflags import Command, Failure, Flag, Parsed, UsageError
from tsd.localapi.schema import CAPABILITY_VERSION, STATUS_PUMP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def own_version() -> str:
    """The version of the installed distribution; `dev` when run from a source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tsd-net")
    except PackageNotFoundError:
        return "0.0.0-dev"


def metrics_command(context: ctx.Context) -> Command:
    def show(parsed: Parsed) -> None:
        sys.stdout.write(context.client.call("GET", "usermetrics").body.decode())

    def write(parsed: Parsed) -> None:
        if len(parsed.args) != 1:
            raise UsageError("usage: tsctl metrics write <file>")
        _write_file(parsed.args[0], context.client.call("GET", "usermetrics").body)

    return Command(
        "metrics",
        "Show metrics in Prometheus' text format",
        show,
        subcommands=(
            Command("print", "Print them", show),
            Command("write", "Write them to a file, replaced at once", write, usage="<file>", max_args=-1),
        ),
    )


def _write_file(path: str, contents: bytes) -> None:
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(contents)
        os.replace(beside, path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None


def version_command(context: ctx.Context) -> Command:
    flags = (
        Flag("daemon", "also ask the running daemon", False),
        Flag("json", "print JSON", False),
    )

    def run(parsed: Parsed) -> None:
        version = own_version()
        status = context.client.status(with_peers=False) if parsed.flag("daemon") else {}
        pump = str(status.get(STATUS_PUMP) or "")
        if parsed.flag("json"):
            ctx.out(ctx.to_json(_version_json(version, status, pump), "\t"))
            return
        if not parsed.flag("daemon"):
            ctx.out(version)
            ctx.out(f"  python version: {sys.version.split()[0]}\n  capability version: {CAPABILITY_VERSION}")
            running = _pump_of_daemon(context)
            if running:
                ctx.out(f"  packet pump of the daemon: {running}")
            return
        ctx.out(f"Client: {version}\n  python version: {sys.version.split()[0]}")
        ctx.out(f"Daemon: {status.get('Version')}")
        if pump:
            ctx.out(f"  packet pump: {pump}")

    return Command("version", "Show versions", run, flags=flags)


def _pump_of_daemon(context: ctx.Context) -> str:
    """ "" when no daemon answers, or when it is not tsd."""
    try:
        return str(context.client.status(with_peers=False).get(STATUS_PUMP) or "")
    except Failure:
        return ""


def _version_json(version: str, status: dict[str, Any], pump: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "majorMinorPatch": version.partition("-")[0].partition("+")[0],
        "short": version,
        "long": version,
        "cap": CAPABILITY_VERSION,
    }
    if status:
        found["daemonLong"] = status.get("Version")
    if pump:
        found["pump"] = pump
    return found


def bugreport_command(context: ctx.Context) -> Command:
    flags = (
        Flag("diagnose", "also write diagnostics to the log", False),
        Flag("record", "not available in tsctl", False, is_hidden=True),
    )

    def run(parsed: Parsed) -> None:
        if len(parsed.args) > 1:
            raise UsageError("too many arguments: the note is one word, or quoted")
        from urllib.parse import quote

        query = [f"note={quote(parsed.args[0])}"] if parsed.args else []
        query += ["diagnose=true"] if parsed.flag("diagnose") else []
        sys.stdout.write(context.client.call("POST", f"bugreport?{'&'.join(query)}", b"").body.decode())

    return Command("bugreport", "Print a marker to find in the logs", run, flags=flags, usage="[note]", max_args=-1)


def serve_command(context: ctx.Context) -> Command:
    flags = (Flag("json", "print the configuration as JSON", False),)

    def status(parsed: Parsed) -> None:
        config = context.client.get("serve-config") or {}
        if parsed.flag("json"):
            ctx.out(ctx.to_json(config))
            return
        lines = _serve_lines(config if isinstance(config, dict) else {})
        ctx.out("\n".join(lines) if lines else "No serve config")

    return Command(
        "serve",
        "Show what this node serves",
        None,
        subcommands=(Command("status", "Show what this node serves", status, flags=flags),),
    )


def _serve_lines(config: dict[str, Any]) -> list[str]:
    public = config.get("AllowFunnel") or {}
    lines: list[str] = []
    for host_port, web in sorted((config.get("Web") or {}).items()):
        host, _, port = host_port.rpartition(":")
        is_https = ((config.get("TCP") or {}).get(port) or {}).get("HTTPS")
        scheme, usual = ("https", "443") if is_https else ("http", "80")
        where = host if port == usual else host_port
        lines.append(f"{scheme}://{where} ({'Funnel on' if public.get(host_port) else 'tailnet only'})")
        for mount, handler in sorted((web.get("Handlers") or {}).items(), key=lambda item: len(item[0])):
            kind, target = next(
                ((kind, handler[key]) for key, kind in _HANDLER_KINDS if handler.get(key)), ("nothing", "")
            )
            lines.append(f"|-- {mount} {kind:<5} {target}")
    for port, tcp in sorted((config.get("TCP") or {}).items()):
        if tcp.get("TCPForward"):
            tls = " (TLS terminated)" if tcp.get("TerminateTLS") else ""
            lines.append(f"|-- tcp://:{port}{tls}\n|--> tcp://{tcp['TCPForward']}")
    return lines


_HANDLER_KINDS = (("Proxy", "proxy"), ("Path", "path"), ("Text", "text"), ("Redirect", "redirect"))

COMMANDS = {
    "metrics": metrics_command,
    "version": version_command,
    "bugreport": bugreport_command,
    "serve": serve_command,
}
