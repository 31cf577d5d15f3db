"""The root command: root flags, the table of commands, and the one place where errors become exit statuses.

0 done; 1 the daemon or the network said no; 2 the command line is wrong. A module is imported when used.
"""

from __future__ import annotations

import errno
import os
import sys

from tsctl import context as ctx
from tsctl.client import ApiFailure
from tsctl.elsewhere import refuse_command, refuse_flags, refuse_subcommand
from tsctl.goflags import Command, Failure, Flag, HelpWanted, Parsed, UsageError, help_text, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# name -> (module, summary); the module has COMMANDS: dict[str, factory(Context) -> Command].
TABLE = {
    "up": ("tsctl.up", "Connect to the tailnet, logging in if needed"),
    "down": ("tsctl.account", "Disconnect from the tailnet"),
    "set": ("tsctl.settings", "Change single settings"),
    "get": ("tsctl.settings", "Show settings"),
    "login": ("tsctl.up", "Log in to a tailnet with a new profile"),
    "logout": ("tsctl.account", "Disconnect and expire this node's key"),
    "switch": ("tsctl.account", "Switch to another login profile"),
    "status": ("tsctl.status", "Show the node, its peers and its health"),
    "ip": ("tsctl.addresses", "Show tailnet addresses"),
    "ping": ("tsctl.ping", "Ping a peer through the tailnet and see the path"),
    "ssh": ("tsctl.ssh", "Log in to a peer with this machine's ssh"),
    "nc": ("tsctl.nc", "Connect standard input and output to a peer's port"),
    "netcheck": ("tsctl.netcheck", "Look at this host's network as seen from the relays"),
    "doctor": ("tsctl.doctor.command", "Find out what is wrong: engine or hull?"),
    "dns": ("tsctl.dns", "See and ask the tailnet's DNS"),
    "whois": ("tsctl.addresses", "Show the machine and user behind a tailnet address"),
    "whoami": ("tsctl.addresses", "Show this machine, its user and its tailnet"),
    "exit-node": ("tsctl.exitnode", "Show exit nodes"),
    "serve": ("tsctl.misc", "Show what this node serves"),
    "lock": ("tsctl.lock", "Manage tailnet lock: who may say which nodes belong to the tailnet"),
    "metrics": ("tsctl.misc", "Show metrics in Prometheus' format"),
    "wait": ("tsctl.account", "Wait until the node is running and has an address"),
    "version": ("tsctl.misc", "Show versions"),
    "bugreport": ("tsctl.misc", "Print a marker to find in the logs"),
    "debug": ("tsctl.debug", "For people who look inside"),
    "completion": ("tsctl.completion", "Print a completion script for bash, zsh or fish"),
}
HIDDEN = {"__complete": "tsctl.completion"}
ROOT_FLAGS = (Flag("socket", "path of the daemon's socket (default: $TSD_SOCKET, else the running daemon's)"),)


def root_command() -> Command:
    subs = [Command(name, summary) for name, (_, summary) in TABLE.items()]
    return Command(
        "tsctl",
        "Talk to tsd, the userspace WireGuard overlay daemon.",
        usage="[flags] <command> [command flags]",
        subcommands=subs,
        flags=ROOT_FLAGS,
        details="Help on one command: tsctl <command> --help",
    )


_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def load_command(name: str, context: ctx.Context) -> Command | None:
    module = TABLE[name][0] if name in TABLE else HIDDEN.get(name)
    if module is None:
        return None
    command = __import__(module, fromlist=["COMMANDS"]).COMMANDS[name](context)
    assert isinstance(command, Command)
    return command


def run(words: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    words = _rewritten(words)
    try:
        _refuse_bytes(words)
        return _run(words)
    except Failure as failure:
        text = failure.text
        if isinstance(failure, ApiFailure) and failure.status == 403:
            text += ctx.denied_hint(words)
        _flush_out()
        if text:
            ctx.note(text)
        return failure.code
    except KeyboardInterrupt:
        ctx.note("interrupted")
        return 1
    except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        if os.environ.get("TSCTL_DEBUG"):
            raise
        _flush_out()
        command = words[0] if words else ""
        ctx.note(
            f"the daemon's answer is not what tsctl {command} expects ({type(error).__name__}: {error});"
            " is it of another version? TSCTL_DEBUG=1 shows where"
        )
        return 1


def _rewritten(words: Sequence[str]) -> list[str]:
    """A sole -V or --version is the command `version`; a sole `help` is --help."""
    if list(words) in (["-V"], ["--version"], ["-version"]):
        return ["version"]
    return ["--help"] if list(words) == ["help"] else list(words)


def _refuse_bytes(words: Sequence[str]) -> None:
    """What the shell gave us must be text before it can be JSON."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{word!a} is not valid UTF-8") from None


def _run(words: Sequence[str]) -> int:
    try:
        parsed = parse(ROOT_FLAGS, words, stops_at_word=True)
    except HelpWanted:
        sys.stderr.write(help_text("tsctl", root_command()))
        return 0
    if not parsed.args:
        sys.stderr.write(help_text("tsctl", root_command()))
        return 0
    name, *rest = parsed.args
    context = ctx.Context(parsed.text("socket"), words)
    command = load_command(name, context)
    if command is None:
        refuse_command(name)
        raise UsageError(f"tsctl: unknown subcommand: {name}{_did_you_mean(name)}")
    return run_command(f"tsctl {name}", command, rest)


def _did_you_mean(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, list(TABLE), 1)
    return f" (did you mean {close[0]}?)" if close else " (see tsctl --help)"


def run_command(path: str, command: Command, words: Sequence[str]) -> int:
    """Parse the command's own words and run it, going down into subcommands."""
    refuse_flags(path, words)
    if command.subcommands:
        refuse_subcommand(path, words)
    try:
        parsed = parse(command.flags, words, stops_at_word=command.stops_at_word or bool(command.subcommands))
    except HelpWanted:
        sys.stderr.write(help_text(path, command))
        return 0
    except UsageError as error:
        hint = f"write tsctl --socket=PATH {path[6:]}" if error.text.endswith(" -socket") else f"see {path} --help"
        raise UsageError(f"{error.text} ({hint})") from None
    if command.subcommands:
        sub = command.subcommand(parsed.args[0]) if parsed.args else None
        if sub is not None:
            return run_command(f"{path} {sub.name}", sub, parsed.args[1:])
        if parsed.args and command.max_args == 0:
            raise UsageError(f"{path}: unknown subcommand: {parsed.args[0]} (see {path} --help)")
        if command.run is None:
            names = ", ".join(one.name for one in command.subcommands if not one.is_hidden)
            raise UsageError(f"{path}: missing subcommand: {names}")
    return _run_leaf(path, command, parsed)


def _run_leaf(path: str, command: Command, parsed: Parsed) -> int:
    if 0 <= command.max_args < len(parsed.args):
        extra = " ".join(ctx.quoted(word) for word in parsed.args[command.max_args :])
        raise UsageError(f"too many non-flag arguments for {path}: [{extra}] (see {path} --help)")
    assert command.run is not None
    return command.run(parsed) or 0


def _flush_out() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _mute_out()


def _mute_out() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def mend_streams() -> None:
    """A stream that was closed (`>&-`, some service managers) swallows; a letter it has no code for is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        else:
            stream.reconfigure(errors="backslashreplace")


def run_and_exit() -> None:
    mend_streams()
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        _mute_out()
        code = 1
    except OSError as error:
        if error.errno not in _WRITE_ERRORS:
            raise
        _mute_out()
        ctx.note(f"cannot write the output: {error.strerror}")
        code = 1
    # Nothing is left to clean up: skipping the interpreter's teardown saves a third of the run time.
    sys.stderr.flush()
    os._exit(code)
