"""Debian packages unpacked into a cache and not installed: daemons that would change the machine that has them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def unpacked(package: str) -> Path | None:
    """The root of the package's files; None where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tsd-tests"
    root = cache / package
    if root.is_dir():
        return root
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return None
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        try:
            _run(["apt-get", "-q", "download", package], folder)
            found = next(Path(folder).glob("*.deb"))
            _run(["dpkg", "-x", str(found), "root"], folder)
        except (OSError, subprocess.SubprocessError, StopIteration):
            return None
        with contextlib.suppress(OSError):  # another run was first
            (Path(folder) / "root").rename(root)
    return root


def _run(words: list[str], folder: str) -> None:
    subprocess.run(words, cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
