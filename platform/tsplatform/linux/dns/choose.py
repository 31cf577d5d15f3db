"""Who keeps this host's resolver settings, and why we think so.

Rules: tailscale: net/dns/manager_linux.go (dnsMode), with what went wrong there put right: a link into resolved's
folder is resolved's also while it does not run yet, and a file of our own counts as what was there before it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tsd.base.errors import HullError
from tsplatform.linux.dns import file
from tsplatform.linux.dns.bus import (
    NETWORK_MANAGER,
    NETWORK_MANAGER_PATH,
    RESOLVED,
    RESOLVED_PATH,
    BusError,
    SystemBus,
)
from tsplatform.linux.dns.manager import Mode
from tsplatform.linux.programs import find_program

STUB = "127.0.0.53"
_RESOLVED_FOLDER, _STUB_NAMES = "/run/systemd/resolve/", ("stub-resolv.conf",)
_RESOLVCONF_FOLDER = "/run/resolvconf/"
_OWNERS = ("systemd-resolved", "NetworkManager", "resolvconf")
_NM_DNS_PATH = f"{NETWORK_MANAGER_PATH}/DnsManager"
_TOOL_S = 5.0
_DEBIAN, _OPENRESOLV, _RESOLVECTL = "debian", "openresolv", "resolvectl"
MISWIRED = (
    "NetworkManager and systemd-resolved do not work together: /etc/resolv.conf should be a link to"
    " /run/systemd/resolve/stub-resolv.conf"
)


@dataclass(slots=True)
class Choice:
    """`because` has the steps of the decision; `warning` what the user should put right."""

    mode: Mode = Mode.DIRECT
    because: list[str] = field(default_factory=list)
    warning: str = ""


class Surveyor(Protocol):
    """What a decision looks at."""

    def before(self) -> file.Before:
        """resolv.conf as it is without us."""

    def real_path(self) -> str: ...

    def nsswitch(self) -> str: ...

    async def resolved_answers(self) -> bool: ...

    async def network_manager_answers(self) -> bool: ...

    async def network_manager_mode(self) -> str:
        """Its DNS plugin, "" when unknown."""

    async def network_manager_version(self) -> str:
        """Raises `HullError`."""

    def resolvconf_flavour(self) -> str:
        """ "debian", "openresolv", "resolvectl", or "" for none."""


async def choose(survey: Surveyor) -> Choice:
    """Raises `HullError` when NetworkManager runs but does not tell which one it is."""
    choice = Choice()
    # First of all: a resolved that is started by this call writes resolv.conf before it answers.
    answers = await survey.resolved_answers()
    choice.because.append(f"systemd-resolved {'answers' if answers else 'does not answer'}")
    before = survey.before()
    if _leads_to_stub(survey.real_path()):
        choice.because.append("resolv.conf is a link to systemd-resolved's")
        return await _by_resolved(choice, survey)
    if before.content is None:
        choice.because.append("resolv.conf is missing")
        return choice
    owner = owner_of(before.content)
    choice.because.append(f"resolv.conf names {owner or 'nobody'} as its writer")
    if owner == "systemd-resolved":
        if _is_resolver(choice, survey, before.content):
            return await _by_resolved(choice, survey)
        if _leads_below(survey.real_path(), _RESOLVCONF_FOLDER):  # whose usual comment speaks of resolved, too
            choice.because.append("resolv.conf is a link to resolvconf's")
            _by_resolvconf(choice, survey)
    elif owner == "resolvconf":
        if _by_resolvconf(choice, survey) and answers and _is_resolver(choice, survey, before.content):
            return await _by_resolved(choice, survey)
    elif owner == "NetworkManager" and _is_resolver(choice, survey, before.content):
        return await _by_network_manager(choice, survey)
    return choice


def owner_of(content: bytes) -> str:
    """The last of the known names in the comments at the beginning."""
    owner = ""
    for line in file.leading_comments(content):
        owner = next((name for name in _OWNERS if name in line), owner)
    return owner


def _leads_below(real_path: str, folder: str) -> str:
    """Which file there, "" for none."""
    real = real_path.replace("/var/run/", "/run/")
    return real.removeprefix(folder) if real.startswith(folder) else ""


def _leads_to_stub(real_path: str) -> bool:
    return _leads_below(real_path, _RESOLVED_FOLDER) in _STUB_NAMES


def _is_resolver(choice: Choice, survey: Surveyor, content: bytes) -> bool:
    """Some files name resolved but do not lead to it."""
    for line in survey.nsswitch().splitlines():
        words = line.split()
        if words[:1] == ["hosts:"] and "resolve" in words and "dns" not in words[: words.index("resolve")]:
            choice.because.append("nsswitch.conf asks systemd-resolved first")
            return True
    servers = file.servers_in(content)
    is_stub = bool(servers) and all(server == STUB for server in servers)
    choice.because.append("resolv.conf has only its address" if is_stub else "programs do not ask systemd-resolved")
    return is_stub


async def _by_resolved(choice: Choice, survey: Surveyor) -> Choice:
    choice.mode = Mode.RESOLVED
    if not await survey.network_manager_answers():
        choice.because.append("NetworkManager does not run")
        return choice
    mode = await survey.network_manager_mode()
    choice.because.append(f"NetworkManager's DNS mode is {mode or 'unknown'}")
    if mode == "systemd-resolved":
        await _by_version(choice, survey)
    return choice


async def _by_network_manager(choice: Choice, survey: Surveyor) -> Choice:
    choice.mode = Mode.RESOLVED
    if not await survey.network_manager_answers():
        choice.because.append("NetworkManager does not run")
        return choice
    if await _by_version(choice, survey):
        return choice
    mode = await survey.network_manager_mode()
    choice.because.append(f"NetworkManager's DNS mode is {mode or 'unknown'}")
    if mode != "systemd-resolved":
        choice.mode = Mode.DIRECT
    else:
        choice.warning = MISWIRED
    return choice


async def _by_version(choice: Choice, survey: Surveyor) -> bool:
    """1.26.0 to 1.26.5 let nobody but themselves set up resolved; newer ones ignore what they are told about us."""
    version = await survey.network_manager_version()
    numbers = [int(word) if word.isdecimal() else 0 for word in version.split("-")[0].split(".")[:3]]
    must_be_asked = [1, 26, 0] <= numbers <= [1, 26, 5]
    choice.because.append(f"NetworkManager is {version}")
    if must_be_asked:
        choice.mode = Mode.NETWORK_MANAGER
    return must_be_asked


def _by_resolvconf(choice: Choice, survey: Surveyor) -> bool:
    """Whether it is systemd-resolved under another name, which keeps no records for us: then the file decides."""
    flavour = survey.resolvconf_flavour()
    choice.because.append(f"resolvconf is {flavour or 'not installed'}")
    if flavour in (_DEBIAN, _OPENRESOLV):
        choice.mode = Mode.DEBIAN_RESOLVCONF if flavour == _DEBIAN else Mode.OPENRESOLV
    return flavour == _RESOLVECTL


class HostSurveyor:
    """Implements `Surveyor` on this host."""

    def __init__(self, bus: SystemBus, backup: Path, path: Path = file.PATH) -> None:
        self._bus = bus
        self._backup = backup
        self._path = path

    def before(self) -> file.Before:
        found = file.look(self._path)
        return file.kept(self._backup, self._path) if file.is_ours(found.content) else found

    def real_path(self) -> str:
        """Also of a link that leads nowhere."""
        target = self.before().target
        return os.path.realpath(self._path.parent / target) if target else str(self._path)

    def nsswitch(self) -> str:
        with contextlib.suppress(OSError):
            return Path("/etc/nsswitch.conf").read_text("utf-8", "replace")
        return ""

    async def resolved_answers(self) -> bool:
        return await self._bus.serves(RESOLVED, RESOLVED_PATH)

    async def network_manager_answers(self) -> bool:
        return await self._bus.serves(NETWORK_MANAGER, NETWORK_MANAGER_PATH)

    async def network_manager_mode(self) -> str:
        try:
            return str(await self._bus.get(NETWORK_MANAGER, _NM_DNS_PATH, f"{NETWORK_MANAGER}.DnsManager", "Mode"))
        except BusError:
            return ""

    async def network_manager_version(self) -> str:
        return str(await self._bus.get(NETWORK_MANAGER, NETWORK_MANAGER_PATH, NETWORK_MANAGER, "Version"))

    def resolvconf_flavour(self) -> str:
        program = find_program("resolvconf")
        if program is None:
            return ""
        try:
            done = subprocess.run([program, "--version"], capture_output=True, timeout=_TOOL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as err:
            raise HullError("ask resolvconf for its version", str(err)) from None
        if done.stdout.startswith(b"systemd ") or os.path.basename(os.path.realpath(program)) == _RESOLVECTL:
            return _RESOLVECTL
        is_debian = done.returncode == 99 or b"Debian resolvconf" in done.stdout
        return _DEBIAN if is_debian else _OPENRESOLV
