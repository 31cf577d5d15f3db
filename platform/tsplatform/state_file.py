"""State stores: one JSON file that survives a crash, or memory.

Layout of tailscale: ipn/store (`tailscaled.state`): one object, base64 values, two spaces. Each write goes to a new
file, is fsynced, renamed, and the folder fsynced; then the same content goes to `<file>.bak`. A damaged file is
recovered from the backup or refused with the remedy; there is never a silent new identity. When a write fails the
values live on in memory, `trouble` says why, and `retry` tries again. Stores in a cluster are not here.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from tsd.base.errors import ConfigError, StateError
from tsplatform import fsync

log = logging.getLogger(__name__)

BACKUP_SUFFIX = ".bak"
DAMAGED_SUFFIX = ".damaged"
_SEALED_KEYS = {"key", "nonce", "data"}
_OWN_FOLDERS = {"tsd", "tailscale"}


class MemoryStore:
    """`mem:`: forgotten at exit."""

    is_durable = False
    trouble = ""
    notice = ""

    def __init__(self, where: str = "mem:") -> None:
        self.where = where
        self._values: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self._values.get(name)

    def put(self, name: str, value: bytes | None) -> None:
        if value is None:
            self._values.pop(name, None)
        else:
            self._values[name] = value

    def names(self) -> list[str]:
        return sorted(self._values)

    def retry(self) -> bool:
        return True


class FileStore:
    """The state file. Raises `StateError` from the constructor when it must not be used; `put` never raises.

    `notice` tells what was repaired at the start; `trouble` is the reason why the last write failed, "" when all is
    on disk; `on_trouble` is called when it changes.
    """

    is_durable = True

    def __init__(self, path: str | os.PathLike[str], on_trouble: Callable[[str], None] | None = None) -> None:
        self.path = _resolved(Path(path).absolute())
        self.where = str(self.path)
        self.backup_path = self.path.with_name(self.path.name + BACKUP_SUFFIX)
        self.notice = ""
        self.trouble = ""
        self.on_trouble = on_trouble
        self._values: dict[str, bytes] = {}
        self._seen: tuple[int, int, int] | None = None
        prepare_folder(self.path.parent)
        self._load()
        self._seen = _identity(self.path)
        if not os.access(self.path.parent, os.W_OK):
            self._set_trouble(_folder_text(self.path.parent, "is read-only"))

    def get(self, name: str) -> bytes | None:
        return self._values.get(name)

    def put(self, name: str, value: bytes | None) -> None:
        if self._values.get(name) == value:
            return
        if value is None:
            self._values.pop(name)
        else:
            self._values[name] = bytes(value)
        self._save()

    def names(self) -> list[str]:
        return sorted(self._values)

    def retry(self) -> bool:
        """Write again after a failure; whether everything is on disk now."""
        if self.trouble:
            self._save()
        return not self.trouble

    # --- writing -----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        raw = encode(self._values)
        if self._seen is not None and _identity(self.path) != self._seen:
            log.warning("%s was changed by another program; what tsd holds in memory replaces it", self.path)
        try:
            fsync.replace(self.path, raw)
        except OSError as err:
            self._set_trouble(f"{self.path}: {err.strerror or err}")
            return
        self._seen = _identity(self.path)
        self._set_trouble("")
        try:
            fsync.replace(self.backup_path, raw)
        except OSError as err:
            log.warning("the backup of the state could not be written: %s: %s", self.backup_path, err.strerror)

    def _set_trouble(self, text: str) -> None:
        if text == self.trouble:
            return
        if text:
            log.error("the state could not be saved and is kept in memory: %s", text)
        else:
            log.info("the state is saved again: %s", self.path)
        self.trouble = text
        if self.on_trouble is not None:
            self.on_trouble(text)

    # --- reading -----------------------------------------------------------------------------------------------

    def _load(self) -> None:
        _check_file(self.path)
        raw = _read(self.path)
        if raw is None and not self.backup_path.exists():
            return
        reason = "is missing"
        if raw is not None:
            try:
                self._values = decode(raw)
                self._refresh_backup(raw)
                return
            except ValueError as err:
                reason = str(err)
                if "sealed" in reason:
                    raise StateError(f"{self.path}: {reason}") from None
        self._recover(raw is not None, reason)

    def _refresh_backup(self, raw: bytes) -> None:
        """Another program (tailscaled) may have written the file, or a crash came between file and backup."""
        with contextlib.suppress(OSError, StateError):
            if _read(self.backup_path) != raw:
                fsync.replace(self.backup_path, raw)

    def _recover(self, has_file: bool, reason: str) -> None:
        try:
            source, raw = self._best_copy()
        except (ValueError, StateError) as err:
            raise StateError(
                f"{self.path}: {reason}, and the backup {self.backup_path.name} does not help: {err}. The file was left"
                " as it is. Restore it from a copy; or, to join as a new machine, remove it together with"
                f" {self.backup_path.name}"
            ) from None
        self._values = decode(raw)
        with contextlib.suppress(OSError):
            if has_file:
                os.replace(self.path, self.path.with_name(self.path.name + DAMAGED_SUFFIX))
            fsync.replace(self.path, raw)
        kept = f"; the damaged file is kept as {self.path.name}{DAMAGED_SUFFIX}" if has_file else ""
        what = "the backup " if source == self.backup_path else "what was being written last, "
        self.notice = (
            f"{self.path} {reason}: this node goes on from {what}{source.name}{kept}."
            " To join as a new machine instead, log out, or remove both files while tsd is stopped."
        )
        log.warning("%s", self.notice)

    def _best_copy(self) -> tuple[Path, bytes]:
        """The backup; else the newest whole file that a crash kept from being renamed. Raises what ails the backup."""
        fault: ValueError | StateError = ValueError("there is none")
        for source in (self.backup_path, *_unfinished(self.path)):
            try:
                raw = _read(source)
                if raw is not None and decode(raw):
                    return source, raw
            except (ValueError, StateError) as err:
                fault = err if source == self.backup_path else fault
        raise fault


def _unfinished(path: Path) -> list[Path]:
    """Temporary files of tailscaled beside the state file (tailscale: `atomicfile`) that no other user can have made,
    newest first."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(path.parent):
            if entry.name.startswith(f"{path.name}.tmp") and entry.is_file(follow_symlinks=False):
                info = entry.stat(follow_symlinks=False)
                if info.st_uid in (0, os.geteuid()) and not info.st_mode & 0o022:
                    found.append((info.st_mtime_ns, Path(entry.path)))
    return [name for _, name in sorted(found, reverse=True)]


def open_store(spec: str, on_trouble: Callable[[str], None] | None = None) -> MemoryStore | FileStore:
    """`--state`: a path or `mem:`. Raises `ConfigError` for kinds that do not exist here, and `StateError`."""
    if spec.startswith("mem:"):
        return MemoryStore()
    for prefix in ("kube:", "arn:", "tpmseal:"):
        if spec.startswith(prefix):
            raise ConfigError(f"--state={spec}: stores of kind {prefix} are not supported; use a file or mem:")
    return FileStore(spec, on_trouble)


def encode(values: dict[str, bytes]) -> bytes:
    """The content of a state file."""
    return json.dumps(
        {name: base64.b64encode(value).decode() for name, value in sorted(values.items())}, indent=2
    ).encode()


def decode(raw: bytes) -> dict[str, bytes]:
    """Raises ValueError whose text completes `<path> …`."""
    if not raw.strip(b"\0 \t\r\n"):
        raise ValueError("is empty" if not raw else "holds nothing but blanks (unclean shutdown?)")
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError(f"is damaged ({len(raw)} bytes that are not JSON)") from None
    if not isinstance(entries, dict):
        raise ValueError("is damaged (not a JSON object)")
    if set(entries) == _SEALED_KEYS:
        raise ValueError(
            "is sealed by a TPM, which tsd cannot open; run `tailscaled --encrypt-state=false` once to unseal it,"
            " or start anew with another --state"
        )
    values: dict[str, bytes] = {}
    for name, text in entries.items():
        try:
            values[name] = b"" if text is None else base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError(f"is damaged (the value of {name!r} is not base64)") from None
    return values


def prepare_folder(folder: Path) -> None:
    """Make the folder 0700 when it is new or carries our name. Raises `StateError` when others may write to it."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        info = folder.stat()
    except OSError as err:
        raise StateError(
            f"the state folder {folder} cannot be made: {err.strerror}; create it for uid {os.geteuid()}, or pass"
            " --statedir=FOLDER"
        ) from None
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISDIR(info.st_mode):
        raise StateError(f"{folder} is not a folder")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise StateError(
            _folder_text(folder, "is writable for everybody, who could swap the keys; run chmod 0700 on it")
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise StateError(_folder_text(folder, f"is closed to uid {os.geteuid()}; run chown or chmod on it"))
    if folder.name in _OWN_FOLDERS and mode & 0o077 and info.st_uid == os.geteuid():
        with contextlib.suppress(OSError):
            folder.chmod(0o700)


def _folder_text(folder: Path, wrong: str) -> str:
    info = folder.stat()
    return f"the state folder {folder} (owner uid {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}) {wrong}"


def _resolved(path: Path) -> Path:
    """Follow a symbolic link that we or root made; anybody else's is refused."""
    try:
        info = path.lstat()
    except OSError:
        return path
    if not stat.S_ISLNK(info.st_mode):
        return path
    if info.st_uid not in (0, os.geteuid()):
        raise StateError(
            f"{path} is a symbolic link made by uid {info.st_uid}; tsd (uid {os.geteuid()}) does not follow it: pass"
            " the real file with --state"
        )
    return Path(os.path.realpath(path))


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What another writer changes; None when there is no file."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _check_file(path: Path) -> None:
    try:
        info = path.stat()
    except FileNotFoundError:
        return
    except OSError as err:
        raise StateError(f"{path}: {err.strerror}") from None
    mode = stat.S_IMODE(info.st_mode)
    text = f"{path} (owner uid {info.st_uid}, mode {mode:04o})"
    if not stat.S_ISREG(info.st_mode):
        raise StateError(f"{text} is not a regular file")
    if os.geteuid() not in (0, info.st_uid):
        raise StateError(f"{text} belongs to another user than tsd (uid {os.geteuid()}); run chown on it")
    if mode & 0o077:
        log.warning("%s was open to others; its mode is 0600 now", text)
        with contextlib.suppress(OSError):
            path.chmod(0o600)


def _read(path: Path) -> bytes | None:
    """None when there is no file."""
    for attempt in (1, 2, 3):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as err:
            if attempt == 3:
                raise StateError(f"{path} cannot be read: {err.strerror}") from None
            time.sleep(0.02)
    return None
