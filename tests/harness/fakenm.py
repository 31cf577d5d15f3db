"""A NetworkManager of any version on a test's own bus: `python -m harness.fakenm FILE VERSION MODE`.

What is reapplied to its one device, tsd0, is written to FILE as JSON. (No `annotations` from the future: dbus-fast
reads signatures from them.)
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from dbus_fast import PropertyAccess, Variant
from dbus_fast.aio import MessageBus
from dbus_fast.service import ServiceInterface, dbus_property, method

NAME, ROOT = "org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager"
DEVICE = f"{ROOT}/Devices/1"


class Manager(ServiceInterface):
    def __init__(self, version: str) -> None:
        super().__init__(NAME)
        self._version = version

    @method()
    def GetDeviceByIpIface(self, name: "s") -> "o":  # type: ignore[name-defined]  # noqa: F821
        return DEVICE if name == "tsd0" else f"{ROOT}/Devices/2"

    @dbus_property(access=PropertyAccess.READ)
    def Version(self) -> "s":  # type: ignore[name-defined]  # noqa: F821
        return self._version


class DnsManager(ServiceInterface):
    def __init__(self, mode: str) -> None:
        super().__init__(f"{NAME}.DnsManager")
        self._mode = mode

    @dbus_property(access=PropertyAccess.READ)
    def Mode(self) -> "s":  # type: ignore[name-defined]  # noqa: F821
        return self._mode

    @dbus_property(access=PropertyAccess.READ)
    def Configuration(self) -> "aa{sv}":  # type: ignore[name-defined]  # noqa: F722
        return [
            _configuration("tsd0", 1, "100.100.100.100"),
            _configuration("wlan0", 200, "192.0.2.2"),
            _configuration("eth0", 100, "192.0.2.1", "fe80::1%2"),
        ]


def _configuration(interface: str, priority: int, *servers: str) -> dict[str, Any]:
    return {
        "interface": Variant("s", interface),
        "priority": Variant("i", priority),
        "nameservers": Variant("as", list(servers)),
    }


class Device(ServiceInterface):
    def __init__(self, file: Path) -> None:
        super().__init__(f"{NAME}.Device")
        self._file = file
        self._version = 7

    @method()
    def GetAppliedConnection(self, flags: "u") -> "a{sa{sv}}t":  # type: ignore[name-defined]  # noqa: F821, F722
        ipv4 = {"method": Variant("s", "manual"), "addresses": Variant("aau", [[1, 32, 0]])}
        return [{"connection": {"id": Variant("s", "tsd0")}, "ipv4": ipv4, "ipv6": {}}, self._version]

    @method()
    def Reapply(self, connection: "a{sa{sv}}", version: "t", flags: "u") -> None:  # type: ignore[name-defined]  # noqa: F821, F722
        assert version == self._version
        self._version += 1
        plain = {part: {name: _plain(value) for name, value in values.items()} for part, values in connection.items()}
        self._file.write_text(json.dumps(plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Variant):
        return _plain(value.value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.hex() if isinstance(value, bytes) else value


async def main(file: str, version: str, mode: str) -> None:
    from tsplatform.linux.dns.bus import address

    bus = await MessageBus(bus_address=address()).connect()
    bus.export(ROOT, Manager(version))
    bus.export(f"{ROOT}/DnsManager", DnsManager(mode))
    bus.export(DEVICE, Device(Path(file)))
    await bus.request_name(NAME)
    print("ready", flush=True)
    await bus.wait_for_disconnect()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
