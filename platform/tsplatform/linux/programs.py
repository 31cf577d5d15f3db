"""Where the system's own programs are looked for, whatever environment we were started in.

A root shell without a login (`su`, cron) has no sbin in its PATH, and nft and iptables live there.
"""

from __future__ import annotations

import os
import shutil

SEARCH_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


def search_path() -> str:
    """The usual folders first, then those of our own PATH that nobody can move."""
    own = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if os.path.isabs(folder)]
    return os.pathsep.join(dict.fromkeys([*SEARCH_PATH.split(os.pathsep), *own]))


def find_program(name: str) -> str | None:
    return shutil.which(name, path=search_path())


def environment() -> dict[str, str]:
    """For a program of the system, so that it finds its own helpers and is itself found."""
    return {**os.environ, "PATH": search_path()}
