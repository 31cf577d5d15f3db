"""The port mapper against a router in memory that can misbehave."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address
from typing import Any

import pytest

from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.portmap import pxp
from tsd.portmap.dialog import Answer, Ask
from tsd.portmap.mapper import HttpWanted, MappingChanged, PortMapper, Seen, SendDatagram

GATEWAY, OWN, OUTSIDE = IPv4Address("192.168.1.1"), IPv4Address("192.168.1.2"), IPv4Address("203.0.113.5")
PXP = AddrPort(GATEWAY, pxp.PORT)
LOCATION = "http://192.168.1.1:5000/root.xml"
DISCOVERY = (
    "HTTP/1.1 200 OK\r\nST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n"
    "USN: uuid:x::urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\nLocation: {location}\r\n\r\n"
)
DESCRIPTION = """<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device><serviceList>{services}
</serviceList></device></root>"""
SERVICE = "<service><serviceType>{kind}</serviceType><controlURL>{path}</controlURL></service>"
IP1, IP2 = (f"urn:schemas-upnp-org:service:WANIPConnection:{n}" for n in (1, 2))
SOAP = '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>{inside}</s:Body></s:Envelope>'
FAULT = "<s:Fault><detail><UPnPError><errorCode>{code}</errorCode></UPnPError></detail></s:Fault>"


class Router:
    """Answers what a mapper sends; each protocol can be switched off or made odd."""

    def __init__(self) -> None:
        self.pmp = self.pcp = self.upnp = False
        self.pcp_result = self.pmp_result = 0
        self.wrong_nonce = False
        self.epoch_s = 1000
        self.port = 5000
        self.lifetime_s = 7200
        self.source = PXP
        self.location = LOCATION
        self.pages: dict[str, Answer] = {}
        self.faults: list[int] = []
        self.outside = str(OUTSIDE)
        self.asked: list[str] = []
        self.services = [(IP1, "/ctl")]

    def datagram(self, sent: SendDatagram) -> list[tuple[bytes, AddrPort]]:
        data = sent.datagram
        if data.startswith(b"M-SEARCH"):
            text = DISCOVERY.format(location=self.location).encode()
            return [(text, AddrPort(GATEWAY, 1900))] if self.upnp else []
        if data[0] == 0 and self.pmp:
            self.asked.append(f"pmp {data[1]}")
            if data[1] == 0:
                return [(struct.pack("!BBHI", 0, 0x80, 0, self.epoch_s) + OUTSIDE.packed, self.source)]
            internal, lifetime_s = struct.unpack_from("!H2xI", data, 4)
            answer = struct.pack(
                "!BBHIHHI",
                0,
                0x81,
                self.pmp_result,
                self.epoch_s,
                internal,
                self.port,
                min(lifetime_s, self.lifetime_s),
            )
            return [(answer, self.source)]
        if data[0] == 2 and self.pcp:
            self.asked.append(f"pcp {data[1]} life {int.from_bytes(data[4:8])}")
            head = struct.pack("!BBBBII12x", 2, 0x80 | data[1], 0, 0, self.lifetime_s, self.epoch_s)
            if data[1] == 0:
                return [(head, self.source)]
            nonce = bytes(12) if self.wrong_nonce else data[24:36]
            head = head[:3] + bytes((self.pcp_result,)) + head[4:]
            tail = data[36:42] + self.port.to_bytes(2) + bytes(10) + b"\xff\xff" + OUTSIDE.packed
            return [(head + nonce + tail, self.source)]
        return []

    def http(self, ask: Ask) -> Answer:
        self.asked.append(ask.url if ask.body is None else ask.headers["SOAPAction"].rpartition("#")[2].strip('"'))
        if ask.url in self.pages:
            return self.pages[ask.url]
        if ask.body is None:
            listed = "".join(SERVICE.format(kind=kind, path=path) for kind, path in self.services)
            return Answer(200, DESCRIPTION.format(services=listed).encode())
        action = self.asked[-1]
        if "Add" in action and self.faults:
            code = self.faults.pop(0)
            return Answer(500, SOAP.format(inside=FAULT.format(code=code)).encode())
        values = {
            "GetExternalIPAddress": f"<NewExternalIPAddress>{self.outside}</NewExternalIPAddress>",
            "AddAnyPortMapping": "<NewReservedPort>6000</NewReservedPort>",
            "GetStatusInfo": "<NewConnectionStatus>Connected</NewConnectionStatus>",
        }
        return Answer(200, SOAP.format(inside=values.get(action, "<ok/>")).encode())


class Bed:
    def __init__(self, router: Router) -> None:
        self.router = router
        self.mapper = PortMapper(entropy=SeededEntropy(3))
        self.now = 100.0
        self.told: list[Any] = []
        self.mapper.set_network(GATEWAY, OWN, 41641, self.now)

    def want(self) -> None:
        self.mapper.want(self.now)
        self.settle()

    def settle(self, until: float | None = None) -> None:
        """Run what is due until nothing is left to do at once, or until a time."""
        for _ in range(200):
            while outputs := self.mapper.take_outputs():
                for output in outputs:
                    self._hand(output)
            deadline = self.mapper.next_deadline()
            if deadline is None or deadline.at > (self.now + 6.0 if until is None else until):
                break
            self.now = max(self.now, deadline.at)
            self.mapper.on_deadline(self.now)
        else:
            pytest.fail("the mapper never rests")
        self.now = until or self.now

    def _hand(self, output: Any) -> None:
        match output:
            case SendDatagram():
                for data, source in self.router.datagram(output):
                    self.mapper.receive(data, source, self.now)
            case HttpWanted(number, ask):
                answer = self.router.http(ask)
                if number:
                    self.mapper.answered(number, answer, self.now)
            case MappingChanged():
                self.told.append(output)

    @property
    def external(self) -> str:
        return str(self.mapper.mapping.external) if self.mapper.mapping else ""


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def bed(router: Router) -> Bed:
    return Bed(router)


@pytest.mark.parametrize("protocol", ["pcp", "pmp", "upnp"])
def test_one_protocol_is_enough(router: Router, bed: Bed, protocol: str) -> None:
    setattr(router, protocol, True)
    bed.want()
    assert bed.mapper.mapping is not None and bed.mapper.mapping.protocol == protocol
    assert bed.mapper.seen == Seen(**{name: name == protocol for name in ("upnp", "pmp", "pcp")})
    assert [str(event.external) for event in bed.told] == [bed.external] and bed.external.startswith("203.0.113.5:")


def test_pcp_goes_first_and_the_others_when_it_refuses(router: Router, bed: Bed) -> None:
    router.pcp = router.pmp = router.upnp = True
    router.pcp_result, router.pmp_result = 8, 2
    bed.want()
    assert bed.mapper.mapping is not None and bed.mapper.mapping.protocol == "upnp"


def test_it_is_renewed_at_half_of_its_life_and_kept_when_that_fails(router: Router, bed: Bed) -> None:
    router.pcp = True
    bed.want()
    began = bed.now
    bed.settle(began + 3700)
    assert sum("pcp 1" in text for text in router.asked) == 2 and len(bed.told) == 1
    router.pcp = False
    bed.settle(began + 10000)
    assert bed.external, "the second renewal failed, but the mapping lives on"
    bed.settle(began + 12000)
    assert not bed.external and bed.told[-1].external is None


def test_a_router_that_started_anew_is_asked_again(router: Router, bed: Bed) -> None:
    router.pcp = True
    bed.want()
    router.epoch_s, router.port = 3, 5001
    bed.settle(bed.now + 3700)
    assert bed.external == "203.0.113.5:5001"


def test_nothing_found_means_longer_and_longer_pauses(router: Router, bed: Bed) -> None:
    sent = 0
    for _ in range(200):
        bed.mapper.want(bed.now)
        sent += any(isinstance(output, SendDatagram) for output in bed.mapper.take_outputs())
        bed.settle(bed.now + 20)
    assert 5 <= sent <= 15 and bed.mapper.seen == Seen(upnp=False, pmp=False, pcp=False)


def test_another_network_releases_and_starts_anew(router: Router, bed: Bed) -> None:
    router.pcp = True
    bed.want()
    bed.mapper.set_network(None, None, 41641, bed.now)
    bed.settle()
    assert "pcp 1 life 0" in router.asked and bed.told[-1].external is None
    bed.want()
    assert not bed.external


def test_public_networks_are_not_asked(router: Router, bed: Bed) -> None:
    router.pcp = True
    bed.mapper.set_network(IPv4Address("8.8.8.1"), IPv4Address("8.8.8.2"), 41641, bed.now)
    bed.want()
    assert not router.asked


@pytest.mark.parametrize("protocol", ["pcp", "pmp", "upnp"])
def test_a_stop_gives_it_back(router: Router, bed: Bed, protocol: str) -> None:
    setattr(router, protocol, True)
    bed.want()
    router.asked.clear()
    bed.mapper.release()
    bed.settle()
    assert router.asked and not bed.external


def test_w24_another_nonce_and_another_source_are_no_answers(router: Router, bed: Bed) -> None:
    router.pcp, router.wrong_nonce = True, True
    bed.want()
    assert not bed.external and bed.mapper.drops["not asked for"]
    stranger = Router()
    stranger.pmp, stranger.source = True, AddrPort(IPv4Address("192.168.1.9"), pxp.PORT)
    second = Bed(stranger)
    second.want()
    assert not second.external and second.mapper.drops["not the gateway"]


def test_w23_only_permanent_leases(router: Router, bed: Bed) -> None:
    router.upnp = True
    router.faults = [725]
    bed.want()
    assert bed.external and router.asked.count("AddPortMapping") == 2


def test_version_two_may_choose_the_port(router: Router, bed: Bed) -> None:
    router.upnp, router.services = True, [(IP1, "/one"), (IP2, "/two")]
    bed.want()
    assert bed.external == "203.0.113.5:6000"


BOMB = b'<?xml version="1.0"?><!DOCTYPE r [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><root>&b;</root>'


@pytest.mark.parametrize(
    "page",
    [
        Answer(200, b""), Answer(200, b"<html><body>login</body></html>"), Answer(200, BOMB), Answer(404, b"no"),
        Answer(0, b""), Answer(200, DESCRIPTION.format(services="").encode()), Answer(200, b"<a>" * 50000),
        Answer(200, DESCRIPTION.format(services=SERVICE.format(kind=IP1, path="")).encode()), Answer(200, b"\xff\xfe<"),
    ],
)  # fmt: skip
def test_w23_odd_descriptions_are_no_mapping(router: Router, bed: Bed, page: Answer) -> None:
    router.upnp = True
    router.pages[LOCATION] = page
    bed.want()
    assert not bed.external and bed.mapper.next_deadline() is None


@pytest.mark.parametrize(
    "page", [Answer(200, b""), Answer(200, b"<html/>"), Answer(500, b"oops"), Answer(200, b"<a/>"), Answer(0, b"")]
)
def test_w23_odd_soap_answers_are_no_mapping(router: Router, bed: Bed, page: Answer) -> None:
    router.upnp = True
    router.pages["http://192.168.1.1:5000/ctl"] = page
    bed.want()
    assert not bed.external


@pytest.mark.parametrize("outside", ["", "0.0.0.0", "127.0.0.1", "fe80::1", "no address"])
def test_w23_ok_but_nothing(router: Router, bed: Bed, outside: str) -> None:
    router.upnp, router.outside = True, outside
    bed.want()
    assert not bed.external


@pytest.mark.parametrize(
    ("location", "asked"),
    [
        ("http://203.0.113.1:5000/root.xml", "http://192.168.1.1:5000/root.xml"),
        ("http://192.168.1.254/d?x=1", "http://192.168.1.1:80/d?x=1"),
        ("http://evil.example/root.xml", ""), ("file:///etc/passwd", ""), ("https://192.168.1.1/x", ""),
        ("http://192.168.1.1:99999/x", ""), ("http://[::1]/x", ""),
    ],
)  # fmt: skip
def test_w23_only_the_gateway_is_asked(router: Router, bed: Bed, location: str, asked: str) -> None:
    router.upnp, router.location = True, location
    bed.want()
    assert [url for url in router.asked if url.startswith("http")] == ([asked] if asked else [])
