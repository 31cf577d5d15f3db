"""The host's resolver where nobody manages it: /etc/resolv.conf itself, given back byte for byte.

Model: tailscale: net/dns/direct.go. What was there is kept in our state folder before anything is changed, so that the
next start or `--cleanup` can undo a crash. The file is replaced by rename, or rewritten in place where it is a bind
mount (containers, `ip netns exec`). Hosts whose file belongs to systemd-resolved, NetworkManager or resolvconf are left
alone: those managers are not spoken to here.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tsd.base.addr import QUAD_100, QUAD_100_V6, IPAddress, parse_ip
from tsd.base.errors import DecodeError, HullError
from tsd.hull import DnsConfig
from tsplatform.linux.hostnames import claim_name

log = logging.getLogger(__name__)

PATH = Path("/etc/resolv.conf")
BACKUP_NAME = "resolv.conf.undo"
MARKER = "# Written by tsd; what was here before comes back when tsd stops."
NAMES_CLAIM = "resolv.conf"
FIGHT_LIMIT = 10
"""Rewrites by others that are undone before we give up until the next change."""

_SERVICE = (str(QUAD_100), str(QUAD_100_V6))
_MANAGERS = ("systemd-resolved", "NetworkManager", "resolvconf")
_MANAGED_LINKS = {"/run/systemd/resolve/": "systemd-resolved", "/run/NetworkManager/": "NetworkManager"}
_IN_PLACE = frozenset({errno.EBUSY, errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV})


@dataclass(frozen=True, slots=True)
class Before:
    """The file as it was: a symlink (`target`), a file, or nothing (`content` None)."""

    content: bytes | None = None
    target: str = ""
    mode: int = 0o644

    def encode(self) -> bytes:
        content = None if self.content is None else base64.b64encode(self.content).decode()
        return json.dumps({"content": content, "target": self.target, "mode": self.mode}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Before:
        """Raises ValueError, KeyError or TypeError."""
        found = json.loads(raw)
        content = None if found["content"] is None else base64.b64decode(found["content"])
        return cls(content, str(found["target"]), int(found["mode"]))


class DirectDns:
    """Implements `tsd.hull.Dns`. `own_addresses` tells which of our service addresses can be reached."""

    def __init__(
        self,
        folder: Path,
        own_addresses: Callable[[], Sequence[IPAddress]],
        path: Path = PATH,
        is_foreign: Callable[[Path], bool] | None = None,
    ) -> None:
        self._path = path
        self._backup = folder / BACKUP_NAME
        self._own_addresses = own_addresses
        self._is_foreign = is_foreign or belongs_to_another_network
        self._wanted = b""
        self._fights = 0
        self._claim: socket.socket | None = None
        self.on_fight: Callable[[str], None] = lambda text: None
        """Told when another program keeps rewriting the file; "" when that is over."""

    def apply(self, config: DnsConfig) -> None:
        wants = config.wants_os_config and (config.routes or config.resolvers)
        if not wants:
            self.revert()
            return
        reason = self._why_not()
        if reason:
            raise HullError(f"set up names in {self._path}", reason, f"ask {_SERVICE[0]} for names of the tailnet")
        self._claim = self._claim or claim_name(NAMES_CLAIM)
        if self._claim is None:
            raise HullError(f"set up names in {self._path}", "another tsd on this host has done so")
        self._note_before()
        self._wanted = render(config, self._before().content or b"", self._own_addresses())
        self._fights = 0
        self._put(self._wanted)

    def revert(self) -> None:
        self._wanted = b""
        try:
            restore(self._backup, self._path)
        finally:
            if self._claim is not None:
                self._claim.close()
                self._claim = None

    def base_resolvers(self) -> list[str]:
        """As they were before us."""
        content = self._before().content if self._backup.exists() else _content(self._path)
        return nameservers(content or b"")

    def check(self) -> None:
        """Put our version back when somebody wrote another one; theirs is what comes back later."""
        if not self._wanted or _content(self._path) == self._wanted or self._fights > FIGHT_LIMIT:
            return
        self._fights += 1
        log.warning("%s was rewritten by another program; putting ours back", self._path)
        if self._fights > FIGHT_LIMIT:
            self.on_fight(f"another program keeps rewriting {self._path}: given up for now")
            return
        try:
            self._note_before()
            self._put(self._wanted)
        except HullError as err:
            self.on_fight(str(err))

    def _why_not(self) -> str:
        if self._is_foreign(self._path):
            return "the file is shared with another network namespace"
        manager = manager_of(self._path)
        return f"the file is managed by {manager}, which is not set up by this version" if manager else ""

    def _before(self) -> Before:
        try:
            return Before.decode(self._backup.read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            return look(self._path)

    def _note_before(self) -> None:
        """Before every change; our own version is never kept as what was before."""
        if is_ours(_content(self._path)):
            return
        try:
            _write_new(self._backup, look(self._path).encode(), 0o600)
        except OSError as err:
            reason = os.strerror(err.errno or 0)
            raise HullError(f"keep {self._path} in {self._backup}", reason, errno=err.errno or 0) from None

    def _put(self, content: bytes) -> None:
        if _content(self._path) != content:
            put(self._path, content, 0o644)


# --- the text


def render(config: DnsConfig, before: bytes, own: Sequence[IPAddress]) -> bytes:
    """Our file. Upstreams of control's choice go in directly when nothing of ours is needed to use them."""
    plain = [text for text in config.resolvers if _is_address(text)]
    if config.routes or len(plain) < len(config.resolvers):
        has_v4 = any(ip.version == 4 for ip in own) or not own
        servers = [_SERVICE[0] if has_v4 else _SERVICE[1]]
    else:
        servers = plain
    search = list(dict.fromkeys([*config.search_domains, *_search(before)]))
    lines = [MARKER, *(f"nameserver {server}" for server in servers)]
    lines += [f"search {' '.join(search)}"] if search else []
    lines += [line for line in _lines(before) if line.split()[:1] == ["options"]]
    return ("\n".join(lines) + "\n").encode()


def nameservers(content: bytes) -> list[str]:
    """Without our own, in case the file is ours or another daemon's of this kind."""
    found = [
        words[1] for words in (line.split() for line in _lines(content)) if words[:1] == ["nameserver"] and words[1:]
    ]
    return [text for text in found if _is_address(text) and text not in _SERVICE]


def _search(content: bytes) -> list[str]:
    found: list[str] = []
    for words in (line.split() for line in _lines(content)):
        if words[:1] in (["search"], ["domain"]):
            found = words[1:]
    return found


def _lines(content: bytes) -> list[str]:
    return content.decode("utf-8", "replace").splitlines()


def _is_address(text: str) -> bool:
    try:
        parse_ip(text.partition("%")[0])
    except DecodeError:
        return False
    return True


def is_ours(content: bytes | None) -> bool:
    return content is not None and content.startswith(MARKER.encode())


def manager_of(path: Path) -> str:
    """Whose file it is: where a symlink leads, or the name in the leading comments; "" for nobody's."""
    with contextlib.suppress(OSError):
        real = os.path.realpath(path).replace("/var/run/", "/run/")
        for folder, manager in _MANAGED_LINKS.items():
            if path.is_symlink() and real.startswith(folder):
                return manager
    content = _content(path) or b""
    if is_ours(content):
        return ""
    owner = ""
    for line in _lines(content):
        if line.strip() and not line.lstrip().startswith(("#", ";")):
            break
        owner = next((manager for manager in _MANAGERS if manager in line), owner)
    return owner


def belongs_to_another_network(path: Path) -> bool:
    """Whether it is the file of process 1, which lives in another network (`ip netns exec` without an own file)."""
    try:
        if os.stat("/proc/1/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return False
        theirs, ours = os.stat(f"/proc/1/root{path.absolute()}"), os.stat(path)
    except OSError:
        return False
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


# --- the file


def look(path: Path) -> Before:
    content = _content(path)
    if path.is_symlink():
        return Before(content, os.readlink(path))
    return Before(content, "", path.stat().st_mode & 0o7777) if content is not None else Before()


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def put(path: Path, content: bytes, mode: int) -> None:
    """Replace the file, or rewrite it where it cannot be replaced. Raises `HullError`."""
    try:
        if is_mount_point(path):
            _rewrite(path, content)
            return
        try:
            _write_new(path, content, mode)
        except OSError as err:
            if err.errno not in _IN_PLACE or path.is_symlink() or not path.exists():
                raise
            _rewrite(path, content)
    except OSError as err:
        raise HullError(f"write {path}", os.strerror(err.errno or 0), errno=err.errno or 0) from None


def is_mount_point(path: Path) -> bool:
    """A bind-mounted file can be neither replaced nor moved."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    return any(len(columns) > 4 and columns[4] == str(path.absolute()) for columns in map(str.split, lines))


def _write_new(path: Path, content: bytes, mode: int) -> None:
    fresh = path.with_name(f".{path.name}.tsd-{os.getpid()}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, mode)
            os.write(fd, content)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def _rewrite(path: Path, content: bytes) -> None:
    """The old end is cut off last: a reader meanwhile sees no empty file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
        os.fsync(fd)
    finally:
        os.close(fd)


def restore(backup: Path, path: Path = PATH) -> bool:
    """Undo by what was kept; whether there was something to undo. A file that is not ours any more stays as it is."""
    for started in (backup, path):
        _drop_unfinished(started)
    try:
        raw = backup.read_bytes()
    except OSError:
        return False
    try:
        before = Before.decode(raw)
    except (ValueError, KeyError, TypeError) as err:
        raise HullError(
            f"give back {path}", f"{backup} is damaged: {err}", f"check {path}, then delete {backup}"
        ) from None
    if is_ours(_content(path)):
        _give_back(path, before)
    with contextlib.suppress(OSError):
        backup.unlink()
    return True


def _drop_unfinished(path: Path) -> None:
    """What a daemon left that was killed while it replaced this file."""
    with contextlib.suppress(OSError):
        for fresh in path.parent.glob(f".{path.name}.tsd-*"):
            fresh.unlink()


def _give_back(path: Path, before: Before) -> None:
    try:
        if before.target:
            fresh = path.with_name(f".{path.name}.tsd-{os.getpid()}")
            os.symlink(before.target, fresh)
            os.rename(fresh, path)
        elif before.content is None:
            path.unlink()
        else:
            put(path, before.content, before.mode)
    except OSError as err:
        raise HullError(f"give back {path}", os.strerror(err.errno or 0), errno=err.errno or 0) from None
