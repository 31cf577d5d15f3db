"""What `tsctl doctor` asks of a Linux host: our rules, routes and firewall as they are, beside what they should be.

Read over sockets of its own, so that it may run in any thread, and nothing is changed. These are facts; what they mean
to people is said by tsctl.doctor. Foreign firewall rules are read from nftables, where iptables-nft lives too.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tsd.base.errors import HullError
from tsd.hull import RouterConfig
from tsplatform.linux.hostnames import BYPASS_MARK, HostNames
from tsplatform.linux.programs import environment
from tsplatform.linux.router import ipv6_trouble_of, present_rules, rules_of
from tsplatform.linux.rtnetlink import RtNetlink

Json = dict[str, Any]

SHOWN = 8
"""At most so many of a kind are named."""
_OFF = 0
_NFT_LIMIT_S = 20.0
_HOOKS = ("input", "forward")
_OUR_CHAINS = "tsd-"


def read_ruleset() -> str:
    """All of nftables as JSON. Raises `HullError`."""
    try:
        words = ["nft", "-j", "list", "ruleset"]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_NFT_LIMIT_S, check=True, env=environment()
        )
    except FileNotFoundError:
        raise HullError("read the firewall", "nft is not installed", "install nftables") from None
    except (OSError, subprocess.SubprocessError) as err:
        raise HullError("read the firewall", str(err)) from None
    return done.stdout


def host_facts(names: HostNames, config: RouterConfig, ruleset: Callable[[], str] = read_ruleset) -> Json:
    """Blocking. What cannot be read is said in `Unread`."""
    facts: Json = {
        "Table": names.table,
        "RulePriority": names.priority,
        "BypassMark": BYPASS_MARK,
        "NetfilterMode": config.netfilter_mode,
        "Wanted": {
            "Addresses": len(config.local_addresses),
            "Routes": len(config.routes),
            "ForwardsFor": [str(prefix) for prefix in config.subnet_routes],
        },
        "Missing": [],
        "ForeignDrops": [],
        "Unread": [],
    }
    if not config.local_addresses:
        return facts
    trouble = ipv6_trouble_of(names.device)
    facts["IPv6OffBecause"] = trouble
    try:
        facts["Missing"] += missing_routing(names, config, (4,) if trouble else (4, 6))
    except HullError as err:
        facts["Unread"].append(str(err))
    try:
        rules = json.loads(ruleset())["nftables"]
    except (HullError, ValueError, KeyError) as err:
        facts["Unread"].append(str(err))
        return facts
    if config.netfilter_mode != _OFF and not has_our_rules(rules, names.nft_table):
        facts["Missing"].append("the firewall rules of tsd")
    facts["ForeignDrops"] = foreign_drops(rules, names.device)[:SHOWN]
    return facts


def missing_routing(names: HostNames, config: RouterConfig, versions: tuple[int, ...]) -> list[str]:
    """Rules, routes and addresses of ours that the kernel does not have. Raises `HullError`."""
    kernel = RtNetlink()
    try:
        index = kernel.index_of(names.device)
        if not index:
            return [f"the interface {names.device}"]
        there = {(ip, length) for _, ip, length in kernel.addresses(index)}
        wanted = [p for p in config.local_addresses if p.version in versions]
        found = [f"the address {p}" for p in wanted if (p.network_address, p.prefixlen) not in there]
        for version in versions:
            rules = present_rules(kernel, version, names)
            wanted_rules = rules_of(version, names, config.uses_exit_node)
            found += [f"the IPv{version} rule {rule.priority}" for rule in wanted_rules if rule not in rules]
            tables = (names.table, names.exit_table)
            routes = {route.prefix for table in tables for route, _ in kernel.routes(version, table)}
            lost = [p for p in config.routes if p.version == version and p not in routes]
            found += [f"the route {p} in table {names.table}" for p in lost[:SHOWN]]
            if len(lost) > SHOWN:
                found.append(f"{len(lost) - SHOWN} more routes in table {names.table}")
    finally:
        kernel.close()
    return found


def has_our_rules(objects: Iterable[Json], table: str) -> bool:
    """Any rule in our table, or in a chain of ours in another one."""
    rules = [item["rule"] for item in objects if isinstance(item.get("rule"), dict)]
    return any(rule.get("table") == table or str(rule.get("chain")).startswith(_OUR_CHAINS) for rule in rules)


def foreign_drops(objects: list[Json], device: str) -> list[Json]:
    """Base chains of others that drop what comes in through (or is forwarded from) our device.

    A chain counts as letting us pass when one of its own rules, or of a chain it jumps to, accepts our device by name;
    chains that only drop certain packets (an address, a port) are the admin's business.
    """
    chains = [item["chain"] for item in objects if isinstance(item.get("chain"), dict)]
    found = []
    for chain in chains:
        if chain.get("hook") not in _HOOKS or _is_ours(chain):
            continue
        rules = list(_rules_of(objects, chain))
        if any(_accepts(objects, rule, device) for rule in rules):
            continue
        why = "policy drop" if chain.get("policy") == "drop" else _final_drop(rules)
        if why:
            named = f"{chain.get('family')} {chain.get('table')} {chain.get('name')}"
            found.append({"Chain": named, "Hook": chain["hook"], "Why": why})
    return found


def _is_ours(chain: Json) -> bool:
    table = str(chain.get("table"))
    return table.startswith("tsd") and (table[3:] == "" or table[3:].isdigit()) and chain.get("family") == "inet"


def _rules_of(objects: Iterable[Json], chain: Json) -> Iterator[Json]:
    place = (chain.get("family"), chain.get("table"), chain.get("name"))
    for item in objects:
        rule = item.get("rule")
        if isinstance(rule, dict) and (rule.get("family"), rule.get("table"), rule.get("chain")) == place:
            yield rule


def _accepts(objects: list[Json], rule: Json, device: str, depth: int = 0) -> bool:
    expressions = [e for e in rule.get("expr") or [] if isinstance(e, dict)]
    names_us = any(_matches_device(e.get("match"), device) for e in expressions)
    if names_us and any("accept" in e for e in expressions):
        return True
    target = next(
        (e[k].get("target") for e in expressions for k in ("jump", "goto") if isinstance(e.get(k), dict)), None
    )
    if target is None or depth > 4:
        return False
    inner = list(_rules_of(objects, {**rule, "name": target}))
    return any(_accepts(objects, one, device, depth + 1) or (names_us and _is_plain_accept(one)) for one in inner)


def _matches_device(match: object, device: str) -> bool:
    if not isinstance(match, dict) or match.get("op") not in ("==", "in") or not isinstance(match.get("left"), dict):
        return False
    if (match["left"].get("meta") or {}).get("key") not in ("iifname", "iif"):
        return False
    right = match.get("right")
    names = right.get("set") if isinstance(right, dict) else right
    many = names if isinstance(names, list) else [names]
    return any(n == device or (isinstance(n, str) and n.endswith("*") and device.startswith(n[:-1])) for n in many)


def _is_plain_accept(rule: Json) -> bool:
    return all("match" not in e for e in rule.get("expr") or []) and any("accept" in e for e in rule.get("expr") or [])


def _final_drop(rules: list[Json]) -> str:
    """A rule without any condition that drops or rejects everything that got so far."""
    for rule in rules:
        expressions = [e for e in rule.get("expr") or [] if isinstance(e, dict)]
        verdict = next((word for e in expressions for word in ("drop", "reject") if word in e), "")
        if verdict and not any(word in e for e in expressions for word in ("match", "xt", "limit", "vmap")):
            return f"a {verdict} of everything"
    return ""
