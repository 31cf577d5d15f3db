"""Everything of a network namespace that a daemon with a TUN might change, as text to compare."""

from __future__ import annotations

import re

from harness.netlab import NetLab

_COMMANDS = {
    "addresses": "ip addr",
    "rules": "ip rule",
    "rules6": "ip -6 rule",
    "routes": "ip route show table all",
    "routes6": "ip -6 route show table all",
    "firewall": "nft list ruleset",
    "resolv.conf": "cat /etc/resolv.conf",
}


def snapshot(lab: NetLab, namespace: str) -> dict[str, str]:
    return {what: lab.run(namespace, *line.split()) for what, line in _COMMANDS.items()}


def is_settled(lab: NetLab, namespace: str) -> bool:
    """Whether duplicate address detection is over, which changes addresses and routes."""
    return "tentative" not in lab.run(namespace, "ip", "addr")


def answered(ping_output: str) -> int:
    """Replies that `ping` counted."""
    found = re.search(r"(\d+) received", ping_output)
    return int(found.group(1)) if found else 0
