"""What every command shares within one run of tsctl: the client, the words of the command line, output helpers."""

from __future__ import annotations

import os
import sys

from tsctl import fastjson
from tsctl.client import LocalClient
from tsctl.goflags import Failure
from tsd.localapi.schema import NEEDS_LOGIN, NEEDS_MACHINE_AUTH, NO_STATE, RUNNING, STARTING, STOPPED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

PROGRAM = "tsctl"


class Context:
    """One per run. `words` are all words of the command line after the program's name."""

    def __init__(self, socket_path: str, words: Sequence[str]) -> None:
        self.socket_path = socket_path
        self.words = list(words)
        self.client = LocalClient(socket_path)


_CONTROLS = {code: "\ufffd" for code in (*range(9), *range(11, 32), *range(127, 160))}


def harmless(text: str) -> str:
    """Names come from other machines: nothing that a terminal would obey."""
    return text.translate(_CONTROLS)


def out(text: str = "") -> None:
    sys.stdout.write(harmless(text) + "\n")


def note(text: str = "") -> None:
    """For people, not for pipes: standard error, at once."""
    sys.stdout.flush()
    sys.stderr.write(harmless(text) + "\n")
    sys.stderr.flush()


def to_json(value: object, indent: int | str | None = 2) -> str:
    return fastjson.dumps(value, indent)


def table(rows: Sequence[Sequence[str]], pad: int = 2, min_width: int = 0, *, pads_last: bool = False) -> list[str]:
    """Columns aligned with spaces; `pads_last` keeps the padding of the last one (the field's status table has it)."""
    if not rows:
        return []
    count = max(len(row) for row in rows)
    widths = [max(min_width, *(len(row[i]) + pad if i < len(row) else 0 for row in rows)) for i in range(count)]
    lines = ["".join(cell.ljust(widths[i]) for i, cell in enumerate(row)) for row in rows]
    return lines if pads_last else [line.rstrip() for line in lines]


def not_running_reason(status: dict[str, Any]) -> str:
    """Empty when the node is up; else what to tell people."""
    state = status.get("BackendState", "")
    if state in (RUNNING, STARTING):
        return ""
    if state == STOPPED:
        return "tsd is stopped; bring it up with `tsctl up`."
    if state == NEEDS_LOGIN:
        url = status.get("AuthURL") or ""
        return f"Logged out.\nLog in at: {url}" if url else "Logged out."
    if state == NEEDS_MACHINE_AUTH:
        return "This machine still waits for approval by an admin of the tailnet."
    if state == NO_STATE:
        hint = "" if status.get("Health") else " `tsctl doctor` may tell why."
        return f"tsd has started but is not connected yet (state {NO_STATE}).{hint}"
    return f"unexpected state: {state}"


def require_running(status: dict[str, Any]) -> None:
    """The field prints this on standard output and exits 1."""
    reason = not_running_reason(status)
    if reason:
        out(reason)
        raise Failure(code=1)


def denied_hint(words: Sequence[str]) -> str:
    """What to add to a 403 for people who are not root."""
    if os.geteuid() == 0:
        return ""
    from shlex import join

    once = f"sudo {program(_socket_of(words))} set --operator=$USER"
    return f"\nUse `sudo {join([PROGRAM, *words])}`.\nTo not need root, run `{once}` once."


def program(socket_path: str) -> str:
    """How to call us again for the same daemon, for a shell."""
    from shlex import join

    return join([PROGRAM, f"--socket={socket_path}"]) if socket_path else PROGRAM


def _socket_of(words: Sequence[str]) -> str:
    """What --socket says before the command."""
    if words and words[0].lstrip("-").startswith("socket="):
        return words[0].partition("=")[2]
    return words[1] if words and words[0] in ("--socket", "-socket") else ""


def own_addresses(status: dict[str, Any]) -> list[str]:
    return list(status.get("TailscaleIPs") or (status.get("Self") or {}).get("TailscaleIPs") or [])


def peers_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Peers that are objects, whatever else a daemon of another version may send."""
    found = status.get("Peer")
    return [peer for peer in found.values() if isinstance(peer, dict)] if isinstance(found, dict) else []


def short_name(peer: dict[str, Any], suffix: str) -> str:
    """The name people use: without the tailnet's suffix; the host's own name when there is none."""
    name = str(peer.get("DNSName") or "").rstrip(".")
    if suffix and name.lower().endswith("." + suffix.lower()):
        return name[: -len(suffix) - 1]
    return name


def go_list(values: Sequence[object]) -> str:
    return "[" + " ".join(str(value) for value in values) + "]"


def quoted(text: str) -> str:
    """Like Go's %q for the names and addresses that occur here."""
    return fastjson.quoted(text)
