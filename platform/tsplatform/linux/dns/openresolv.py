"""Names by openresolv: an exclusive record of ours, of which it makes /etc/resolv.conf (its resolvconf(8))."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tsd.base.errors import HullError
from tsd.dns.osconfig import OsDns
from tsplatform.linux.dns import file, tools
from tsplatform.linux.dns.manager import Found, Mode

_RECORDS = Path("/run/resolvconf/interfaces")


class Openresolv(tools.Record):
    """Implements `Manager`."""

    mode = Mode.OPENRESOLV

    def __init__(self, folder: Path, device: str, path: Path = file.PATH) -> None:
        super().__init__(folder, record_of(device), path)
        self._made: list[str] = []
        self._base: list[str] = []
        self._base_of_ns = -1

    async def _make(self, wanted: OsDns) -> None:
        await self._read_base()
        # The lowest metric comes first, and an exclusive record alone.
        text = file.record(wanted.nameservers, wanted.search)
        await tools.resolvconf("-m", "0", "-x", "-a", self._record, given=text)
        self._made = self._servers()  # perhaps a local resolver by openresolv's own setup, which then asks us

    def _undo(self) -> None:
        undo(self._record)

    async def look(self) -> Found:
        if self._wanted is None:
            return Found.FINE
        await self._read_base()
        return Found.FINE if self._servers() == self._made else Found.CHANGED

    def base_resolvers(self) -> list[str]:
        return self._base

    def watched(self) -> list[Path]:
        return [self._path.parent, self._path, _RECORDS]

    async def _read_base(self) -> None:
        """What all others say together; when a record came or went."""
        changed_ns = _changed_ns(_RECORDS)
        if changed_ns == self._base_of_ns:
            return
        with contextlib.suppress(HullError):
            names = (await tools.resolvconf("-i")).decode("utf-8", "replace").split()
            others = [name for name in names if name != self._record]
            self._base = file.nameservers(await tools.resolvconf("-l", *others)) if others else []
            self._base_of_ns = changed_ns


def record_of(device: str) -> str:
    return f"{device}.tsd"


def undo(record: str) -> None:
    tools.resolvconf_now("-f", "-d", record)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
