"""What a Linux host tells doctor: foreign drops found in `nft -j list ruleset`, our own rules among them."""

from __future__ import annotations

import json
from ipaddress import ip_network
from typing import Any

import pytest

from tsd.base.errors import HullError
from tsd.hull import RouterConfig
from tsplatform.linux import checks
from tsplatform.linux.checks import has_our_rules, host_facts
from tsplatform.linux.hostnames import HostNames
from tsplatform.linux.netfilter.foreign import foreign_drops
from tsplatform.linux.netfilter.remedy import remedy_for

Json = dict[str, Any]


def chain(name: str = "input", hook: str = "input", policy: str = "accept", table: str = "filter") -> Json:
    found: Json = {"family": "inet", "table": table, "name": name}
    return {"chain": {**found, "type": "filter", "hook": hook, "prio": 0, "policy": policy} if hook else found}


def rule(*expressions: Json, at: str = "input", table: str = "filter") -> Json:
    return {"rule": {"family": "inet", "table": table, "chain": at, "expr": list(expressions)}}


def iif(name: object, op: str = "==") -> Json:
    return {"match": {"op": op, "left": {"meta": {"key": "iifname"}}, "right": name}}


def oif(name: object) -> Json:
    return {"match": {"op": "==", "left": {"meta": {"key": "oifname"}}, "right": name}}


def saddr(what: object, op: str = "==") -> Json:
    return {"match": {"op": op, "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": what}}


def bogons(element: object) -> Json:
    return {"set": {"family": "inet", "table": "filter", "name": "bogons", "elem": ["192.0.2.1", element]}}


CGNAT = {"prefix": {"addr": "100.64.0.0", "len": 10}}
LAN = {"prefix": {"addr": "192.0.2.0", "len": 24}}


ACCEPT, DROP = {"accept": None}, {"drop": None}


@pytest.mark.parametrize(
    ("objects", "why"),
    [
        ([chain()], ""),
        ([chain(policy="drop")], "policy drop"),
        ([chain(policy="drop"), rule(iif("eth0"), ACCEPT)], "policy drop"),
        ([chain(policy="drop"), rule(iif("tsd0"), ACCEPT)], ""),
        ([chain(policy="drop"), rule(iif("tsd*"), ACCEPT)], ""),
        ([chain(policy="drop"), rule(iif({"set": ["lo", "tsd0"]}), ACCEPT)], ""),
        ([chain(), rule(DROP)], "a drop of everything"),
        ([chain(), rule({"counter": None}, {"reject": {"type": "icmp"}})], "a reject of everything"),
        ([chain(), rule(iif("eth0"), DROP)], ""),
        ([chain(), rule({"xt": None}, DROP)], ""),
        (
            [chain(policy="drop"), chain("z", ""), rule({"jump": {"target": "z"}}), rule(iif("tsd0"), ACCEPT, at="z")],
            "",
        ),
        (
            [chain(policy="drop"), chain("z", ""), rule(iif("tsd0"), {"jump": {"target": "z"}}), rule(ACCEPT, at="z")],
            "",
        ),
        (
            [
                chain(policy="drop"),
                chain("z", ""),
                rule({"goto": {"target": "z"}}),
                rule({"jump": {"target": "z"}}, at="z"),
            ],
            "policy drop",
        ),
        ([chain(policy="drop", hook="output")], "policy drop"),
        ([chain(policy="drop", hook="output"), rule(oif("tsd0"), ACCEPT)], ""),
        ([chain(policy="drop", hook="output"), rule(iif("tsd0"), ACCEPT)], "policy drop"),
        ([chain(hook="postrouting"), rule(oif("tsd0"), DROP)], "a drop of what goes out on tsd0"),
        ([chain(hook="prerouting"), rule(iif("tsd0"), DROP)], "a drop of what comes in on tsd0"),
        ([chain(), rule(iif("tsd0"), ACCEPT), rule(DROP)], ""),
        ([chain(), rule(DROP), rule(iif("tsd0"), ACCEPT)], "a drop of everything"),
        ([chain(), rule(iif("tsd0", "!="), DROP)], ""),
        ([chain(), rule(iif("lo", "!="), DROP)], "a drop of what comes in on tsd0"),
        ([chain(), rule(saddr(CGNAT), DROP)], "a drop of 100.64.0.0/10"),
        ([chain(), rule(saddr({"set": ["192.0.2.0", CGNAT]}), {"counter": None}, DROP)], "a drop of 100.64.0.0/10"),
        ([chain(), bogons(CGNAT), rule(saddr("@bogons"), DROP)], "a drop of 100.64.0.0/10"),
        (
            [chain(), bogons({"elem": {"val": CGNAT, "comment": "x"}}), rule(saddr("@bogons"), DROP)],
            "a drop of 100.64.0.0/10",
        ),
        (
            [chain(), bogons({"range": ["100.64.0.0", "100.127.255.255"]}), rule(saddr("@bogons"), DROP)],
            "a drop of 100.64.0.0/10",
        ),
        ([chain(), rule(saddr("@absent"), DROP)], ""),
        ([chain(), rule(saddr("100.64.0.9"), DROP)], ""),
        ([chain(), rule(saddr(LAN, "!="), DROP)], "a drop of 100.64.0.0/10"),
        ([chain(), rule(saddr(CGNAT, "!="), DROP)], ""),
        ([chain(), rule(iif("eth0"), saddr(CGNAT), DROP)], ""),
        ([chain(), rule(iif("tailscale0*", "!="), saddr(CGNAT), DROP)], "a drop of 100.64.0.0/10"),
        (
            [
                chain(),
                rule(saddr(CGNAT), {"match": {"op": "==", "left": {"payload": {"field": "dport"}}, "right": 22}}, DROP),
            ],
            "",
        ),
        (
            [chain(), chain("z", ""), rule({"jump": {"target": "z"}}), rule(iif("tsd0"), DROP, at="z")],
            "a drop of what comes in on tsd0",
        ),
        ([chain(), chain("z", ""), rule({"xt": None}, {"jump": {"target": "z"}}), rule(DROP, at="z")], ""),
        ([chain(), rule({"return": None}), rule(DROP)], ""),
        ([chain(policy="drop", table="tsd")], ""),
        ([chain(policy="drop", table="tsd3")], ""),
    ],
)
def test_a_drop_is_found_unless_our_device_is_let_in(objects: list[Json], why: str) -> None:
    found = foreign_drops(objects, "tsd0")
    assert [one["Why"] for one in found] == ([why] if why else [])


def test_the_drop_is_named_where_it_is_with_what_puts_it_right() -> None:
    inner = [chain(), chain("z", ""), rule({"jump": {"target": "z"}}), rule(iif("tsd0"), DROP, at="z")]
    (drop,) = foreign_drops(inner, "tsd0")
    assert drop["Chain"] == "inet filter z"
    assert remedy_for(drop, "tsd0") == "nft insert rule inet filter z iifname tsd0 accept"
    (drop,) = foreign_drops([chain("out", "output", "drop")], "tsd0")
    assert remedy_for(drop, "tsd0") == "nft insert rule inet filter out oifname tsd0 accept"


def test_our_rules_are_known_in_both_backends() -> None:
    assert not has_our_rules([rule(ACCEPT)], "tsd")
    assert has_our_rules([rule(ACCEPT, table="tsd")], "tsd")
    assert has_our_rules([rule(ACCEPT, at="tsd-input")], "tsd")


def test_facts_without_nft_or_netlink_say_what_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise HullError("read the firewall", "nft is not installed", "install nftables")

    monkeypatch.setattr(checks, "missing_routing", lambda *_: ["the IPv4 rule 5370"])
    monkeypatch.setattr(checks, "detours", lambda *_: [])
    config = RouterConfig(local_addresses=(ip_network("100.64.0.1/32"),), subnet_routes=(ip_network("10.1.0.0/16"),))
    facts = host_facts(HostNames("tsd0"), config, refuse)
    assert facts["Missing"] == ["the IPv4 rule 5370"] and "nft is not installed" in facts["Unread"][0]
    facts = host_facts(HostNames("tsd0"), config, lambda: json.dumps({"nftables": [chain()]}))
    assert facts["Missing"][-1] == "the firewall rules of tsd" and facts["Unread"] == []
    assert host_facts(HostNames("tsd0"), RouterConfig(), refuse)["Missing"] == []
