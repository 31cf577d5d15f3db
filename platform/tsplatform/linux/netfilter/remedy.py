"""What an admin does about a rule of another program that drops what comes through our interface."""

from __future__ import annotations

from typing import Any

TAILSCALED = "ts-input"
"""A real tailscaled on this host takes every node of another tailnet for forged."""


def remedy_for(drop: dict[str, Any], device: str) -> str:
    """`drop`: Chain ("family table name") and Hook, as `foreign_drops` gives them."""
    family, table, chain = str(drop["Chain"]).split(" ", 2)
    hook = drop["Hook"]
    if table == "firewalld":
        add = f"firewall-cmd --permanent --zone=trusted --add-interface={device}"
        return f"{add} && firewall-cmd --reload"
    if chain == TAILSCALED:
        return "tsctl set --netfilter-backend=auto puts our rules before it"
    if family in ("ip", "ip6") and table == "filter" and hook in ("input", "forward"):
        return "tsctl set --netfilter-backend=iptables puts our rules before it"
    ways = {"forward": ("iifname", "oifname"), "output": ("oifname",), "postrouting": ("oifname",)}
    return " && ".join(
        f"nft insert rule {family} {table} {chain} {way} {device} accept" for way in ways.get(hook, ("iifname",))
    )
