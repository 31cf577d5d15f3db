"""Which firewall rules we want, written once; `nft` and `iptables` render them.

Facts and traps: tailscale: util/linuxfw. Chains of our own hold the rules; in mode "on" the hooks of the host lead to
them, in mode "nodivert" the admin wires them, in mode "off" there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tsd.base.addr import CGNAT
from tsplatform.linux.hostnames import BYPASS_MARK, SUBNET_MARK, HostNames

OFF, NODIVERT, ON = 0, 1, 2

Chain = Literal["input", "forward", "postrouting", "prerouting", "output"]
Verdict = Literal["accept", "drop", "return", "masquerade", "mark", "clamp", "save", "restore"]

FILTER_CHAINS: tuple[Chain, ...] = ("input", "forward", "postrouting")
MARK_CHAINS: tuple[Chain, ...] = ("prerouting", "output")
"""Only in mode "on": without a hook they would mean nothing."""


@dataclass(frozen=True, slots=True)
class FirewallWishes:
    """What the rules depend on. Equal wishes give equal rules."""

    mode: int = OFF
    masquerade: bool = False
    is_stateful: bool = False
    drops_strangers: bool = False
    """Drop new packets from 100.64.0.0/10 that do not come through the tunnel: only where no other interface has such
    addresses (a provider's network, another overlay)."""
    udp_ports: tuple[int, ...] = ()
    """Where our peers' packets arrive."""
    kind: str = ""
    """The backend that was asked for, "" for the one that fits."""


class Netfilter(Protocol):
    """Raises `HullError`."""

    @property
    def backend(self) -> str:
        """Which one is at work: nftables, or a flavour of iptables; "" before the first `apply`."""

    @property
    def trouble(self) -> str:
        """What of the rules is missing on this host, and why."""

    def apply(self, wishes: FirewallWishes) -> bool:
        """Make it so; also when somebody changed our rules meanwhile. Whether rules had to be put back."""

    def remove(self) -> None: ...

    def reconsider(self) -> None:
        """The host's other rules changed: at the next `apply`, is the backend still the right one, and are we first?"""

    def hints(self) -> list[str]:
        """The lines that wire our chains in mode nodivert."""


@dataclass(frozen=True, slots=True)
class Rule:
    """All conditions must hold."""

    chain: Chain
    verdict: Verdict
    in_device: str = ""
    out_device: str = ""
    source: str = ""
    """An IPv4 prefix."""
    udp: tuple[int, int] = (0, 0)
    """Source and destination port; 0 for any."""
    mark: int = 0
    connection_mark: int = 0
    is_new: bool = False
    """Not part of a connection that is known."""
    is_syn: bool = False

    @property
    def is_v4_only(self) -> bool:
        return bool(self.source)


def rules_of(names: HostNames, wishes: FirewallWishes) -> list[Rule]:
    """In the order in which they are asked."""
    rules = [*_input(names, wishes), *_forward(names, wishes)]
    if wishes.masquerade:
        rules.append(Rule("postrouting", "masquerade", mark=SUBNET_MARK))
    if wishes.mode == ON:
        # Answers to our own packets carry our mark again, so that a strict rp_filter finds the way they came.
        rules.append(Rule("output", "save", mark=BYPASS_MARK))
        rules.append(Rule("prerouting", "restore", connection_mark=BYPASS_MARK))
    return rules


def _input(names: HostNames, wishes: FirewallWishes) -> list[Rule]:
    rules = [Rule("input", "accept", in_device=names.device)]
    rules += [Rule("input", "accept", udp=(0, port)) for port in wishes.udp_ports]
    if wishes.drops_strangers:
        rules.append(Rule("input", "return", in_device="lo"))
        rules.append(Rule("input", "return", udp=(67, 68)))
        rules.append(Rule("input", "drop", source=str(CGNAT), is_new=True))
    return rules


def _forward(names: HostNames, wishes: FirewallWishes) -> list[Rule]:
    device = names.device
    rules = [
        Rule("forward", "clamp", in_device=device, is_syn=True),
        Rule("forward", "clamp", out_device=device, is_syn=True),
        Rule("forward", "mark", in_device=device),
        Rule("forward", "accept", in_device=device),
    ]
    if wishes.drops_strangers:
        rules.append(Rule("forward", "drop", out_device=device, source=str(CGNAT), is_new=True))
    if wishes.is_stateful:
        rules.append(Rule("forward", "drop", out_device=device, is_new=True))
    return [*rules, Rule("forward", "accept", out_device=device)]


def mode_text(mode: int) -> str:
    return {ON: "on", NODIVERT: "nodivert"}.get(mode, "off")
