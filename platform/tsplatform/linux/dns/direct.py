"""The host's resolver where nobody manages it: /etc/resolv.conf itself.

What somebody else writes meanwhile is what comes back when we stop.
"""

from __future__ import annotations

import os
from pathlib import Path

from tsd.base.errors import HullError
from tsd.dns.osconfig import OsDns
from tsplatform.linux.dns import file
from tsplatform.linux.dns.manager import Found, Mode

_WRITERS = (
    "NetworkManager",
    "systemd-resolved",
    "resolvconf",
    "dhclient",
    "dhcpcd",
    "connman",
    "tailscale",
    "netconfig",
)


class DirectFile:
    """Implements `Manager`. `folder` keeps what was there."""

    mode = Mode.DIRECT
    can_split = False

    def __init__(self, folder: Path, path: Path = file.PATH) -> None:
        self._path = path
        self._backup = folder / file.BACKUP_NAME
        self._settings = OsDns()
        self._wanted = b""

    async def set(self, wanted: OsDns) -> None:
        self._note_before()
        self._settings, self._wanted = wanted, self._rendered(wanted)
        if file.content_of(self._path) != self._wanted:
            file.put(self._path, self._wanted, 0o644)
            file.relabel(self._path)

    async def revert(self) -> None:
        self._settings, self._wanted = OsDns(), b""
        if file.restore(self._backup, self._path):
            file.relabel(self._path)

    async def look(self) -> Found:
        if not self._wanted:
            return Found.FINE
        if file.content_of(self._path) != self._wanted:
            return Found.CHANGED
        if self._rendered(self._settings) != self._wanted:  # search domains or options where a link led to
            await self.set(self._settings)
        return Found.FINE

    def base_resolvers(self) -> list[str]:
        return file.upstreams_in(self._before())

    def watched(self) -> list[Path]:
        return [self._path.parent, self._path]

    def rival(self) -> str:
        comments = " ".join(file.leading_comments(file.content_of(self._path) or b""))
        if self._path.is_symlink():
            comments += os.readlink(self._path)
        return next((name for name in _WRITERS if name in comments), "")

    def _before(self) -> bytes:
        return file.kept(self._backup, self._path).content or b""

    def _rendered(self, wanted: OsDns) -> bytes:
        return file.render(wanted.nameservers, wanted.search, self._before())

    def _note_before(self) -> None:
        """Before every change; our own version is never kept as what was before, nor is its absence."""
        content = file.content_of(self._path)
        was_deleted = content is None and not self._path.is_symlink() and self._backup.exists()
        if was_deleted or file.is_ours(content):
            return
        try:
            file.write_new(self._backup, file.look(self._path).encode(), 0o600)
        except OSError as err:
            reason = os.strerror(err.errno or 0)
            raise HullError(f"keep {self._path} in {self._backup}", reason, errno=err.errno or 0) from None
