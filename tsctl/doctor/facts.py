"""What doctor knows before it judges: plain records, filled by box, daemon and probes, made up by tests.

An empty default means "not looked at"; verdicts skip what was not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ABSENT, REFUSED, DENIED, SILENT, FOREIGN = "absent", "refused", "denied", "silent", "foreign"
"""Why no daemon answers: no socket, nobody listens, no permission, no answer in time, not the LocalAPI."""


USUAL_MTU_BYTES = 1280


@dataclass
class DaemonFacts:
    """What answers on the socket, and what it says."""

    socket: str = ""
    trouble: str = ""
    trouble_text: str = ""
    pid: int = 0
    is_tsd: bool = False
    client_version: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    prefs: dict[str, Any] = field(default_factory=dict)
    warnings: dict[str, dict[str, Any]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    """The daemon's own facts (debug action `doctor`); empty from tailscaled and for callers without write access."""
    missing_before: list[str] = field(default_factory=list)
    """What was missing at a first look, when a second one was needed."""

    @property
    def answers(self) -> bool:
        return not self.trouble

    @property
    def state(self) -> str:
        return str(self.status.get("BackendState") or "")

    @property
    def hull(self) -> dict[str, Any]:
        found = self.report.get("Hull")
        return found if isinstance(found, dict) else {}

    @property
    def mtu_bytes(self) -> int:
        """The largest packet of the tailnet here."""
        found = self.hull.get("MtuBytes")
        return found if isinstance(found, int) and found > 0 else USUAL_MTU_BYTES

    @property
    def has_device(self) -> bool:
        return self.status.get("TUN") is True


@dataclass
class Process:
    """A running daemon."""

    pid: int
    name: str
    socket: str = ""
    is_here: bool = True
    """In our network namespace; False also when that cannot be seen, as for people who are not root."""


@dataclass
class BoxFacts:
    """This machine, in the network namespace of the daemon where that is ours too."""

    is_linux: bool = True
    is_root: bool = True
    is_same_network: bool = True
    """The daemon lives in our network namespace."""
    has_tun: bool | None = None
    can_net_admin: bool | None = None
    """The daemon; without one, this process when it is root."""
    processes: list[Process] = field(default_factory=list)
    sysctl: dict[str, str] = field(default_factory=dict)
    """By the name below /proc/sys; what cannot be read is not there."""
    mtu_bytes: dict[str, int] = field(default_factory=dict)
    networks: list[tuple[str, str]] = field(default_factory=list)
    """(prefix, interface) that the host itself is in, the daemon's own device left out."""
    default_interfaces: list[str] = field(default_factory=list)
    legacy_drops: list[tuple[str, str]] = field(default_factory=list)
    """Chains of iptables-legacy that drop the tailnet, and why."""
    nameservers: list[str] = field(default_factory=list)
    resolver_owner: str = ""


@dataclass
class NameFacts:
    """What the host's resolver says about our own name."""

    name: str = ""
    addresses: list[str] = field(default_factory=list)
    error: str = ""
    service_trouble: str = ""
    """Why tsd's own resolver gave no answer when it was asked directly."""


@dataclass
class Reached:
    """How far a connection came: dns, proxy, tcp, tls, http are layers that failed; ok."""

    stage: str = ""
    reason: str = ""

    @property
    def is_ok(self) -> bool:
        return self.stage == "ok"


@dataclass
class ControlFacts:
    url: str = ""
    reached: Reached = field(default_factory=Reached)
    proxy: str = ""
    clock_offset_s: float | None = None
    """Our clock minus the server's."""
    certificate: str = ""
    """Why the certificate does not count: not-yet-valid, expired, unknown-issuer, other-name."""


@dataclass
class RelayFacts:
    """Relays of the map by region code, and what STUN says."""

    home: str = ""
    reached: dict[str, Reached] = field(default_factory=dict)
    stun_targets: int = 0
    stun_answers: int = 0
    mapping_varies: bool | None = None
    public_addresses: list[str] = field(default_factory=list)


@dataclass
class PathFacts:
    """A direct path, asked with a small and with a full-sized packet."""

    peer: str
    endpoint: str
    small_ok: bool
    full_ok: bool


@dataclass
class Facts:
    daemon: DaemonFacts = field(default_factory=DaemonFacts)
    box: BoxFacts = field(default_factory=BoxFacts)
    name: NameFacts | None = None
    control: ControlFacts | None = None
    relays: RelayFacts | None = None
    paths: list[PathFacts] | None = None
    now_s: float = 0.0
