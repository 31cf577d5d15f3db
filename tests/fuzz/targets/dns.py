"""Fuzz targets: DNS queries of peers and programs, and replies of upstreams."""

from __future__ import annotations

from typing import Any

from harness.fedstream import Bench, FedStream
from tsd.base.addr import AddrPort, IPAddress, parse_ip
from tsd.base.errors import DecodeError
from tsd.dns import message
from tsd.dns import wire as codec
from tsd.dns.osconfig import os_dns
from tsd.dns.zone import Zone
from tsd.engine.names.resolver import Resolver
from tsd.engine.names.upstreams import schedule
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


def fuzz_dns_message(data: bytes) -> None:
    """A message of any kind as a forwarder sees it: nothing raises, and what is cut is a message again that fits."""
    for limit in (12, 40, message.PLAIN_UDP_BYTES, message.MAX_UDP_BYTES):
        made = message.fitted(data, limit)
        assert len(made) <= max(limit, message.HEADER_BYTES)
        if len(data) > limit >= message.PLAIN_UDP_BYTES:
            assert message.is_cut(made) and (message.question_end(data) is None or _is_whole(made))
    message.question_of(data)
    message.answers(data, data)
    message.rcode_of(data)
    if len(data) >= message.HEADER_BYTES:
        limited = message.with_payload_limit(data, 1232)
        assert len(limited) == len(data)
        assert message.udp_limit(limited) <= 1232 or message.opt_of(limited) is None
        reply = message.refusal(data, message.SERVFAIL, message.EDE_OTHER, "why")
        assert reply[:2] == data[:2] and message.is_reply(reply) and _is_whole(reply)


def _is_whole(wire: bytes) -> bool:
    """All records that the header counts are there, and nothing behind them."""
    end = message.question_end(wire)
    found = list(message.records(wire))
    counted = sum(int.from_bytes(wire[at : at + 2], "big") for at in (6, 8, 10))
    return len(found) == counted and (found[-1].end if found else end) == len(wire)


def fuzz_dns_http(data: bytes) -> None:
    """What an exit node's PeerAPI says: an answer for the asker comes of it, or SERVFAIL."""

    async def run() -> None:
        made = Resolver(_Dialer(data))  # type: ignore[arg-type]
        made.configure(DnsConfig(resolvers=("http://100.64.0.9:4000/dns-query",)))
        reply = await made.query(codec.question("www.example", "A", 7))
        assert len(reply) >= 12 and reply[:2] == b"\0\x07"

    _BENCH.run(run())


def fuzz_dns_upstreams(data: bytes) -> None:
    """Resolvers as control may write them, one a line: they are asked in some order, or not at all."""
    texts = data.decode("utf-8", "replace").splitlines()
    found = schedule(texts)
    assert all(one.text in texts and one.delay_s >= 0 for one in found)
    wanted = os_dns(DnsConfig(resolvers=tuple(texts), routes={"corp": tuple(texts)}), (), True)
    assert all(parse_ip(server) for server in wanted.nameservers)
