"""Fuzz targets: filter rules as JSON, and packets before a filter."""

from __future__ import annotations

from ipaddress import ip_network

import msgspec

from tsd.base.errors import DecodeError
from tsd.filter.filter import PacketFilter
from tsd.filter.rules import ALLOW_ALL, matches_from_rules, parse_ip_set
from tsd.packet.parse import parse
from tsd.tailcfg.filterrule import FilterRule

_DECODER = msgspec.json.Decoder(list[FilterRule])
_LOCAL = [ip_network("0.0.0.0/1"), ip_network("::/0")]


def fuzz_filter_rules(data: bytes) -> None:
    try:
        matches, _ = matches_from_rules(_DECODER.decode(data))
    except (DecodeError, msgspec.DecodeError):
        return
    PacketFilter(matches, _LOCAL)


def fuzz_ip_set(data: bytes) -> None:
    try:
        parse_ip_set(data.decode("latin-1"))
    except DecodeError:
        pass


def fuzz_filter_packet(data: bytes) -> None:
    packet = parse(data)
    for packet_filter in (PacketFilter((ALLOW_ALL,), _LOCAL), PacketFilter((), _LOCAL, shields_up=True)):
        packet_filter.own_disco_key = bytes(32)
        assert packet_filter.inbound(packet).reason
        assert packet_filter.outbound(packet).reason
