"""What `iptables-save` says about chains of ours, and the lines that change it.

Our jumps from builtin chains are told from those of an admin by their exact text, comment included. A builtin chain
that iptables cannot read (rules that only nft understands) is unknown: neither empty nor in order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

LABEL = "-m comment --comment tsd"
_UNKNOWN = "?"
_JUMP = re.compile(rf"-A ([A-Z]+) {LABEL} -j \S+-([a-z]+)")

Saved = dict[str, list[str]]
"""The lines that are about our chains, by table."""


def jump(builtin: str, name: str) -> str:
    """Our rule in a builtin chain, without the verb."""
    return f"{builtin} {LABEL} -j {name}"


def is_jump(line: str) -> bool:
    """Whether it is a rule that we put into a builtin chain."""
    found = _JUMP.fullmatch(line)
    return found is not None and found[1].lower() == found[2]


def ours(save: str, prefix: str) -> Saved:
    """What is about the chains `prefix`-*, without counters."""
    about = re.compile(rf"(?:^:| ){re.escape(prefix)}-(?:input|forward|postrouting|prerouting|output)\b")
    found: Saved = {}
    table = ""
    for line in save.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif about.search(line) or line.startswith(_UNKNOWN):
            found.setdefault(table, []).append(line.partition(" [")[0] if line.startswith(":") else line)
    return found


def unreadable(builtin: str) -> str:
    """The line that stands for a builtin chain that cannot be read."""
    return _UNKNOWN + builtin


def unknown(lines: Iterable[str]) -> set[str]:
    """Builtin chains that could not be read."""
    return {line.removeprefix(_UNKNOWN) for line in lines if line.startswith(_UNKNOWN)}


def counted(lines: Iterable[str], prefix: str) -> Counter[str]:
    """Each jump of ours, and of each of our chains the number of rules."""
    lines = list(lines)
    rules = (line.split()[1] for line in lines if line.startswith(f"-A {prefix}-"))
    return Counter([*rules, *filter(is_jump, lines)])


def completed(lines: list[str], jumps: Iterable[str]) -> list[str]:
    """With those of the jumps that are in chains which cannot be read."""
    hidden = unknown(lines)
    return [*(line for line in lines if not line.startswith(_UNKNOWN)), *(j for j in jumps if j.split()[1] in hidden)]


def is_same(now: Saved, then: Saved) -> bool:
    """Whether there is no difference, but for what cannot be read now."""
    return all(_parts(now.get(table, []), now) == _parts(then.get(table, []), now) for table in {*now, *then})


def _parts(lines: list[str], now: Saved) -> tuple[list[str], Counter[str]]:
    """Our chains with their rules in order, and the ways to them."""
    hidden = unknown(line for table in now.values() for line in table)
    hooks = [line for line in _hooks(lines) if line.split()[1] not in hidden]
    return [line for line in lines if line not in _hooks(lines) and not line.startswith(_UNKNOWN)], Counter(hooks)


def followers(save: str, prefix: str) -> set[str]:
    """Chains of ours whose jump is not the first rule of its chain."""
    seen: set[tuple[str, str]] = set()
    found: set[str] = set()
    table = ""
    for line in save.splitlines():
        table = line[1:] if line.startswith("*") else table
        if line.startswith("-A "):
            place = (table, line.split()[1])
            if is_jump(line) and line.split()[-1].startswith(f"{prefix}-") and place in seen:
                found.add(line.split()[-1])
            seen.add(place)
    return found


def hooked(lines: list[str]) -> set[str]:
    """Chains of ours that a jump of ours leads to."""
    return {line.split()[-1] for line in lines if is_jump(line)}


def unhooked(lines: list[str], keep: set[str]) -> list[str]:
    """Delete our own jumps, but for those to `keep`."""
    return [f"-D{line[2:]}" for line in lines if is_jump(line) and line.split()[-1] not in keep]


def dropped(lines: list[str], keep: set[str]) -> list[str]:
    """Delete chains of ours that are not wanted any more; where somebody else's rule leads, only what is in them."""
    gone = [name for name in _own_chains(lines) if name not in keep]
    wired = {line.split()[-1] for line in _hooks(lines) if not is_jump(line)}
    wired |= {name for name in gone for builtin in unknown(lines) if name.endswith(f"-{builtin.lower()}")}
    return [*(f"-F {name}" for name in gone), *(f"-X {name}" for name in gone if name not in wired)]


def _own_chains(lines: list[str]) -> list[str]:
    return [line[1:].split()[0] for line in lines if line.startswith(":")]


def _hooks(lines: list[str]) -> list[str]:
    """Rules of other chains that lead to ours."""
    own = set(_own_chains(lines))
    return [line for line in lines if line.startswith("-A ") and line.split()[1] not in own]
