"""Debian packages that tests use without installing them: installed, they would take over this machine's names.

Fetched by apt-get once and unpacked in the user's cache; without apt-get or its servers the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tsd-tests" / "debs"


def unpacked(package: str) -> Path:
    """The folder with the package's files; skips the test when it cannot be had."""
    folder = CACHE / package
    if not folder.is_dir():
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            pytest.skip(f"{package} is needed, and this is no Debian")
        _fetch(package, folder)
    return folder


def archive(package: str) -> Path:
    """The .deb itself, for a root of its own; skips the test when it cannot be had."""
    files = CACHE / "archives" / package
    if not any(files.glob("*.deb")):
        if shutil.which("apt-get") is None:
            pytest.skip(f"{package} is needed, and this is no Debian")
        files.mkdir(parents=True, exist_ok=True)
        try:
            _run(files, "apt-get", "download", "-q", package)
        except (OSError, subprocess.SubprocessError) as err:
            pytest.skip(f"{package} cannot be fetched: {err}")
    return next(files.glob("*.deb"))


def _fetch(package: str, folder: Path) -> None:
    fresh = folder.with_name(f".{package}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _run(fresh, "apt-get", "download", "-q", package)
        file = next(fresh.glob("*.deb"))
        _run(fresh, "dpkg", "-x", str(file), "files")
        shutil.rmtree(folder, ignore_errors=True)
        (fresh / "files").rename(folder)
    except (OSError, subprocess.SubprocessError, StopIteration) as err:
        pytest.skip(f"{package} cannot be fetched: {err}")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _run(folder: Path, *words: str) -> None:
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)
