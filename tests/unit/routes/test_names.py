"""Which names exist and who answers for the others: zones, exit nodes, extra records, nodes that want none of it."""

from __future__ import annotations

from typing import Any

from tsd.base.addr import parse_ip
from tsd.hull import DnsConfig
from tsd.netmap.netmap import Netmap
from tsd.routes.derive import RouteWishes, derive
from tsd.tailcfg.dns import DNSConfig, DNSRecord, Resolver
from tsd.tailcfg.hostinfo import Hostinfo, Service
from tsd.tailcfg.node import Node, hostinfo_field

SELF = Node(id=1, name="self.tn.example.", addresses=("100.64.0.1/32",))
EXIT = Node(
    id=2,
    stable_id="n2",
    name="exit.tn.example.",
    addresses=("100.64.0.2/32",),
    allowed_ips=("100.64.0.2/32", "0.0.0.0/0", "::/0"),
    hostinfo_raw=hostinfo_field(
        Hostinfo(services=(Service(proto="peerapi4", port=4000), Service(proto="peerapi-dns-proxy", port=1)))
    ),
)
DOH = "http://100.64.0.2:4000/dns-query"
USING = RouteWishes(exit_node_id="n2")
ONE, WITH_EXIT = Resolver(addr="192.0.2.1"), Resolver(addr="192.0.2.2", use_with_exit_node=True)


def names(wishes: RouteWishes, *peers: Node, **dns: Any) -> DnsConfig:
    return derive(Netmap(SELF, peers={peer.id: peer for peer in peers}, dns=DNSConfig(**dns)), wishes).dns


def test_who_does_not_accept_dns_still_answers_for_the_tailnet() -> None:
    found = names(RouteWishes(accept_dns=False), proxied=True, resolvers=(ONE,), routes={"corp.example": (ONE,)})
    assert found.routes == {"tn.example": ()} and found.resolvers == () and not found.wants_os_config


def test_an_exit_node_answers_for_everything_else() -> None:
    routes = {"a.example": (ONE,), "b.example": (ONE, WITH_EXIT), "own.example": ()}
    found = names(USING, EXIT, proxied=True, resolvers=(ONE,), routes=routes)
    assert found.resolvers == (DOH,)
    assert found.routes == {"b.example": ("192.0.2.2",), "own.example": (), "tn.example": ()}
    assert names(USING, EXIT, resolvers=(ONE, WITH_EXIT)).resolvers == ("192.0.2.2",)


def test_exit_nodes_that_do_not_answer_dns() -> None:
    mute = Node(id=2, stable_id="n2", addresses=EXIT.addresses, allowed_ips=EXIT.allowed_ips)
    assert names(USING, mute, resolvers=(ONE,)).resolvers == ("192.0.2.1",)
    assert names(USING, mute, fallback_resolvers=(ONE,)).resolvers == ("192.0.2.1",)
    assert names(USING, fallback_resolvers=(ONE,)).resolvers == ("192.0.2.1",)
    wireguard = Node(
        id=2,
        stable_id="n2",
        addresses=EXIT.addresses,
        allowed_ips=EXIT.allowed_ips,
        is_wireguard_only=True,
        exit_node_dns_resolvers=(Resolver(addr="10.64.0.1"),),
    )
    assert names(USING, wireguard).resolvers == ("10.64.0.1",)
    assert names(USING, wireguard, resolvers=(ONE,)).resolvers == ("192.0.2.1",)


def test_extra_records_outside_of_all_zones_are_zones() -> None:
    records = (
        DNSRecord(name="App.Other.example.", value="100.64.0.9"),
        DNSRecord(name="db.corp.example", type="A", value="100.64.0.8"),
        DNSRecord(name="text.other.example", type="TXT", value="100.64.0.8"),
        DNSRecord(name="bad.other.example", value="not an address"),
    )
    found = names(RouteWishes(), extra_records=records, routes={"corp.example": (ONE,)})
    assert found.routes == {"corp.example": ("192.0.2.1",), "app.other.example": ()}
    assert found.hosts["app.other.example"] == (parse_ip("100.64.0.9"),)
    assert names(RouteWishes(accept_dns=False), extra_records=records).routes == {}


def test_nodes_with_all_names_below_theirs_come_and_go() -> None:
    wild = Node(id=3, name="web.tn.example.", addresses=("100.64.0.3/32",), cap_map={"dns-subdomain-resolve": None})
    assert names(RouteWishes(), wild, proxied=True).subdomain_hosts == {"web.tn.example"}
    assert names(RouteWishes(), EXIT, proxied=True).subdomain_hosts == frozenset()


def test_what_peers_may_not_resolve_through_us() -> None:
    assert names(RouteWishes(), exit_node_filtered_set=(".corp", "", "x.example", ".")).exit_node_filtered == (
        ".corp",
        "x.example",
    )
