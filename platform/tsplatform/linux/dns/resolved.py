"""Names by systemd-resolved: servers and zones of our interface, set over D-Bus.

Interface: org.freedesktop.resolve1(5); which calls: tailscale: net/dns/resolved.go. resolved keeps the host's own
servers for all other names, so nothing on disk changes; what we set goes with the interface, also after a crash.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from pathlib import Path
from typing import Any

from tsd.base.addr import parse_ip
from tsd.base.errors import DecodeError, HullError
from tsd.dns.osconfig import OsDns
from tsplatform.linux.dns import file
from tsplatform.linux.dns.bus import PROPERTIES, RESOLVED, RESOLVED_PATH, BusError, SystemBus, plain
from tsplatform.linux.dns.manager import Found, Mode

log = logging.getLogger(__name__)

_MANAGER, _LINK = f"{RESOLVED}.Manager", f"{RESOLVED}.Link"
UPLINKS = Path("/run/systemd/resolve/resolv.conf")
"""Where resolved writes the servers that it asks itself."""
_OFF = ("SetLinkLLMNR", "SetLinkMulticastDNS", "SetLinkDNSSEC", "SetLinkDNSOverTLS")


class ResolvedLink:
    """Implements `Manager` for one interface."""

    mode = Mode.RESOLVED
    can_split = True

    def __init__(self, bus: SystemBus, device: str, uplinks: Path = UPLINKS) -> None:
        self._bus = bus
        self._device = device
        self._uplinks = uplinks
        self._wanted: OsDns | None = None

    async def set(self, wanted: OsDns) -> None:
        index = self._index()
        self._wanted = wanted
        await self._call("SetLinkDNS", "ia(iay)", [index, [list(server) for server in _servers(wanted)]])
        domains = _domains(wanted)
        try:
            await self._call("SetLinkDomains", "ia(sb)", [index, [list(domain) for domain in domains]])
        except BusError as err:
            if "too long" not in err.reason:
                raise
            # Old versions take few zones: the reverse ones are those that can be done without.
            few = [list(domain) for domain in domains if not domain[0].endswith(".arpa")]
            await self._call("SetLinkDomains", "ia(sb)", [index, few])
        try:
            await self._call("SetLinkDefaultRoute", "ib", [index, not wanted.match])
        except BusError as err:
            if not err.name.endswith(".UnknownMethod"):
                raise
        for member in _OFF:
            with contextlib.suppress(BusError):
                await self._call(member, "is", [index, "no"])
        with contextlib.suppress(BusError):
            await self._call("FlushCaches")

    async def revert(self) -> None:
        """Settings go with the interface too; before that the host must not be left with a server that is gone."""
        if self._wanted is None:
            return
        self._wanted = None
        try:
            await self._call("RevertLink", "i", [self._index()])
            await self._call("FlushCaches")
        except HullError as err:
            log.info("systemd-resolved: %s", err)

    async def look(self) -> Found:
        if self._wanted is None:
            return Found.FINE
        try:
            path = (await self._call("GetLink", "i", [self._index()]))[0]
            found = (await self._bus.call(RESOLVED, path, PROPERTIES, "GetAll", "s", [_LINK]))[0]
        except BusError:
            return Found.FINE  # it is away; its coming back is heard of
        return Found.FINE if _is_as_wanted(found, self._wanted) else Found.CHANGED

    def base_resolvers(self) -> list[str]:
        return file.nameservers(file.content_of(self._uplinks) or b"")

    def watched(self) -> list[Path]:
        return []

    def rival(self) -> str:
        return ""

    async def _call(self, member: str, signature: str = "", body: list[Any] | None = None) -> list[Any]:
        return await self._bus.call(RESOLVED, RESOLVED_PATH, _MANAGER, member, signature, body or [])

    def _index(self) -> int:
        try:
            return socket.if_nametoindex(self._device)
        except OSError:
            raise HullError("set up names", f"the interface {self._device} is gone") from None


def _servers(wanted: OsDns) -> list[tuple[int, bytes]]:
    found = []
    for text in wanted.nameservers:
        with contextlib.suppress(DecodeError):
            ip = parse_ip(text)
            found.append((int(socket.AF_INET if ip.version == 4 else socket.AF_INET6), ip.packed))
    return found


def _domains(wanted: OsDns) -> list[tuple[str, bool]]:
    """(zone, only for choosing servers); what is searched is also routed."""
    found = {domain: False for domain in wanted.search}
    for domain in wanted.match:
        found.setdefault(domain, True)
    if not wanted.match:
        found["."] = True
    return list(found.items())


def _is_as_wanted(found: dict[str, Any], wanted: OsDns) -> bool:
    servers = [(family, bytes(packed)) for family, packed in plain(found.get("DNS")) or []]
    domains = {(str(name).rstrip(".").lower(), bool(only)) for name, only in plain(found.get("Domains")) or []}
    default = plain(found.get("DefaultRoute"))
    wished = {(name.rstrip(".").lower(), only) for name, only in _domains(wanted)}
    few = {(name, only) for name, only in wished if not name.endswith(".arpa")}
    return servers == _servers(wanted) and domains in (wished, few) and default in (None, not wanted.match)
