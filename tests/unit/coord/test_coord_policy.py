"""Policy: HuJSON with positions, name checks, tests at load, filters and visibility."""

from __future__ import annotations

import json
from ipaddress import ip_address, ip_network

import pytest

from tsd.coord.policy import hujson
from tsd.coord.policy.compile import CompiledPolicy, allows
from tsd.coord.policy.hujson import PolicyError
from tsd.coord.policy.load import load
from tsd.coord.policy.model import Subject, UserRef
from tsd.coord.state.visibility import Visibility

FULL = """
// A tailnet with two groups.
{
  "groups": {"group:dev": ["alice@", "bob@example.com"], "group:ops": ["carol@"]},
  "hosts": {"db": "10.0.0.5", "lan": "10.0.0.0/24"},
  "tagOwners": {"tag:web": ["group:dev"], "tag:ci": ["tag:web", "autogroup:admin"]},
  "autoApprovers": {"routes": {"10.0.0.0/8": ["tag:web"]}, "exitNode": ["group:ops"]},
  "acls": [
    {"action": "accept", "src": ["group:dev"], "dst": ["tag:web:80,443", "db:5432", "lan:8000-8010"]},
    {"action": "accept", "proto": "icmp", "src": ["*"], "dst": ["*:*"]}, /* pings for all */
    {"action": "accept", "src": ["autogroup:member"], "dst": ["autogroup:self:*"]},
  ],
  "grants": [{"src": ["tag:web"], "dst": ["tag:ci"], "ip": ["tcp:22", "udp:53"],
              "app": {"example.com/cap": [{"x": 1}]}}],
  "ssh": [{"action": "accept", "src": ["group:dev"], "dst": ["tag:web"], "users": ["autogroup:nonroot", "root"]}],
  "nodeAttrs": [{"target": ["tag:web"], "attr": ["funnel"]}],
  "tests": [
    {"src": "alice@", "accept": ["tag:web:80", "db:5432", "10.0.0.9:8005"], "deny": ["tag:web:22", "tag:ci:22"]},
    {"src": "tag:web", "accept": ["tag:ci:22"], "deny": ["tag:ci:23"]},
    {"src": "tag:web", "proto": "udp", "accept": ["tag:ci:53"]},
  ],
}
"""

ALICE = UserRef("alice@tsd.internal", "alice")


def node(
    node_id: int, user: UserRef | None = None, tags: tuple[str, ...] = (), routes: tuple[str, ...] = ()
) -> Subject:
    return Subject(node_id, user, tags, (ip_address(f"100.64.0.{node_id}"),), tuple(map(ip_network, routes)))


def test_full_policy_loads_and_its_tests_pass() -> None:
    policy = load(FULL)
    assert len(policy.rules) == 3 + 2 + 1
    assert policy.groups["group:dev"] == ("alice@", "bob@example.com")


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("", 1, 1, "text ends"),
        ("{\n  // only a comment\n", 3, 1, "never closed"),
        ('{"a": 1 /* open', 1, 9, "comment is never closed"),
        ('{"acls": [,]}', 1, 11, "unexpected ','"),
        ('{"acls": [],,}', 1, 13, "double quotes"),
        ("{acls: []}", 1, 2, "double quotes"),
        ("{'acls': []}", 1, 2, "double quotes"),
        ('{"acls": NaN}', 1, 10, "unexpected 'NaN'"),
        ('{"acls": +1}', 1, 10, "unexpected '+'"),
        ('{"acls": 01}', 1, 10, "not a number"),
        ('{"acls": "a\nb"}', 1, 10, "string"),
        ('{"acls": [], "ACLs": []}', 1, 14, "twice"),
        ('{"acls": [], "acls": []}', 1, 14, "twice"),
        ('{"acl": []}', 1, 2, "unknown section 'acl'"),
        ('{"acls": {}}', 1, 10, "must be a list"),
        ('{"acls": [{"action": "deny"}]}', 1, 22, "action must be"),
        ('{"acls": [\n  {"action": "accept", "src": ["*"]}]}', 2, 3, "needs 'dst'"),
        ('{"acls": [{"action": "accept", "src": ["*"], "dst": ["*"]}]}', 1, 54, "needs ports"),
        ('{"acls": [{"action": "accept", "src": ["*"], "dst": ["*:70000"]}]}', 1, 54, "not a port"),
        ('{"acls": [{"action": "accept", "src": ["*"], "dst": ["*:9-1"]}]}', 1, 54, "not a port"),
        ('{"acls": [{"action": "accept", "src": ["group:x"], "dst": ["*:*"]}]}', 1, 40, "not in groups"),
        ('{"acls": [{"action": "accept", "src": ["tag:x"], "dst": ["*:*"]}]}', 1, 40, "not in tagOwners"),
        ('{"acls": [{"action": "accept", "src": ["bob"], "dst": ["*:*"]}]}', 1, 40, "'bob' is not"),
        ('{"acls": [{"action": "accept", "src": ["10.0.0.1/8"], "dst": ["*:*"]}]}', 1, 40, "host bits"),
        ('{"acls": [{"action": "accept", "src": ["autogroup:self"], "dst": ["*:*"]}]}', 1, 40, "destination"),
        ('{"acls": [{"action": "accept", "proto": "icmp", "src": ["*"], "dst": ["*:22"]}]}', 1, 71, "no ports"),
        ('{"acls": [{"action": "accept", "proto": "carrier", "src": ["*"], "dst": ["*:22"]}]}', 1, 41, "carrier"),
        ('{"acls": [{"action": "accept", "sources": ["*"]}]}', 1, 32, "unknown key 'sources'"),
        ('{"groups": {"dev": []}}', 1, 13, "must look like"),
        ('{"groups": {"group:a": ["group:b"]}}', 1, 25, "must be a user"),
        ('{"hosts": {"a": "nowhere"}}', 1, 17, "not an address"),
        ('{"tagOwners": {"tag:1": []}}', 1, 16, "must look like"),
        ('{"tagOwners": {"tag:a": ["*"]}}', 1, 26, "takes users"),
        ('{"grants": [{"src": ["*"], "dst": ["*"]}]}', 1, 13, "needs 'ip' or 'app'"),
        ('{"acls": [],\n "tests": [{"src": "a@", "accept": ["10.0.0.1:1"]}]}', 2, 37, "test failed"),
    ],
)
def test_errors_name_line_and_column(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load(text)
    assert (caught.value.line, caught.value.column) == (line, column), str(caught.value)
    assert words in caught.value.reason


def test_hujson_agrees_with_json_and_keeps_offsets() -> None:
    text = '{"a": [1, -2.5e3, true, null, "\\u00e9\\n"], "b": {}}'
    assert hujson.parse(text).plain() == json.loads(text)
    relaxed = text.replace("]", ",] // c\n").replace("{}", "{/* x */}")
    parsed = hujson.parse(relaxed)
    assert parsed.plain() == json.loads(text)
    assert relaxed[parsed.value["b"].offset] == "{"
    assert hujson.parse("\ufeff{}").plain() == {}


def test_deep_nesting_is_refused_not_a_crash() -> None:
    with pytest.raises(PolicyError, match="nested deeper"):
        hujson.parse("[" * 100000)


def test_no_rules_means_all_allowed_but_empty_rules_mean_none() -> None:
    one, other = node(1, ALICE), node(2, UserRef("bob@x"))
    assert allows(load("{}"), one, other, 6, 22)
    assert not allows(load('{"acls": []}'), one, other, 6, 22)


def visibility(text: str, *subjects: Subject) -> Visibility:
    found = Visibility(CompiledPolicy(load(text)))
    for subject in subjects:
        found.put(subject)
    return found


def test_filter_of_a_target_lists_its_sources_and_ports() -> None:
    view = visibility(FULL, node(1, ALICE), node(2, tags=("tag:web",)), node(3, UserRef("eve@x", "eve")))
    rules = [rule for chunk in view.filters(2).values() for rule in chunk]
    web = next(rule for rule in rules if rule["SrcIPs"] == ["100.64.0.1"])
    assert web["DstPorts"] == [
        {"IP": "100.64.0.2", "Ports": {"First": 80, "Last": 80}},
        {"IP": "100.64.0.2", "Ports": {"First": 443, "Last": 443}},
    ]
    ping = next(rule for rule in rules if rule["SrcIPs"] == ["*"])
    assert ping["IPProto"] == [1, 58]


def test_a_router_gets_the_part_of_a_rule_behind_it() -> None:
    view = visibility(FULL, node(1, ALICE), node(2, routes=("10.0.0.0/25",)))
    ports = [port for chunk in view.filters(2).values() for rule in chunk for port in rule["DstPorts"]]
    assert {port["IP"] for port in ports} == {"10.0.0.5", "10.0.0.0/25", "*"}
    assert view.usable_routes(1, 2) == (ip_network("10.0.0.0/25"),)


def test_a_route_nobody_may_use_is_not_shown() -> None:
    text = '{"acls": [{"action": "accept", "src": ["alice@"], "dst": ["100.64.0.2:22", "10.1.0.0/16:22"]}]}'
    view = visibility(text, node(1, ALICE), node(2, routes=("10.1.2.0/24", "10.9.0.0/24")))
    assert view.usable_routes(1, 2) == (ip_network("10.1.2.0/24"),)


def test_capability_grant_has_prefixes_and_opens_no_port() -> None:
    view = visibility(FULL, node(1, tags=("tag:web",)), node(2, tags=("tag:ci",)))
    rules = [rule for chunk in view.filters(2).values() for rule in chunk]
    granted = next(rule for rule in rules if "CapGrant" in rule)
    assert granted["CapGrant"] == [{"Dsts": ["100.64.0.2"], "CapMap": {"example.com/cap": [{"x": 1}]}}]
    assert "DstPorts" not in granted


def test_self_rule_joins_devices_of_one_user_only() -> None:
    text = '{"acls": [{"action": "accept", "src": ["autogroup:member"], "dst": ["autogroup:self:*"]}]}'
    bob = UserRef("bob@x", "bob")
    view = visibility(text, node(1, ALICE), node(2, ALICE), node(3, bob), node(4, ALICE, tags=("tag:a",)))
    assert view.sees(1, 2) and not view.sees(1, 3) and not view.sees(1, 4)
    sources = [ip for chunk in view.filters(1).values() for rule in chunk for ip in rule["SrcIPs"]]
    assert sources == ["100.64.0.1", "100.64.0.2"]


def test_internet_reaches_exit_nodes_only() -> None:
    text = '{"acls": [{"action": "accept", "src": ["*"], "dst": ["autogroup:internet:*"]}]}'
    view = visibility(text, node(1, ALICE), node(2, routes=("0.0.0.0/0", "::/0")), node(3, ALICE))
    assert view.sees(1, 2) and not view.sees(1, 3)
    targets = [port["IP"] for chunk in view.filters(2).values() for rule in chunk for port in rule["DstPorts"]]
    assert "10.0.0.0/8" not in targets and "8.0.0.0/7" in targets


def test_approvers_and_tag_owners() -> None:
    compiled = CompiledPolicy(load(FULL))
    web, carol = node(1, tags=("tag:web",)), node(2, UserRef("carol@tsd.internal", "carol"))
    assert compiled.approves_route(web, ip_network("10.2.0.0/16"))
    assert not compiled.approves_route(web, ip_network("11.0.0.0/16"))
    assert not compiled.approves_route(web, ip_network("0.0.0.0/0"))
    assert compiled.approves_route(carol, ip_network("::/0"))
    assert compiled.may_tag(node(3, ALICE), "tag:web") and not compiled.may_tag(carol, "tag:web")
    assert compiled.may_tag(web, "tag:ci")
    assert compiled.attributes(web) == {"funnel": []}
