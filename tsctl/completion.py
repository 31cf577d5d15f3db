"""`tsctl completion bash|zsh|fish`: scripts that ask `tsctl __complete -- WORDS...` for what may come next."""

from __future__ import annotations

from typing import Any

from tsctl import context as ctx
from tsctl.goflags import BOOL, Command, Failure, Flag, Parsed, UsageError
from tsctl.prefflags import NETFILTER_BACKENDS, NETFILTER_MODES

_BASH = """\
_tsctl_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(tsctl __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f1))
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _tsctl_complete tsctl
"""
_ZSH = """\
#compdef tsctl
_tsctl() {
    local -a found
    local line
    for line in ${(f)"$(tsctl __complete -- ${words[2,CURRENT]} 2>/dev/null)"}; do
        found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
    done
    _describe tsctl found || _files
}
compdef _tsctl tsctl
"""
_FISH = """\
function __tsctl_complete
    set -l words (commandline -opc) (commandline -ct)
    tsctl __complete -- $words[2..-1] 2>/dev/null
end
complete -c tsctl -f -a '(__tsctl_complete)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_PEER_COMMANDS = ("ping", "nc", "ip")


def completion_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        shell = parsed.args[0] if parsed.args else ""
        if shell not in SCRIPTS:
            raise UsageError("usage: tsctl completion bash|zsh|fish")
        ctx.out(SCRIPTS[shell].rstrip("\n"))

    details = (
        "bash:  tsctl completion bash > ~/.local/share/bash-completion/completions/tsctl\n"
        'zsh:   tsctl completion zsh > "${fpath[1]}/_tsctl"\n'
        "fish:  tsctl completion fish > ~/.config/fish/completions/tsctl.fish"
    )
    return Command("completion", "Print a completion script", run, usage="bash|zsh|fish", details=details, max_args=1)


def complete_command(context: ctx.Context) -> Command:
    def run(parsed: Parsed) -> None:
        for word, summary in candidates(context, parsed.args or [""]):
            ctx.out(f"{word}\t{summary}" if summary else word)

    return Command("__complete", "", run, max_args=-1, stops_at_word=True, is_hidden=True)


def candidates(context: ctx.Context, words: list[str]) -> list[tuple[str, str]]:
    """What the last (perhaps unfinished) word may become."""
    from tsctl.root import load_command, root_command

    *before, last = words
    command = root_command()
    depth = 0
    for word in before:
        if word.startswith("-"):
            continue
        found = load_command(word, context) if depth == 0 else command.subcommand(word)
        if found is None:
            break
        command, depth = found, depth + 1
    options = _options(context, command, before, last)
    return [(word, summary) for word, summary in options if word.startswith(last)]


def _options(context: ctx.Context, command: Command, before: list[str], last: str) -> list[tuple[str, str]]:
    if last.startswith("-"):
        name, equals, _ = last.lstrip("-").partition("=")
        if equals:
            return [(f"--{name}={value}", "") for value in _flag_values(context, name)]
        return [(_flag_word(flag), flag.summary) for flag in command.flags if not flag.is_hidden]
    if command.subcommands:
        return [(sub.name, sub.summary) for sub in command.subcommands if not sub.is_hidden]
    if command.name in _PEER_COMMANDS:
        return [(name, "") for name in _peer_names(context)]
    if command.name == "switch":
        return [(str(one.get("ID")), str(one.get("Name") or "")) for one in _quietly(context, "profiles/") or []]
    if command.name == "completion":
        return [(shell, "") for shell in SCRIPTS]
    return []


def _flag_word(flag: Flag) -> str:
    dashes = "-" if len(flag.name) == 1 else "--"
    return f"{dashes}{flag.name}" if flag.kind == BOOL else f"{dashes}{flag.name}="


def _flag_values(context: ctx.Context, name: str) -> list[str]:
    if name == "exit-node":
        return [*_peer_names(context, only_exit_nodes=True), "auto:any"]
    if name == "netfilter-mode":
        return list(NETFILTER_MODES)
    if name == "netfilter-backend":
        return list(NETFILTER_BACKENDS)
    return []


def _peer_names(context: ctx.Context, *, only_exit_nodes: bool = False) -> list[str]:
    status = _quietly(context, "status") or {}
    suffix = status.get("MagicDNSSuffix") or ""
    peers = [one for one in ctx.peers_of(status) if one.get("ExitNodeOption") or not only_exit_nodes]
    return sorted(name for name in (ctx.short_name(one, suffix) for one in peers) if name)


def _quietly(context: ctx.Context, name: str) -> Any:
    try:
        return context.client.get(name)
    except (Failure, OSError):
        return None


COMMANDS = {"completion": completion_command, "__complete": complete_command}
