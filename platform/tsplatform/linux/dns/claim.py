"""Who may set up names: one daemon of a network namespace, and one that keeps what was there before in a folder.

Daemons of several namespaces may share a folder (two state files in one), and each would take the other's note of how
its resolver file was for its own.
"""

from __future__ import annotations

from pathlib import Path

from tsd.base.errors import StateError
from tsplatform.linux.hostnames import Claim, TakenError, claim_name
from tsplatform.lock import FileLock, HeldError

NAMES_CLAIM = "resolv.conf"


class NamesClaim:
    """Held until `close` or the end of the process."""

    def __init__(self, *held: Claim) -> None:
        self._held = held

    def close(self) -> None:
        for held in self._held:
            held.close()


def claim_names(folder: Path) -> NamesClaim:
    """Raises `TakenError`, or `HullError`. A folder that is not there keeps nothing, so nothing can be taken for it."""
    host = claim_name(NAMES_CLAIM)
    try:
        return NamesClaim(host, FileLock(folder / "names", "note of this host's names"))
    except HeldError as err:
        host.close()
        reason = f"another tsd, process {err.holder}, keeps its own in {folder}: give each daemon its own --statedir"
        raise TakenError("keep what names were like", reason) from None
    except StateError:
        return NamesClaim(host)
