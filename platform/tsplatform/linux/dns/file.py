"""Resolver files (/etc/resolv.conf): reading them, writing ours, and giving back byte for byte what was there.

Model: tailscale: net/dns/direct.go. What was there is kept in our state folder before anything is changed, so that the
next start or `--cleanup` can undo a crash. A file is replaced by rename, or rewritten in place where it is a bind mount
(containers, `ip netns exec`).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tsd.base.addr import parse_ip
from tsd.base.errors import DecodeError, HullError
from tsd.dns.osconfig import SERVICE_TEXTS
from tsplatform.linux.programs import find_program

PATH = Path("/etc/resolv.conf")
BACKUP_NAME = "resolv.conf.undo"
MARKER = "# Written by tsd; what was here before comes back when tsd stops."
_IN_PLACE = frozenset({errno.EBUSY, errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV})
_MAX_SEARCH_BYTES = 1024
_RELABEL_S = 5.0
_FS_IOC_GETFLAGS, _FS_IMMUTABLE_FL = 0x80086601, 0x10
_LOCAL_RESOLVER = "127.0.0.1"
_MAX_SERVERS = 3
"""libc looks at no more than three servers."""


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


# --- the text


def render(servers: Sequence[str], search: Sequence[str], before: bytes) -> bytes:
    """Our file; search domains and options that were there stay."""
    lines = [MARKER, *(f"nameserver {server}" for server in servers[:_MAX_SERVERS])]
    lines += _search_line([*search, *searched(before)])
    lines += [line for line in _lines(before) if line.split()[:1] == ["options"]]
    return ("\n".join(lines) + "\n").encode()


def record(servers: Sequence[str], search: Sequence[str]) -> bytes:
    """The same for tools that make the file out of records."""
    lines = [*(f"nameserver {server}" for server in servers[:_MAX_SERVERS]), *_search_line(search)]
    return ("\n".join(lines) + "\n").encode()


def _search_line(domains: Sequence[str]) -> list[str]:
    """As much as every libc reads; what comes first counts most."""
    kept: list[str] = []
    for domain in dict.fromkeys(domains):
        if sum(map(len, kept)) + len(kept) + len(domain) <= _MAX_SEARCH_BYTES:
            kept.append(domain)
    return [f"search {' '.join(kept)}"] if kept else []


def nameservers(content: bytes) -> list[str]:
    """Without our own, in case the file is ours or another daemon's of this kind."""
    return [text for text in servers_in(content) if _is_address(text) and text not in SERVICE_TEXTS]


def upstreams_in(content: bytes) -> list[str]:
    """Who is asked without us: a file that names nobody means the resolver of this machine (resolv.conf(5))."""
    return nameservers(content) or ([] if servers_in(content) else [_LOCAL_RESOLVER])


def servers_in(content: bytes) -> list[str]:
    """As programs find them, ours too."""
    return [words[1] for words in map(str.split, _lines(content)) if words[:1] == ["nameserver"] and words[1:]]


def searched(content: bytes) -> list[str]:
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


def leading_comments(content: bytes) -> list[str]:
    found: list[str] = []
    for line in _lines(content):
        if line.strip() and not line.lstrip().startswith(("#", ";")):
            break
        found.append(line)
    return found


# --- the file


def look(path: Path) -> Before:
    content = content_of(path)
    if path.is_symlink():
        return Before(content, os.readlink(path))
    return Before(content, "", path.stat().st_mode & 0o7777) if content is not None else Before()


def kept(backup: Path, path: Path) -> Before:
    """The file as it is without us. Where a link led to, its owner goes on writing: that counts."""
    try:
        before = Before.decode(backup.read_bytes())
    except (OSError, ValueError, KeyError, TypeError):
        return look(path)
    now = content_of(path.parent / before.target) if before.target else None
    return before if now is None or is_ours(now) else replace(before, content=now)


def content_of(path: Path) -> bytes | None:
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
            write_new(path, content, mode)
        except OSError as err:
            if err.errno not in _IN_PLACE or path.is_symlink() or not path.exists():
                raise
            _rewrite(path, content)
    except OSError as err:
        hint = _why_refused(path, err.errno or 0)
        raise HullError(f"write {path}", os.strerror(err.errno or 0), hint, err.errno or 0) from None


def _why_refused(path: Path, code: int) -> str:
    if code == errno.EROFS:
        return f"mount {path} writable, or tsctl set --accept-dns=false"
    if code == errno.EPERM and _is_immutable(path):
        return f"somebody made it immutable: chattr -i {path}, or tsctl set --accept-dns=false"
    return ""


def _is_immutable(path: Path) -> bool:
    flags = bytearray(8)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
        finally:
            os.close(fd)
    except OSError:
        return False
    return bool(int.from_bytes(flags[:4], sys.byteorder) & _FS_IMMUTABLE_FL)


def relabel(path: Path, enforce: Path = Path("/sys/fs/selinux/enforce")) -> None:
    """A new file has not the SELinux label of the old one, so confined programs cannot read it. Raises `HullError`."""
    try:
        program = find_program("restorecon") if enforce.read_text().strip() == "1" else None
        if program is None:
            return
        done = subprocess.run([program, str(path)], capture_output=True, timeout=_RELABEL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode:
        hint = f"run restorecon {path}"
        raise HullError(f"give {path} its SELinux label", f"restorecon: exit code {done.returncode}", hint)


def is_mount_point(path: Path) -> bool:
    """A bind-mounted file can be neither replaced nor moved."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    return any(len(columns) > 4 and columns[4] == str(path.absolute()) for columns in map(str.split, lines))


def belongs_to_another_network(path: Path) -> bool:
    """Whether it is the file of process 1, which lives in another network (`ip netns exec` without an own file)."""
    try:
        if os.stat("/proc/1/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return False
        theirs, ours = os.stat(f"/proc/1/root{path.absolute()}"), os.stat(path)
    except OSError:
        return False
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Raises OSError."""
    fresh = _unfinished(path)
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
    """Undo by what was kept; whether there was something to undo. What somebody else put there stays as it is."""
    for started in (backup, path):
        drop_unfinished(started)
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
    if is_ours(content_of(path)) or not os.path.lexists(path):
        _give_back(path, before)
    with contextlib.suppress(OSError):
        backup.unlink()
    return True


def _unfinished(path: Path) -> Path:
    """A name that nobody else uses, also in another thread or in a process of the same number elsewhere."""
    return path.with_name(f".{path.name}.tsd-{os.getpid()}-{secrets.token_hex(4)}")


def drop_unfinished(path: Path) -> None:
    """What a daemon left that was killed while it replaced this file."""
    with contextlib.suppress(OSError):
        for fresh in path.parent.glob(f".{path.name}.tsd-*"):
            fresh.unlink()


def _give_back(path: Path, before: Before) -> None:
    try:
        if before.target:
            fresh = _unfinished(path)
            os.symlink(before.target, fresh)
            os.rename(fresh, path)
        elif before.content is None:
            if os.path.lexists(path):  # on a read-only file system nothing may be deleted, not even what is not there
                path.unlink()
        else:
            put(path, before.content, before.mode)
    except OSError as err:
        raise HullError(f"give back {path}", os.strerror(err.errno or 0), errno=err.errno or 0) from None
