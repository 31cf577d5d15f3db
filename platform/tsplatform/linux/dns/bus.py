"""The system bus as far as names need it: calls with a limit, and who owns a name (D-Bus specification, dbus-fast).

Belongs to the names thread. A service of another network namespace is as good as none: the numbers of its interfaces
are not ours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsd.base.errors import HullError

if TYPE_CHECKING:
    from dbus_fast.aio import MessageBus
    from dbus_fast.message import Message

RESOLVED, RESOLVED_PATH = "org.freedesktop.resolve1", "/org/freedesktop/resolve1"
NETWORK_MANAGER, NETWORK_MANAGER_PATH = "org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager"
_BUS, _BUS_PATH = "org.freedesktop.DBus", "/org/freedesktop/DBus"
PROPERTIES = "org.freedesktop.DBus.Properties"
CALL_S = 3.0
_SOCKETS = ("/run/dbus/system_bus_socket", "/var/run/dbus/system_bus_socket")


class BusError(HullError):
    """`name` is D-Bus's name of the error, "" when there was no answer."""

    def __init__(self, operation: str, reason: str, name: str = "") -> None:
        super().__init__(operation, reason)
        self.name = name


def address() -> str:
    """Of the system bus; "" where there is none."""
    given = os.environ.get("DBUS_SYSTEM_BUS_ADDRESS", "")
    return given or next((f"unix:path={path}" for path in _SOCKETS if Path(path).exists()), "")


class SystemBus:
    """Connected by the first call and again after a loss. `on_owner` is told which watched name came or went."""

    def __init__(self) -> None:
        self._bus: MessageBus | None = None
        self._connecting = asyncio.Lock()
        self._watched: list[str] = []
        self.may_start = True
        """Whether asking for a service may start it: at first only, for whoever stopped one later wants it so."""
        self.on_owner: Callable[[str], None] = lambda name: None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_properties: Callable[[], None] = lambda: None
        """Something about resolved's settings changed."""

    @property
    def is_there(self) -> bool:
        return bool(address())

    async def watch(self, names: Sequence[str]) -> None:
        """Hear when these names change hands. Raises `BusError`."""
        self._watched = list(names)
        if self._bus is not None:
            self.close()
        await self._connected()

    def close(self) -> None:
        if self._bus is not None:
            bus, self._bus = self._bus, None
            bus.disconnect()

    async def call(
        self, service: str, path: str, interface: str, member: str, signature: str = "", body: Sequence[Any] = ()
    ) -> list[Any]:
        """What the method returned. Raises `BusError`."""
        from dbus_fast.constants import MessageFlag, MessageType
        from dbus_fast.message import Message

        bus = await self._connected()
        message = Message(
            destination=service,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=list(body),
            flags=MessageFlag.NONE if self.may_start else MessageFlag.NO_AUTOSTART,
        )
        try:
            async with asyncio.timeout(CALL_S):
                reply = await bus.call(message)
        except (TimeoutError, OSError, EOFError) as err:
            raise BusError(f"call {service} {member}", str(err) or f"no answer within {CALL_S:.0f} s") from None
        if reply is None or reply.message_type is MessageType.ERROR:
            reason, name = (reply.body, reply.error_name) if reply is not None else ([], "")
            raise BusError(f"call {service} {member}", str(reason[0]) if reason else str(name), str(name))
        return list(reply.body)

    async def get(self, service: str, path: str, interface: str, name: str) -> Any:
        """A property's plain value."""
        found = await self.call(service, path, PROPERTIES, "Get", "ss", [interface, name])
        return plain(found[0])

    async def serves(self, service: str, path: str) -> bool:
        """Whether a service of this network namespace answers; may start it, as any call does."""
        if not self.is_there:
            return False
        try:
            await self.call(service, path, "org.freedesktop.DBus.Peer", "Ping")
            pid = (await self.call(_BUS, _BUS_PATH, _BUS, "GetConnectionUnixProcessID", "s", [service]))[0]
        except BusError:
            return False
        return is_in_our_network(int(pid))

    async def _connected(self) -> MessageBus:
        from dbus_fast.aio import MessageBus
        from dbus_fast.errors import AuthError, DBusError

        async with self._connecting:
            if self._bus is not None and self._bus.connected:
                return self._bus
            if not self.is_there:
                raise BusError("connect to the system bus", "there is none")
            try:
                async with asyncio.timeout(CALL_S):
                    bus = await MessageBus(bus_address=address()).connect()
            except (OSError, EOFError, TimeoutError, AuthError, DBusError, ValueError) as err:
                raise BusError("connect to the system bus", str(err) or "no answer") from None
            self._bus = bus
        bus.add_message_handler(self._on_message)
        ending = asyncio.ensure_future(bus.wait_for_disconnect())  # type: ignore[no-untyped-call]
        ending.add_done_callback(lambda done: self._on_end(bus, done))
        for name in self._watched:
            rule = f"type='signal',sender='{_BUS}',member='NameOwnerChanged',arg0='{name}'"
            await self.call(_BUS, _BUS_PATH, _BUS, "AddMatch", "s", [rule])
        if RESOLVED in self._watched:
            rule = f"type='signal',sender='{RESOLVED}',interface='{PROPERTIES}',member='PropertiesChanged'"
            await self.call(_BUS, _BUS_PATH, _BUS, "AddMatch", "s", [rule])
        return bus

    def _on_message(self, message: Message) -> None:
        if message.member == "NameOwnerChanged" and message.sender == _BUS and message.body[:1]:
            self.on_owner(str(message.body[0]))
        elif message.member == "PropertiesChanged" and str(message.path).startswith(RESOLVED_PATH):
            self.on_properties()

    def _on_end(self, bus: MessageBus, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()
        if self._bus is bus:
            self._bus = None
            self.on_lost()


def plain(value: Any) -> Any:
    """Without D-Bus's wrappings."""
    from dbus_fast.signature import Variant

    return value.value if isinstance(value, Variant) else value


def is_in_our_network(pid: int) -> bool:
    """Not when there is no such process here: the bus is another host's, lent to a container."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino
    except FileNotFoundError:
        return False
    except OSError:
        return True
