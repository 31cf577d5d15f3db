"""Plans: what is accepted, what is hidden, names, exit nodes, and that steps give what a fresh start gives."""

import json
import random
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from tsd.netmap.netmap import Netmap, apply
from tsd.routes import planner
from tsd.routes.derive import RouteWishes, derive, peer_prefixes
from tsd.routes.planner import Planner
from tsd.tailcfg.mapresponse import MapResponse, decode_map_response


def node(number: int, **changes: Any) -> dict[str, Any]:
    addresses = [f"100.64.{number >> 8}.{number & 255}/32", f"fd7a:115c:a1e0::{number:x}/128"]
    base = {"ID": number, "StableID": f"n{number}", "Name": f"N{number}.tn.example.", "User": 1}
    return base | {"Key": f"nodekey:{number:064x}", "Addresses": addresses} | changes


def message(**parts: Any) -> MapResponse:
    return decode_map_response(json.dumps(parts).encode())


def start(*peers: dict[str, Any], own: dict[str, Any] | None = None, **parts: Any) -> Netmap:
    return apply(None, message(Node=own or node(1), Peers=list(peers), **parts), wall_ns=0, is_first=True)[0]


ROUTER = node(2, AllowedIPs=["100.64.0.2/32", "10.1.0.0/16", "0.0.0.0/0", "::/0"], PrimaryRoutes=["10.1.0.0/16"])


def nets(*texts: str) -> tuple[Any, ...]:
    return tuple(ip_network(text) for text in texts)


def test_subnet_routes_are_opt_in() -> None:
    netmap = start(ROUTER)
    hidden = derive(netmap, RouteWishes())
    assert hidden.hidden_routes
    assert hidden.router.routes == nets("100.64.0.2/32", "100.100.100.100/32", "fd7a:115c:a1e0::53/128")
    accepted = derive(netmap, RouteWishes(accept_routes=True))
    assert not accepted.hidden_routes
    assert ip_network("10.1.0.0/16") in accepted.router.routes
    assert ip_network("0.0.0.0/0") not in accepted.router.routes


def test_a_single_overlay_address_is_no_subnet() -> None:
    host = node(2, AllowedIPs=["100.64.0.2/32", "100.99.99.99/32", "100.115.92.7/32", "203.0.113.9/32"])
    routes = derive(start(host), RouteWishes()).router.routes
    assert ip_network("100.99.99.99/32") in routes
    assert not set(nets("100.115.92.7/32", "203.0.113.9/32")) & set(routes)


@pytest.mark.parametrize("wish", [{"exit_node_id": "n2"}, {"exit_node_ip": ip_address("100.64.0.2")}])
def test_exit_node(wish: dict[str, Any]) -> None:
    netmap = start(ROUTER)
    plan = derive(netmap, RouteWishes(**wish))
    assert set(nets("0.0.0.0/0", "::/0")) <= set(plan.router.routes)
    assert plan.router.uses_exit_node and not plan.router.exit_node_allow_lan
    assert derive(netmap, RouteWishes(**wish, exit_node_allow_lan=True)).router.exit_node_allow_lan
    assert peer_prefixes(netmap.peers[2], RouteWishes(**wish)) == nets("100.64.0.2/32", "0.0.0.0/0", "::/0")


def test_missing_exit_node_leaks_nothing() -> None:
    for wishes in (RouteWishes(exit_node_id="gone"), RouteWishes(auto_exit_node="any")):
        assert set(nets("0.0.0.0/0", "::/0")) <= set(derive(start(), wishes).router.routes)
    plan = derive(start(), RouteWishes(exit_node_id="gone"))
    assert set(nets("0.0.0.0/0", "::/0")) <= set(plan.router.routes)


def test_exit_node_answers_dns() -> None:
    services = {"Services": [{"Proto": "peerapi4", "Port": 4000}, {"Proto": "peerapi-dns-proxy", "Port": 1}]}
    dns = {"Resolvers": [{"Addr": "192.0.2.53"}]}
    netmap = start(ROUTER | {"Hostinfo": services}, DNSConfig=dns)
    wishes = RouteWishes(exit_node_id="n2")
    assert derive(netmap, wishes).dns.resolvers == ("http://100.64.0.2:4000/dns-query",)
    assert derive(netmap, RouteWishes()).dns.resolvers == ("192.0.2.53",)
    kept = {"Resolvers": [{"Addr": "192.0.2.53"}, {"Addr": "192.0.2.54", "UseWithExitNode": True}]}
    assert derive(start(ROUTER | {"Hostinfo": services}, DNSConfig=kept), wishes).dns.resolvers == ("192.0.2.54",)


def test_names() -> None:
    dns = {
        "Proxied": True, "Domains": ["tn.example", "corp.example."], "Routes": {"corp.example": [{"Addr": "10.0.0.1"}]},
        "ExtraRecords": [
            {"Name": "extra.tn.example", "Value": "100.64.0.9"}, {"Name": "t", "Type": "TXT", "Value": "x"},
        ],
    }  # fmt: skip
    plan = derive(start(node(2), DNSConfig=dns), RouteWishes()).dns
    assert [str(ip) for ip in plan.hosts["n2.tn.example"]] == ["100.64.0.2", "fd7a:115c:a1e0::2"]
    assert "n1.tn.example" in plan.hosts
    assert [str(ip) for ip in plan.hosts["extra.tn.example"]] == ["100.64.0.9"]
    assert "t" not in plan.hosts
    assert plan.search_domains == ("tn.example", "corp.example")
    assert plan.routes == {"corp.example": ("10.0.0.1",), "tn.example": ()}
    assert plan.magic_suffix == "tn.example"


def test_n19_prefixes_outside_the_usual_range() -> None:
    own = node(1, Addresses=["172.27.0.1/32", "fd00:1::1/128"])
    peer = node(2, Addresses=["172.27.0.2/32", "fd00:1::2/128"])
    plan = derive(start(peer, own=own, DNSConfig={"Proxied": True}), RouteWishes())
    assert ip_network("172.27.0.2/32") in plan.router.routes
    assert [str(ip) for ip in plan.dns.hosts["n2.tn.example"]] == ["172.27.0.2", "fd00:1::2"]


def test_n20_tailnet_without_ipv4() -> None:
    own = node(1, Addresses=["fd7a:115c:a1e0::5/128"])
    plan = derive(start(node(2), own=own, DNSConfig={"Proxied": True}), RouteWishes())
    assert ip_network("100.100.100.100/32") not in plan.router.routes
    assert ip_network("fd7a:115c:a1e0::53/128") in plan.router.routes
    assert "n2.tn.example" in plan.dns.hosts


def test_filter_destinations() -> None:
    plan = derive(start(), RouteWishes(advertise_routes=nets("10.7.0.0/16", "0.0.0.0/0")))
    local = plan.local_prefixes
    assert set(nets("100.64.0.1/32", "10.7.0.0/16")) <= set(local)
    assert not any(ip_address("192.168.1.1") in prefix for prefix in local if prefix.version == 4)
    assert any(ip_address("8.8.8.8") in prefix for prefix in local if prefix.version == 4)


def random_step(rng: random.Random, netmap: Netmap) -> MapResponse:
    known = [*netmap.peers, 2]
    pick = rng.randrange(6)
    if pick == 0:
        return message(PeersRemoved=[rng.choice(known)])
    if pick == 1:
        return message(PeersChangedPatch=[{"NodeID": rng.choice(known), "Online": rng.random() < 0.5}])
    if pick == 2:
        return message(Node=node(1, Addresses=[f"100.64.0.{rng.randrange(1, 3)}/32"]))
    if pick == 3:
        return message(DNSConfig={"Proxied": rng.random() < 0.5, "Domains": ["x"]})
    number = rng.randrange(2, 40)
    routes = [f"10.{rng.randrange(3)}.0.0/16"] * rng.randrange(2) + ["0.0.0.0/0"] * rng.randrange(2)
    changed = node(number, Name=f"n{rng.randrange(2, 40)}.tn.example.", PrimaryRoutes=routes[:1])
    return message(PeersChanged=[changed | {"AllowedIPs": [*changed["Addresses"], *routes]}])


@pytest.mark.parametrize("seed", range(12))
def test_steps_give_what_a_fresh_start_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "COLLAPSE_OVER", 8)
    rng = random.Random(seed)
    one_cgnat = (None, True, False)[seed // 4]
    wishes = RouteWishes(accept_routes=seed % 2 == 0, exit_node_id="n5" if seed % 3 == 0 else "", one_cgnat=one_cgnat)
    netmap, steps = start(node(5)), Planner()
    steps.plan(netmap, wishes)
    for _ in range(60):
        netmap, diff = apply(netmap, random_step(rng, netmap), wall_ns=0)
        plan, fresh = steps.update(netmap, diff), derive(netmap, wishes)
        assert plan.router == fresh.router
        assert plan.local_prefixes == fresh.local_prefixes
        assert plan.hidden_routes == fresh.hidden_routes
        assert plan.dns == fresh.dns


@pytest.mark.parametrize(("wish", "is_range"), [(None, False), (True, True), (False, False)])
def test_control_may_ask_for_one_route_to_all_peers(wish: bool | None, is_range: bool) -> None:
    netmap = start(node(5), node(6))
    routes = derive(netmap, RouteWishes(one_cgnat=wish)).router.routes
    assert (ip_network("100.64.0.0/10") in routes) is is_range
    assert (ip_network("100.64.0.5/32") in routes) is not is_range


def test_n22_ten_thousand_peers_are_planned_in_slices() -> None:
    netmap, steps = start(*[node(n) for n in range(2, 10_002)]), Planner()
    slices = sum(1 for _ in steps.plan_in_slices(netmap, RouteWishes()))
    assert slices >= 20
    assert ip_network("100.64.0.0/10") in steps.current.router.routes
    assert len(steps.current.router.routes) < 10
    netmap, diff = apply(netmap, message(PeersChanged=[node(10_500)]), wall_ns=0)
    assert "n10500.tn.example" in steps.update(netmap, diff).dns.hosts
