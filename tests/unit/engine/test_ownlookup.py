"""The daemon's own look-ups: by the host when it answers, else straight from the resolvers that it had before us."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import pytest

from tsd.base.addr import AddrPort, IPAddress
from tsd.engine.names import ownlookup
from tsd.engine.names.exchange import Reply
from tsd.engine.names.ownlookup import OwnLookup

FAR = ip_address("192.0.2.9")


async def _fine(name: str) -> list[IPAddress]:
    return [ip_address("198.51.100.1")]


async def _closed(name: str) -> list[IPAddress]:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


async def _unknown(name: str) -> list[IPAddress]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def _never(name: str) -> list[IPAddress]:
    await asyncio.sleep(60)
    return []


def _lookup(by_host: object, monkeypatch: pytest.MonkeyPatch, answers: bool = True) -> OwnLookup:
    monkeypatch.setattr(ownlookup, "PATIENCE_S", 0.02)
    lookup = OwnLookup(lambda sock: None, lambda: ["not an address", "192.0.2.53"], by_host)  # type: ignore[arg-type]

    async def ask(target: AddrPort, query: bytes, over_tcp: bool) -> Reply:
        if not answers or str(target.ip) != "192.0.2.53":
            raise TimeoutError
        if b"\0\x1c\0\1" in query:
            raise TimeoutError  # no IPv6 there
        import dns.message
        import dns.rrset

        reply = dns.message.make_response(dns.message.from_wire(query))
        reply.answer.append(dns.rrset.from_text(reply.question[0].name, 60, "IN", "A", str(FAR)))
        return Reply(reply.to_wire(), "udp")

    monkeypatch.setattr(lookup._exchange, "ask", ask)
    return lookup


async def test_the_host_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _lookup(_fine, monkeypatch)("h.example") == [ip_address("198.51.100.1")]


@pytest.mark.parametrize("by_host", [_closed, _never])
async def test_p05_names_are_found_while_the_exit_node_is_away(
    monkeypatch: pytest.MonkeyPatch, by_host: object
) -> None:
    assert await _lookup(by_host, monkeypatch)("h.example") == [FAR]


async def test_a_name_that_does_not_exist_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(socket.gaierror, match="not known"):
        await _lookup(_unknown, monkeypatch)("h.example")


async def test_what_the_host_said_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(socket.gaierror, match="Temporary"):
        await _lookup(_closed, monkeypatch, answers=False)("h.example")
