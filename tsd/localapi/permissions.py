"""Who is calling, and what may they do: peer credentials of a Unix socket (tailscale: `ipn/ipnauth`, `ipn/ipnserver`).

Everybody may read. Writing needs root, the daemon's own user when the daemon is not root, the operator named in the
preferences, or (macOS) a member of the group `admin`. Evaluated per connection; the operator per request.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass

_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
SUDO_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Credentials of the process at the other end; uid -1 when the system does not tell."""

    pid: int = 0
    uid: int = -1
    gid: int = -1

    @property
    def name(self) -> str:
        """The user's name, or digits when there is none."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except (KeyError, OverflowError):
            return str(self.uid)


def caller_of(sock: socket.socket) -> Caller:
    """Read the credentials the kernel noted at connect time."""
    try:
        if sys.platform == "linux":
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return Caller(*struct.unpack("3i", raw))
        raw = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 76)
        return Caller(uid=struct.unpack_from("=II", raw)[1])
    except (OSError, struct.error, AttributeError):
        return Caller()


def has_peer_credentials() -> bool:
    return sys.platform in ("linux", "darwin") or sys.platform.startswith("freebsd")


def uid_of_user(name: str) -> int | None:
    """The uid of a user name or of digits; None when the system does not know it."""
    if not name:
        return None
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return int(name) if name.isascii() and name.isdigit() and len(name) < 11 else None


def may_write(caller: Caller, daemon_uid: int, operator: str) -> bool:
    if not has_peer_credentials():
        return True
    if caller.uid < 0:
        return False
    if caller.uid == 0 or (daemon_uid != 0 and caller.uid == daemon_uid):
        return True
    return is_operator(caller, operator) or _is_local_admin(caller)


def is_operator(caller: Caller, operator: str) -> bool:
    return caller.uid >= 0 and caller.uid == uid_of_user(operator)


def may_fetch_cert(caller: Caller) -> bool:
    """The one user named in TS_PERMIT_CERT_UID may fetch certificates without other rights."""
    return caller.uid >= 0 and caller.uid == uid_of_user(os.environ.get("TS_PERMIT_CERT_UID", ""))


def may_become_root(caller: Caller) -> bool:
    """Whether sudo would let this user run the CLI as root (asked of sudo, at most 3 s). Blocking."""
    command = ["sudo", f"--other-user={caller.name}", "--list", "tailscale"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SUDO_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _is_local_admin(caller: Caller) -> bool:
    if sys.platform != "darwin":
        return False
    try:
        return caller.name in grp.getgrnam("admin").gr_mem
    except KeyError:
        return False
