"""A namespace with files of its own: /etc, /run and added programs, so that a test can set up a whole host's names.

`/etc` is a copy that may be changed, `/run` is empty, `/usr` has the files of unpacked packages in front of the real
ones. Everything vanishes with the box's first process.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from harness.netlab import NetLab, Process, wait_for

_MAKE = """
set -e
mount --make-rprivate /
umount /etc/resolv.conf 2>/dev/null || true
cp -a /etc "$1/etc"
mount --bind "$1/etc" /etc
mount -t tmpfs none /run
mkdir -p /run/dbus /run/lock
[ ! -d "$1/usr" ] || mount -t overlay none -o "lowerdir=$1/usr:/usr" /usr
touch "$1/ready"
exec sleep infinity
"""


class HostBox:
    """`run` and `start` work inside. `folder` must not be below /etc or /run."""

    def __init__(self, lab: NetLab, namespace: str, folder: Path, packages: Sequence[Path] = ()) -> None:
        self.lab = lab
        self.namespace = namespace
        self.folder = folder
        folder.mkdir(parents=True)
        for package in packages:
            for source, target in (("sbin", "usr/sbin"), ("bin", "usr/bin"), ("lib", "usr/lib"), ("usr", "usr")):
                if (package / source).is_dir():
                    shutil.copytree(package / source, folder / target, symlinks=True, dirs_exist_ok=True)
        line = ["unshare", "-m", "sh", "-c", _MAKE, "sh", str(folder)]
        self._holder = lab.start(namespace, line, folder / "box.log")
        wait_for(self._is_ready, 30, f"the box of {namespace}")
        for package in packages:
            if (package / "etc").is_dir():
                shutil.copytree(package / "etc", folder / "etc", symlinks=True, dirs_exist_ok=True)

    def _is_ready(self) -> bool:
        if not self._holder.is_running:
            raise RuntimeError(self._holder.tail())
        return (self.folder / "ready").exists()

    @property
    def prefix(self) -> list[str]:
        """In front of a command that is already in the network namespace."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]

    def run(self, *words: str, given: str = "", check: bool = True, timeout_s: float = 30.0) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, *self.prefix, *words],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def start(self, *words: str, log: str, environ: dict[str, str] | None = None) -> Process:
        return self.lab.start(self.namespace, [*self.prefix, *words], self.folder / log, environ)

    def resolv_conf(self) -> str:
        """What programs read, and where a link leads."""
        return self.run("sh", "-c", "readlink /etc/resolv.conf; cat /etc/resolv.conf; stat -c %a /etc/resolv.conf")
