"""Settings under /proc/sys that routing depends on: what is on, and the one that we change and give back.

Standard: Linux Documentation/networking/ip-sysctl.rst. An answer to one of our own marked packets passes a strict
`rp_filter` only where the kernel looks at the mark that the firewall gave back (`src_valid_mark`): that is set for the
interfaces concerned, never for all, written to the journal first, and set back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from tsd.base.addr import IPPrefix, is_via_route
from tsplatform.linux.journal import Entry, UndoJournal

log = logging.getLogger(__name__)

PROC = Path("/proc/sys")
STRICT = 1
MARKED = "source-mark"
"""Kind of the journal's entries."""


def read(path: Path) -> int | None:
    """None when it cannot be read, which says nothing."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def strict_interfaces(proc: Path = PROC) -> list[str]:
    """Where packets must come in the way that answers would leave."""
    conf = proc / "net/ipv4/conf"
    everywhere = read(conf / "all/rp_filter") or 0
    return [name for name in _interfaces(conf) if max(everywhere, read(conf / name / "rp_filter") or 0) == STRICT]


def _interfaces(conf: Path) -> Iterator[str]:
    try:
        names = sorted(entry.name for entry in conf.iterdir())
    except OSError:
        return
    yield from (name for name in names if name not in ("all", "default", "lo"))


class MarkedSources:
    """Lets marks count for the reverse path where it is strict."""

    def __init__(self, journal: UndoJournal, slot: int, proc: Path = PROC) -> None:
        self._journal = journal
        self._slot = slot
        self._proc = proc

    def trust_marks(self) -> None:
        """Never raises; what cannot be written is told by the log."""
        if read(self._proc / "net/ipv4/conf/all/src_valid_mark"):
            return
        for name in strict_interfaces(self._proc):
            if read(self._path(name)) == 0:
                self._journal.note(Entry(MARKED, self._slot, name))
                self._write(name, "1")
                log.info("rp_filter is strict on %s: net.ipv4.conf.%s.src_valid_mark set", name, name)

    def restore(self) -> None:
        for entry in self._journal.entries:
            if entry.kind == MARKED and entry.slot == self._slot:
                if self._path(entry.device).exists():
                    self._write(entry.device, "0")
                self._journal.forget(entry)

    def _path(self, name: str) -> Path:
        return self._proc / "net/ipv4/conf" / name / "src_valid_mark"

    def _write(self, name: str, value: str) -> None:
        try:
            self._path(name).write_text(value)
        except OSError as err:
            log.warning("net.ipv4.conf.%s.src_valid_mark cannot be set: %s", name, err.strerror)


def forwarding_trouble(routes: Sequence[IPPrefix], proc: Path = PROC) -> str:
    """Why packets to advertised routes would not be forwarded, and the fix; "" when all is well or cannot be known.

    One key for all interfaces, or one for each, lets packets through; a value that cannot be read says nothing.
    """
    by_kernel = [route for route in routes if route.prefixlen < route.max_prefixlen and not is_via_route(route)]
    versions = {route.version for route in by_kernel}
    troubles = [_v4_trouble(proc)] if 4 in versions else []
    if 6 in versions and read(proc / "net/ipv6/conf/all/forwarding") == 0:
        troubles.append("IPv6 forwarding is disabled; set net.ipv6.conf.all.forwarding=1")
    return "; ".join(text for text in troubles if text)


def _v4_trouble(proc: Path) -> str:
    conf = proc / "net/ipv4/conf"
    state = {name: read(conf / name / "forwarding") for name in _interfaces(conf)}
    off = [name for name, value in state.items() if value == 0]
    if not off:
        everywhere = read(proc / "net/ipv4/ip_forward")
        return "IPv4 forwarding is disabled; set net.ipv4.ip_forward=1" if everywhere == 0 and not state else ""
    if len(off) == len(state):
        return "IPv4 forwarding is disabled; set net.ipv4.ip_forward=1"
    keys = " ".join(f"net.ipv4.conf.{name.replace('.', '/')}.forwarding=1" for name in off)
    return f"packets that come in on {', '.join(off)} are not forwarded; set {keys}"
