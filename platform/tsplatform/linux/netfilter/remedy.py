"""What an admin does about a rule of another program that drops what comes through our interface."""

from __future__ import annotations

from typing import Any


def remedy_for(drop: dict[str, Any], device: str) -> str:
    """`drop`: Chain ("family table name") and Hook, as `tsplatform.linux.checks.foreign_drops` gives them."""
    family, table, chain = str(drop["Chain"]).split(" ", 2)
    if table == "firewalld":
        add = f"firewall-cmd --permanent --zone=trusted --add-interface={device}"
        return f"{add} && firewall-cmd --reload"
    if family in ("ip", "ip6") and table == "filter":
        return "tsctl set --netfilter-backend=iptables puts our rules before it"
    ways = ("iifname", "oifname") if drop["Hook"] == "forward" else ("iifname",)
    return " && ".join(f"nft insert rule {family} {table} {chain} {way} {device} accept" for way in ways)
