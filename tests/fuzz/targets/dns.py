"""Fuzz targets: DNS queries of peers and programs, and replies of upstreams."""

from __future__ import annotations

from typing import Any

from harness.fedstream import Bench, FedStream
from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.dns import message
from tsd.dns import wire as codec
from tsd.dns.zone import Zone
from tsd.engine.names.resolver import Resolver
from tsd.hull import DnsConfig

_BENCH = Bench()
_HOSTS = {
    "host.tn.example": (parse_ip("100.64.0.7"), parse_ip("fd7a:115c:a1e0::7")),
    "a..b.tn.example": (parse_ip("100.64.0.8"),),
}
_ZONE = Zone(_HOSTS, ("tn.example", "64.100.in-addr.arpa", "o d d"))


def fuzz_dns_query(data: bytes) -> None:
    """What we answer fits the asker and repeats his number; what we do not answer, we can name."""
    for limit, most in ((None, message.MAX_UDP_BYTES), (65535, 65535)):
        reply = codec.answer(_ZONE, data, max_bytes=limit)
        assert reply is None or (12 <= len(reply) <= most and reply[:2] == data[:2] and reply[2] & 0x80)
    name = codec.name_in(data)
    if name is not None and len(data) > 2 and not data[2] & 0x80:
        message.refusal(data, message.SERVFAIL, 0, "why") if len(data) >= 12 else None
        _ZONE.owns(name)


class _Port:
    def __init__(self, reply: bytes) -> None:
        self._reply = reply

    def send(self, data: bytes, remote: AddrPort) -> None:
        self._sent, self._remote = data, remote

    async def receive(self) -> tuple[bytes, AddrPort]:
        """The bytes as they are would be ignored: number and question are put in order."""
        head = (
            self._sent[:2] + bytes([self._reply[0] | 0x80 if self._reply else 0x80]) + self._reply[1:10].ljust(9, b"\0")
        )
        return head[:4] + b"\0\x01" + head[6:12] + self._sent[12:] + self._reply[10:], self._remote

    def close(self) -> None: ...


class _Dialer:
    def __init__(self, reply: bytes) -> None:
        self._reply = reply

    async def open_datagram(self, ip: IPAddress) -> _Port:
        return _Port(self._reply)

    async def dial_ip(self, remote: AddrPort, timeout_s: float = 10.0) -> Any:
        return FedStream(self._reply)


def fuzz_dns_reply(data: bytes) -> None:
    """An upstream's reply, by UDP and by TCP: one answer for the asker comes of it, or an OSError."""

    async def run() -> None:
        made = Resolver(_Dialer(data), lambda: ["192.0.2.1"])  # type: ignore[arg-type]
        made.configure(DnsConfig(hosts=_HOSTS, magic_suffix="tn.example", routes={"corp.example": ("192.0.2.2",)}))
        for over_tcp in (False, True):
            reply = await made.query(codec.question("www.example", "A", 7), over_tcp)
            assert len(reply) >= 12 and reply[:2] == b"\0\x07"
        try:
            await made.addresses("www.example")
        except OSError:
            pass

    codec.addresses_in(data)
    try:
        codec.open_alias(data)
    except DecodeError:
        pass
    codec.joined(data, data)
    _BENCH.run(run())
