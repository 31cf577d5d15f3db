"""What we call our things on a Linux host: interface, routing table, rule priorities, packet marks, nft table.

Own names everywhere, so that a real tailscaled (table 52, priorities 52xx, marks under 0xff0000 with other values) and
a second tsd can run beside us. Every running daemon of a network namespace holds one slot, by a file lock that the
kernel releases with the process; the slot number moves table, priorities and nft table. The lock files lie in a folder
that only root may enter, one for all daemons of the host, so that no other user can take a slot. Where that folder
cannot be made (no root, read-only /run) an abstract Unix socket does the same, without that protection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from tsd.base.errors import HullError, StateError
from tsplatform.lock import FileLock, HeldError

log = logging.getLogger(__name__)

CLAIMS = Path("/run/tsd-claims")
"""Not the service's own /run/tsd, which systemd removes when the service stops."""

MARK_MASK = 0x300000
SUBNET_MARK = 0x100000
"""On packets that came out of the tunnel and are forwarded: they may be masqueraded."""
BYPASS_MARK = 0x200000
"""On our own sockets: they never enter the tunnel."""

SLOTS = 8
_TABLE, _EXIT_TABLE, _PRIORITY, _PRIORITY_STEP = 53, 63, 5300, 100


@dataclass(frozen=True, slots=True)
class HostNames:
    """The names of one slot; `device` is the interface."""

    device: str
    slot: int = 0

    @property
    def table(self) -> int:
        return _TABLE + self.slot

    @property
    def priority(self) -> int:
        """Rules of this slot lie in [priority, priority + 100)."""
        return _PRIORITY + _PRIORITY_STEP * self.slot

    @property
    def exit_table(self) -> int:
        """Default routes of an exit node."""
        return _EXIT_TABLE + self.slot

    @property
    def exit_priority(self) -> int:
        """After the routes of every slot: other tailnets of this host are not behind our exit node."""
        return _PRIORITY + _PRIORITY_STEP * (SLOTS + 1) + self.slot

    @property
    def nft_table(self) -> str:
        return "tsd" if self.slot == 0 else f"tsd{self.slot}"


Claim = FileLock | socket.socket
"""Released by `close`."""


class TakenError(HullError):
    """A running daemon has it."""


class SlotClaim:
    """One slot of this network namespace, held until `close` or the end of the process."""

    def __init__(self, names: HostNames, held: Claim) -> None:
        self.names = names
        self._held = held

    def close(self) -> None:
        self._held.close()


def claim_slot(device: str) -> SlotClaim:
    """The slot that the device's number asks for, or the next free one. Raises `HullError` when all are taken."""
    digits = device[len(device.rstrip("0123456789")) :]
    wanted = int(digits) % SLOTS if digits else 0
    for step in range(SLOTS):
        claim = try_slot((wanted + step) % SLOTS, device)
        if claim is not None:
            return claim
    raise HullError(f"set up {device}", f"{SLOTS} daemons run in this network namespace already", "stop one of them")


def try_slot(slot: int, device: str = "") -> SlotClaim | None:
    """That slot, unless a running daemon holds it, which is logged. Raises `HullError`."""
    try:
        return SlotClaim(HostNames(device, slot), claim_name(f"slot.{slot}"))
    except TakenError as err:
        log.info("slot %d of this network namespace is left alone: %s", slot, err.reason)
        return None


def claim_name(what: str, folder: Path | None = None) -> Claim:
    """Something that only one tsd of a network namespace may have. Raises `TakenError`, or `HullError`."""
    folder = folder or CLAIMS
    if _is_private(folder):
        try:
            lock = FileLock(folder / f"{what}.{os.stat('/proc/self/ns/net').st_ino}", what)
        except HeldError as err:
            raise TakenError(f"claim {what}", f"another tsd on this host has it, process {err.holder}") from None
        except (StateError, OSError) as err:
            raise HullError(f"claim {what}", str(err)) from None
        if lock.is_held:
            return lock
    log.info("%s is claimed by a socket, which any user of this host could take: %s cannot be used", what, folder)
    return _claim_socket(what)


def _is_private(folder: Path) -> bool:
    """Whether it is there, made now if need be, and nobody else may write in it."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _claim_socket(what: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.bind(f"\0tsd.{what}")
    except OSError as err:
        sock.close()
        if err.errno == errno.EADDRINUSE:
            holder = f"somebody has the socket @tsd.{what}: ss -xap tells who"
            raise TakenError(f"claim {what}", holder) from None
        raise HullError(f"claim {what}", os.strerror(err.errno or 0), errno=err.errno or 0) from None
    return sock
