"""Which hull a `--tun` value leads to on this machine.

The list is tried in order, as in the field. A device that cannot be made is not a reason to stop: restricted
containers and ordinary users get userspace networking, with one line that says why.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

log = logging.getLogger(__name__)

USERSPACE_TUN = "userspace-networking"


@dataclass(frozen=True, slots=True)
class Choice:
    """`kind` is "userspace" or "linux"; `device` is the interface to make; `reason`: why not a device."""

    kind: str
    device: str = ""
    reason: str = ""


def choose_hull(tun: str, has_kernel_hull: bool = False, tun_node: str = "/dev/net/tun") -> Choice:
    """First entry of the comma list that works here; userspace networking when none does."""
    reasons: list[str] = []
    for device in (part.strip() for part in tun.split(",")):
        if device == USERSPACE_TUN:
            return Choice("userspace", reason="; ".join(reasons))
        reason = _why_not(device, has_kernel_hull, tun_node)
        if not reason:
            return Choice("linux", device)
        reasons.append(f"{device}: {reason}")
    why = "; ".join(reasons)
    log.warning("userspace networking is used instead of a network device (%s)", why)
    return Choice("userspace", reason=why)


def _why_not(device: str, has_kernel_hull: bool, tun_node: str) -> str:
    if not device or device.startswith("tap:"):
        return "not a TUN device name"
    if not has_kernel_hull:
        return "this version makes no network devices"
    if not os.path.exists(tun_node):
        return f"{tun_node} does not exist"
    if not os.access(tun_node, os.R_OK | os.W_OK):
        return f"no permission for {tun_node}"
    return "" if _has_net_admin() else "the capability NET_ADMIN is missing"


def _has_net_admin() -> bool:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("CapEff:"):
                    return bool(int(line.split()[1], 16) & (1 << 12))
    except OSError:
        pass
    return os.geteuid() == 0
