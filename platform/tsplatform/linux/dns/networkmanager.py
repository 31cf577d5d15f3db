"""Names by NetworkManager itself: only for those versions that let nobody else set up systemd-resolved.

Interface: org.freedesktop.NetworkManager.Device(5); which settings: tailscale: net/dns/nm.go. What is set goes with the
interface.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from pathlib import Path
from typing import Any

from tsd.base.addr import IPAddress, parse_ip
from tsd.base.errors import DecodeError, HullError
from tsd.dns.osconfig import SERVICE_TEXTS, OsDns
from tsplatform.linux.dns.bus import NETWORK_MANAGER, NETWORK_MANAGER_PATH, BusError, SystemBus, plain
from tsplatform.linux.dns.manager import Found, Mode

log = logging.getLogger(__name__)

_DEVICE = f"{NETWORK_MANAGER}.Device"
_ALONE, _BESIDE, _LAST = -(1 << 31), 1, 200
"""Priorities: no other servers at all, before others in our zones, no servers of ours."""
_REFUSED_BACK = ("addresses", "routes")
"""Old forms that are read but not taken."""
_TRIES, _PAUSE_S = 50, 0.02


class NetworkManager:
    """Implements `Manager` for one interface."""

    mode = Mode.NETWORK_MANAGER

    def __init__(self, bus: SystemBus, device: str, own: list[IPAddress], *, can_split: bool) -> None:
        """`own` are our overlay addresses: the IPv6 ones have to be said again."""
        self._bus = bus
        self._device = device
        self._own = own
        self.can_split = can_split
        self._base: list[str] = []
        self._wanted: OsDns | None = None

    async def set(self, wanted: OsDns) -> None:
        self._wanted = wanted
        await self._read_base()
        for left in range(_TRIES - 1, -1, -1):
            try:
                await self._reapply(wanted)
                return
            except BusError:
                # It learns of a new interface a moment after us.
                if not left:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def revert(self) -> None:
        if self._wanted is None:
            return
        self._wanted = None
        try:
            await self._reapply(OsDns())
        except HullError as err:
            log.info("NetworkManager: %s", err)

    async def look(self) -> Found:
        await self._read_base()
        return Found.FINE

    def base_resolvers(self) -> list[str]:
        return self._base

    def watched(self) -> list[Path]:
        return []

    def rival(self) -> str:
        return ""

    async def _reapply(self, wanted: OsDns) -> None:
        path = (await self._call(NETWORK_MANAGER_PATH, NETWORK_MANAGER, "GetDeviceByIpIface", "s", [self._device]))[0]
        settings, version = await self._call(path, _DEVICE, "GetAppliedConnection", "u", [0])
        changed = _with_names(settings, wanted, self._own)
        await self._call(path, _DEVICE, "Reapply", "a{sa{sv}}tu", [changed, version, 0])

    async def _read_base(self) -> None:
        path, interface = f"{NETWORK_MANAGER_PATH}/DnsManager", f"{NETWORK_MANAGER}.DnsManager"
        try:
            found = await self._bus.get(NETWORK_MANAGER, path, interface, "Configuration")
        except BusError:
            return
        self._base = _servers_of_others(found, self._device)

    async def _call(self, path: str, interface: str, member: str, signature: str, body: list[Any]) -> list[Any]:
        return await self._bus.call(NETWORK_MANAGER, path, interface, member, signature, body)


def _with_names(settings: dict[str, Any], wanted: OsDns, own: list[IPAddress]) -> dict[str, Any]:
    from dbus_fast.signature import Variant

    servers = [parse_ip(text) for text in wanted.nameservers]
    v4 = [struct.unpack("=I", ip.packed)[0] for ip in servers if ip.version == 4]
    v6 = [ip.packed for ip in servers if ip.version == 6]
    zones = [*wanted.search, *(f"~{zone}" for zone in wanted.match if zone not in wanted.search)]
    if not wanted.match and servers:
        zones.append("~.")
    made = {name: dict(values) for name, values in settings.items()}
    for family, found, signature in (("ipv4", v4, "au"), ("ipv6", v6, "aay")):
        values = made.setdefault(family, {})
        for name in _REFUSED_BACK:
            values.pop(name, None)
        priority = _LAST if not found else _BESIDE if wanted.match else _ALONE
        values |= {
            "dns": Variant(signature, found),
            "dns-search": Variant("as", zones),
            "dns-priority": Variant("i", priority),
        }
    made["ipv6"] |= _ipv6_manner(own)
    return made


def _ipv6_manner(own: list[IPAddress]) -> dict[str, Any]:
    """Servers can only be set beside addresses that it finds itself, which it then must not use."""
    from dbus_fast.signature import Variant

    addresses = [{"address": Variant("s", str(ip)), "prefix": Variant("u", 128)} for ip in own if ip.version == 6]
    made = {name: Variant("b", True) for name in ("ignore-auto-routes", "ignore-auto-dns", "never-default")}
    made["method"] = Variant("s", "auto")
    return made | ({"address-data": Variant("aa{sv}", addresses)} if addresses else {})


def _servers_of_others(found: list[dict[str, Any]], device: str) -> list[str]:
    """By priority; an exclusive one ends the list."""
    others = [{name: plain(value) for name, value in one.items()} for one in found or []]
    kept: list[str] = []
    for one in sorted(others, key=lambda one: int(one.get("priority", 0))):
        if one.get("interface") == device:
            continue
        kept += [text for text in one.get("nameservers", []) if _is_foreign(text)]
        if int(one.get("priority", 0)) < 0:
            break
    return list(dict.fromkeys(kept))


def _is_foreign(text: str) -> bool:
    try:
        ip = parse_ip(text)
    except DecodeError:
        return False
    return str(ip) not in SERVICE_TEXTS
