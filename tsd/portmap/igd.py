"""UPnP Internet Gateway Device: the texts of discovery (SSDP), description (XML) and calls (SOAP).

Standards: UPnP Device Architecture 1.1, WANIPConnection:1 and :2, WANPPPConnection:1. Everything that comes from the
network is hostile: sizes are bounded, documents with a DTD are refused, and only the gateway's own address is asked.
"""

from __future__ import annotations

import html
import re
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urljoin, urlsplit

from tsd.base.addr import AddrPort

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

SSDP_PORT: Final = 1900
SSDP_GROUP: Final = AddrPort(IPv4Address("239.255.255.250"), SSDP_PORT)
DOCUMENT_BYTES: Final = 256 << 10
DESCRIPTION: Final = "tsd"
ONLY_PERMANENT: Final = frozenset({402, 725})
"""Faults after which a mapping without an end is asked for: invalid arguments, only permanent leases."""

_DTD = re.compile(rb"<!\s*(DOCTYPE|ENTITY)", re.IGNORECASE)
_GATEWAY = ":InternetGatewayDevice:"
_SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
    "urn:dslforum-org:service:WANPPPConnection:1",
    "urn:dslforum-org:service:WANIPConnection:1",
)
_ENVELOPE = (
    '<?xml version="1.0"?>\r\n<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
    ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body><u:{action} xmlns:u="{service}">'
    "{arguments}</u:{action}></s:Body></s:Envelope>\r\n"
)


class Service(NamedTuple):
    """A WAN connection of a gateway."""

    kind: str
    control_url: str

    @property
    def can_choose_port(self) -> bool:
        """Version 2 answers with another port when the wanted one is taken."""
        return self.kind == _SERVICES[0]


class SoapReply(NamedTuple):
    """`fault` is the UPnP error code, 0 without one; `values` by argument name."""

    fault: int
    values: dict[str, str]


def searches(gateway: IPv4Address) -> list[tuple[AddrPort, bytes]]:
    """Unicast first, so that a host firewall expects the answers to the multicast ones."""
    everything, device = _search("ssdp:all"), _search("urn:schemas-upnp-org:device:InternetGatewayDevice:1")
    return [(AddrPort(gateway, SSDP_PORT), everything), (SSDP_GROUP, everything), (SSDP_GROUP, device)]


def _search(target: str) -> bytes:
    lines = ("M-SEARCH * HTTP/1.1", f"HOST: {SSDP_GROUP}", f"ST: {target}", 'MAN: "ssdp:discover"', "MX: 2", "", "")
    return "\r\n".join(lines).encode()


def parse_discovery(datagram: bytes, gateway: IPv4Address) -> str | None:
    """Where the device's description is, always on the gateway; None when this is no gateway device."""
    text = datagram.decode("utf-8", "replace")
    if not text.startswith("HTTP/1.") or _GATEWAY not in text:
        return None
    found = re.search(r"^location:[ \t]*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    return on_gateway(found.group(1), gateway) if found else None


def on_gateway(url: str, gateway: IPv4Address) -> str | None:
    """The same URL at the gateway's address: some announce another one of theirs, and nobody else is asked."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
        IPv4Address(parts.hostname or "")
    except ValueError:
        return None
    if parts.scheme != "http":
        return None
    query = f"?{parts.query}" if parts.query else ""
    return f"http://{gateway}:{port}{parts.path or '/'}{query}"


def parse_description(body: bytes, location: str, gateway: IPv4Address) -> list[Service]:
    """The usable services, best first; empty when there is none or the document is odd."""
    root = _parse(body)
    if root is None:
        return []
    base = _text(root, "URLBase") or location
    found: list[Service] = []
    for element in root.iter():
        if _local(element.tag) != "service":
            continue
        kind, path = _text(element, "serviceType"), _text(element, "controlURL")
        url = _joined(base, path, gateway)
        if kind in _SERVICES and url is not None:
            found.append(Service(kind, url))
    return sorted(found, key=lambda service: _SERVICES.index(service.kind))


def _joined(base: str, path: str, gateway: IPv4Address) -> str | None:
    try:
        return on_gateway(urljoin(base, path), gateway) if path else None
    except ValueError:
        return None


def call(service: Service, action: str, **arguments: str | int) -> tuple[dict[str, str], bytes]:
    """Headers and body of a SOAP call."""
    inside = "".join(f"<{name}>{html.escape(str(value), quote=False)}</{name}>" for name, value in arguments.items())
    body = _ENVELOPE.format(action=action, service=service.kind, arguments=inside).encode()
    return {"Content-Type": 'text/xml; charset="utf-8"', "SOAPAction": f'"{service.kind}#{action}"'}, body


def parse_reply(status: int, body: bytes) -> SoapReply | None:
    """None when this is no SOAP answer, whatever its status says."""
    root = _parse(body)
    if root is None or _local(root.tag) != "Envelope":
        return None
    values = {_local(element.tag): (element.text or "").strip() for element in root.iter()}
    if "Fault" in values or status != 200:
        code = values.get("errorCode", "")
        return SoapReply(int(code) if code.isascii() and code.isdigit() and len(code) < 6 else -1, values)
    return SoapReply(0, values)


def _parse(body: bytes) -> Element | None:
    if len(body) > DOCUMENT_BYTES or b"\0" in body or _DTD.search(body):
        return None
    from xml.etree import ElementTree  # most networks have no such router

    try:
        return ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError, LookupError):
        return None


def _local(tag: object) -> str:
    return str(tag).rpartition("}")[2]


def _text(element: Element, name: str) -> str:
    for child in element:
        if _local(child.tag) == name:
            return (child.text or "").strip()
    return ""
