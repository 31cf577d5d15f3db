"""NATs and firewalls of the simulated internet: mapping and filtering after RFC 4787, time limits, hairpins, layers.

Mapping: "none" (a firewall), EIM, ADM, APDM. Filtering: EIF, ADF, APDF. A NAT may stand behind another one (`outer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from tsd.base.addr import AddrPort, IPAddress

CLASSES = {
    "P": ("", ""),
    "A": ("EIM", "ADF"),
    "E": ("EIM", "APDF"),
    "F": ("none", "APDF"),
    "H": ("APDM", "APDF"),
    "X": ("APDM", "EIF"),
}
"""Classes of the protocol notes: P has no NAT; F is a firewall on a public address. B is not a NAT but a `Link`."""


@dataclass(slots=True)
class _Mapping:
    inner: AddrPort
    last_used: float
    sent_to: dict[Any, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Nat:
    """One external address. `idle_s` without outbound traffic ends a mapping; `epoch` counts reboots."""

    external: IPAddress
    mapping: str = "EIM"
    filtering: str = "APDF"
    hairpins: bool = False
    idle_s: float = 300.0
    keeps_ports: bool = False
    outer: Nat | None = None
    inside: dict[IPAddress, Any] = field(default_factory=dict)
    epoch: int = 0
    _by_key: dict[Any, int] = field(default_factory=dict)
    _by_port: dict[int, _Mapping] = field(default_factory=dict)
    _next_port: int = 50000

    @classmethod
    def of(cls, kind: str, external: str, **more: Any) -> Nat:
        mapping, filtering = CLASSES[kind]
        return cls(ip_address(external), mapping, filtering, **more)

    def outbound(self, source: AddrPort, to: AddrPort, now: float) -> AddrPort:
        """The source as the world sees it; opens or refreshes the mapping."""
        key: Any = {"none": source, "EIM": source, "ADM": (source, to.ip), "APDM": (source, to)}[self.mapping]
        port = self._by_key.get(key)
        found = self._by_port.get(port) if port is not None else None
        if port is None or found is None or now - found.last_used > self.idle_s:
            port = self._new_port(source.port)
            self._by_key[key] = port
            found = self._by_port[port] = _Mapping(source, now)
        found.last_used = now
        found.sent_to[to] = found.sent_to[to.ip] = None
        return AddrPort(self.external, port)

    def _new_port(self, wanted: int) -> int:
        if self.mapping == "none" or (self.keeps_ports and wanted not in self._by_port):
            return wanted
        self._next_port += 1
        return self._next_port

    def inbound(self, source: AddrPort, port: int, now: float) -> AddrPort | None:
        """Where a datagram for one of our ports goes, None when it is filtered."""
        found = self._by_port.get(port)
        if found is None or now - found.last_used > self.idle_s:
            return None
        if self.filtering == "EIF":
            return found.inner
        return found.inner if (source if self.filtering == "APDF" else source.ip) in found.sent_to else None

    def reboot(self, external: str = "") -> None:
        """Lose every mapping; perhaps come back with another address (the net must be told: `SimNet.renumber`)."""
        self._by_key.clear()
        self._by_port.clear()
        self._next_port += 1000
        self.epoch += 1
        if external:
            self.external = ip_address(external)
