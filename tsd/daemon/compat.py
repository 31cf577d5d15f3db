"""Drop-in for tailscaled: under that name tsd takes its file names, socket, process name and environment.

tailscale: paths/paths.go, cmd/tailscaled/tailscaled.go. Imported before anything heavy: the CLI looks for a process
called `tailscaled` within milliseconds of the start. Under our own name everything has our own names, so that a real
tailscaled can run beside us.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The version of the CLI that the LocalAPI header may name; see tsd.localapi.
COMPAT_NAME = "tailscaled"


@dataclass(frozen=True, slots=True)
class Names:
    """What a daemon of this name calls its things."""

    program: str
    state_file: str
    system_state_folder: str
    system_socket: str
    user_folder: str
    socket_file: str
    tun: str


OURS = Names("tsd", "tsd.state", "/var/lib/tsd", "/run/tsd/tsd.sock", "tsd", "tsd.sock", "tsd0")
TAILSCALED = Names(
    "tailscaled",
    "tailscaled.state",
    "/var/lib/tailscale",
    "/var/run/tailscale/tailscaled.sock",
    "tailscale",
    "tailscaled.sock",
    "tailscale0",
)
_DARWIN_STATE_FOLDER, _DARWIN_SOCKET = "/Library/Tailscale", "/var/run/tailscaled.socket"


def is_compat(argv0: str, env: Mapping[str, str]) -> bool:
    """Started as `tailscaled`, or told to be one by TSD_COMPAT=tailscaled."""
    return os.path.basename(argv0) == COMPAT_NAME or env.get("TSD_COMPAT") == COMPAT_NAME


def names(compat: bool, platform: str = sys.platform) -> Names:
    if not compat:
        return OURS
    if platform != "darwin":
        return TAILSCALED
    return Names(
        "tailscaled", "tailscaled.state", _DARWIN_STATE_FOLDER, _DARWIN_SOCKET, "tailscale", "tailscaled.sock", "utun"
    )


def set_process_name(name: str) -> None:
    """Linux: the name in /proc/self/comm and `ps`; elsewhere nothing."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(name[:15])


def early(argv: Sequence[str]) -> bool:
    """First thing in `main`: name the process. Whether this is a drop-in run."""
    compat = is_compat(argv[0] if argv else "", os.environ)
    set_process_name(names(compat).program)
    return compat
