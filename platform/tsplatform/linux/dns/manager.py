"""What every way of setting up names on a Linux host has in common."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Protocol

from tsd.dns.osconfig import OsDns


class Mode(enum.Enum):
    """Who keeps the host's resolver settings; the values are tailscaled's words for them."""

    DIRECT = "direct"
    RESOLVED = "systemd-resolved"
    NETWORK_MANAGER = "network-manager"
    DEBIAN_RESOLVCONF = "debian-resolvconf"
    OPENRESOLV = "openresolv"


class Found(enum.Enum):
    """What a look at the host showed."""

    FINE = "fine"
    CHANGED = "changed"
    """Somebody else wrote other settings over ours."""


class Manager(Protocol):
    """Methods raise `HullError`. All run in the names thread."""

    mode: Mode
    can_split: bool

    async def set(self, wanted: OsDns) -> None:
        """Idempotent; `wanted` is never empty."""

    async def revert(self) -> None:
        """As before the first `set`; idempotent."""

    async def look(self) -> Found:
        """Compare with what was set."""

    def base_resolvers(self) -> list[str]:
        """Upstreams of the host without us. Called from other threads, and often."""

    def watched(self) -> list[Path]:
        """Files and folders whose changes are worth a look."""

    def rival(self) -> str:
        """Who seems to have written what stands there now; "" when that cannot be told."""
