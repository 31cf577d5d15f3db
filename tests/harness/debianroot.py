"""A Debian root with systemd as process 1, in namespaces of its own and without a network to the outside.

Made once by debootstrap and kept in a cache folder; each boot gets an overlay over it, so that it stays new.
debootstrap and systemd-nspawn are unpacked from their packages when the machine has none: nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SUITE = "bookworm"
PACKAGES = "systemd,systemd-sysv,dbus,iproute2,nftables,procps,python3.11,ca-certificates,init-system-helpers"
MIRROR = os.environ.get("TSD_DEBIAN_MIRROR", "http://deb.debian.org/debian")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tsd-test"
BUILD_LIMIT_S, BOOT_LIMIT_S = 900, 120


class CannotMake(Exception):
    """The text says what stopped it."""


def tool(name: str, package: str) -> str:
    """A program of this machine, or one unpacked from its Debian package."""
    found = shutil.which(name)
    if found:
        return found
    folder = CACHE / "tools" / package
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        done = _try(["apt-get", "download", package], cwd=CACHE)
        debs = sorted(CACHE.glob(f"{package}_*.deb"))
        if not debs:
            raise CannotMake(f"{name} is missing and {package} cannot be downloaded: {done}")
        folder.mkdir(parents=True)
        _try(["dpkg-deb", "-x", str(debs[-1]), str(folder)])
    for place in ("usr/bin", "usr/sbin", "bin"):
        if (folder / place / name).exists():
            return str(folder / place / name)
    raise CannotMake(f"{package} has no {name}")


def _try(words: list[str], cwd: Path | None = None) -> str:
    """What it said at the end."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        return str(err)
    return (done.stderr or done.stdout).strip()[-300:]


def base_root() -> Path:
    """The root that is never booted itself. Raises CannotMake."""
    root = CACHE / f"{SUITE}-root"
    if (root / ".complete").exists():
        return root
    if os.geteuid() != 0:
        raise CannotMake("making a Debian root needs root")
    program = tool("debootstrap", "debootstrap")
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    share = Path(program).parents[1] / "share/debootstrap"
    env = {**os.environ, **({"DEBOOTSTRAP_DIR": str(share)} if share.exists() else {})}
    words = [program, "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), MIRROR]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_LIMIT_S, env=env, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise CannotMake(f"debootstrap: {err}") from None
    if done.returncode != 0:
        raise CannotMake(f"debootstrap failed: {(done.stdout + done.stderr).strip()[-300:]}")
    (root / ".complete").touch()
    return root


class BootedRoot:
    """systemd runs in it between `boot` and `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "merged"
        self.log = folder / "console.log"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def boot(self) -> BootedRoot:
        """Raises CannotMake with the console's last lines."""
        base, program = base_root(), tool("systemd-nspawn", "systemd-container")
        for name in ("upper", "work", "merged"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        layers = f"lowerdir={base},upperdir={self.folder}/upper,workdir={self.folder}/work"
        # The overlay lives in a mount namespace of its own and goes with it.
        script = f'mount -t overlay overlay -o {layers} {self.root} && exec "$@"'
        words = [program, "-D", str(self.root), "--boot", "--private-network", "--register=no", "--keep-unit"]
        words += ["--console=pipe", f"--machine=tsdD{os.getpid()}", "--bind=/dev/net/tun", "--quiet"]
        words += ["systemd.show_status=1", "systemd.log_target=console"]
        with self.log.open("wb") as log:
            self._nspawn = subprocess.Popen(
                ["unshare", "-m", "sh", "-c", script, "sh", *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._wait(lambda: self._find_leader() and self._is_up(), BOOT_LIMIT_S)
        return self

    def _wait(self, condition: Callable[[], object], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self._nspawn is not None
            if self._nspawn.poll() is not None or time.monotonic() > deadline:
                text = self.log.read_text(errors="replace")[-1500:]
                raise CannotMake(f"systemd does not come up in namespaces: {text.strip() or 'no word from it'}")
            time.sleep(0.2)

    def _find_leader(self) -> bool:
        """nspawn's child is process 1 inside."""
        assert self._nspawn is not None
        try:
            children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        except OSError:
            return False
        self._leader = int(children[0]) if children else 0
        return bool(self._leader)

    def _is_up(self) -> bool:
        return self.run("systemctl", "is-system-running", check=False).strip() in ("running", "degraded")

    def run(self, *words: str, check: bool = True, timeout_s: float = 90.0) -> str:
        """A command inside; what it said on both streams."""
        line = ["nsenter", f"--target={self._leader}", "--all", "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
        line += ["DEBIAN_FRONTEND=noninteractive", "HOME=/root", *words]
        done = subprocess.run(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}: {done.stdout}")
        return done.stdout

    def close(self) -> None:
        if self._nspawn is None:
            return
        if self._leader:
            self.run("systemctl", "poweroff", "--no-block", check=False)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            try:
                self._nspawn.wait(15)
                return
            except subprocess.TimeoutExpired:
                self._nspawn.send_signal(number)
        self._nspawn.wait(15)
