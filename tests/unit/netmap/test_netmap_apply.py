"""Delta rules of the map stream."""

import json
from pathlib import Path
from typing import Any

import pytest

from tsd.base.errors import ProtocolError
from tsd.netmap.netmap import Diff, Netmap, apply
from tsd.tailcfg.mapresponse import MapResponse, decode_map_response
from tsd.tailcfg.wire import encode_json

WALL_NS = 1_796_000_000_000_000_000
MAPS = Path(__file__).resolve().parents[2] / "vectors/maps"


def node(number: int, **changes: Any) -> dict[str, Any]:
    base = {"ID": number, "StableID": f"n{number}", "Name": f"n{number}.tn.example.", "User": 1}
    return base | {"Key": f"nodekey:{number:064x}", "Addresses": [f"100.64.0.{number}/32"]} | changes


def message(**parts: Any) -> MapResponse:
    return decode_map_response(json.dumps(parts).encode())


def start(*peers: dict[str, Any], **parts: Any) -> Netmap:
    return apply(None, message(Node=node(1), Peers=list(peers), **parts), wall_ns=WALL_NS, is_first=True)[0]


def step(old: Netmap, **parts: Any) -> tuple[Netmap, Diff]:
    return apply(old, message(**parts), wall_ns=WALL_NS)


def test_first_message_needs_the_self_node() -> None:
    with pytest.raises(ProtocolError):
        apply(None, message(Peers=[node(2)]), wall_ns=WALL_NS, is_first=True)


def test_n02_peer_that_came_only_by_delta() -> None:
    netmap, diff = step(start(), PeersChanged=[node(2, AllowedIPs=["100.64.0.2/32", "10.0.0.0/24"])])
    assert diff.added == (2,)
    assert netmap.peers[2].routed_ips == ("100.64.0.2/32", "10.0.0.0/24")


def test_n03_patches_for_unknown_peers_are_ignored() -> None:
    old = start(node(2))
    netmap, diff = step(old, PeersChangedPatch=[{"NodeID": 999, "Online": False}, {"NodeID": 2}, {}])
    assert netmap is old
    assert diff.is_empty
    assert step(old, PeersChangedPatch=[{"NodeID": 2, "Online": True}])[1].moved == (2,)


def test_n04_mixed_deltas_end_in_the_same_map() -> None:
    netmap = start(*[node(n) for n in range(2, 12)])
    netmap, _ = step(netmap, OnlineChange={"2": True, "3": False, "99": True})
    netmap, _ = step(netmap, PeerSeenChange={"4": True, "5": False})
    netmap, _ = step(
        netmap,
        PeersRemoved=[11, 77],
        PeersChanged=[node(6, Tags=["tag:x"])],
        PeersChangedPatch=[
            {"NodeID": 6, "DERPRegion": 3, "Cap": 120, "Endpoints": ["192.0.2.1:1"]},
            {"NodeID": 7, "Key": "nodekey:" + "cd" * 32, "DiscoKey": "discokey:" + "ef" * 32, "CapMap": {"a": None}},
        ],
    )
    full = start(
        node(2, Online=True), node(3, Online=False), node(4, LastSeen="2026-11-30T00:53:20Z"), node(5),
        node(6, Tags=["tag:x"], HomeDERP=3, Cap=120, Endpoints=["192.0.2.1:1"]),
        node(7, Key="nodekey:" + "cd" * 32, DiscoKey="discokey:" + "ef" * 32, CapMap={"a": None}),
        *[node(n) for n in range(8, 11)],
    )  # fmt: skip
    assert netmap == full


@pytest.mark.parametrize("parts", [{}, {"Peers": None}, {"Peers": []}])
def test_n05_empty_or_absent_peers_mean_no_change(parts: dict[str, Any]) -> None:
    old = start(node(2))
    netmap, diff = step(old, ControlTime="2026-11-30T00:53:20Z", **parts)
    assert netmap.peers == old.peers
    assert not diff.upserted
    assert not diff.removed


def test_n05_removal_is_explicit() -> None:
    netmap, diff = step(start(node(2)), PeersRemoved=[2])
    assert netmap.peers == {}
    assert diff.removed == (2,)


def test_n07_keep_alive_changes_nothing() -> None:
    old = start(node(2))
    assert step(old, KeepAlive=True) == (old, Diff())


def test_full_list_beats_deltas_in_the_same_message() -> None:
    netmap, diff = step(start(node(2), node(3)), Peers=[node(3), node(4)], PeersRemoved=[3], PeersChanged=[node(5)])
    assert list(netmap.peers) == [3, 4]
    assert (diff.added, diff.removed, diff.changed) == ((4,), (2,), ())


def test_new_stream_replaces_peers_but_keeps_the_derp_map() -> None:
    old = start(node(2), DERPMap={"Regions": {"1": {"RegionID": 1}}}, PacketFilter=[], UserProfiles=[{"ID": 1}])
    netmap, diff = apply(old, message(Node=node(1), Peers=[node(3)]), wall_ns=WALL_NS, is_first=True)
    assert (diff.added, diff.removed) == ((3,), (2,))
    assert netmap.derp_map == old.derp_map
    assert netmap.users == old.users
    assert netmap.filters == {}
    assert not diff.derp_map


def test_n24_derp_map_absent_and_empty() -> None:
    old = start(DERPMap={"Regions": {"1": {"RegionID": 1}}})
    assert step(old, Domain="x")[0].derp_map == old.derp_map
    assert step(old, DERPMap={"HomeParams": {"RegionScore": {"1": 0.5}}})[0].derp_map.region(1) is not None  # type: ignore[union-attr]
    emptied, diff = step(old, DERPMap={"Regions": {}})
    assert emptied.derp_map is not None
    assert not emptied.derp_map.is_usable
    assert diff.derp_map


def test_named_filters() -> None:
    rule = {"SrcIPs": ["*"], "DstPorts": [{"IP": "*", "Ports": {"First": 0, "Last": 65535}}]}
    netmap = start(PacketFilter=[rule])
    assert len(netmap.filter_rules()) == 1
    netmap, diff = step(netmap, PacketFilters={"z": [rule], "a": [rule, rule]})
    assert diff.filters
    assert len(netmap.filter_rules()) == 4
    assert len(step(netmap, PacketFilters={"base": None})[0].filter_rules()) == 3
    assert len(step(netmap, PacketFilters={"*": None, "b": [rule]})[0].filter_rules()) == 1
    assert step(netmap, PacketFilters={"*": None})[0].filter_rules() == ()
    assert len(step(netmap, PacketFilter=[])[0].filter_rules()) == 3
    assert step(netmap, PacketFilter=None)[0] is netmap


def test_display_messages_and_health() -> None:
    netmap, diff = step(start(), Health=["bad"], DisplayMessages={"a": {"Title": "A"}, "b": {"Title": "B"}})
    assert diff.health
    netmap, _ = step(netmap, DisplayMessages={"a": None})
    assert list(netmap.display_messages) == ["b"]
    assert step(netmap, Health=[])[0].health == ()


def test_stale_disco_key_is_not_taken_back() -> None:
    seen = "2026-11-30T00:00:10Z"
    old = start(node(2, DiscoKey="discokey:" + "aa" * 32, LastSeen=seen))
    stale = {"NodeID": 2, "DiscoKey": "discokey:" + "bb" * 32, "Online": False, "LastSeen": seen}
    assert step(old, PeersChangedPatch=[stale])[0] is old
    fresh = stale | {"LastSeen": "2026-11-30T00:00:11Z"}
    assert step(old, PeersChangedPatch=[fresh])[1].moved == (2,)
    assert step(old, PeersChangedPatch=[stale | {"Online": True}])[1].moved == (2,)


def test_a_key_that_does_not_expire_any_more() -> None:
    near = start(node(2, KeyExpiry="2026-11-30T01:00:00Z"))
    lifted, diff = step(near, PeersChangedPatch=[{"NodeID": 2, "KeyExpiry": "0001-01-01T00:00:00Z"}])
    assert lifted.peers[2].key_expiry is None
    assert diff.changed == (2,)


def test_recorded_session_applies() -> None:
    netmap: Netmap | None = None
    for name in ("full", "changed", "patch", "policy"):
        response = decode_map_response((MAPS / f"{name}.json").read_bytes())
        netmap, _ = apply(netmap, response, wall_ns=WALL_NS, is_first=netmap is None)
    assert netmap is not None
    assert netmap.self_node.stable_id == "2"
    assert netmap.magic_suffix == "tn.example"


def test_n22_one_delta_on_a_large_map_is_cheap() -> None:
    peers = [node(2, ID=n, Name=f"n{n}.tn.example.", Key=f"nodekey:{n:064x}") for n in range(2, 10_002)]
    netmap = start(*peers)
    raw = encode_json(message(PeersChanged=[node(5, ID=10_500)], PeersChangedPatch=[{"NodeID": 9, "Online": True}]))
    after, diff = apply(netmap, decode_map_response(raw), wall_ns=WALL_NS)
    assert (diff.added, diff.moved) == ((10_500,), (9,))
    assert len(after.peers) == 10_001
    untouched = [node_id for node_id in netmap.peers if node_id != 9]
    assert all(after.peers[node_id] is netmap.peers[node_id] for node_id in untouched)
