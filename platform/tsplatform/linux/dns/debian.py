"""Names by Debian's resolvconf: a record of ours, and a hook that makes it the only one that counts (resolvconf(8)).

Its records are blended, so that other servers would be asked beside ours; the hook runs after each blending and writes
ours alone (as tailscale: net/dns/debian_resolvconf.go does).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tsd.base.errors import HullError
from tsd.dns.osconfig import OsDns
from tsplatform.linux.dns import file, tools
from tsplatform.linux.dns.manager import Found, Mode

RECORDS = Path("/run/resolvconf/interface")
HOOK = Path("/etc/resolvconf/update-libc.d/tsd")
_BASE = Path("/etc/resolvconf/resolv.conf.d/base")
_SCRIPT = """#!/bin/sh
# Written by tsd while it sets up names: its servers alone, whatever other records there are.
# resolvconf runs this in the folder of its records, after it has made resolv.conf.
set -e
umask 022
[ -f '{record}' ] || exit 0
made=/run/resolvconf/resolv.conf
[ "$(readlink -f /etc/resolv.conf)" = "$made" ] || exit 0
{{
    [ ! -f /etc/resolvconf/resolv.conf.d/head ] || cat /etc/resolvconf/resolv.conf.d/head
    cat '{record}'
    grep -h '^ *options ' "$made" || true
}} >"$made.tsd"
mv -f "$made.tsd" "$made"
"""


class DebianResolvconf(tools.Record):
    """Implements `Manager`."""

    mode = Mode.DEBIAN_RESOLVCONF

    def __init__(self, folder: Path, device: str, path: Path = file.PATH) -> None:
        super().__init__(folder, record_of(device), path)

    async def _make(self, wanted: OsDns) -> None:
        try:
            HOOK.parent.mkdir(parents=True, exist_ok=True)
            file.write_new(HOOK, _SCRIPT.format(record=self._record).encode(), 0o755)
        except OSError as err:
            raise HullError(f"write {HOOK}", os.strerror(err.errno or 0), errno=err.errno or 0) from None
        reason = f"{self._path} is not made by it"
        given = file.record(wanted.nameservers, wanted.search)
        for words in (("-a", self._record), ("-u",)):
            try:
                await tools.resolvconf(*words, given=given)
            except HullError as err:
                reason = err.reason  # perhaps of a hook that has nothing to do with us: the file counts
            if self._servers() == list(wanted.nameservers):
                return
        hint = "run dpkg-reconfigure resolvconf, or remove it"
        raise HullError("set up names by resolvconf", reason, hint)

    def _undo(self) -> None:
        undo(self._record)

    async def look(self) -> Found:
        if self._wanted is None or self._servers() == list(self._wanted.nameservers):
            return Found.FINE
        return Found.CHANGED

    def base_resolvers(self) -> list[str]:
        """Of all records but ours, in the order of their names."""
        try:
            others = sorted(path for path in RECORDS.iterdir() if path.name != self._record)
        except OSError:
            others = []
        found = [server for path in (*others, _BASE) for server in file.nameservers(file.content_of(path) or b"")]
        return list(dict.fromkeys(found))

    def watched(self) -> list[Path]:
        return [self._path.parent, self._path, RECORDS.parent]


def record_of(device: str) -> str:
    """Records of tunnels come first in the usual order."""
    return f"tun-{device}.tsd"


def undo(record: str) -> None:
    with contextlib.suppress(OSError):
        HOOK.unlink()
    try:
        tools.resolvconf_now("-d", record)
    except HullError:
        if (RECORDS / record).exists():
            raise
