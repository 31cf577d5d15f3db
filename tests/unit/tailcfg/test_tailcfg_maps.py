"""Map messages: golden round trips, tolerance, time and omission rules."""

import json
from pathlib import Path

import msgspec
import pytest

from tsd.base.errors import DecodeError
from tsd.tailcfg.derpmap import DERPMap, DERPNode, DERPRegion, merge_derp_map, problems
from tsd.tailcfg.mapresponse import MapResponse, decode_in_slices, decode_map_response
from tsd.tailcfg.node import Node, decode_node
from tsd.tailcfg.register import RegisterRequest
from tsd.tailcfg.wire import decode_json, encode_json, time_ns, time_text, to_go

REPO = Path(__file__).resolve().parents[3]
MAPS = sorted((REPO / "tests/vectors/maps").glob("*.json"))


@pytest.mark.parametrize("path", MAPS, ids=lambda path: path.stem)
def test_every_map_round_trips(path: Path) -> None:
    raw, found = path.read_bytes(), []
    assert to_go(decode_map_response(raw, found)) == json.loads(raw)
    assert found == []


def node_json(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {"ID": 7, "StableID": "7", "Name": "a.tn.example.", "User": 1, "Key": f"nodekey:{7:064x}"}
    return base | {"Addresses": ["100.64.0.7/32"]} | changes


def test_bad_peer_is_left_out_and_named() -> None:
    raw = json.dumps({"Peers": [node_json(), node_json(ID="x"), node_json(Key=""), None, node_json(ID=9)]}).encode()
    found: list[str] = []
    response = decode_map_response(raw, found)
    assert [peer.id for peer in response.peers or ()] == [7, 9]
    assert len(found) == 2
    assert all(text.startswith("peer left out") for text in found)


@pytest.mark.parametrize("part", [{"Node": {"ID": "x"}}, {"PacketFilter": 3}, {"SSHPolicy": []}])
def test_bad_essential_part_fails_the_message(part: dict[str, object]) -> None:
    with pytest.raises(DecodeError):
        decode_map_response(json.dumps(part).encode())


def test_nulls_and_unknown_fields_are_tolerated() -> None:
    nulls = dict.fromkeys(["Node", "Peers", "PeersChanged", "PeersRemoved", "DERPMap", "DNSConfig", "PacketFilter"])
    assert decode_map_response(json.dumps(nulls | {"Brand": {"new": 1}}).encode()) == MapResponse()
    node = decode_node(
        json.dumps(node_json(AllowedIPs=None, DiscoKey=None, Hostinfo=None, CapMap={"a": None})).encode()
    )
    assert node.routed_ips == ("100.64.0.7/32",)
    assert node.hostinfo is None
    assert node.disco is None
    assert node.has_cap("a")


def test_empty_is_not_absent() -> None:
    assert decode_map_response(b'{"PacketFilter":[]}').packet_filter == ()
    assert decode_map_response(b'{"PacketFilters":{"base":null,"x":[]}}').packet_filters == {"base": None, "x": ()}
    assert to_go(MapResponse(packet_filter=())) == {"PacketFilter": []}


def test_fields_that_are_always_sent() -> None:
    assert set(to_go(Node())) == {"ID", "StableID", "Name", "User", "Key", "Addresses"}
    request = to_go(RegisterRequest(node_key="nodekey:" + "1" * 64))
    assert list(request) == [
        "Version", "NodeKey", "OldNodeKey", "NLKey", "Expiry", "Followup", "Hostinfo", "NodeKeySignature",
    ]  # fmt: skip
    assert request["Expiry"] == "0001-01-01T00:00:00Z"


def test_legacy_home_derp() -> None:
    assert Node(legacy_derp="127.3.3.40:12").home_region == 12
    assert Node(legacy_derp="127.3.3.40:12", home_derp=3).home_region == 3
    assert Node(legacy_derp="127.3.3.40:x").home_region == 0


def test_times() -> None:
    assert time_ns("0001-01-01T00:00:00Z") is None
    assert time_ns("2026-11-30T13:40:47.315794138Z") == 1796046047315794138
    assert time_ns("1970-01-01T01:02:03+01:00") == 123_000_000_000
    assert time_ns("soon") is None
    assert time_text(1796046047315794138) == "2026-11-30T13:40:47.315794138Z"
    assert time_text(123_000_000_000) == "1970-01-01T00:02:03Z"


def test_expiry() -> None:
    node = Node(key_expiry="1970-01-01T00:02:03Z")
    assert node.is_expired(123_000_000_000)
    assert not node.is_expired(122_999_999_999)
    assert not Node(key_expiry="0001-01-01T00:00:00Z").is_expired(1 << 62)


def test_slices_pause_and_agree() -> None:
    raw = encode_json(MapResponse(peers=tuple(Node(id=n, key=f"nodekey:{n:064x}") for n in range(1, 26))))
    slices, pauses = decode_in_slices(raw, slice_nodes=10), 0
    while True:
        try:
            next(slices)
        except StopIteration as done:
            assert done.value == decode_map_response(raw)
            break
        pauses += 1
    assert pauses == 2


def test_derp_map_merge_keeps_what_is_absent() -> None:
    old = DERPMap(regions={1: DERPRegion(region_id=1)}, omit_default_regions=True)
    assert merge_derp_map(old, DERPMap()).regions == old.regions
    assert merge_derp_map(old, DERPMap()).omit_default_regions
    assert merge_derp_map(old, DERPMap(regions={2: None, 3: DERPRegion(region_id=3)})).regions == {
        3: DERPRegion(region_id=3)
    }
    assert merge_derp_map(old, DERPMap(regions={})).regions == {}


def test_n18_a_derp_map_with_odd_numbers_is_made_usable() -> None:
    """Regions go by their key, as peers name them; ports that do not exist are never dialled."""
    good, stun, relay = DERPNode(name="a"), DERPNode(name="b", stun_port=70000), DERPNode(name="c", derp_port=70000)
    odd = {901: DERPRegion(region_id=903, nodes=(good, stun, relay)), 0: DERPRegion(), -1: DERPRegion(region_id=-1)}
    merged = merge_derp_map(None, DERPMap(regions=odd))
    assert merged.regions == {901: DERPRegion(region_id=901, nodes=(good, DERPNode(name="b", stun_port=-1)))}
    assert not merge_derp_map(None, DERPMap(regions={1: DERPRegion(region_id=1, nodes=(relay,))})).is_usable


def test_n18_relay_ports_and_bad_hosts_are_named() -> None:
    node = DERPNode(
        name="1a", region_id=1, host_name="https://relay.example", derp_port=30000, stun_port=-1, ipv6="none"
    )
    assert (node.effective_derp_port, node.effective_stun_port) == (30000, 0)
    assert DERPNode().effective_stun_port == 3478
    (text,) = problems(DERPMap(regions={1: DERPRegion(region_id=1, nodes=(node,))}))
    assert "region 1" in text
    assert "https://relay.example" in text


def test_a_service_on_no_port_is_none() -> None:
    for port in (70000, -1):
        node = decode_node(
            json.dumps({"ID": 1, "Hostinfo": {"Services": [{"Proto": "peerapi4", "Port": port}]}}).encode()
        )
        assert node.hostinfo is not None and node.hostinfo.service_port("peerapi4") == 0


def test_decode_error_names_the_field() -> None:
    with pytest.raises(DecodeError, match="RegionID"):
        decode_json(b'{"Regions":{"1":{"RegionID":"one"}}}', DERPMap)
    with pytest.raises(DecodeError):
        decode_map_response(b"\xff" * 4)
    with pytest.raises(DecodeError):
        decode_map_response(b"[" * 100_000)
    assert isinstance(Node().hostinfo_raw, msgspec.Raw)
