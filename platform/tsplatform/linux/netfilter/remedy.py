"""What an admin does about a rule of another program that drops what comes through our interface."""

from __future__ import annotations

from typing import Any

TAILSCALED = "ts-input"


def drops_of_tailscaled(ruleset: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A real tailscaled on this host takes every node of another tailnet for forged."""
    rules = [item["rule"] for item in ruleset if isinstance(item.get("rule"), dict)]
    dropping = [rule for rule in rules if rule.get("chain") == TAILSCALED and {"drop": None} in rule.get("expr", [])]
    return [
        {"Chain": f"{r['family']} {r['table']} {TAILSCALED}", "Hook": "input", "Why": "a drop of 100.64.0.0/10"}
        for r in dropping
    ]


def remedy_for(drop: dict[str, Any], device: str) -> str:
    """`drop`: Chain ("family table name") and Hook, as `tsplatform.linux.checks.foreign_drops` gives them."""
    family, table, chain = str(drop["Chain"]).split(" ", 2)
    if table == "firewalld":
        add = f"firewall-cmd --permanent --zone=trusted --add-interface={device}"
        return f"{add} && firewall-cmd --reload"
    if chain == TAILSCALED:
        return "tsctl set --netfilter-backend=auto puts our rules before it"
    if family in ("ip", "ip6") and table == "filter":
        return "tsctl set --netfilter-backend=iptables puts our rules before it"
    ways = ("iifname", "oifname") if drop["Hook"] == "forward" else ("iifname",)
    return " && ".join(f"nft insert rule {family} {table} {chain} {way} {device} accept" for way in ways)
