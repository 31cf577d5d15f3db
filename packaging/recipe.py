"""What the packages of tsd contain: the one recipe that the .deb and the .rpm are made from.

The program with everything it imports lives in /usr/lib/tsd, made for one Python (that of the host it is for); the
distribution's own Python modules are not used: Debian 12 has aiohttp 3.8, cryptography 38 and no backports.zstd, which
are too old or missing. Identity and settings are never part of a package: /var/lib/tsd stays until a purge.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

PACKAGING = Path(__file__).resolve().parent
ROOT = PACKAGING.parent

NAME = "tsd"
SUMMARY = "userspace WireGuard overlay daemon, wire-compatible with Tailscale and headscale"
DESCRIPTION = (
    "tsd joins this machine to a tailnet, with a network device or in userspace, and tsctl is its command line.",
    "It also brings a small coordination server with relay and STUN (tsd coord).",
)
MAINTAINER = "tsd maintainers <root@localhost>"
LICENSE = "MIT"
SITE = "usr/lib/tsd"
COMMANDS = {"tsd": "tsd.daemon.cli", "tsctl": "tsctl"}
FILES = (
    # source (below the repository), place on the host, mode
    ("packaging/systemd/tsd.service", "{units}/tsd.service", 0o644),
    ("packaging/systemd/tsd.defaults", "etc/default/tsd", 0o644),
    ("packaging/openrc/tsd", "usr/share/doc/tsd/openrc/tsd", 0o755),
    ("README.md", "usr/share/doc/tsd/README.md", 0o644),
    ("CHANGELOG.md", "usr/share/doc/tsd/CHANGELOG.md", 0o644),
    ("LICENSE", "usr/share/doc/tsd/copyright", 0o644),
)
CONFIG_FILES = ("etc/default/tsd",)
"""Kept as the admin left them."""
SCRIPTS = ("after-install", "before-remove", "after-remove")
WANTED_TOO = ("nftables", "iproute2", "ca-certificates")
"""Not needed to run; a network device without a firewall tool has no NAT for subnet routes."""

_LAUNCHER = """#!{interpreter} -IS
import sys

sys.path.insert(0, "/{site}")
from {module} import main

sys.exit(main())
"""


@dataclass(frozen=True)
class Target:
    """For which Python and machine."""

    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"

    @property
    def interpreter(self) -> str:
        return f"/usr/bin/python{self.python}"


def version() -> str:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def launcher(command: str, target: Target) -> str:
    """Neither the environment nor the distribution's modules change what is imported."""
    return _LAUNCHER.format(interpreter=target.interpreter, site=SITE, module=COMMANDS[command])


def script(name: str) -> str:
    """A script's body; it is called with `action` set to install, upgrade, remove or purge."""
    return (PACKAGING / "scripts" / f"{name}.sh").read_text()


def needed_libc(root: Path) -> str:
    """The newest glibc that a library below `root` asks for."""
    newest = (2, 17)
    for path in root.rglob("*.so*"):
        found = re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())
        newest = max([newest, *((int(major), int(minor)) for major, minor in found)])
    return f"{newest[0]}.{newest[1]}"
