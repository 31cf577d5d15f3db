"""Commands of the field's `tailscale` that tsctl does not have: one line each, what it is, why not here, what to do.

Scripts and fingers know them; "unknown subcommand" would leave people to guess whether they mistyped.
"""

from __future__ import annotations

from tsctl.goflags import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_FILES = "tsd neither sends nor receives files yet (Taildrop); use scp through `tsctl nc`"
_NO_SERVE = "tsd serves nothing to the tailnet yet; peers reach ports that a program opens on this machine's own"
_NO_DEBUG = "not in tsctl; `tsctl doctor` and `tsctl netcheck` look at relays, the coordination server and routers"

COMMANDS: dict[str, str] = {
    "appc-routes": "lists what an app connector has learned; tsd is none",
    "cert": "fetches a TLS certificate for the node's name; tsd has no source of certificates yet",
    "configure": "sets up other programs and appliances (kubeconfig, Synology), which tsd does not",
    "drive": "shares folders (Taildrive), which tsd does not",
    "file": _NO_FILES,
    "funnel": f"{_NO_SERVE}, and nothing to the internet",
    "id-token": "asks the coordination server for an OIDC token of this node, which tsd does not",
    "licenses": "the licence of tsd is in its file LICENSE; `pip show` tells those of its libraries",
    "service": "is about Tailscale Services, which tsd does not offer",
    "syspolicy": "shows what an administrator's tools prescribe on this machine; tsd follows no such policies",
    "systray": "is a desktop program; `tsctl status` and `tsctl set` do the same in a terminal",
    "update": "tsd is updated by what installed it: apt-get install, dnf upgrade, pipx upgrade",
    "web": "is a web page for settings, which tsd does not have; use `tsctl set`",
}
_DEBUG = (
    *("capture", "component-logs", "daemon-bus-events", "daemon-bus-graph", "daemon-bus-queues", "derp"),
    *("derp-set-on-demand", "derp-unset-on-demand", "dev-store-set", "dial-types", "env", "go-buildinfo", "hostinfo"),
    *("peer-endpoint-changes", "peer-relay-servers", "peer-relay-sessions", "portmap", "resolve", "set-expire"),
    *("stat", "test-risk", "ts2021"),
)
SUBCOMMANDS: dict[str, dict[str, str]] = {
    "debug": dict.fromkeys(_DEBUG, _NO_DEBUG),
    "serve": dict.fromkeys(("reset", "drain", "clear", "advertise", "get-config", "set-config"), _NO_SERVE),
}
_SERVE_HERE = ("json", "h", "help")
_NO_OAUTH = "tsctl logs in by a browser or an auth key; make one (it may have tags), and give it with --auth-key"
_LOGIN_FLAGS = dict.fromkeys(("client-id", "client-secret", "id-token", "audience"), _NO_OAUTH)
_NO_UPSTREAM = "what the newest version is, is known to what installed tsd (apt-cache policy, dnf info, pip index)"
FLAGS: dict[str, dict[str, str]] = {
    "up": _LOGIN_FLAGS,
    "login": _LOGIN_FLAGS,
    "version": dict.fromkeys(("upstream", "track"), _NO_UPSTREAM),
    "bugreport": {"record": "nothing is recorded; look at `journalctl -u tsd` while it happens"},
}


def refuse_command(name: str) -> None:
    """Raises Failure when the field has that command and tsctl has not."""
    if name in COMMANDS:
        raise Failure(f"tsctl {name}: {COMMANDS[name]}")


def refuse_flags(path: str, words: Sequence[str]) -> None:
    """Raises Failure for a flag that the field's command of this name has."""
    known = FLAGS.get(path.removeprefix("tsctl "), {})
    for word in words:
        name = word.lstrip("-").partition("=")[0] if word.startswith("-") else ""
        if name in known:
            raise Failure(f"{path} --{name}: {known[name]}", 2)


def refuse_subcommand(path: str, words: Sequence[str]) -> None:
    """`path` is `tsctl COMMAND`, `words` what follows. What to serve may be a port, a path, a URL or any flag."""
    command, word = path.removeprefix("tsctl "), words[0] if words else ""
    if word in SUBCOMMANDS.get(command, {}):
        raise Failure(f"{path} {word}: {SUBCOMMANDS[command][word]}")
    if command == "serve" and word and not word.isalpha() and word.strip("-").partition("=")[0] not in _SERVE_HERE:
        raise Failure(f"{path}: {_NO_SERVE}")
