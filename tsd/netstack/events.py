"""What a `Stack` tells its owner; taken with `take_events` in the order in which it happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tsd.base.addr import AddrPort, IPAddress
from tsd.netstack.tcp.connection import Connection
from tsd.netstack.tcp.segment import Segment


@dataclass(slots=True)
class StreamAdvanced:
    """`bits` of CONNECTED, READABLE, WRITABLE, DEAD for a connection that has an owner."""

    connection: Connection
    bits: int


@dataclass(slots=True)
class StreamAccepted:
    """A peer connected to a listening port."""

    listener: Listener
    connection: Connection


@dataclass(slots=True, eq=False)
class SynReceived:
    """A connection attempt that nobody listens for: answer with `Stack.accept`, `refuse` or `forget`."""

    key: bytes
    local: AddrPort
    remote: AddrPort
    is_own: bool
    """Whether `local` is one of our addresses; otherwise it lies in an advertised subnet."""
    segment: Segment = field(repr=False)
    is_settled: bool = False


@dataclass(slots=True)
class DatagramReceived:
    """`port` is None when nobody bound the destination; `packet` serves to answer with an ICMP error."""

    port: DatagramBinding | None
    payload: bytes
    local: AddrPort
    remote: AddrPort
    packet: bytes = field(repr=False)


@dataclass(slots=True)
class EchoRequested:
    """An ICMP echo request to an address of an advertised subnet; answer with `Stack.answer_echo`."""

    target: IPAddress
    packet: bytes = field(repr=False)


@dataclass(slots=True, eq=False)
class Listener:
    """A listening TCP port; `address` None is every own address."""

    address: IPAddress | None
    port: int
    owner: Any


@dataclass(slots=True, eq=False)
class DatagramBinding:
    """A bound UDP port; `address` None is every own address."""

    address: IPAddress | None
    port: int
    owner: Any


Event = StreamAdvanced | StreamAccepted | SynReceived | DatagramReceived | EchoRequested
