"""Cases of nodes that tell the coordination server nonsense: the others keep their maps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.coordsim import Client, Tailnet
from tsd.base.errors import DecodeError
from tsd.tailcfg.mapping import MapRequest
from tsd.tailcfg.register import RegisterRequest
from tsd.tailcfg.wire import decode_json

LONG = "9" * 5000
ODD: list[Any] = [
    None, "", 0, -1, 2**31, 2**64, 1.5, True, [], {}, [None], [""], ["x"], "\x00", "a..b", "äö", "\ud800", "x" * 300,
    "9999-12-31T23:59:59-14:00", "2026-13-45", ["1.2.3.4:" + LONG, "[::]:5", "[fe80::1%eth0]:1"], {"Hostname": "\x00"},
    ["::/0", "10.0.0.0/8", "x", "fe80::1%eth0/128"], {"NetInfo": {"PreferredDERP": -5, "DERPLatency": {"x": 1e308}}},
    {"Services": [{"Proto": "x", "Port": -1}]}, {"RequestTags": ["tag:x", ""]}, "nodekey:" + "AB" * 32,
    "discokey:" + "f" * 64,
]  # fmt: skip
HOSTINFO = {
    "OS": "linux", "Hostname": "odd", "RoutableIPs": ["10.0.0.0/8"], "RequestTags": ["tag:a"], "WoLMACs": ["x"],
    "Services": [{"Proto": "peerapi4", "Port": 80}], "NetInfo": {"PreferredDERP": 1, "DERPLatency": {"1-v4": 0.5}},
    "Location": {"Country": "x", "Priority": 1}, "sshHostKeys": ["x"],
}  # fmt: skip
REGISTER = {
    "Version": 145, "OldNodeKey": "nodekey:" + "0" * 64, "Auth": {"AuthKey": "k"}, "Expiry": "2030-01-01T00:00:00Z",
    "Followup": "http://x/register/abc", "Hostinfo": HOSTINFO, "Ephemeral": True, "Timestamp": "2026-01-01T00:00:00Z",
}  # fmt: skip
MAP = {
    "Version": 145, "Compress": "zstd", "DiscoKey": "discokey:" + "1" * 64, "Hostinfo": HOSTINFO, "ReadOnly": False,
    "Endpoints": ["1.2.3.4:5"], "EndpointTypes": [1], "OmitPeers": True, "MapSessionSeq": 5, "DebugFlags": ["x"],
}  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def _put(message: dict[str, Any], path: tuple[Any, ...], value: Any) -> bytes:
    copied: Any = json.loads(json.dumps(message))
    at = copied
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(copied).encode()


def _ask(net: Tailnet, odd: Client, kind: str, raw: bytes) -> None:
    try:
        if kind == "register":
            net.register(odd.machine, decode_json(raw, RegisterRequest))
            return
        request = decode_json(raw, MapRequest)
    except DecodeError:
        return
    record = net.coordinator.find(odd.machine, odd.node_key)
    if record is not None:
        net.coordinator.update(record, request, net.moment())
        net.drain()
        net.coordinator.map_once(record, request, net.moment())


@pytest.mark.parametrize("kind", ["register", "map"])
def test_n15_whatever_one_node_says_of_itself(kind: str) -> None:
    message = REGISTER if kind == "register" else MAP
    for turn, path in enumerate(_places(message)):
        net = Tailnet()
        good, odd = net.join("good"), net.join("odd")
        for value in ODD[turn % 6 :: 6]:
            if odd.record is None:
                odd = net.join("odd")
            _ask(net, odd, kind, _put(message | {"NodeKey": odd.node_key}, path, value))
            net.settle()
        good.poll()
        assert good.netmap is not None and good.frames, path
        net.boot()
        good.poll()
        assert good.netmap is not None, "a restart reads what was stored"


def test_n15_an_expiry_beyond_all_years() -> None:
    net = Tailnet()
    good, odd = net.join("good"), net.join("odd")
    odd.register(expiry="9999-12-31T23:59:59-14:00")
    net.settle()
    good.poll()
    assert good.peers()["odd"].key_expiry == "9999-12-31T23:59:59Z"


def test_n14_a_node_does_not_fill_the_maps_of_others() -> None:
    net = Tailnet()
    good, odd = net.join("good"), net.join("odd")
    many = tuple(f"10.{n // 256}.{n % 256}.0/24" for n in range(5000))
    odd.update(hostname="h" * 100_000, os="x" * 5000, wol_macs=("m" * 100_000,) * 5, routable_ips=many)
    net.settle()
    assert len(good.raw_frames[-1]) < 40_000
    (peer,) = [node for node in good.netmap.peers.values() if node.hostinfo.wol_macs is None]  # type: ignore[union-attr]
    assert peer.base_name == "h" * 63


def test_n13_a_key_in_another_spelling_is_the_same_key() -> None:
    net = Tailnet()
    client = Client(net, "loud")
    client.node_key = client.node_key[:8] + client.node_key[8:].upper()
    answer = client.register(net.auth_key(reusable=True))
    assert answer is not None
    if not answer.error:
        client.node_key = client.node_key.lower()
        assert client.record is not None


def test_n16_nodes_and_keys_that_come_and_go_leave_nothing_behind() -> None:
    """CI churn: a one-off key and an ephemeral node for each run, some deleted by hand, some reaped."""
    net = Tailnet()
    for number in range(1030):
        client = Client(net, f"run{number}")
        assert client.register(net.auth_key(ephemeral=True)) is not None
        if number % 2:
            record = client.record
            assert record is not None
            net.admin.delete(str(record.id), net.moment())
            net.drain()
    net.run(4 * 3600.0)
    assert net.coordinator.registry.nodes == {} and net.store["nodes"] == {}
    assert len(net.store["auth_keys"]) == len(net.coordinator.registry.auth_keys) <= 1001
    assert len(net.coordinator._contact) == 0
