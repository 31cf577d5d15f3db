"""Flags as Go's flag package reads them, and the commands that carry them. Standard library only, no heavy imports.

`-x`, `--x`, `--x=v`, `--x v`; booleans only `--x` or `--x=false`; a repeated flag is an error. Unlike Go, flags are
also taken after positional arguments (unless the command passes them on), because nobody means a file named `--json`.
"""

from __future__ import annotations

from tsd.localapi.schema import parse_bool, parse_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BOOL, TEXT, INT, DURATION = "bool", "text", "int", "duration"


class Failure(Exception):
    """What went wrong, for people; `code` is the exit status. An empty text prints nothing."""

    def __init__(self, text: str = "", code: int = 1) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


class UsageError(Failure):
    """The command line itself is wrong: one line, exit status 2."""

    def __init__(self, text: str) -> None:
        super().__init__(text, 2)


class HelpWanted(Exception):
    """`--help` was given."""


class Flag:
    """One flag. `default` also tells its Python type; `kind` how text becomes a value."""

    def __init__(
        self,
        name: str,
        summary: str,
        default: bool | str | int | float = "",
        *,
        kind: str = "",
        aliases: Sequence[str] = (),
        is_hidden: bool = False,
        optional_value: str = "",
    ) -> None:
        self.name = name
        self.summary = summary
        self.default = default
        self.kind = kind or (BOOL if isinstance(default, bool) else INT if isinstance(default, int) else TEXT)
        self.aliases = tuple(aliases)
        self.is_hidden = is_hidden
        self.optional_value = optional_value

    def parse(self, text: str) -> bool | str | int | float:
        if self.kind == TEXT:
            return text
        value: bool | int | float | None
        if self.kind == BOOL:
            value = parse_bool(text)
        elif self.kind == DURATION:
            value = parse_duration(text)
        else:
            value = int(text) if text.removeprefix("-").isdigit() and text.isascii() else None
        if value is None:
            raise UsageError(f'invalid value "{text}" for flag -{self.name}: expected {_WANTED[self.kind]}')
        return value


_WANTED = {BOOL: "true or false", INT: "a whole number", DURATION: "a duration such as 5s or 1m30s"}


class Parsed:
    """The outcome: values (defaults included), which flags were written, and the other words."""

    def __init__(self, values: dict[str, bool | str | int | float], mentioned: list[str], args: list[str]) -> None:
        self.values = values
        self.mentioned = mentioned
        self.args = args

    def text(self, name: str) -> str:
        return str(self.values[name])

    def flag(self, name: str) -> bool:
        return self.values[name] is True

    def number(self, name: str) -> int:
        return int(self.values[name])

    def seconds(self, name: str) -> float:
        return float(self.values[name])


def parse(flags: Sequence[Flag], words: Sequence[str], *, stops_at_word: bool = False) -> Parsed:
    """Raises UsageError or HelpWanted."""
    table = {name: flag for flag in flags for name in (flag.name, *flag.aliases)}
    parsed = Parsed({flag.name: flag.default for flag in flags}, [], [])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            parsed.args += rest
            break
        if not word.startswith("-") or word == "-":
            parsed.args.append(word)
            if stops_at_word:
                parsed.args += rest
                break
            continue
        _take_flag(table, parsed, word, rest)
    return parsed


def _take_flag(table: dict[str, Flag], parsed: Parsed, word: str, rest: list[str]) -> None:
    name, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
    if not name or name.startswith("-"):
        raise UsageError(f"bad flag syntax: {word}")
    flag = table.get(name)
    if flag is None:
        if name in ("help", "h"):
            raise HelpWanted
        raise UsageError(f"flag provided but not defined: -{_masked(name)}")
    if flag.name in parsed.mentioned:
        raise UsageError(f"flag -{flag.name} was given more than once")
    if not equals:
        if flag.kind == BOOL:
            value = "true"
        elif flag.optional_value:
            value = flag.optional_value
        elif rest:
            value = rest.pop(0)
        else:
            raise UsageError(f"flag needs an argument: -{flag.name}")
    parsed.values[flag.name] = flag.parse(value)
    parsed.mentioned.append(flag.name)


def _masked(text: str) -> str:
    """Never print an auth key that was glued to a mistyped flag."""
    return "X" * len(text) if "key-" in text else text


class Command:
    """A command: its flags, its help, and the function that does it. `subcommands` makes it a group."""

    def __init__(
        self,
        name: str,
        summary: str,
        run: Callable[[Parsed], int | None] | None = None,
        *,
        flags: Sequence[Flag] = (),
        usage: str = "",
        details: str = "",
        subcommands: Sequence[Command] = (),
        max_args: int = 0,
        stops_at_word: bool = False,
        is_hidden: bool = False,
    ) -> None:
        self.name = name
        self.summary = summary
        self.run = run
        self.flags = tuple(flags)
        self.usage = usage
        self.details = details
        self.subcommands = tuple(subcommands)
        self.max_args = max_args
        self.stops_at_word = stops_at_word
        self.is_hidden = is_hidden

    def subcommand(self, name: str) -> Command | None:
        return next((command for command in self.subcommands if command.name == name), None)


def help_text(path: str, command: Command, *, shows_defaults: bool = True) -> str:
    """Summary, usage, details, subcommands, flags."""
    visible = [sub for sub in command.subcommands if not sub.is_hidden]
    usage = command.usage or ("<command>" if command.subcommands else "[flags]" if command.flags else "")
    lines = [command.summary, "", "USAGE", f"  {path} {usage}".rstrip()]
    if command.details:
        lines += ["", command.details.strip("\n")]
    if visible:
        width = max(len(sub.name) for sub in visible)
        lines += ["", "SUBCOMMANDS", *(f"  {sub.name:{width}}  {sub.summary}" for sub in visible)]
    shown = [flag for flag in command.flags if not flag.is_hidden]
    if shown:
        lines += ["", "FLAGS"]
        for flag in shown:
            lines += [f"  {_flag_form(flag)}", f"        {flag.summary}{_default_note(flag, shows_defaults)}"]
    return "\n".join(lines) + "\n"


def _flag_form(flag: Flag) -> str:
    dashes = "-" if len(flag.name) == 1 else "--"
    if flag.kind == BOOL:
        return f"{dashes}{flag.name}, {dashes}{flag.name}=false"
    return f"{dashes}{flag.name} {'value' if flag.kind == TEXT else flag.kind}"


def _default_note(flag: Flag, shows_defaults: bool) -> str:
    if not shows_defaults or flag.default == "":
        return ""
    if flag.kind == BOOL:
        return f" (default {'true' if flag.default else 'false'})"
    return f" (default {flag.default:g}s)" if flag.kind == DURATION else f" (default {flag.default})"
