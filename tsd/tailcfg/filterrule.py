"""Packet filter rules as control sends them (tailscale: tailcfg/tailcfg.go, FilterRule); `tsd.filter` reads them."""

from __future__ import annotations

from typing import Any

from tsd.tailcfg.wire import Wire, always


class PortRange(Wire, frozen=True, gc=False):
    first: int = always(0)
    last: int = always(0)


class NetPortRange(Wire, frozen=True, gc=False):
    ip: str = always("")
    bits: int | None = None
    ports: PortRange = always(PortRange())


class CapGrant(Wire, frozen=True, gc=False):
    """Capabilities that the sources hold towards `dsts`; grants nothing in the packet filter itself."""

    dsts: tuple[str, ...] | None = always(None)
    caps: tuple[str, ...] | None = None
    cap_map: dict[str, tuple[Any, ...] | None] | None = None


class FilterRule(Wire, frozen=True, gc=False):
    """`dst_ports` and `cap_grant` exclude each other; `src_bits` and `bits` are obsolete and make a filter invalid."""

    src_ips: tuple[str, ...] | None = always(None)
    src_bits: tuple[int, ...] | None = None
    dst_ports: tuple[NetPortRange, ...] | None = None
    ip_proto: tuple[int, ...] | None = None
    cap_grant: tuple[CapGrant, ...] | None = None


ALLOW_ALL = FilterRule(src_ips=("*",), dst_ports=(NetPortRange(ip="*", ports=PortRange(first=0, last=65535)),))
"""Every source, TCP, UDP and ICMP."""
