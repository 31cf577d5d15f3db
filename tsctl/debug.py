"""`tsctl debug`: raw views of the daemon. Formats may change."""

from __future__ import annotations

import sys
from typing import Any

from tsctl import context as ctx
from tsctl.goflags import Command, Failure, Flag, Parsed, UsageError
from tsd.base.notify import Mask
from tsd.localapi import schema

_DEFAULT_MASK = Mask.PEER_CHANGES | Mask.NO_NETMAP | Mask.PEER_PATCHES


def debug_command(context: ctx.Context) -> Command:
    subcommands = (*_prints(context), *_actions(context), *_others(context))
    return Command("debug", "For people who look inside", None, subcommands=subcommands)


def _prints(context: ctx.Context) -> tuple[Command, ...]:
    def show(path: str, name: str, summary: str) -> Command:
        def run(parsed: Parsed) -> None:
            ctx.out(ctx.to_json(context.client.get(path), "\t"))

        return Command(name, summary, run)

    return (
        show("prefs", "prefs", "Print the preferences"),
        show("derpmap", "derp-map", "Print the DERP map"),
        Command("daemon-logs", "Follow the daemon's log", lambda p: _daemon_logs(context, p), flags=_LOG_FLAGS),
        Command("watch-ipn", "Follow the notification bus", lambda p: _watch(context, p), flags=_WATCH_FLAGS),
        Command("netmap", "Print the network map", lambda p: _netmap(context)),
        Command("metrics", "Print the daemon's own metrics", lambda p: _metrics(context)),
        Command("statedir", "Print the folder of the daemon's state", lambda p: _statedir(context)),
        Command("goroutines", "Print where every task of the daemon stands", lambda p: _text(context, "goroutines")),
        Command("control-knobs", "Print what the coordination server has switched", lambda p: _knobs(context)),
        Command("local-creds", "Print how to call the LocalAPI with curl", lambda p: _creds(context)),
    )


def _actions(context: ctx.Context) -> tuple[Command, ...]:
    def action(name: str, summary: str) -> Command:
        def run(parsed: Parsed) -> None:
            context.client.call("POST", f"debug?action={name}", b"")

        return Command(name, summary, run)

    return (
        action("rebind", "Open the UDP sockets anew"),
        action("restun", "Ask the STUN servers again"),
        action("rotate-disco-key", "Take a new disco key"),
        action("break-derp-conns", "Drop the relay connections"),
        action("break-tcp-conns", "Drop the control connection"),
        action("force-netmap-update", "Fetch the whole network map again"),
        action("pick-new-derp", "Choose another home relay"),
        action("clear-netmap-cache", "Delete the netmap kept for the next start"),
        Command("reload-config", "Read the file of --config again", lambda p: _reload(context)),
    )


def _others(context: ctx.Context) -> tuple[Command, ...]:
    return (
        Command(
            "localapi",
            "Make one call: [METHOD] PATH [BODY|-]",
            lambda p: _localapi(context, p),
            usage="[METHOD] <path> [body or -]",
            max_args=-1,
            stops_at_word=True,
        ),
        Command(
            "force-prefer-derp",
            "Make this region the home relay while it is reachable; 0: as measured",
            lambda p: _prefer_derp(context, p),
            usage="<region ID>",
            max_args=1,
        ),
        Command(
            "via",
            "Turn a site and its IPv4 network into an IPv6 (4via6) route, or back",
            _via,
            usage="<site ID> <IPv4 network> | <IPv6 route>",
            max_args=2,
        ),
    )


_LOG_FLAGS = (
    Flag("verbose", "show lines up to this level", 0),
    Flag("time", "print when the daemon wrote the line", False),
)
_WATCH_BITS = {
    "engine-updates": Mask.ENGINE_UPDATES,
    "initial-drive-shares": Mask.INITIAL_DRIVE_SHARES,
    "initial-outgoing-files": Mask.INITIAL_OUTGOING_FILES,
    "initial-health": Mask.INITIAL_HEALTH,
    "health-actions": Mask.HEALTH_ACTIONS,
    "initial-suggested-exit-node": Mask.INITIAL_SUGGESTED_EXIT_NODE,
    "initial-client-version": Mask.INITIAL_CLIENT_VERSION,
    "peer-changes": Mask.PEER_CHANGES,
    "initial-status": Mask.INITIAL_STATUS,
    "peer-patches": Mask.PEER_PATCHES,
    "peer-wireguard-state": Mask.PEER_WIREGUARD_STATE,
}
_WATCH_FLAGS = (
    Flag("initial", "also print the state at the start", False),
    Flag("netmap", "with --initial: include the network map", False),
    Flag("mask", "the bits to subscribe to, instead of the usual ones", -1),
    Flag("count", "stop after this many notifications; 0 for never", 0),
    *(Flag(name, f"the bit {bit.name} of the mask", bool(bit & _DEFAULT_MASK)) for name, bit in _WATCH_BITS.items()),
)


def _daemon_logs(context: ctx.Context, parsed: Parsed) -> None:
    stream = context.client.stream("logtap")
    try:
        while True:
            line = stream.next_json() or {}
            if int(line.get("v") or 0) > parsed.number("verbose"):
                continue
            stamp = str((line.get("logtail") or {}).get("client_time") or "") if parsed.flag("time") else ""
            text = str(line.get("text") or "")
            sys.stdout.write(f"{stamp} {text}" if stamp else text)
            if not text.endswith("\n"):
                sys.stdout.write("\n")
            sys.stdout.flush()
    except EOFError:
        raise Failure("the daemon ended the stream") from None


def _watch(context: ctx.Context, parsed: Parsed) -> None:
    mask = parsed.number("mask")
    if mask < 0:
        mask = Mask.NO_NETMAP
        for name, bit in _WATCH_BITS.items():
            mask |= bit if parsed.flag(name) else 0
        if parsed.flag("initial"):
            mask |= Mask.INITIAL_STATE | Mask.INITIAL_PREFS | Mask.INITIAL_HEALTH
            mask |= Mask.INITIAL_NETMAP if parsed.flag("netmap") else 0
    stream = context.client.stream(f"watch-ipn-bus?mask={mask}")
    ctx.note("Connected.")
    seen = 0
    try:
        while parsed.number("count") == 0 or seen < parsed.number("count"):
            notify: dict[str, Any] = stream.next_json() or {}
            seen += 1
            ctx.out(ctx.to_json({key: value for key, value in notify.items() if value is not None}, "\t"))
            sys.stdout.flush()
    except EOFError:
        raise Failure("the daemon ended the stream") from None
    finally:
        stream.close()


def _netmap(context: ctx.Context) -> None:
    found = context.client.call("POST", "debug?action=current-netmap", b"").json()
    ctx.out(ctx.to_json(found, "\t"))


def _metrics(context: ctx.Context) -> None:
    _text(context, "metrics")


def _text(context: ctx.Context, name: str) -> None:
    sys.stdout.write(context.client.call("GET", name).body.decode("utf-8", "replace"))


def _statedir(context: ctx.Context) -> None:
    found = context.client.call("POST", "debug?action=statedir", b"").json()
    if not found:
        raise Failure("the daemon has no state folder")
    ctx.out(str(found))


def _prefer_derp(context: ctx.Context, parsed: Parsed) -> None:
    if len(parsed.args) != 1 or not (parsed.args[0].isascii() and parsed.args[0].isdigit()):
        raise UsageError("usage: tsctl debug force-prefer-derp <region ID>; `tsctl debug derp-map` shows them")
    context.client.call("POST", "debug?action=force-prefer-derp", parsed.args[0].encode())


def _knobs(context: ctx.Context) -> None:
    ctx.out(ctx.to_json(context.client.call("POST", "debug?action=control-knobs", b"").json(), "\t"))


def _reload(context: ctx.Context) -> None:
    found = context.client.call("POST", "reload-config", b"").json() or {}
    if found.get("Err"):
        raise Failure(str(found["Err"]))
    if not found.get("Reloaded"):
        raise Failure("the daemon runs without a configuration file (--config)")
    ctx.out("config reloaded")


def _creds(context: ctx.Context) -> None:
    ctx.out(f"curl --unix-socket {context.client.path} http://local-tailscaled.sock{schema.LOCALAPI_PREFIX}status")


def _via(parsed: Parsed) -> None:
    from tsctl.via import to_ipv4, to_route

    if len(parsed.args) == 2:
        ctx.out(to_route(*parsed.args))
    elif len(parsed.args) == 1:
        ctx.out(to_ipv4(parsed.args[0]))
    else:
        raise UsageError("usage: tsctl debug via <site ID> <IPv4 network>, or <IPv6 route>")


def _localapi(context: ctx.Context, parsed: Parsed) -> None:
    words = [word for word in parsed.args if word != "-v"]
    method = "GET"
    if len(words) > 1 and words[0].isupper():
        method = words.pop(0)
    if not 1 <= len(words) <= 2:
        raise UsageError("usage: tsctl debug localapi [METHOD] <path> [body or -]")
    name = words[0]
    body = None
    if len(words) == 2:
        body = sys.stdin.buffer.read() if words[1] == "-" else words[1].encode()
    elif method != "GET":
        body = b""
    shown = name if name.startswith("/") else schema.LOCALAPI_PREFIX + name
    ctx.note(f"# doing request {method} {shown}")
    reply = context.client.call(method, name, body, expect=tuple(range(100, 600)))
    ctx.note(f"# Response status {reply.status}")
    sys.stdout.write(reply.body.decode("utf-8", "replace"))
    if reply.status >= 300:
        raise Failure(f"status {reply.status}")


COMMANDS = {"debug": debug_command}
