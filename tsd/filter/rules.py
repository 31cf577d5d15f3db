"""Packet filter rules of the control protocol as matches (tailscale: `wgengine/filter/tailcfg.go`).

A rule with a mistake in one address loses that address only; the first mistake is reported. Obsolete bit fields make
the whole filter invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network, summarize_address_range
from typing import Any, NamedTuple

from tsd.base.addr import IPPrefix, parse_ip, parse_prefix
from tsd.base.errors import DecodeError
from tsd.packet.constants import ICMP, ICMPV6, TCP, UDP
from tsd.tailcfg.filterrule import FilterRule

DEFAULT_PROTOS = frozenset((TCP, UDP, ICMP, ICMPV6))
EVERYWHERE: tuple[IPPrefix, ...] = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))
LAST_PORT = 65535


class Destination(NamedTuple):
    prefix: IPPrefix
    first_port: int = 0
    last_port: int = LAST_PORT


class Grant(NamedTuple):
    """A capability that the sources hold towards `prefix`; `values` are opaque JSON."""

    prefix: IPPrefix
    capability: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """One rule: any of the sources (or any node with one of `source_caps`) to any of the destinations."""

    protos: frozenset[int] = DEFAULT_PROTOS
    sources: tuple[IPPrefix, ...] = ()
    source_caps: tuple[str, ...] = ()
    destinations: tuple[Destination, ...] = ()
    grants: tuple[Grant, ...] = field(default=())


ALLOW_ALL = Match(sources=EVERYWHERE, destinations=tuple(Destination(prefix) for prefix in EVERYWHERE))
"""Every source; TCP, UDP and ICMP."""


def matches_from_rules(rules: Iterable[FilterRule]) -> tuple[list[Match], str]:
    """All usable rules and the first mistake ("" when there is none).

    Raises `DecodeError` when a rule carries the obsolete SrcBits or Bits.
    """
    mistakes: list[str] = []
    matches = [_match(rule, mistakes) for rule in rules]
    return matches, mistakes[0] if mistakes else ""


def parse_ip_set(text: str) -> tuple[Sequence[IPPrefix], str]:
    """`*`, an address, a CIDR without host bits, an inclusive range `a-b`, or `cap:name` (returned second).

    Raises `DecodeError`.
    """
    if text == "*":
        return EVERYWHERE, ""
    if text.startswith("cap:"):
        return (), text[4:]
    if "/" in text:
        return (parse_prefix(text),), ""
    if text.count("-") == 1:
        first, last = (parse_ip(part) for part in text.split("-"))
        try:
            return tuple(summarize_address_range(first, last)), ""
        except (ValueError, TypeError) as err:
            raise DecodeError("filter", f"invalid IP range {text!r}: {err}") from None
    return (ip_network(parse_ip(text)),), ""


def _match(rule: FilterRule, mistakes: list[str]) -> Match:
    if rule.src_bits:
        raise DecodeError("filter", "SrcBits is obsolete")
    sources: list[IPPrefix] = []
    source_caps: list[str] = []
    for text in rule.src_ips or ():
        prefixes, capability = _ip_set(text, mistakes)
        sources += prefixes
        if capability:
            source_caps.append(capability)
    return Match(
        _protos(rule), tuple(sources), tuple(source_caps), _destinations(rule, mistakes), _grants(rule, mistakes)
    )


def _protos(rule: FilterRule) -> frozenset[int]:
    if not rule.ip_proto:
        return DEFAULT_PROTOS
    return frozenset(proto for proto in rule.ip_proto if 0 <= proto <= 255)


def _destinations(rule: FilterRule, mistakes: list[str]) -> tuple[Destination, ...]:
    destinations: list[Destination] = []
    for wanted in rule.dst_ports or ():
        if wanted.bits is not None:
            raise DecodeError("filter", "Bits is obsolete")
        prefixes, capability = _ip_set(wanted.ip, mistakes)
        if capability:
            mistakes.append(f"capability {capability!r} cannot be a destination")
        destinations += [Destination(prefix, wanted.ports.first, wanted.ports.last) for prefix in prefixes]
    return tuple(destinations)


def _grants(rule: FilterRule, mistakes: list[str]) -> tuple[Grant, ...]:
    grants: list[Grant] = []
    for granted in rule.cap_grant or ():
        for text in granted.dsts or ():
            prefixes, _ = _ip_set(text, mistakes)
            for prefix in prefixes:
                grants += [Grant(prefix, name) for name in granted.caps or ()]
                grants += [Grant(prefix, name, tuple(values or ())) for name, values in (granted.cap_map or {}).items()]
    return tuple(grants)


def _ip_set(text: str, mistakes: list[str]) -> tuple[Sequence[IPPrefix], str]:
    try:
        return parse_ip_set(text)
    except DecodeError as err:
        mistakes.append(str(err))
        return (), ""
