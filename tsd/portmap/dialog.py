"""The conversation with a UPnP gateway: find its best WAN service, map a port there, ask for the address outside.

A generator: it yields `Ask`, gets the answer's (status, body), and returns what came of it. A gateway that says "ok"
and gives nothing is a gateway without a mapping.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from ipaddress import IPv4Address
from typing import NamedTuple

from tsd.base.addr import AddrPort
from tsd.portmap import igd
from tsd.portmap.igd import Service, SoapReply

FIRST_PORT = 1024


class Ask(NamedTuple):
    """An HTTP request to the gateway; `body` None: GET."""

    url: str
    headers: dict[str, str]
    body: bytes | None


class Answer(NamedTuple):
    """`status` 0: none came."""

    status: int
    body: bytes


class Mapped(NamedTuple):
    service: Service
    external: AddrPort
    lifetime_s: int
    """0: without an end."""


Dialog = Generator[Ask, Answer, Mapped | None]
_Part = Generator[Ask, Answer, SoapReply | None]


def map_port(locations: Iterable[str], gateway: IPv4Address, internal: AddrPort, wish: int, lifetime_s: int) -> Dialog:
    """`wish` is an external port of at least `FIRST_PORT`."""
    for location in locations:
        answer = yield Ask(location, {}, None)
        if answer.status != 200:
            continue
        services = igd.parse_description(answer.body, location, gateway)
        service = yield from _best(services)
        if service is None:
            continue
        found = yield from _map_at(service, internal, wish, lifetime_s)
        if found is not None:
            return found
    return None


def delete(service: Service, external_port: int) -> Ask:
    headers, body = igd.call(
        service, "DeletePortMapping", NewRemoteHost="", NewExternalPort=external_port, NewProtocol="UDP"
    )
    return Ask(service.control_url, headers, body)


def _best(services: list[Service]) -> Generator[Ask, Answer, Service | None]:
    """One that is connected and public, else connected, else the first."""
    if len(services) < 2:
        return services[0] if services else None
    connected: Service | None = None
    for service in services[:4]:
        status = yield from _call(service, "GetStatusInfo")
        if status is None or status.values.get("NewConnectionStatus") not in ("Connected", "Up"):
            continue
        address = yield from _external_address(service)
        if address is not None and address.is_global:
            return service
        connected = connected or service
    return connected or services[0]


def _map_at(service: Service, internal: AddrPort, wish: int, lifetime_s: int) -> Dialog:
    action = "AddAnyPortMapping" if service.can_choose_port else "AddPortMapping"
    for lease_s in (lifetime_s, 0):
        reply = yield from _call(
            service, action, NewRemoteHost="", NewExternalPort=wish, NewProtocol="UDP", NewInternalPort=internal.port,
            NewInternalClient=str(internal.ip), NewEnabled=1, NewPortMappingDescription=igd.DESCRIPTION,
            NewLeaseDuration=lease_s,
        )  # fmt: skip
        if reply is None or (reply.fault and reply.fault not in igd.ONLY_PERMANENT):
            return None
        if reply.fault:
            continue
        port = _port(reply.values.get("NewReservedPort", ""), wish) if service.can_choose_port else wish
        address = yield from _external_address(service)
        return Mapped(service, AddrPort(address, port), lease_s) if address is not None else None
    return None


def _external_address(service: Service) -> Generator[Ask, Answer, IPv4Address | None]:
    """None also for addresses that nobody can reach; a private one may be behind a second NAT and stays."""
    reply = yield from _call(service, "GetExternalIPAddress")
    try:
        address = IPv4Address(reply.values.get("NewExternalIPAddress", "") if reply is not None else "")
    except ValueError:
        return None
    return None if address.is_unspecified or address.is_loopback or address.is_multicast else address


def _call(service: Service, action: str, **arguments: str | int) -> _Part:
    answer = yield Ask(service.control_url, *igd.call(service, action, **arguments))
    return igd.parse_reply(answer.status, answer.body) if answer.status else None


def _port(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else otherwise
