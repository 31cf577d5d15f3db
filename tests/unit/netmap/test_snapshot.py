"""A netmap that went through a file is the netmap that control described."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, TypeVar

import pytest

from harness.loneengine import DERP_MAP, FILTER, peer_json
from tsd.base.errors import DecodeError
from tsd.netmap import snapshot
from tsd.netmap.netmap import Netmap, apply
from tsd.netmap.snapshot import About
from tsd.tailcfg.mapresponse import decode_map_response

T = TypeVar("T")

ABOUT = About(snapshot.VERSION, "2026-11-30T12:00:00.5Z", "https://control.example", 7)


def result(steps: Generator[None, None, T]) -> tuple[int, T]:
    pauses = 0
    while True:
        try:
            next(steps)
            pauses += 1
        except StopIteration as done:
            return pauses, done.value


def netmap(peers: int = 3, **parts: Any) -> Netmap:
    message: dict[str, Any] = {
        "Node": peer_json(1),
        "Peers": [peer_json(number % 250 + 2) | {"ID": number + 2} for number in range(peers)],
        "DERPMap": DERP_MAP,
        "PacketFilters": {"base": FILTER, "more": []},
        "DNSConfig": {"Proxied": True, "Domains": ["tail.example"], "Routes": {"x.example": []}},
        "UserProfiles": [{"ID": 7, "LoginName": "lab@example.com", "DisplayName": "Lab"}],
        "Domain": "example.com",
        "SSHPolicy": {"rules": []},
        "TKAInfo": {"Head": "abc"},
        "CollectServices": True,
        "DomainDataPlaneAuditLogID": "log",
    } | parts
    made, _ = apply(None, decode_map_response(json.dumps(message).encode()), wall_ns=0, is_first=True)
    return made


@pytest.mark.parametrize("peers", [0, 1, 3])
def test_round_trip(peers: int) -> None:
    before = netmap(peers)
    _, raw = result(snapshot.encode(before, ABOUT))
    _, found = result(snapshot.decode(raw))
    assert found.about == ABOUT and found.node_key == before.self_node.key
    assert found.saved_ns == 1796040000_500000000
    after, _ = apply(None, found.message, wall_ns=0, is_first=True)
    assert after == before


def test_what_is_about_a_moment_is_not_kept() -> None:
    told = netmap(1, Health=["something is wrong"], DisplayMessages={"a": {"Title": "t", "Text": "x"}})
    assert told.health and told.display_messages
    _, raw = result(snapshot.encode(told, ABOUT))
    _, found = result(snapshot.decode(raw))
    after, _ = apply(None, found.message, wall_ns=0, is_first=True)
    assert not after.health and not after.display_messages


def test_many_peers_are_worked_in_slices() -> None:
    pauses, raw = result(snapshot.encode(netmap(2500), ABOUT))
    assert pauses == 2
    pauses, found = result(snapshot.decode(raw))
    assert pauses >= 2 and found.message.peers is not None and len(found.message.peers) == 2500


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"not json\n{}",
        b'{"Version":2,"Saved":"","ControlURL":""}\n{"Node":{}}',
        b'{"Version":1,"Saved":"","ControlURL":""}\n{}',
        b'{"Version":1,"Saved":"","ControlURL":""}\n{"Node":{"ID":1,"Key":"nodekey:00"}}',
        b'{"Version":1,"Saved":"","ControlURL":""}\n',
    ],
)
def test_what_is_no_snapshot_is_refused(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        result(snapshot.decode(raw))
