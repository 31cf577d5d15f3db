"""Fuzz targets: what a home router, or anybody in its name, may answer to the port mapper."""

from __future__ import annotations

from ipaddress import IPv4Address

from tsd.base.addr import AddrPort
from tsd.base.entropy import SeededEntropy
from tsd.portmap import igd, pxp
from tsd.portmap.dialog import Answer
from tsd.portmap.mapper import HttpWanted, PortMapper

_GATEWAY = IPv4Address("192.168.1.1")


def fuzz_pxp(data: bytes) -> None:
    pxp.decode(data)


def fuzz_igd(data: bytes) -> None:
    igd.parse_discovery(data, _GATEWAY)
    igd.parse_description(data, "http://192.168.1.1:5000/d.xml", _GATEWAY)
    igd.parse_reply(200, data)


def fuzz_port_mapper(data: bytes) -> None:
    """Pieces of two bytes of length: datagrams to the mapper, and answers to whatever it asks."""
    mapper = PortMapper(entropy=SeededEntropy(1))
    mapper.set_network(_GATEWAY, IPv4Address("192.168.1.2"), 41641, 1.0)
    mapper.want(1.0)
    now, at = 1.0, 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2]) & 0x7FF
        piece = data[at + 2 : at + 2 + size]
        at += 2 + size
        mapper.receive(piece, AddrPort(_GATEWAY, pxp.PORT), now)
        for output in mapper.take_outputs():
            if isinstance(output, HttpWanted):
                mapper.answered(output.number, Answer(200, piece), now)
        deadline = mapper.next_deadline()
        if deadline is not None:
            now = max(now, deadline.at)
            mapper.on_deadline(now)
