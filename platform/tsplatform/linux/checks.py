"""What `tsctl doctor` asks of a Linux host: our rules, routes and firewall as they are, beside what they should be.

Read over sockets of its own, so that it may run in any thread, and nothing is changed. These are facts; what they mean
to people is said by tsctl.doctor.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from ipaddress import ip_address, ip_network
from typing import Any

from tsd.base.addr import IPAddress
from tsd.base.errors import HullError
from tsd.hull import RouterConfig
from tsplatform.linux.hostnames import BYPASS_MARK, SLOTS, HostNames
from tsplatform.linux.netfilter.foreign import foreign_drops
from tsplatform.linux.netfilter.remedy import remedy_for
from tsplatform.linux.programs import environment
from tsplatform.linux.router import ipv6_trouble_of, present_rules, rules_of
from tsplatform.linux.rtnetlink import RtNetlink, Rule

Json = dict[str, Any]

SHOWN = 8
"""At most so many of a kind are named."""
_OFF = 0
_NFT_LIMIT_S, _IP_LIMIT_S = 20.0, 5.0
_AFTER_OURS = 6400
"""The rules of all slots lie before it, also those of exit nodes."""
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
        "Detours": [],
        "ForeignDrops": [],
        "Unread": [],
    }
    if not config.local_addresses:
        return facts
    trouble = ipv6_trouble_of(names.device)
    facts["IPv6OffBecause"] = trouble
    versions = (4,) if trouble else (4, 6)
    try:
        facts["Missing"] += missing_routing(names, config, versions)
        facts["Detours"] += detours(names, config, versions)
    except HullError as err:
        facts["Unread"].append(str(err))
    try:
        rules = json.loads(ruleset())["nftables"]
    except (HullError, ValueError, KeyError) as err:
        facts["Unread"].append(str(err))
        return facts
    if config.netfilter_mode != _OFF and not has_our_rules(rules, names.nft_table):
        facts["Missing"].append("the firewall rules of tsd")
    drops = foreign_drops(rules, names.device)[:SHOWN]
    facts["ForeignDrops"] = [drop | {"Fix": remedy_for(drop, names.device)} for drop in drops]
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


def detours(names: HostNames, config: RouterConfig, versions: tuple[int, ...]) -> list[Json]:
    """Tailnet addresses that the kernel would send elsewhere, and the rules of others that it asks before ours.

    Asked by look-ups, as each packet would make them; nothing is sent. Raises `HullError`.
    """
    kernel = RtNetlink()
    found: list[Json] = []
    try:
        index = kernel.index_of(names.device)
        lan = [ip_network((ip, length), strict=False) for number, ip, length in kernel.addresses() if number != index]
        for version in versions:
            earlier = [rule for rule in kernel.rules(version, 1, _AFTER_OURS) if not _is_ours(rule)]
            for ip in _samples(config, version):
                if any(ip in network for network in lan):
                    continue
                way = kernel.way(ip)
                if way.oif != index:
                    near = [rule for rule in earlier if rule.table == way.table or not way.oif]
                    rules = [_move(version, rule.priority) for rule in near]
                    found.append({"To": str(ip), "By": way.device, "Rules": rules[:SHOWN]})
                    break  # the same rule most likely catches the others too
    finally:
        kernel.close()
    return found


def _is_ours(rule: Rule) -> bool:
    """Of any daemon of this kind on the host."""
    slots = [HostNames("", slot) for slot in range(SLOTS)]
    return rule.mark == BYPASS_MARK or rule.table in {table for one in slots for table in (one.table, one.exit_table)}


def in_words(found: list[Json], device: str) -> str:
    """For health; only what a rule of another program is to blame for."""
    to_blame = [one for one in found if one["Rules"]]
    if not to_blame:
        return ""
    way = f"by {to_blame[0]['By']}" if to_blame[0]["By"] else "nowhere"
    return f"packets for {to_blame[0]['To']} go {way} instead of through {device}: {to_blame[0]['Rules'][0]}"


def _move(version: int, priority: int) -> str:
    """A command line that has a rule asked after ours, and does what it did else."""
    delete = f"ip -{version} rule del pref {priority}"
    try:
        words = ["ip", f"-{version}", "rule", "show", "pref", str(priority)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_IP_LIMIT_S, check=True, env=environment())
    except (OSError, subprocess.SubprocessError):
        return delete
    shown = done.stdout.strip().partition("\t")[2].strip()
    if not shown or "\n" in shown:
        return delete
    return f"{delete} && ip -{version} rule add pref {_AFTER_OURS + priority % 100} {shown}"


_WORLD: dict[int, IPAddress] = {4: ip_address("192.0.2.1"), 6: ip_address("2001:db8::1")}


def _samples(config: RouterConfig, version: int) -> list[IPAddress]:
    """The services, some peers, some networks, and the world behind an exit node."""
    routes = [p for p in config.routes if p.version == version]
    single = [p.network_address for p in routes if p.prefixlen == p.max_prefixlen]
    wide = [p.network_address + 1 for p in routes if 0 < p.prefixlen < p.max_prefixlen]
    world = [_WORLD[version]] if any(not p.prefixlen for p in routes) else []
    return [*single[:3], *wide[:SHOWN], *world]


def has_our_rules(objects: Iterable[Json], table: str) -> bool:
    """Any rule in our table, or in a chain of ours in another one."""
    rules = [item["rule"] for item in objects if isinstance(item.get("rule"), dict)]
    return any(rule.get("table") == table or str(rule.get("chain")).startswith(_OUR_CHAINS) for rule in rules)
